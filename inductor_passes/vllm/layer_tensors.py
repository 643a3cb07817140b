"""Which compiled region fits a layer, and the layer's tensors in the form in which the region takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from inductor_passes.vllm.compiled_region import present
from inductor_passes.vllm.example_inputs import SLOT_MULTIPLE
from inductor_passes.vllm.region_inputs import ALIGNMENT, LayerShape, LayerTensors


def layer_shape(layer: Any, dtype: torch.dtype, device: torch.device, channels_last: bool) -> LayerShape:
    """The shape of a layer of vLLM's.

    Args:
        layer: a `MambaMixer2`.
        dtype: of its activations. device: where it runs.
        channels_last: whether the convolution's cache stores the channels of a token together.

    Raises:
        ValueError: the layer is something that the region cannot be.
    """
    if layer.activation not in ("silu", "swish"):
        raise ValueError(f"activation {layer.activation!r}; the region has silu")
    conv_dtype, state_dtype = layer.get_state_dtype()[:2]
    if conv_dtype != dtype:
        raise ValueError(f"the convolution's cache is {conv_dtype}, the activations are {dtype}")
    conv_dim, history = layer.tped_conv_size, layer.conv_kernel_size - 1
    stored = layer.get_state_shape()[0]
    length = stored[0] if channels_last else stored[1]
    if sorted(stored) != sorted((length, conv_dim)) or length < history:
        raise ValueError(f"a slot of the convolution's cache is {tuple(stored)}")
    if device.type != "cpu" and stored[0] * stored[1] * conv_dtype.itemsize % ALIGNMENT:
        raise ValueError(f"the states behind a convolution's slot of {tuple(stored)} are not aligned")
    shape = LayerShape(
        nheads=layer.num_heads // layer.tp_size,
        headdim=layer.head_dim,
        ngroups=layer.n_groups // layer.tp_size,
        dstate=layer.ssm_state_size,
        chunk_size=layer.model_config.get_mamba_chunk_size(),
        width=layer.conv_kernel_size,
        dtype=dtype,
        state_dtype=state_dtype,
        parameter_dtypes=(layer.conv_weights.dtype, layer.D.dtype, layer.dt_bias.dtype),
        has_conv_bias=layer.conv1d.bias is not None,
        conv_strides=(1, conv_dim) if channels_last else (length, 1),
        device=device,
    )
    if (shape.inner, shape.conv_dim) != (layer.tped_intermediate_size, conv_dim):
        raise ValueError(f"sizes {layer.tped_intermediate_size} and {conv_dim} do not follow from heads and groups")
    return shape


class BoundLayer(NamedTuple):
    """What a region takes of a layer whose caches have been allocated.

    Attributes:
        tensors: of `LayerTensors`, those that are there. addresses: of all, None for one that is not.
        sizes: the last three of `Sizes`.
    """

    tensors: list[Tensor]
    addresses: tuple[int | None, ...]
    sizes: tuple[int, int, int]


def bind(layer: Any, shape: LayerShape, channels_last: bool) -> BoundLayer | None:
    """What there is of a layer; None if the layout of its caches is not the one compiled for."""
    conv_cache, ssm_state = layer.kv_cache[:2]
    conv_state = (conv_cache.transpose(-1, -2) if channels_last else conv_cache)[..., : shape.width - 1]
    tensors = LayerTensors(
        layer.conv_weights.detach(),
        None if layer.conv1d.bias is None else layer.conv1d.bias.detach(),
        layer.A.detach(),
        layer.D.detach(),
        layer.dt_bias.detach(),
        conv_state,
        ssm_state,
    )
    if not _fits(tensors, shape):
        return None
    steps = (cache.stride(0) // SLOT_MULTIPLE for cache in (conv_state, ssm_state))
    addresses = tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
    return BoundLayer(present(tensors), addresses, (ssm_state.shape[0], *steps))


def _fits(tensors: LayerTensors, shape: LayerShape) -> bool:
    """What guards would check in every call."""
    heads = (shape.nheads,)
    num_slots = tensors.ssm_state.shape[0]
    conv_dtype, d_dtype, dt_bias_dtype = shape.parameter_dtypes
    row = (shape.headdim * shape.dstate, shape.dstate, 1)
    expected: list[tuple[Tensor, torch.dtype, tuple[int, ...], tuple[int, ...] | None]] = [
        (tensors.conv_weight, conv_dtype, (shape.conv_dim, shape.width), None),
        (tensors.A, torch.float32, heads, None),
        (tensors.D, d_dtype, heads, None),
        (tensors.dt_bias, dt_bias_dtype, heads, None),
        (tensors.conv_state, shape.dtype, (num_slots, shape.conv_dim, shape.width - 1), shape.conv_strides),
        (tensors.ssm_state, shape.state_dtype, (num_slots, shape.nheads, shape.headdim, shape.dstate), row),
    ]
    if tensors.conv_bias is not None:
        expected.append((tensors.conv_bias, conv_dtype, (shape.conv_dim,), None))
    for tensor, dtype, size, inner_strides in expected:
        if tensor.dtype != dtype or tensor.device != shape.device or tensor.shape != size:
            return False
        if tensor.data_ptr() % ALIGNMENT:
            return False
        if inner_strides is None:
            if not tensor.is_contiguous():
                return False
        elif tensor.stride()[1:] != inner_strides or tensor.stride(0) % SLOT_MULTIPLE or tensor.stride(0) >> 31:
            return False
    return True
