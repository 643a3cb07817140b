"""MAMBA_OPS_CHECKS=1 on a GPU: wrong values are named before anything is written, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from mamba_ops import ChunkMetadata, build_chunk_metadata, ssd_chunk_scan

pytestmark = pytest.mark.gpu


def scan(x: torch.Tensor, metadata: ChunkMetadata, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    dt, A, B = x[:, :, 0], -torch.ones(4, device="cuda"), x[:, :1, :16]
    return ssd_chunk_scan(
        x, dt, A, B, B, metadata, dt_softplus=True, state_cache=cache, read_slots=slots, write_slots=slots
    ).out


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("slots", "offsets", "message"),
    [
        ([1, 9], [0, 32, 40, 70], "write_slots: slot 9 of sequence 1"),
        ([2, 2], [0, 32, 40, 70], "write_slots: slot 2 is written by more than one"),
        ([1, 2], [0, 40, 32, 70], "cu_chunk_seqlens: decreases to 32"),
        ([1, 2], [0, 32, 40, 71], "cu_chunk_seqlens: ends at 71"),
    ],
)
def test_wrong_values_are_named_before_anything_is_written(
    slots: list[int], offsets: list[int], message: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBA_OPS_CHECKS", "1")
    run: Callable[..., torch.Tensor] = torch.compile(scan, fullgraph=True) if compiled else scan
    x = torch.randn(70, 4, 32, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(4, 4, 32, 16, device="cuda", dtype=torch.bfloat16)
    before = cache.clone()
    good = build_chunk_metadata([0, 40, 70], 64, split_at=[32, 0], device="cuda")
    bad = good._replace(cu_chunk_seqlens=torch.tensor(offsets, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match=message):
        run(x, bad, cache, torch.tensor(slots, device="cuda"))
    assert_close(cache, before, rtol=0, atol=0)
    out = run(x, good, cache, torch.tensor([1, 2], device="cuda"))
    assert out.isfinite().all()
    assert not cache.equal(before)
