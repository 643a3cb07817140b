"""The cutting of sequences into chunks, as properties of the result, and bad arguments."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_ops import build_chunk_metadata
from mamba_ops.value_checks import check_batch
from tests.mamba_ops.batches import offsets


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[int]]:
    """Lengths, a chunk size, and for each sequence its context and a place to split."""
    lengths = draw(st.lists(st.integers(0, 200), max_size=6))
    contexts = [draw(st.integers(0, 300)) for _ in lengths]
    splits = [draw(st.integers(0, length)) for length in lengths]
    return lengths, draw(st.sampled_from([16, 32, 64, 128])), contexts, splits


@given(cuts())
def test_chunks_end_where_physical_chunks_and_splits_do(case: tuple[list[int], int, list[int], list[int]]) -> None:
    lengths, chunk_size, contexts, splits = case
    metadata = build_chunk_metadata(offsets(lengths), chunk_size, contexts, splits)
    chunks = list(pairwise(metadata.cu_chunk_seqlens.tolist()))
    owner = metadata.seq_idx.tolist()
    last = metadata.last_chunk_indices.tolist()

    check_batch(*metadata[:4], sum(lengths), chunk_size, 0, None, None, None, crossed=False)
    assert metadata.cu_seqlens.tolist() == offsets(lengths)
    for b, (start, end) in enumerate(pairwise(offsets(lengths))):
        first = last[b - 1] + 1 if b else 0
        assert owner[first : last[b] + 1] == [b] * (last[b] + 1 - first)
        ends = {chunk[1] for chunk in chunks[first : last[b] + 1]}
        expected = {start + t for t in range(1, end - start + 1) if (contexts[b] + t) % chunk_size == 0}
        if end > start:
            expected |= {end, start + splits[b]} - {start}
        assert ends == expected
    assert len(owner) == len(chunks) == last[-1] + 1 if last else not chunks


def test_lists_and_strided_tensors_of_either_integer_type_mean_the_same() -> None:
    expected = build_chunk_metadata([0, 40, 40, 100], 16, [3, 0, 20], [0, 0, 7])
    for dtype in (torch.int32, torch.int64):
        table = torch.tensor([[0, 9], [40, 9], [40, 9], [100, 9]], dtype=dtype)
        got = build_chunk_metadata(
            table[:, 0], 16, torch.tensor([3, 0, 20], dtype=dtype), torch.tensor([0, 0, 7], dtype=dtype)
        )
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(tensor.dtype == torch.int32 for tensor in expected[:4])


def test_metadata_goes_to_the_device_that_is_asked_for() -> None:
    metadata = build_chunk_metadata([0, 5], 16, device="meta")
    assert {tensor.device.type for tensor in metadata[:4]} == {"meta"}


@pytest.mark.fault(21)
@pytest.mark.parametrize("chunk_size", [50, 0, -64, 1, 8, 48, 100, 512])
def test_a_chunk_size_that_kernels_do_not_take_is_an_error(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=rf"chunk_size: {chunk_size}; it must be a power of two"):
        build_chunk_metadata([0, 100], chunk_size)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0, 10, 5], 64), ValueError, "cu_seqlens: decreases to 5 after sequence 1"),
        (([1, 10], 64), ValueError, "cu_seqlens: starts with"),
        (([], 64), ValueError, "cu_seqlens: starts with"),
        (([0, 1 << 31], 64), ValueError, "cu_seqlens: ends at 2147483648"),
        (([0, 1.5], 64), TypeError, r"cu_seqlens: holds 1\.5"),
        ((torch.tensor([0.0, 1.0]), 64), TypeError, r"cu_seqlens: dtype torch\.float32"),
        ((torch.zeros(2, 2, dtype=torch.int32), 64), ValueError, "cu_seqlens: shape"),
        (([0, 10], 64, [1, 2]), ValueError, "context_lens: 2 entries; there are 1 sequences"),
        (([0, 10], 64, [-1]), ValueError, "context_lens: -1"),
        (([0, 10], 64, None, [11]), ValueError, "split_at: 11 for sequence 0, which has 10 tokens"),
        (([0, 10], 64, None, [-3]), ValueError, "split_at: -3"),
        (([0, 10], 64.0), TypeError, r"chunk_size: 64\.0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_chunk_metadata(*arguments)
