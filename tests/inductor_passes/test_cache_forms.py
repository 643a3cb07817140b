"""However the cache comes into the graph, it is neither cloned nor copied, and what lies around its slots stays."""

import re
from functools import partial

import pytest
import torch

from inductor_passes import Condition, SnapshotElimination, inductor_options
from mamba_ops import ops
from mamba_ops.ops import state_passing, state_passing_update
from tests.inductor_passes.harness import assert_equal, assert_same_as_eager, compile_with_pass, run_graph
from tests.inductor_passes.programs import NUM_SLOTS, ROW, Inputs, make_inputs, older_form_with, snapshot, update_with


def assert_cache_only_passed_on(code):
    """The generated code hands the cache, or a view of it, to the op, and makes nothing else."""
    body = code[code.index("def call(") : code.index("runner = Runner")]
    assert re.search(r"torch\.ops\.mamba_ops\.state_passing_indexed\w*\.default\(.*\barg", body)
    assert not re.search(r"clone|copy_|empty_strided|cpp_fused|triton", body)


def of_window(spelling):
    def program(states, dA, last, cache, slots, has):
        window = cache[1:-1]
        initial = spelling(window, slots, has)
        return state_passing_update(states, dA, last, initial, window, slots)

    return program


def of_layers(states, dA, last, cache, slots, has):
    layers = cache[:8].view(2, 4, *ROW)
    entering = []
    for layer in layers.unbind():
        initial = snapshot(layer, slots, has)
        entering.append(state_passing_update(states, dA, last, initial, layer, slots))
    return entering


def of_pages(states, dA, last, cache, slots, has):
    """The cache is every other page of a buffer."""
    row = cache[0].numel()
    pages = cache.as_strided((4, *ROW), (2 * row, *cache.stride()[1:]), row)
    return state_passing_update(states, dA, last, snapshot(pages, slots, has), pages, slots)


def of_flat_pool(states, dA, last, cache, slots, has):
    pool = cache.view(-1)
    window = pool[: 4 * cache[0].numel()].view(4, *ROW)
    return state_passing_update(states, dA, last, snapshot(window, slots, has), window, slots)


def window_written_later(states, dA, last, cache, slots, has):
    window = cache[1:-1]
    entering, final = state_passing(states, dA, last, snapshot(window, slots, has), cache.dtype)
    window[slots] = final
    return entering


def window_read_again(states, dA, last, cache, slots, has):
    window = cache[1:-1]
    entering, final = state_passing(states, dA, last, snapshot(window, slots, has), cache.dtype)
    window[slots] = final
    return entering, window.sum(0), cache.sum(0)


def viewed(cache, slots, has):
    return snapshot(cache.view(NUM_SLOTS, *ROW), slots, has)


PROGRAMS = {
    "argument": update_with(snapshot),
    "argument, read through a view": update_with(viewed),
    "window": of_window(snapshot),
    "layers of one tensor": of_layers,
    "every other page": of_pages,
    "flat pool": of_flat_pool,
    "window, written later": window_written_later,
    "window, written later and read": window_read_again,
}


@pytest.mark.fault(5)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize("slot_padding", [0, 64], ids=["adjacent", "padded"])
def test_no_clone_of_the_cache(program, slot_padding):
    if slot_padding and program in (of_flat_pool, of_pages):
        pytest.skip("needs adjacent slots")
    inputs = make_inputs((2, 0, 1), slot_padding=slot_padding)
    inputs.slots.copy_(torch.tensor([3, 0, 2]))
    compiled = assert_same_as_eager(program, inputs, compile_with_pass)
    assert compiled.report.eliminated == (2 if program is of_layers else 1)
    assert not compiled.report.declines
    if program is not window_read_again:
        assert_cache_only_passed_on(compiled.code)


class Layer(torch.nn.Module):
    """A layer that owns its cache."""

    def __init__(self, cache):
        super().__init__()
        self.register_buffer("cache", cache)

    def forward(self, states, dA, last, slots, has):
        return state_passing_update(states, dA, last, snapshot(self.cache, slots, has), self.cache, slots)


@pytest.mark.fault(5)
def test_cache_as_a_buffer():
    inputs = make_inputs()
    expected, eager = inputs.clone(), Layer(inputs.cache.clone())
    layer = Layer(inputs.cache)

    def program(states, dA, last, cache, slots, has):
        return layer(states, dA, last, slots, has)

    compiled = compile_with_pass(program, inputs)
    assert_equal(
        compiled.output, eager(expected.states, expected.dA_cumsum, *expected.args()[2:3], *expected.args()[4:])
    )
    assert_equal(layer.cache, eager.cache)
    assert compiled.report.eliminated == 1
    assert_cache_only_passed_on(compiled.code)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("program", [update_with(snapshot), of_window(snapshot), window_written_later])
def test_grad_modes(context, program):
    inputs = make_inputs()
    inputs.slots.copy_(torch.tensor([3, 0, 2]))
    with context():
        compiled = assert_same_as_eager(program, inputs.clone(), compile_with_pass)
    assert compiled.report.eliminated == 1
    assert_cache_only_passed_on(compiled.code)


@pytest.mark.fault(18)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("program", [update_with(snapshot), of_window(snapshot)])
def test_modes(mode, program):
    inputs = make_inputs()
    inputs.slots.copy_(torch.tensor([3, 0, 2]))
    compiled = assert_same_as_eager(
        program, inputs, lambda program, inputs: compile_with_pass(program, inputs, mode=mode)
    )
    assert compiled.report.eliminated == 1
    assert_cache_only_passed_on(compiled.code)


