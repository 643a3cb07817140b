"""The launches of a region on tensors without memory, which stand for all later ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inductor_passes.vllm.example_inputs import SLOT_MULTIPLE
from inductor_passes.vllm.made_up_layers import empty_layer
from inductor_passes.vllm.region_inputs import CheckpointTensors, LayerShape, LayerTensors
from mamba_ops.kernels import one_pass_heads
from mamba_ops.ops.bmm_chunk import bmm_chunk_launch
from mamba_ops.ops.chunk_scan import chunk_scan_launch
from mamba_ops.ops.chunk_state import chunk_state_launch
from mamba_ops.ops.conv_checkpoint import conv_checkpoint_launch
from mamba_ops.ops.conv_cumsum import conv_cumsum_launch
from mamba_ops.ops.launch import Launch
from mamba_ops.ops.one_pass import one_pass_launch
from mamba_ops.ops.one_pass_heads import has_form_of_heads, one_pass_heads_launch
from mamba_ops.ops.state_passing import state_passing_launch


class _Tensors(NamedTuple):
    x: Tensor
    B: Tensor
    C: Tensor
    steps: Tensor  # dt and its running sums
    state_cache: Tensor
    integers: Tensor
    has: Tensor
    out: Tensor
    D: Tensor
    checkpoints: CheckpointTensors


def keep_launch(shape: LayerShape) -> Launch:
    """The convolution's states at checkpoints."""
    with torch.device("meta"):
        _, inputs, _ = _split(shape)
        integers, has = torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.bool)
        state, slots = _layer(shape).conv_state, integers[:1]
        return conv_checkpoint_launch(inputs, integers, state, slots, has, slots, slots, shape.width)


def conv_launch(shape: LayerShape) -> Launch:
    """The convolution and the running sums."""
    with torch.device("meta"):
        layer = _layer(shape)
        _, inputs, dt = _split(shape)
        steps = torch.empty(1, shape.nheads, shape.chunk_size, dtype=torch.float32)
        integers, has = torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.bool)
        return conv_cumsum_launch(
            inputs,
            layer.conv_weight,
            layer.conv_bias,
            integers,
            layer.conv_state,
            integers[:1],
            has,
            integers[:1],
            integers[:1],
            torch.empty(2, shape.conv_dim, dtype=shape.dtype),
            dt,
            layer.A,
            layer.dt_bias,
            integers,
            steps,
            steps,
            True,
        )


def scan_launch(shape: LayerShape, max_tokens: int, one_chunk: bool, checkpoints: bool = False) -> Launch:
    """All that follows, in one pass."""
    with torch.device("meta"):
        t = _tensors(shape)
        last = None if one_chunk else t.integers[:1]
        sequences = (t.integers, t.state_cache, t.integers[:1], t.has)
        kept = t.checkpoints if checkpoints else ()
        return one_pass_launch(t.x, t.B, t.C, t.steps, t.steps, *sequences, t.out, max_tokens, t.D, last, *kept)


def scan_of_heads_launch(shape: LayerShape, max_tokens: int) -> Launch:
    """The same for many sequences of one chunk each."""
    with torch.device("meta"):
        t = _tensors(shape)
        sequences = (t.integers, t.state_cache, t.integers[:1], t.has)
        return one_pass_heads_launch(t.x, t.B, t.C, t.steps, t.steps, *sequences, t.out, max_tokens, t.D, 1)


def sequences_for_heads(shape: LayerShape, max_tokens: int) -> int | None:
    """From how many sequences on that form is faster; None: layers of this shape have no such form."""
    with torch.device("meta"):
        t = _tensors(shape)
    if not has_form_of_heads(t.x, t.B, max_tokens):
        return None
    return one_pass_heads.least_sequences(shape.nheads, _multiprocessors(shape))


def heads_of_a_program(nseqs: int, shape: LayerShape) -> int:
    """How many heads a program of that form takes."""
    return one_pass_heads.heads_of_a_program(
        nseqs, shape.nheads, shape.nheads // shape.ngroups, _multiprocessors(shape)
    )


def staged_launches(shape: LayerShape, checkpoints: bool = False) -> tuple[Launch, Launch, Launch, Launch]:
    """All that follows, in stages: chunk state, state passing, C . B, scan."""
    with torch.device("meta"):
        t = _tensors(shape)
        slots, kept = t.integers[:1], t.checkpoints if checkpoints else ()
        states = torch.empty(1, shape.nheads, shape.headdim, shape.dstate, dtype=torch.float32)
        entering = states.to(shape.state_dtype)
        cb = torch.empty(1, shape.ngroups, shape.chunk_size, shape.chunk_size, dtype=torch.float32)
        return (
            chunk_state_launch(t.B, t.x, t.steps, t.steps, t.integers, states),
            state_passing_launch(
                states, t.steps, slots, entering, t.state_cache, slots, t.has, t.state_cache, slots, False, *kept
            ),
            bmm_chunk_launch(t.C, t.B, t.integers, cb),
            chunk_scan_launch(cb, t.x, t.steps, t.steps, t.C, entering, t.integers, t.out, t.D, None),
        )


def _multiprocessors(shape: LayerShape) -> int:
    return torch.cuda.get_device_properties(shape.device).multi_processor_count


def _split(shape: LayerShape) -> tuple[Tensor, Tensor, Tensor]:
    # Two tokens, as a view of a single one forgets the distance between tokens.
    projected = torch.empty(2, shape.projected, dtype=shape.dtype)
    gate, inputs, dt = projected.split([shape.inner, shape.conv_dim, shape.nheads], dim=1)
    return gate, inputs, dt


def _tensors(shape: LayerShape) -> _Tensors:
    layer = _layer(shape)
    groups = shape.ngroups * shape.dstate
    x, B, C = torch.empty(2, shape.conv_dim, dtype=shape.dtype).split([shape.inner, groups, groups], dim=1)
    return _Tensors(
        x.unflatten(1, (shape.nheads, shape.headdim)),
        B.unflatten(1, (shape.ngroups, shape.dstate)),
        C.unflatten(1, (shape.ngroups, shape.dstate)),
        torch.empty(1, shape.nheads, shape.chunk_size, dtype=torch.float32),
        layer.ssm_state,
        torch.empty(2, dtype=torch.int32),
        torch.empty(1, dtype=torch.bool),
        torch.empty(2, shape.nheads, shape.headdim, dtype=shape.dtype),
        layer.D,
        CheckpointTensors(
            torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
        ),
    )


def _layer(shape: LayerShape) -> LayerTensors:
    return empty_layer(shape, 1, 2 * SLOT_MULTIPLE, 2 * SLOT_MULTIPLE)
