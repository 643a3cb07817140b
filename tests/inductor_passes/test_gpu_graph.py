"""The GPU's graph and generated code, without a GPU: there our ops are opened into Triton launches."""

import functools
import re

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.custom_graph_pass import CustomGraphPass

from inductor_passes import Condition
from inductor_passes.inspection.recorded import Recording, Role
from inductor_passes.inspection.recording import recorded
from inductor_passes.inspection.savings import saving
from mamba_ops import ops
from mamba_ops.ops import masked_gather, state_passing, state_passing_indexed, state_passing_update
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.conv_cumsum import conv_cumsum
from tests.inductor_passes import harness
from tests.inductor_passes.absent_gpu import absent_gpu, stop_at_code
from tests.inductor_passes.programs import (
    CHUNK_SIZE,
    NHEADS,
    NUM_SLOTS,
    ROW,
    SPELLINGS,
    Inputs,
    older_form_with,
    snapshot,
    update_with,
)

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(),
    reason="needs a CUDA build of PyTorch, and no GPU",
)

compile_with_pass = functools.partial(harness.compile_with_pass, run=stop_at_code)


@pytest.fixture(autouse=True)
def gpu():
    with absent_gpu():
        yield


def fake_inputs(nseqs=3, nchunks=5, dtype=torch.bfloat16, slot_padding=0) -> Inputs:
    empty = functools.partial(torch.empty, device="cuda")
    row = ROW[0] * ROW[1] * ROW[2]
    strides = (row + slot_padding, *torch.empty(ROW).stride())
    return Inputs(
        empty(nchunks, *ROW),
        empty(nchunks, NHEADS, CHUNK_SIZE),
        empty(nseqs, dtype=torch.int32),
        torch.empty_strided((NUM_SLOTS, *ROW), strides, dtype=dtype, device="cuda"),
        empty(nseqs, dtype=torch.int32),
        empty(nseqs, dtype=torch.bool),
    )


def body(code):
    return code[code.index("def call(") : code.index("runner = Runner")]


def assert_one_launch(compiled):
    """State passing is all that is left, and reads the cache in the place of the initial states."""
    text = body(compiled.code)
    assert text.count(".run(") == 1
    assert "state_passing_kernel" in text
    assert not re.search(r"clone|copy_\(", text)
    assert text.count("empty_strided_cuda") == 1  # the entering states


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("form", ["update", "older"])
def test_spelling_goes(spelling, form):
    if spelling in (SPELLINGS["where, zero as a tensor"], SPELLINGS["rows[~has] = 0"]):
        pytest.skip("needs a constant folded")
    write = functools.partial(lambda cache, slots, final: cache.index_put_((slots,), final))
    program = update_with(spelling) if form == "update" else older_form_with(write, spelling)
    compiled = compile_with_pass(program, fake_inputs())
    assert compiled.report.eliminated == 1
    assert "state_passing_kernel" in compiled.after
    assert not compiled.has("aten.index")
    if compiled.code:
        assert_one_launch(compiled)


@pytest.mark.fault(1)
def test_nothing_is_tuned_and_nothing_is_restored():
    """A trial launch would advance the cache: the launch has one choice, and no argument is put back."""
    code = compile_with_pass(update_with(snapshot), fake_inputs()).code
    choices = re.findall(r"configs=\[(.*?)\],\n", code)
    assert len(choices) == 1
    assert choices[0].count("num_warps") == 1
    assert not re.search(r"restore_value|reset_to_zero|mutated_arg_names", code)


@pytest.mark.fault(5)
@pytest.mark.parametrize("slot_padding", [0, 4096])
def test_padded_cache_is_passed_on(slot_padding):
    assert_one_launch(compile_with_pass(update_with(snapshot), fake_inputs(slot_padding=slot_padding)))


def of_window(states, dA, last, cache, slots, has):
    window = cache[1:-1]
    return state_passing_update(states, dA, last, snapshot(window, slots, has), window, slots)


