"""PyTorch's own checks of every op, on the CPU: schema, declared mutation, fake tensors, compilation by AOTAutograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mamba_ops import build_chunk_metadata, ops
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.checked_slots import checked_slots
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
    # Behind a chunk in the middle of a sequence, behind none, behind the last chunk or again one in the middle.
    until = torch.tensor([9, 0, 2], dtype=torch.int32)
    checkpoints = (torch.tensor([0, 99, 2]), until, torch.tensor([[1, 9], [99, 9], [3, 9]], dtype=torch.int32)[:, 0])
    edges = build_chunk_metadata(offsets, chunk_size, split_at=until)
    across_edges = ops.chunk_cumsum(*steps[:2], edges.cu_chunk_seqlens, chunk_size)[::-1]
    on_the_way = (x, B, C, *across_edges, edges.cu_chunk_seqlens, *one_pass[6:], None, edges.last_chunk_indices)
    return {
        "chunk_cumsum": (ops.chunk_cumsum, steps),
        "chunk_state": (ops.chunk_state, (B, x, dt_out, dA_cumsum, cu)),
        "bmm_chunk": (ops.bmm_chunk, (C, B, cu, chunk_size)),
        "state_passing": (ops.state_passing, (states, dA_cumsum, last, rows, state_dtype)),
        "state_passing_update": (ops.state_passing_update, (states, dA_cumsum, last, rows, cache, slots)),
        "state_passing_indexed": (ops.state_passing_indexed, (states, dA_cumsum, last, cache, slots, has, slots)),
        "state_passing_indexed, checkpoints": (
            ops.state_passing_indexed,
            (states, dA_cumsum, last, cache, slots, has, slots, False, *checkpoints),
        ),
        "chunk_scan": (ops.chunk_scan, (*scan, torch.randn(nheads), torch.randn(25, nheads, headdim))),
        "masked_gather": (ops.masked_gather, (cache, slots, has)),
        "one_pass_scan": (ops.one_pass_scan, (*one_pass, torch.randn(nheads, headdim))),
        "one_pass_scan, checkpoints": (ops.one_pass_scan, (*on_the_way, *checkpoints)),
        "conv_checkpoint": (ops.conv_checkpoint, (wide, offsets, conv_state, slots, has, *checkpoints[1:], 4)),
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
