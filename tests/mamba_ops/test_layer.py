"""The rules of `Mamba2Layer` itself: both spellings of the state, compiled code, padding, and bad input."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from mamba_ops.layer import LayerState, Mamba2Layer
from mamba_ops.metadata import ChunkMetadata, build_chunk_metadata

NUM_SLOTS = 19
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_layer(dtype: torch.dtype = torch.float32, **options: Any) -> Mamba2Layer:
    return Mamba2Layer(32, nheads=4, headdim=16, dstate=32, ngroups=2, chunk_size=16, dtype=dtype, **options)


def make_state(layer: Mamba2Layer, live: list[int], state_dtype: torch.dtype | None = None) -> LayerState:
    """Slots in `live` hold numbers; the others, and the padding between slots, hold NaN."""
    state = layer.allocate_state(NUM_SLOTS, state_dtype, slot_padding=5)
    for cache in state:
        whole = torch.as_strided(cache, (cache.untyped_storage().nbytes() // cache.itemsize,), (1,))
        whole.fill_(torch.nan)
        cache[live] = torch.randn(len(live), *cache.shape[1:]).to(cache)
    return state


def clone(state: LayerState) -> LayerState:
    """A copy with the same padding."""
    copies = []
    for cache in state:
        storage = torch.as_strided(cache, (cache.untyped_storage().nbytes() // cache.itemsize,), (1,)).clone()
        copies.append(torch.as_strided(storage, cache.shape, cache.stride()))
    return LayerState(*copies)


def storage_bytes(state: LayerState) -> Tensor:
    """Every byte of both caches, the padding too."""
    return torch.cat([torch.tensor(cache.untyped_storage(), dtype=torch.uint8) for cache in state])


def batch(lengths: list[int], dtype: torch.dtype, padding_tokens: int = 0) -> tuple[Tensor, ChunkMetadata]:
    hidden_states = torch.randn(sum(lengths) + padding_tokens, 32, dtype=dtype)
    return hidden_states, build_chunk_metadata(torch.tensor([0, *lengths]).cumsum(0), 16)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_snapshot_and_indexed_spelling_are_equal_bit_for_bit(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    dtype, state_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    has = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    indexed = make_layer(dtype)
    snapshot = make_layer(dtype, snapshot=True)
    snapshot.load_state_dict(indexed.state_dict())
    hidden_states, metadata = batch(lengths, dtype)
    slots = torch.randperm(NUM_SLOTS)[: len(lengths)]
    state = make_state(indexed, slots[has].tolist(), state_dtype)
    other = clone(state)
    out = indexed(hidden_states, metadata, *state, slots, has, slots)
    expected = snapshot(hidden_states, metadata, *other, slots, has, slots)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert torch.equal(storage_bytes(state), storage_bytes(other))
    assert out.isfinite().all()


@pytest.mark.parametrize("snapshot", [False, True])
def test_no_byte_of_another_slot_changes(snapshot: bool) -> None:
    layer = make_layer(snapshot=snapshot)
    hidden_states, metadata = batch([3, 0, 40], torch.float32)
    table = torch.tensor([[7, 1], [2, 1], [9, 1]], dtype=torch.int32)
    state = make_state(layer, list(range(NUM_SLOTS)))
    before = clone(state)
    layer(hidden_states, metadata, *state, table[:, 0], None, table[:, 0])
    for cache, old in zip(state, before, strict=True):
        assert not torch.equal(cache[7], old[7])
        assert not torch.equal(cache[9], old[9])
        cache[[7, 9]] = old[[7, 9]]
    assert torch.equal(storage_bytes(state), storage_bytes(before))


@pytest.mark.fault(15)
@torch.fx.experimental._config.patch(use_duck_shape=False)  # else sizes equal by chance in one batch must stay equal
def test_one_layer_compiles_at_most_twice_for_all_batch_sizes() -> None:
    layer = make_layer()
    compiles = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal compiles
        compiles += 1
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for nseqs in 1, 2, 3, 17:
        for length in range(17, 57, 4):  # at least two chunks: PyTorch compiles a dimension of one apart
            hidden_states, metadata = batch([length + b for b in range(nseqs)], torch.float32)
            slots = torch.randperm(NUM_SLOTS)[:nseqs]
            state = make_state(layer, slots.tolist())
            other = clone(state)
            out = compiled(hidden_states, metadata, *state, slots, None, slots)
            torch.testing.assert_close(out, layer(hidden_states, metadata, *other, slots, None, slots), rtol=0, atol=0)
    assert compiles <= 2, "one sequence, and several"


@pytest.mark.fault(5)
@pytest.mark.parametrize("snapshot", [False, True])
def test_compiled_code_has_no_copy_of_a_cache(snapshot: bool) -> None:
    layer = make_layer(snapshot=snapshot)
    hidden_states, metadata = batch([5, 1, 40], torch.float32)
    slots = torch.tensor([4, 10, 0])
    state = make_state(layer, slots.tolist())
    other = clone(state)
    compiled = torch.compile(layer, fullgraph=True)
    out, (code,) = run_and_get_code(compiled, hidden_states, metadata, *state, slots, None, slots)
    torch.testing.assert_close(out, layer(hidden_states, metadata, *other, slots, None, slots), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.state_cache, other.state_cache, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(state.conv_state, other.conv_state, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert f"empty_strided_cpu(({NUM_SLOTS}, " not in code, "a buffer of the size of a cache"
    assert not re.search(r"aten\.(clone|copy_)", code)


def test_padding_tokens_and_sequences_leave_the_rest_alone() -> None:
    layer = make_layer()
    hidden_states, metadata = batch([0, 20, 0], torch.float32, padding_tokens=4)
    hidden_states[20:] = torch.nan
    slots = torch.tensor([3, 3, 10**6])
    state = make_state(layer, [3])
    other = clone(state)
    out = layer(hidden_states, metadata, *state, slots, None, slots)
    alone, one = build_chunk_metadata([0, 20], 16), slots[1:2]
    expected = layer(hidden_states[:20], alone, *other, one, None, one)
    torch.testing.assert_close(out[:20], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.state_cache, other.state_cache, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(state.conv_state, other.conv_state, rtol=0, atol=0, equal_nan=True)


BAD_ARGUMENTS = {
    "hidden_states dtype": ("hidden_states", lambda good: good.double(), TypeError),
    "hidden_states width": ("hidden_states", lambda good: good[:, 1:], ValueError),
    "hidden_states short": ("cu_chunk_seqlens", lambda good: good, ValueError),
    "chunk_size": ("metadata", lambda good: good._replace(chunk_size=50), ValueError),
    "conv_state": ("conv_state", lambda good: good[:, :, :2], ValueError),
    "state_cache": ("state_cache", lambda good: good.transpose(2, 3), ValueError),
    "state_cache slots": ("state_cache", lambda good: good[:-1], ValueError),
    "state_cache dtype": ("state_cache", lambda good: good.double(), TypeError),
    "read_slots range": ("read_slots", lambda good: good + NUM_SLOTS, ValueError),
    "read_slots crossed": ("read_slots", lambda good: good.flip(0), ValueError),
    "write_slots twice": ("write_slots", torch.zeros_like, ValueError),
    "write_slots dtype": ("write_slots", lambda good: good.short(), TypeError),
    "has_initial_state": ("has_initial_state", lambda good: good[:1], ValueError),
}


# Sequences of 5 and 20 tokens in chunks of 16: offsets 0, 5, 21, 25.
BAD_METADATA = {
    "last chunk missing": {"last_chunk_indices": [0, 9]},
    "last chunk decreases": {"last_chunk_indices": [2, 0]},
    "a chunk without owner": {"last_chunk_indices": [0, 1]},
    "a chunk of the next sequence": {"last_chunk_indices": [1, 2]},
    "tokens without a chunk": {"cu_chunk_seqlens": [0, 5, 21, 24]},
    "a chunk too long": {"cu_chunk_seqlens": [0, 5, 5, 25]},
    "beyond the tokens": {"cu_chunk_seqlens": [0, 5, 21, 30]},
    "sequences cut elsewhere": {"cu_seqlens": [0, 9, 25]},
    "another chunk size": {"chunk_size": 8},
    "one sequence more": {"last_chunk_indices": [0, 2, 2]},
    "the wrong owner": {"seq_idx": [0, 0, 1]},
    "one owner more": {"seq_idx": [0, 1, 1, 1]},
}


def as_metadata(good: ChunkMetadata, changes: dict[str, Any]) -> ChunkMetadata:
    tensors = {name: torch.tensor(v, dtype=torch.int32) if name != "chunk_size" else v for name, v in changes.items()}
    return good._replace(**tensors)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("snapshot", [False, True])
def test_metadata_that_does_not_fit_is_an_error_before_anything_is_written(snapshot: bool, compiled: bool) -> None:
    layer = make_layer(snapshot=snapshot)
    hidden_states, good = batch([5, 20], torch.float32)
    slots = torch.tensor([4, 10])
    state = make_state(layer, slots.tolist())
    before = storage_bytes(state)
    forward = torch.compile(layer, fullgraph=True) if compiled else layer
    cases = [as_metadata(good, changes) for changes in BAD_METADATA.values()]
    cases += [good._replace(cu_chunk_seqlens=good.cu_chunk_seqlens.long())]
    for metadata in cases if not compiled else cases[:8]:
        with pytest.raises((ValueError, TypeError)):
            forward(hidden_states, metadata, *state, slots, None, slots)
        assert torch.equal(storage_bytes(state), before), metadata
    forward(hidden_states, good, *state, slots, None, slots)


BAD_WEIGHTS = {
    "D": lambda layer: layer.D.data.double(),
    "dt_bias": lambda layer: layer.dt_bias.data[:1],
    "conv_weight": lambda layer: layer.conv_weight.data.bfloat16(),
    "norm_weight": lambda layer: layer.norm_weight.data[:3],
    "out_proj.weight": lambda layer: layer.out_proj.weight.data.half(),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_do_not_fit_are_an_error_before_anything_is_written(name: str) -> None:
    layer = make_layer()
    hidden_states, metadata = batch([5, 20], torch.float32)
    slots = torch.tensor([4, 10])
    state = make_state(layer, slots.tolist())
    before = storage_bytes(state)
    layer.get_parameter(name).data = BAD_WEIGHTS[name](layer)
    with pytest.raises((ValueError, TypeError), match=name):
        layer(hidden_states, metadata, *state, slots, None, slots)
    assert torch.equal(storage_bytes(state), before)


@pytest.mark.parametrize("limit", [(1.0, 0.5), (float("nan"), 1.0)])
def test_limits_of_dt_must_be_a_range(limit: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="dt_limit"):
        make_layer(dt_limit=limit)


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_input_is_an_error_before_anything_is_written(case: str) -> None:
    name, spoil, error = BAD_ARGUMENTS[case]
    layer = make_layer()
    hidden_states, metadata = batch([5, 20], torch.float32)
    slots = torch.tensor([4, 10])
    state = make_state(layer, slots.tolist())
    before = clone(state)
    arguments: dict[str, Any] = {"hidden_states": hidden_states, "metadata": metadata, **state._asdict()}
    arguments |= {"read_slots": slots, "has_initial_state": torch.tensor([True, True]), "write_slots": slots}
    if name == "cu_chunk_seqlens":
        arguments["hidden_states"] = hidden_states[:-1]
    else:
        arguments[name] = spoil(arguments[name])
    with pytest.raises(error, match="chunk_size" if name == "metadata" else name):
        layer(**arguments)
    assert torch.equal(storage_bytes(state), storage_bytes(before))


@pytest.mark.parametrize(("options", "name"), [({"ngroups": 3}, "ngroups"), ({"conv_width": 1}, "conv_width")])
def test_sizes_that_do_not_fit_are_an_error(options: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Mamba2Layer(32, nheads=4, headdim=16, dstate=32, **options)