def of_layers(states, dA, last, cache, slots, has):
    layers = cache[:8].view(2, 4, *ROW)
    return [state_passing_update(states, dA, last, snapshot(layers[i], slots, has), layers[i], slots) for i in range(2)]


def of_layers_unbound(states, dA, last, cache, slots, has):
    layers = cache[:8].view(2, 4, *ROW).unbind()
    return [state_passing_update(states, dA, last, snapshot(layer, slots, has), layer, slots) for layer in layers]


def window_written_later(states, dA, last, cache, slots, has):
    window = cache[1:-1]
    entering, final = state_passing(states, dA, last, snapshot(window, slots, has), cache.dtype)
    window[slots] = final
    return entering


@pytest.mark.fault(5)
@pytest.mark.parametrize("program", [of_window, of_layers, of_layers_unbound, window_written_later])
@pytest.mark.parametrize("slot_padding", [0, 4096])
def test_view_made_inside_is_not_cloned(program, slot_padding):
    """PyTorch clones a view of an argument before a Triton launch may mutate it; it does not before an op."""
    compiled = compile_with_pass(program, fake_inputs(slot_padding=slot_padding))
    assert not compiled.report.declines
    text = body(compiled.code)
    assert text.count("torch.ops.mamba_ops.state_passing_indexed.default(") == compiled.report.eliminated
    assert not re.search(r"clone|copy_\(", text)
    assert "empty_strided_cuda" not in text


@pytest.mark.parametrize(
    "copy", [lambda cache: cache[1:4].clone(), lambda cache: cache.clone()[1:4].contiguous()], ids=["slice", "all"]
)
@pytest.mark.parametrize("nseqs", [1, 3])
def test_copy_of_slots_stays_where_it_protects_them(copy, nseqs):
    """PyTorch drops the copy from a functional graph, but one sequence may write what another one still has to read."""

    def program(states, dA, last, cache, slots, has):
        return state_passing_update(states, dA, last, copy(cache)[:nseqs], cache, slots)

    compiled = compile_with_pass(program, fake_inputs(nseqs))
    assert compiled.has("aten.clone") == (nseqs > 1)
    assert [rewrite.into for rewrite in compiled.report.rewrites] == [
        "state_passing_update on a copy of its initial states"
    ] * (nseqs > 1)


def test_copy_of_the_whole_cache_stays():
    def program(states, dA, last, cache, slots, has):
        return state_passing_update(states, dA, last, cache.clone(), cache, slots)

    compiled = compile_with_pass(program, fake_inputs(NUM_SLOTS))
    assert compiled.has("aten.clone")
    assert "state_passing_kernel" in compiled.after


def test_crossed_slots_are_read_in_one_launch():
    def program(states, dA, last, cache, slots, has):
        return state_passing_update(states, dA, last, snapshot(cache, slots.flip(0), has), cache, slots)

    compiled = compile_with_pass(program, fake_inputs())
    assert compiled.report.count() == {Condition.CROSSED_SLOTS: 1}
    assert "masked_gather_kernel" in compiled.after
    assert not compiled.has("aten.where")


def test_slots_on_the_cpu_are_left_there():
    """A CPU tensor may index a CUDA tensor, but a kernel cannot read it."""

    def program(states, dA, last, cache, slots, has, slots_on_cpu):
        return state_passing_update(states, dA, last, snapshot(cache, slots_on_cpu, has), cache, slots)

    slots = torch.empty(1, dtype=torch.int64)
    compiled = compile_with_pass(program, [*fake_inputs(1).args(), slots])
    assert compiled.report.count() == {Condition.OTHER_DEVICE: 1}
    assert compiled.after == compiled.before


@pytest.mark.parametrize("nseqs", [1, 2])
def test_changed_cache_is_left_alone(nseqs):
    def program(states, dA, last, cache, slots, has):
        initial = snapshot(cache, slots, has)
        cache.mul_(2)
        return state_passing_update(states, dA, last, initial, cache, slots)

    compiled = compile_with_pass(program, fake_inputs(nseqs))
    assert compiled.report.count() == {Condition.CACHE_CHANGED: 1}
    assert compiled.after == compiled.before


