"""PyTorch's own checks of every op, on the CPU: schema, declared mutation, fake tensors, compilation by AOTAutograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mamba_ops import build_chunk_metadata, ops
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.checked_slots import checked_slots
from mamba_ops.ops.conv_checkpoint import conv_checkpoint
from mamba_ops.ops.conv_cumsum import conv_cumsum

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def arguments_of_every_op(state_dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each op with arguments that the one before it computed; strides as models have them."""
    nheads, headdim, dstate, ngroups, chunk_size = 4, 16, 32, 2, 16
    metadata = build_chunk_metadata([0, 20, 20, 25], chunk_size)
    cu, last = metadata.cu_chunk_seqlens, metadata.last_chunk_indices
    wide = torch.randn(25, nheads * headdim + 2 * ngroups * dstate)
    x, B, C = wide.split([nheads * headdim, ngroups * dstate, ngroups * dstate], dim=1)
    x, B, C = x.unflatten(1, (nheads, -1)), B.unflatten(1, (ngroups, -1)), C.unflatten(1, (ngroups, -1))
    steps = (torch.randn(25, nheads), -torch.rand(nheads), cu, chunk_size, torch.randn(nheads), True, 0.0, None)
    dA_cumsum, dt_out = ops.chunk_cumsum(*steps)
    states = ops.chunk_state(B, x, dt_out, dA_cumsum, cu)
    cache = (
        torch.randn(6, nheads * headdim * dstate + 8).to(state_dtype)[:, :-8].unflatten(1, (nheads, headdim, dstate))
    )
    slots, has = torch.tensor([[4, 9], [0, 9], [2, 9]])[:, 0], torch.tensor([True, False, True])
    rows = ops.masked_gather(cache, slots, has)
    entering, _ = ops.state_passing(states, dA_cumsum, last, rows, state_dtype)
    scan = (
        ops.bmm_chunk(C, B, cu, chunk_size),
        x,
        dt_out,
        dA_cumsum,
        C,
        entering,
        cu,
        torch.zeros(25, nheads, headdim),
    )
    offsets = torch.tensor([0, 15, 15, 25], dtype=torch.int32)
    conv_state = torch.randn(6, 5, wide.shape[1]).transpose(1, 2)  # room for two tokens more
    convolution = (wide, torch.randn(wide.shape[1], 4), None, offsets, conv_state, slots, has, offsets, offsets)
    one_chunk_each = ops.chunk_cumsum(steps[0], steps[1], torch.tensor([0, 15, 25, 25]).int(), chunk_size)
    one_chunk_each = [step[[0, 2, 1]] for step in one_chunk_each[::-1]]
    one_pass = (x, B, C, *one_chunk_each, offsets, cache, slots, has, torch.zeros(25, nheads, headdim), 15)
    marks = (torch.tensor([15, 0, 0]).int(), torch.tensor([1, 3, 3]))  # behind the first chunk of the first sequence
    kept = (torch.zeros(3, dtype=torch.int64), *marks)
    passed = (states, dA_cumsum, last, cache, slots, has, slots)
    over_chunks = (x, B, C, dt_out, dA_cumsum, cu, cache, slots, has, torch.zeros(25, nheads, headdim), 16, None, last)
    return {
        "chunk_cumsum": (ops.chunk_cumsum, steps),
        "chunk_state": (ops.chunk_state, (B, x, dt_out, dA_cumsum, cu)),
        "bmm_chunk": (ops.bmm_chunk, (C, B, cu, chunk_size)),
        "state_passing": (ops.state_passing, (states, dA_cumsum, last, rows, state_dtype)),
        "state_passing_update": (ops.state_passing_update, (states, dA_cumsum, last, rows, cache, slots)),
        "state_passing_indexed": (ops.state_passing_indexed, passed),
        "state_passing_indexed with checkpoints": (ops.state_passing_indexed, (*passed, False, *kept)),
        "chunk_scan": (ops.chunk_scan, (*scan, torch.randn(nheads), torch.randn(25, nheads, headdim))),
        "masked_gather": (ops.masked_gather, (cache, slots, has)),
        "one_pass_scan": (ops.one_pass_scan, (*one_pass, torch.randn(nheads, headdim))),
        "one_pass_scan with checkpoints": (ops.one_pass_scan, (*over_chunks, *kept)),
        "conv_checkpoint": (conv_checkpoint, (wide, offsets, conv_state, slots, has, *marks, 4)),
        "causal_conv_tiled": (causal_conv_tiled, convolution),
        "conv_cumsum": (conv_cumsum, (*convolution, *steps[:2], chunk_size, steps[4], True)),
        "checked_slots": (checked_slots, (metadata.cu_seqlens, slots, has, slots, 25, 6)),
    }


def test_every_public_op_is_here() -> None:
    assert set(ops.__all__) <= set(arguments_of_every_op(torch.float32))


@pytest.mark.fault(17)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("name", arguments_of_every_op(torch.float32))
def test_opcheck(name: str, state_dtype: torch.dtype) -> None:
    op, arguments = arguments_of_every_op(state_dtype)[name]
    torch.library.opcheck(op, arguments)
