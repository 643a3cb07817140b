"""Launches of decodes are tried before they are used: each must leave the bits that vLLM's own functions leave."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_passes.vllm.decode_launches import DecodeLayout, decode_views
from inductor_passes.vllm.direct_decode import DirectDecode
from inductor_passes.vllm.made_up_layers import memory, random, random_layer, with_own_caches
from inductor_passes.vllm.region_inputs import LayerTensors
from inductor_passes.vllm.step import StepDecodes

_NUM_SLOTS = 6  # of which the last one is nobody's; 0 is vLLM's null slot


def check_decodes(decode: DirectDecode) -> None:
    """Raise RuntimeError if any kernels of it differ from vLLM's in a bit of an output or of a cache."""
    for ndecodes, slots_stride in decode.samples():
        if not equals_vllm(decode, ndecodes, slots_stride, seed=ndecodes):
            raise RuntimeError(f"self check: {ndecodes} decodes, slots {slots_stride} apart, differ from vLLM's own")


def equals_vllm(decode: DirectDecode, ndecodes: int, slots_stride: int, seed: int) -> bool:
    """Whether both leave the same bits after a step of made-up decodes, in the layout that `decode` was made for.

    A few decodes have slots of their own, the others have the null slot, so that the caches are small.
    """
    layout = decode.layout
    shape, device = layout.shape, layout.shape.device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        projected = random((ndecodes + 1, shape.projected), shape.dtype, generator)
        layer = random_layer(shape, _NUM_SLOTS, layout.conv_step, layout.ssm_step, generator)
        slots = _slots(ndecodes, slots_stride, generator)
        out = torch.full((ndecodes + 1, shape.inner), torch.nan, dtype=shape.dtype)
    other = with_own_caches(layer)
    other_projected, other_out = projected.clone(), out.clone()
    run_vllm(layout, other_projected, other_out, slots, other)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in layer]
    step = StepDecodes(ndecodes, slots.data_ptr(), slots_stride)
    if not decode(step, projected.data_ptr(), out.data_ptr(), addresses, _NUM_SLOTS):
        return False
    pairs = [(projected, other_projected), (out, other_out)]
    pairs += [(memory(layer.conv_state), memory(other.conv_state)), (memory(layer.ssm_state), memory(other.ssm_state))]
    return all(torch.equal(_bits(ours), _bits(theirs)) for ours, theirs in pairs)


def run_vllm(layout: DecodeLayout, projected: Tensor, out: Tensor, slots: Tensor, layer: LayerTensors) -> None:
    """vLLM's own functions, with the arguments that its layer gives them."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import selective_state_update

    views = decode_views(projected, out, slots.shape[0], layer, layout.shape)
    convolved = causal_conv1d_update(
        views.inputs,
        layer.conv_state,
        layer.conv_weight,
        layer.conv_bias,
        "silu",
        conv_state_indices=slots,
        num_accepted_tokens=None,
        query_start_loc=None,
        max_query_len=slots.size(-1),
    )
    assert convolved.data_ptr() == views.inputs.data_ptr()  # what x, B and C are views of
    selective_state_update(
        layer.ssm_state,
        views.x,
        views.dt,
        views.A,
        views.B,
        views.C,
        views.D,
        views.dt_bias,
        dt_softplus=True,
        state_batch_indices=slots,
        dst_state_batch_indices=slots,
        out=views.out,
        num_accepted_tokens=None,
        cu_seqlens=None,
        is_blackwell=layout.is_blackwell,
    )


def _slots(ndecodes: int, stride: int, generator: torch.Generator) -> Tensor:
    """The first column of a table with so many columns."""
    table = torch.zeros(ndecodes, stride, dtype=torch.int32)
    owned = min(ndecodes, _NUM_SLOTS - 2)
    rows = torch.randperm(ndecodes, generator=generator)[:owned]
    table[rows, 0] = 1 + torch.randperm(owned, generator=generator, dtype=torch.int32)
    return table.as_strided((ndecodes, 1), (stride, 1))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