@pytest.mark.fault(15)
def test_dynamic_shapes():
    compiled = compile_with_pass(update_with(snapshot), fake_inputs(), dynamic=True)
    assert compiled.report.eliminated == 1
    assert_one_launch(compiled)


class Mutations(CustomGraphPass):
    """Which arguments of each launch PyTorch takes to be written."""

    def __init__(self):
        self.found: list[tuple[str, set[str]]] = []

    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional:
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                self.found.append((getattr(kernel, "fn", kernel).__name__, set(node.kwargs["tensors_to_clone"])))

    def uuid(self):
        return None


@pytest.mark.fault(17)
def test_exactly_the_declared_arguments_are_mutated():
    """Where the analysis of a kernel fails, or sees too much, PyTorch clones the inputs or writes them back."""

    def program(x, dt, A, B, cu_seqlens, inputs: list[Tensor]):
        states, dA, last, cache, slots, has = inputs
        dA_cumsum, dt_out = ops.chunk_cumsum(dt, A, cu_seqlens, CHUNK_SIZE)
        entering = state_passing_update(states, dA, last, masked_gather(cache, slots, has), cache, slots)
        entering_again = state_passing_indexed(states, dA, last, cache, slots, has, slots)
        out = torch.empty_like(x)
        cb = ops.bmm_chunk(B, B, cu_seqlens, CHUNK_SIZE)
        ops.chunk_scan(cb, x, dt_out, dA_cumsum, B, entering, cu_seqlens, out)
        more = ops.chunk_state(B, x, dt_out, dA_cumsum, cu_seqlens)
        return entering_again, state_passing(states, dA, last, None, torch.float32), out, more

    ntokens, nchunks = 70, 5
    empty = functools.partial(torch.empty, device="cuda")
    x, B = (empty(ntokens, *shape, dtype=torch.bfloat16) for shape in ((NHEADS, ROW[1]), (1, ROW[2])))
    cu_seqlens = empty(nchunks + 1, dtype=torch.int32)
    mutations = Mutations()
    compiled = torch.compile(program, fullgraph=True, options={"post_grad_custom_post_pass": mutations})
    inputs = list(fake_inputs(nchunks=nchunks).args())
    stop_at_code(compiled, x, empty(ntokens, NHEADS), empty(NHEADS), B, cu_seqlens, inputs)
    assert dict(mutations.found) == {
        "chunk_cumsum_kernel": {"dt_out_ptr", "dA_cumsum_ptr"},
        "chunk_state_kernel": {"states_ptr"},
        "bmm_chunk_kernel": {"cb_ptr"},
        "masked_gather_kernel": {"rows_ptr"},
        "state_passing_kernel": {"entering_ptr", "final_ptr"},
        "chunk_scan_kernel": {"out_ptr"},
    }
    assert all(written == {"entering_ptr", "final_ptr"} for name, written in mutations.found if "passing" in name)


def one_pass(conv_in, weight, dt, head, cu_seqlens, slots, has, tiles, conv_state, state_cache, out, last=None):
    """A layer's prefill of short sequences, in one pass."""
    sequences = (cu_seqlens, conv_state, slots, has, tiles, tiles)
    convolved, dA, steps = conv_cumsum(conv_in, weight, None, *sequences, dt, head, CHUNK_SIZE, head, True, cu_seqlens)
    x, B, C = convolved.split([NHEADS * ROW[1], ROW[2], ROW[2]], dim=1)
    x, B, C = x.unflatten(1, (NHEADS, ROW[1])), B.unflatten(1, (1, ROW[2])), C.unflatten(1, (1, ROW[2]))
    ops.one_pass_scan(x, B, C, steps, dA, cu_seqlens, state_cache, slots, has, out, 16, head, last)


