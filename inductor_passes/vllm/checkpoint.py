"""A prefill that also keeps the state in its middle, for prefix caching on a CPU.

vLLM's CPU scan returns one state a sequence where this needs one a chunk, and fails. On a GPU vLLM's own code runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_passes.vllm.region import LayerShape, LayerTensors, StepTensors
from mamba_ops import ChunkMetadata, ssd_chunk_scan
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled


def prefill_with_checkpoints(
    projected: Tensor,
    out: Tensor,
    layer: LayerTensors,
    step: StepTensors,
    shape: LayerShape,
    checkpoint_chunks: Tensor,
    checkpoint_offsets: Tensor,
    checkpoint_slots: Tensor,
) -> None:
    """`inductor_passes.vllm.region.prefill`, and the states at a token of some sequences go to slots of their own.

    Args:
        projected, out, layer, step, shape: as for `prefill`.
        checkpoint_chunks: (nseqs,), the chunk that ends at the checkpoint.
        checkpoint_offsets: (nseqs,), tokens of the sequence in this step up to the checkpoint; 0 for no checkpoint.
        checkpoint_slots: (nseqs,), where the states there go.
    """
    ntokens, groups = projected.shape[0], shape.ngroups * shape.dstate
    _, inputs, dt = projected.split([shape.inner, shape.conv_dim, shape.nheads], dim=1)
    rows = (checkpoint_offsets > 0).nonzero().squeeze(1)
    checkpoint_inputs = _inputs_before(checkpoint_offsets[rows], rows, inputs, layer, step, shape.width - 1)
    convolved = causal_conv_tiled(
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
    x, B, C = convolved.split([shape.inner, groups, groups], dim=1)
    initial_states = torch.where(step.has_initial_state[:, None, None, None], layer.ssm_state[step.slots], 0)
    result = ssd_chunk_scan(
        x.view(ntokens, shape.nheads, shape.headdim),
        dt,
        layer.A,
        B.view(ntokens, shape.ngroups, shape.dstate),
        C.view(ntokens, shape.ngroups, shape.dstate),
        ChunkMetadata(
            step.cu_seqlens, step.cu_chunk_seqlens, step.last_chunk_indices, step.seq_idx, shape.chunk_size
        ),
        D=layer.D,
        dt_bias=layer.dt_bias,
        dt_softplus=True,
        initial_states=initial_states,
        return_intermediate_states=True,
        out=out,
    )
    assert result.intermediate_states is not None
    slots = checkpoint_slots[rows].long()
    layer.conv_state[slots] = checkpoint_inputs
    layer.ssm_state[slots] = result.intermediate_states[checkpoint_chunks[rows].long()]
    layer.ssm_state[step.slots] = result.final_states


def _inputs_before(
    offsets: Tensor, rows: Tensor, inputs: Tensor, layer: LayerTensors, step: StepTensors, history: int
) -> Tensor:
    """The last inputs of the convolution before the token at `offsets` of the sequences `rows`, as a slot stores them."""
    position = offsets[:, None] - history + torch.arange(history, device=inputs.device)
    new = inputs[(step.cu_seqlens[rows][:, None] + position).clamp(min=0)]
    cached = layer.conv_state[step.slots[rows][:, None], :, (position + history).clamp(max=history - 1)]
    cached = torch.where(step.has_initial_state[rows][:, None, None], cached, 0)
    return torch.where((position >= 0)[:, :, None], new, cached).transpose(1, 2)