@pytest.mark.fault(18)
def test_state_advances_once_a_call():
    """Three calls in a mode that warms up and records: the state advances three times."""
    program, inputs = update_with(snapshot), make_inputs(has=(True, True, True))
    expected = inputs.clone()
    elimination = SnapshotElimination()
    compiled = torch.compile(program, fullgraph=True, options=inductor_options(elimination, mode="reduce-overhead"))
    for _ in range(3):
        assert_equal(compiled(*inputs.args()), program(*expected.args()))
    assert_equal(inputs.cache, expected.cache)
    assert elimination.report().eliminated == 1


@pytest.mark.fault(1)
def test_first_call_equals_the_snapshot():
    """The reported input: one sequence, one slot of four, read and written."""
    states, dA = torch.randn(1, 8, 64, 128), -torch.rand(1, 8, 64).cumsum(-1)
    cache, slots, has = torch.randn(4, 8, 64, 128), torch.tensor([2]), torch.tensor([True])
    inputs = Inputs(states, dA, torch.zeros(1, dtype=torch.int32), cache, slots, has)
    compiled = assert_same_as_eager(update_with(snapshot), inputs, compile_with_pass)
    assert compiled.report.eliminated == 1
    assert_cache_only_passed_on(compiled.code)


@pytest.mark.fault(17)
def test_exactly_the_declared_arguments_are_written():
    written = {
        name: {arg.name for arg in getattr(torch.ops.mamba_ops, name).default._schema.arguments if arg.is_write}
        for name in (*ops.__all__, *(f"{op}_cpu" for op in ops.__all__))
        if hasattr(torch.ops.mamba_ops, name)
    }
    declared = {
        "chunk_scan": {"out"},
        "one_pass_scan": {"out", "state_cache"},
        "state_passing_update": {"state_cache"},
        "state_passing_indexed": {"state_cache"},
        "conv_checkpoint": {"conv_state"},
    }
    assert len(written) >= 16
    assert all(names == declared.get(op.removesuffix("_cpu"), set()) for op, names in written.items())


@pytest.mark.fault(17)
@pytest.mark.parametrize("write_empty", [False, True])
def test_indexed_op_alone_writes_the_cache_and_nothing_else(write_empty):
    def program(states, dA, last, cache, slots, has):
        return ops.state_passing_indexed(states, dA, last, cache, slots, has, slots, write_empty)

    compiled = assert_same_as_eager(program, make_inputs(), compile_with_pass)
    assert compiled.before == compiled.after
    assert_cache_only_passed_on(compiled.code)


@pytest.mark.fault(15)
def test_batch_sizes_compile_twice_at_most():
    """One sequence, or any number of them: PyTorch makes a graph of its own only for a dimension of one."""
    elimination = SnapshotElimination()
    compiled = torch.compile(update_with(snapshot), fullgraph=True, dynamic=True, options=inductor_options(elimination))
    for nseqs in (1, 2, 3, 5, 9):
        for chunks in range(5, 13):
            inputs = make_inputs((chunks, *[1] * (nseqs - 1)), (True,) * nseqs)
            expected = inputs.clone()
            assert_equal(compiled(*inputs.args()), update_with(snapshot)(*expected.args()))
            assert_equal(inputs.cache, expected.cache)
    report = elimination.report()
    assert len(report.graphs) <= 2
    assert report.eliminated == len(report.graphs)


@pytest.mark.fault(15)
@pytest.mark.parametrize("nseqs", [1, 2, 3, 9])
@pytest.mark.parametrize("dynamic", [False, True])
def test_initial_state_of_each_sequence_is_used(nseqs, dynamic):
    inputs = make_inputs((1,) * nseqs, (True,) * nseqs)
    inputs.cache[inputs.slots[-1].item()] = 7.0  # enters the last sequence's only chunk
    compiled = assert_same_as_eager(update_with(snapshot), inputs, partial(compile_with_pass, dynamic=dynamic))
    assert (compiled.output[-1] == 7.0).all()
    assert compiled.report.eliminated == 1


@pytest.mark.parametrize(
    "program", [window_written_later, of_layers, older_form_with(lambda c, s, f: c.index_put_((s,), f))]
)
def test_dynamic_shapes_of_views(program):
    inputs = make_inputs((2, 0, 1))
    inputs.slots.copy_(torch.tensor([3, 0, 2]))
    compiled = assert_same_as_eager(program, inputs, partial(compile_with_pass, dynamic=True))
    assert not compiled.report.declines
    assert_cache_only_passed_on(compiled.code)


def test_cache_seen_through_another_dtype_is_left_alone():
    """Inductor copies such a view, and an op that is to write through it would write elsewhere."""

    def program(states, dA, last, cache, slots, has):
        window = cache.view(torch.int16)[1:].view(cache.dtype)
        return state_passing_update(states, dA, last, snapshot(window, slots, has), window, slots)

    inputs, elimination = make_inputs(), SnapshotElimination()
    inputs.slots.copy_(torch.tensor([3, 0, 2]))
    run_graph(program, inputs, elimination)
    assert elimination.report().count() == {Condition.VIEWED_AS_OTHER_DTYPE: 1}
    assert not elimination.report().rewrites
