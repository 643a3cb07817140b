"""vLLM's two kernels for a decode, with the arguments that vLLM's own functions give them.

All arguments go by name: a vLLM that renames, adds or removes a parameter makes a launch fail before it is compiled,
and its decodes take vLLM's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inductor_passes.vllm.made_up_layers import empty_layer
from inductor_passes.vllm.region_inputs import LayerShape, LayerTensors
from mamba_ops.ops.launch import Launch

# What is given in each launch, in this order: addresses, the number of decodes, and for one the number of slots.
CONV_VARYING = (
    "x_ptr",
    "w_ptr",
    "bias_ptr",
    "conv_state_ptr",
    "conv_state_indices_ptr",
    "o_ptr",
    "batch",
    "num_cache_lines",
)
UPDATE_VARYING = (
    "state_ptr",
    "x_ptr",
    "dt_ptr",
    "dt_bias_ptr",
    "A_ptr",
    "B_ptr",
    "C_ptr",
    "D_ptr",
    "out_ptr",
    "state_batch_indices_ptr",
    "dst_state_batch_indices_ptr",
    "N",
)
_BLOCK_CHANNELS = 256  # of the convolution
_SLOTS = 2  # stand for any number but 1, to which Triton has other code


class VllmKernels(NamedTuple):
    """What vLLM's functions take their launches from.

    Attributes:
        conv, update: of the convolution and of the state.
        config: (headdim, dstate, ndecodes, nheads, name of a dtype, is_blackwell) to (BLOCK_SIZE_M, num_warps).
        launch_pdl: whether the convolution may begin before the kernel in front of it has ended.
        null_slot: decodes with this slot are skipped.
    """

    conv: Any
    update: Any
    config: Callable[[int, int, int, int, str, bool], tuple[int, int]]
    launch_pdl: bool
    null_slot: int


class DecodeLayout(NamedTuple):
    """What is constant for the decodes of layers that share kernels.

    Attributes:
        shape: of the layers.
        conv_step, ssm_step: distance of two slots in either cache, in elements.
        slots_strides: those of the slots of a step that are expected, in elements.
        max_decodes: of a step.
        is_blackwell, philox_rounds: as vLLM's layer and configuration have them.
    """

    shape: LayerShape
    conv_step: int
    ssm_step: int
    slots_strides: tuple[int, ...]
    max_decodes: int
    is_blackwell: bool
    philox_rounds: int


class DecodeViews(NamedTuple):
    """The arguments of vLLM's functions, as vLLM's layer makes them.

    Attributes:
        inputs: (ndecodes, conv_dim) x, B and C, in the place where the convolution writes its result.
        x, dt, out: (ndecodes, nheads, headdim). A: (nheads, headdim, dstate). B, C: (ndecodes, ngroups, dstate).
        D, dt_bias: (nheads, headdim).
    """

    inputs: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    out: Tensor


def vllm_kernels() -> VllmKernels:
    """Those of this vLLM.

    Raises:
        ImportError: it has them elsewhere, or not at all.
    """
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import _causal_conv1d_update_kernel
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import (
        _selective_scan_update_kernel,
        try_get_optimal_ssm_config,
    )
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

    return VllmKernels(
        _causal_conv1d_update_kernel,
        _selective_scan_update_kernel,
        try_get_optimal_ssm_config,
        current_platform.is_arch_support_pdl(),
        NULL_BLOCK_ID,
    )


def decode_views(projected: Tensor, out: Tensor, ndecodes: int, layer: LayerTensors, shape: LayerShape) -> DecodeViews:
    """Views of the activations of a step, and of a layer's parameters."""
    inputs, dt = torch.split(projected[..., shape.inner :], [shape.conv_dim, shape.nheads], dim=-1)
    inputs, dt, out = inputs[:ndecodes], dt[:ndecodes], out[:ndecodes]
    groups = shape.ngroups * shape.dstate
    x, B, C = torch.split(inputs, [shape.inner, groups, groups], dim=-1)
    return DecodeViews(
        inputs,
        x.view(-1, shape.nheads, shape.headdim),
        dt[:, :, None].expand(-1, -1, shape.headdim),
        layer.A[:, None, ...][:, :, None].expand(-1, shape.headdim, shape.dstate),
        B.view(-1, shape.ngroups, shape.dstate),
        C.view(-1, shape.ngroups, shape.dstate),
        layer.D[:, None, ...].expand(-1, shape.headdim),
        layer.dt_bias[:, None, ...].expand(-1, shape.headdim),
        out.view(ndecodes, -1, shape.headdim),
    )