def staged_convolution(conv_in, weight, dt, head, cu_seqlens, slots, has, tiles, conv_state, state_cache, out):
    return causal_conv_tiled(conv_in, weight, None, cu_seqlens, conv_state, slots, has, tiles, tiles)


def one_pass_inputs(slot_padding):
    empty = functools.partial(torch.empty, device="cuda")
    inputs, ntokens, conv_dim = fake_inputs(slot_padding=slot_padding), 40, NHEADS * ROW[1] + 2 * ROW[2]
    projected = empty(ntokens, conv_dim + NHEADS, dtype=torch.bfloat16)
    conv_in, dt = projected.split([conv_dim, NHEADS], dim=1)
    strides = (conv_dim * 3 + slot_padding, 1, conv_dim)
    conv_state = torch.empty_strided((NUM_SLOTS, conv_dim, 3), strides, dtype=torch.bfloat16, device="cuda")
    *_, cache, slots, has = inputs.args()
    cu_seqlens, tiles = empty(4, dtype=torch.int32), empty(7, dtype=torch.int32)
    out = empty(ntokens, NHEADS, ROW[1], dtype=torch.bfloat16)
    weight = empty(conv_dim, 4, dtype=torch.bfloat16)
    return [conv_in, weight, dt, empty(NHEADS), cu_seqlens, slots, has, tiles, conv_state, cache, out]


@pytest.mark.fault(5)
@pytest.mark.fault(17)
@pytest.mark.parametrize("slot_padding", [0, 4096])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("one_chunk", [False, True])
def test_one_pass_is_two_launches(slot_padding, dynamic, one_chunk):
    """Both kernels write what they say they write; neither cache is cloned or written back, nor is the output."""
    mutations = Mutations()
    options = {"post_grad_custom_post_pass": mutations}
    compiled = torch.compile(one_pass, fullgraph=True, dynamic=dynamic, options=options)
    last = [] if one_chunk else [torch.empty(3, dtype=torch.int32, device="cuda")]
    _, (code,) = stop_at_code(compiled, *one_pass_inputs(slot_padding), *last)
    assert mutations.found == [
        ("conv_cumsum_kernel", {"state_ptr", "out_ptr", "dt_out_ptr", "dA_cumsum_ptr"}),
        ("one_pass_kernel", {"state_ptr", "out_ptr"}),
    ]
    text = body(code)
    assert text.count(".run(") == 2
    assert not re.search(r"clone|copy_\(", text)
    assert text.count("empty_strided_cuda") == 3  # what is convolved, the steps and their sums


@pytest.mark.fault(5)
@pytest.mark.fault(17)
def test_the_convolution_is_one_launch():
    mutations = Mutations()
    compiled = torch.compile(staged_convolution, fullgraph=True, options={"post_grad_custom_post_pass": mutations})
    _, (code,) = stop_at_code(compiled, *one_pass_inputs(16))
    assert mutations.found == [("causal_conv_tiled_kernel", {"state_ptr", "out_ptr"})]
    assert body(code).count(".run(") == 1
    assert not re.search(r"clone|copy_\(", body(code))


def test_an_inspection_knows_launches_by_their_kernels():
    recording = Recording()
    with recorded(recording):
        compile_with_pass(update_with(snapshot), fake_inputs())
    (change,) = recording.changes
    roles = {node.role: node.op for node in change.before.nodes}
    assert roles[Role.STATE_PASSING] == "state_passing_kernel"
    assert {node.op for node in change.before.nodes if node.role is Role.SNAPSHOT} == {
        "aten.index.Tensor",
        "aten.where.self",
    }
    assert not [node for node in change.after.nodes if node.role is Role.SNAPSHOT]
    size = change.report.rewrites[0].snapshot_bytes
    saved = saving(change)
    assert (saved.launches, saved.launches_one_by_one) == (1, 2)
    assert (saved.nbytes, saved.nbytes_one_by_one) == (size, 2 * size)
