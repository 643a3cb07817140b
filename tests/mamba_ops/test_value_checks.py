"""The switch for checks that look at values, and the op that makes them in a compiled graph on a GPU."""

import pytest
import torch
from torch import Tensor

from mamba_ops.ops.checked_offsets import checked_offsets
from mamba_ops.value_checks import checks_enabled
from tests.mamba_ops.batches import assert_same, make_batch

GOOD = {
    "cu_seqlens": [0, 0, 32, 70, 70],
    "seq_idx": [1, 2, 0],
    "cu_chunk_seqlens": [0, 32, 70, 70],
    "last_chunk_indices": [-1, 0, 1, 1],
    "read_slots": [99, 3, -1, 99],
    "has_initial_state": [True, False, True, True],
    "write_slots": [99, 4, 5, 99],
}

BAD = [
    ("cu_chunk_seqlens", [0, 70, 70, 70], "70 tokens in chunk 0"),
    ("last_chunk_indices", [-1, 0, 1, 3], "3 for sequence 3; there are 3 chunks"),
    ("cu_seqlens", [1, 1, 32, 70, 70], "starts at 1"),
    ("cu_seqlens", [0, 0, 32, 69, 69], "69 at the end of sequence 2"),
    ("cu_seqlens", [0, 0, 16, 70, 70], "16 at the end of sequence 1"),
    ("last_chunk_indices", [-1, -1, 1, 1], "whose last chunk ends elsewhere"),
    ("last_chunk_indices", [0, 0, 1, 1], "whose last chunk ends elsewhere"),
    ("seq_idx", [1, 1, 0], "1 for chunk 1, which belongs to another sequence"),
    ("read_slots", [99, 3, 6, 99], "slot 6 of sequence 2"),
    ("read_slots", [99, 3, -2, 99], "slot 4 of sequence 2 is written by another"),
    ("write_slots", [99, 4, 6, 99], "slot 6 of sequence 2"),
    ("write_slots", [99, 5, -1, 99], "slot 5 is written by more than one"),
]


def arguments(**changes: list[int]) -> dict[str, Tensor | int]:
    values = {**GOOD, **changes}
    dtypes = {"has_initial_state": torch.bool, "read_slots": torch.int64}
    return {
        "ntokens": 70,
        "chunk_size": 64,
        "num_slots": 6,
        **{name: torch.tensor(value, dtype=dtypes.get(name, torch.int32)) for name, value in values.items()},
    }


def test_on_a_gpu_the_switch_decides_and_on_a_cpu_the_checks_are_always_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("MAMBA_OPS_CHECKS", raising=False)
    assert (checks_enabled(cpu), checks_enabled(gpu)) == (True, False)
    monkeypatch.setenv("MAMBA_OPS_CHECKS", "0")
    assert (checks_enabled(cpu), checks_enabled(gpu)) == (True, False)
    monkeypatch.setenv("MAMBA_OPS_CHECKS", "1")
    assert (checks_enabled(cpu), checks_enabled(gpu)) == (True, True)


def test_good_values_pass_and_the_offsets_come_back_as_a_copy() -> None:
    good = arguments()
    for offsets, name in zip(checked_offsets(**good), ("cu_seqlens", "cu_chunk_seqlens"), strict=True):
        assert_same(offsets, good[name])
        assert offsets.data_ptr() != good[name].data_ptr()
    cu_seqlens, cu_chunk_seqlens, *others, chunk_size = make_batch([40, 0, 3]).metadata
    checked = checked_offsets(cu_seqlens, cu_chunk_seqlens, *others, 43, chunk_size)
    assert_same(checked[1], cu_chunk_seqlens)


@pytest.mark.parametrize(("name", "values", "message"), BAD)
def test_bad_values_are_named(name: str, values: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        checked_offsets(**arguments(**{name: values}))
    named = {"last_chunk_indices": "cu_seqlens"} if "ends elsewhere" in message else {}
    assert str(raised.value).startswith(f"{named.get(name, name)}: ")


def test_in_a_compiled_graph_whatever_uses_the_offsets_comes_after_the_checks() -> None:
    def write(cache: Tensor, values: dict[str, Tensor | int]) -> None:
        cache.add_(checked_offsets(**values)[1].sum())

    compiled = torch.compile(write, fullgraph=True)
    cache = torch.zeros(4)
    for name, values, message in BAD:
        with pytest.raises(ValueError, match=message):
            compiled(cache, arguments(**{name: values}))
        assert_same(cache, torch.zeros(4))
    compiled(cache, arguments())
    assert_same(cache, torch.full((4,), 172.0))


def test_the_op_is_one_that_pytorch_accepts() -> None:
    torch.library.opcheck(checked_offsets, (), arguments())