def conv_launch(kernels: VllmKernels, layout: DecodeLayout, ndecodes: int, slots_stride: int) -> Launch:
    """What `causal_conv1d_update` launches; see `update_launch`."""
    layer, views, slots = _without_memory(layout, ndecodes, slots_stride)
    x, weight = views.inputs.unsqueeze(-1), layer.conv_weight
    _, dim, seqlen = x.shape
    width = weight.shape[1]
    arguments = {
        "x_ptr": x,
        "w_ptr": weight,
        "bias_ptr": layer.conv_bias,
        "conv_state_ptr": layer.conv_state,
        "conv_state_indices_ptr": slots,
        "num_accepted_tokens_ptr": None,
        "query_start_loc_ptr": None,
        "o_ptr": x,
        "batch": ndecodes,
        "dim": dim,
        "seqlen": seqlen,
        "state_len": width - 1,
        "num_cache_lines": layer.conv_state.shape[0],
        **_strides("stride_x", x, "seq", "dim", "token"),
        **_strides("stride_w", weight, "dim", "width"),
        **_strides("stride_conv_state", layer.conv_state, "seq", "dim", "tok"),
        "stride_state_indices": slots_stride,
        **_strides("stride_o", x, "seq", "dim", "token"),
        "null_block_id": kernels.null_slot,
        "HAS_BIAS": layer.conv_bias is not None,
        "KERNEL_WIDTH": width,
        "SILU_ACTIVATION": True,
        "IS_VARLEN": False,
        "IS_SPEC_DECODING": False,
        "NP2_STATELEN": 1 << (width - 2).bit_length(),
        "HAS_NULL_BLOCK": True,
        "BLOCK_N": _BLOCK_CHANNELS,
        "launch_pdl": kernels.launch_pdl,
    }
    return Launch(kernels.conv, (ndecodes, -(-dim // _BLOCK_CHANNELS), 1), (), arguments)


def update_launch(
    kernels: VllmKernels, layout: DecodeLayout, ndecodes: int, slots_stride: int, config: tuple[int, int]
) -> Launch:
    """What `selective_state_update` launches.

    Args:
        kernels: vLLM's.
        layout: of the layers.
        ndecodes: of the step. slots_stride: of its slots, in elements.
        config: what `kernels.config` gives for so many decodes.
    """
    layer, views, slots = _without_memory(layout, ndecodes, slots_stride)
    shape, (block_channels, num_warps) = layout.shape, config
    arguments = {
        "state_ptr": layer.ssm_state,
        "rand_seed_ptr": None,
        "x_ptr": views.x,
        "dt_ptr": views.dt,
        "dt_bias_ptr": views.dt_bias,
        "A_ptr": views.A,
        "B_ptr": views.B,
        "C_ptr": views.C,
        "D_ptr": views.D,
        "z_ptr": None,
        "out_ptr": views.out,
        "state_batch_indices_ptr": slots,
        "dst_state_batch_indices_ptr": slots,
        "null_block_id": kernels.null_slot,
        "num_accepted_tokens_ptr": None,
        "cu_seqlens_ptr": None,
        "N": ndecodes,
        "nheads": shape.nheads,
        "dim": shape.headdim,
        "dstate": shape.dstate,
        "nheads_ngroups_ratio": shape.nheads // shape.ngroups,
        **_strides("stride_state", layer.ssm_state, "batch", "head", "dim", "dstate"),
        **_strides("stride_x", views.x, "batch", "head", "dim"),
        **_strides("stride_dt", views.dt, "batch", "head", "dim"),
        **_strides("stride_dt_bias", views.dt_bias, "head", "dim"),
        **_strides("stride_A", views.A, "head", "dim", "dstate"),
        **_strides("stride_B", views.B, "batch", "group", "dstate"),
        **_strides("stride_C", views.C, "batch", "group", "dstate"),
        **_strides("stride_D", views.D, "head", "dim"),
        **dict.fromkeys(("stride_z_batch", "stride_z_head", "stride_z_dim"), 0),
        **_strides("stride_out", views.out, "batch", "head", "dim"),
        **_strides("stride_state_indices", slots, "batch", "T"),
        **_strides("stride_dst_state_indices", slots, "batch", "T"),
        "DT_SOFTPLUS": True,
        "TIE_HDIM": all(t.stride(-1) == 0 for t in (views.A, views.dt, views.dt_bias)) and views.A.stride(-2) == 0,
        "BLOCK_SIZE_M": block_channels,
        "num_warps": num_warps,
        "USE_RS_ROUNDING": False,
        "PHILOX_ROUNDS": layout.philox_rounds,
    }
    grid = (-(-shape.headdim // block_channels), ndecodes, shape.nheads)
    return Launch(kernels.update, grid, (), arguments)


def _strides(prefix: str, tensor: Tensor, *dims: str) -> dict[str, int]:
    return {f"{prefix}_{dim}": stride for dim, stride in zip(dims, tensor.stride(), strict=True)}


def _without_memory(layout: DecodeLayout, ndecodes: int, slots_stride: int) -> tuple[LayerTensors, DecodeViews, Tensor]:
    shape = layout.shape
    with torch.device("meta"):
        layer = empty_layer(shape, _SLOTS, layout.conv_step, layout.ssm_step)
        # One more token, in prefill: a step of decodes alone never comes here.
        projected = torch.empty(ndecodes + 1, shape.projected, dtype=shape.dtype)
        out = torch.empty(ndecodes + 1, shape.inner, dtype=shape.dtype)
        slots = torch.empty_strided((ndecodes, 1), (slots_stride, 1), dtype=torch.int32)
    return layer, decode_views(projected, out, ndecodes, layer, shape), slots
