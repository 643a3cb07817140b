"""What is compiled: the prefill of one layer, spelled as vLLM's layer spells it.

The gather and the `torch.where` below are the snapshot. They are here so that `SnapshotElimination` removes them from
the compiled graph, and so that a run without the pass is still right.
"""

from typing import Any

import torch
from torch import Tensor

from inductor_passes.vllm.region_inputs import CheckpointTensors, LayerShape, LayerTensors, StepTensors
from mamba_ops import ChunkMetadata, ssd_chunk_scan
from mamba_ops.ops import one_pass_scan
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.conv_cumsum import conv_cumsum


def prefill(projected: Tensor, out: Tensor, layer: LayerTensors, step: StepTensors, shape: LayerShape) -> None:
    """Convolution, SSD and state writeback of the sequences of a step.

    Args:
        projected: (ntokens, shape.projected) dense. Tokens past the last sequence are padding.
        out: (ntokens, nheads, headdim) dense. Written, except at padding. In this shape, because a mutated argument of
            which the graph takes a view is cloned by Inductor.
        layer: its caches are updated in place.
        step: the sequences.
        shape: constants.
    """
    _, inputs, dt = projected.split([shape.inner, shape.conv_dim, shape.nheads], dim=1)
    convolved = _convolve(inputs, layer, step)
    _scan(convolved, dt, out, layer, step, shape, {"state_cache": layer.ssm_state, "write_slots": step.slots})


def prefill_in_one_pass(
    projected: Tensor,
    out: Tensor,
    layer: LayerTensors,
    step: StepTensors,
    shape: LayerShape,
    max_tokens: int,
    one_chunk: bool,
) -> None:
    """`prefill` for sequences of at most `max_tokens`, each of them one chunk if `one_chunk`.

    Two launches, and the same bits.
    """
    _, inputs, dt = projected.split([shape.inner, shape.conv_dim, shape.nheads], dim=1)
    convolved, dA_cumsum, dt_out = conv_cumsum(
        inputs,
        layer.conv_weight,
        layer.conv_bias,
        step.cu_seqlens,
        layer.conv_state,
        step.slots,
        step.has_initial_state,
        step.tile_sequence,
        step.tile_offset,
        dt,
        layer.A,
        shape.chunk_size,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
        cu_chunk_seqlens=None if one_chunk else step.cu_chunk_seqlens,
    )
    x, B, C = _views(convolved, shape)
    one_pass_scan(
        x,
        B,
        C,
        dt_out,
        dA_cumsum,
        step.cu_seqlens if one_chunk else step.cu_chunk_seqlens,
        layer.ssm_state,
        step.slots,
        step.has_initial_state,
        out,
        max_tokens,
        D=layer.D,
        last_chunk_indices=None if one_chunk else step.last_chunk_indices,
    )


def prefill_with_checkpoints(
    projected: Tensor,
    out: Tensor,
    layer: LayerTensors,
    step: StepTensors,
    checkpoints: CheckpointTensors,
    shape: LayerShape,
) -> None:
    """`prefill`, and the SSM states in the middle of some sequences go to slots of their own.

    Shapes may not depend on how many there are, so a sequence without a checkpoint writes its last state instead, to
    its own slot, which it reaches anyway.
    """
    _, inputs, dt = projected.split([shape.inner, shape.conv_dim, shape.nheads], dim=1)
    convolved = _convolve(inputs, layer, step)
    result = _scan(convolved, dt, out, layer, step, shape, {"return_intermediate_states": True})

    has = checkpoints.offsets > 0
    slots = torch.where(has, checkpoints.slots, step.slots)
    states_there = result.intermediate_states[checkpoints.chunks]
    final = result.final_states
    layer.ssm_state.index_put_((slots,), torch.where(has[:, None, None, None], states_there, final))
    layer.ssm_state.index_put_((step.slots,), final)


def keep_inputs(
    projected: Tensor, layer: LayerTensors, step: StepTensors, checkpoints: CheckpointTensors, shape: LayerShape
) -> None:
    """Before `prefill_with_checkpoints`: the convolution's states in the middle of some sequences.

    A function of its own, so that each graph writes a cache once: of a cache that is written twice Inductor makes a
    copy. A sequence without a checkpoint writes what its slot holds.
    """
    inputs = projected[:, shape.inner : shape.inner + shape.conv_dim]
    history = shape.width - 1
    position = checkpoints.offsets[:, None] - history + torch.arange(history, device=inputs.device)
    new = inputs[(step.cu_seqlens[:-1][:, None] + position).clamp(min=0)]
    older = layer.conv_state[step.slots[:, None], :, (position + history).clamp(max=history - 1)]
    older = torch.where(step.has_initial_state[:, None, None], older, 0)
    there = torch.where((position >= 0)[:, :, None], new, older).transpose(1, 2)

    has = checkpoints.offsets > 0
    slots = torch.where(has, checkpoints.slots, step.slots)
    layer.conv_state.index_put_((slots,), torch.where(has[:, None, None], there, layer.conv_state[step.slots]))


def _convolve(inputs: Tensor, layer: LayerTensors, step: StepTensors) -> Tensor:
    convolved: Tensor = causal_conv_tiled(
        inputs,
        layer.conv_weight,
        layer.conv_bias,
        step.cu_seqlens,
        layer.conv_state,
        step.slots,
        step.has_initial_state,
        step.tile_sequence,
        step.tile_offset,
    )
    return convolved


def _scan(
    convolved: Tensor,
    dt: Tensor,
    out: Tensor,
    layer: LayerTensors,
    step: StepTensors,
    shape: LayerShape,
    states: dict[str, Any],
) -> Any:
    x, B, C = _views(convolved, shape)
    initial_states = torch.where(step.has_initial_state[:, None, None, None], layer.ssm_state[step.slots], 0)
    return ssd_chunk_scan(
        x,
        dt,
        layer.A,
        B,
        C,
        ChunkMetadata(step.cu_seqlens, step.cu_chunk_seqlens, step.last_chunk_indices, step.seq_idx, shape.chunk_size),
        D=layer.D,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
        initial_states=initial_states,
        out=out,
        **states,
    )


def _views(convolved: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor, Tensor]:
    ntokens, groups = convolved.shape[0], shape.ngroups * shape.dstate
    x, B, C = convolved.split([shape.inner, groups, groups], dim=1)
    return (
        x.view(ntokens, shape.nheads, shape.headdim),
        B.view(ntokens, shape.ngroups, shape.dstate),
        C.view(ntokens, shape.ngroups, shape.dstate),
    )
