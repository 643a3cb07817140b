"""Tensors that stand for a layer's: to compile for it before there is a layer, and to try out what was compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_passes.vllm.region_inputs import LayerShape, LayerTensors


def empty_layer(shape: LayerShape, num_slots: int, conv_step: int, ssm_step: int) -> LayerTensors:
    """A layer without contents, on the device that is the default.

    Args:
        shape: of the layer.
        num_slots: of its caches. conv_step, ssm_step: distance of two slots, in elements.
    """
    conv_dtype, d_dtype, dt_bias_dtype = shape.parameter_dtypes
    return LayerTensors(
        conv_weight=torch.empty(shape.conv_dim, shape.width, dtype=conv_dtype),
        conv_bias=torch.empty(shape.conv_dim, dtype=conv_dtype) if shape.has_conv_bias else None,
        A=torch.empty(shape.nheads, dtype=torch.float32),
        D=torch.empty(shape.nheads, dtype=d_dtype),
        dt_bias=torch.empty(shape.nheads, dtype=dt_bias_dtype),
        conv_state=torch.empty_strided(
            (num_slots, shape.conv_dim, shape.width - 1), (conv_step, *shape.conv_strides), dtype=shape.dtype
        ),
        ssm_state=torch.empty_strided(
            (num_slots, shape.nheads, shape.headdim, shape.dstate),
            (ssm_step, shape.headdim * shape.dstate, shape.dstate, 1),
            dtype=shape.state_dtype,
        ),
    )


def random_layer(
    shape: LayerShape, num_slots: int, conv_step: int, ssm_step: int, generator: torch.Generator
) -> LayerTensors:
    """The same with random contents, also between the slots."""
    layer = empty_layer(shape, num_slots, conv_step, ssm_step)
    caches = (memory(layer.conv_state), memory(layer.ssm_state))
    for tensor in (layer.conv_weight, layer.conv_bias, layer.D, layer.dt_bias, *caches):
        if tensor is not None:
            tensor.copy_(random(tensor.shape, torch.float32, generator))
    layer.A.uniform_(-1.0, 0.0, generator=generator)
    return layer


def with_own_caches(layer: LayerTensors) -> LayerTensors:
    """The same layer with copies of its caches, and of what lies between their slots."""
    conv_state, ssm_state = (
        memory(cache).clone().as_strided(cache.shape, cache.stride()) for cache in (layer.conv_state, layer.ssm_state)
    )
    return layer._replace(conv_state=conv_state, ssm_state=ssm_state)


def memory(cache: Tensor) -> Tensor:
    """All of the memory of a cache in a row, with what lies between the slots."""
    return cache.as_strided((cache.untyped_storage().nbytes() // cache.itemsize,), (1,), 0)


def random(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal values, made as FP32 whatever the default is."""
    return torch.randn(size, generator=generator, dtype=torch.float32).to(dtype)
