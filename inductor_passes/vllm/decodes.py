"""How the layers of this process launch decodes beside prefills: made when a layer's caches are bound."""

from __future__ import annotations

import logging
from typing import Any

import torch

from inductor_passes.vllm.decode_check import check_decodes
from inductor_passes.vllm.decode_launches import DecodeLayout, vllm_kernels
from inductor_passes.vllm.direct_decode import DirectDecode
from inductor_passes.vllm.example_inputs import SLOT_MULTIPLE
from inductor_passes.vllm.once import say_once
from inductor_passes.vllm.options import Options
from inductor_passes.vllm.region_inputs import LayerShape

logger = logging.getLogger("vllm.mamba_ops")

_made: dict[tuple[DecodeLayout, bool], DirectDecode | None] = {}


def direct_decode_for(
    layer: Any,
    shape: LayerShape,
    cache_sizes: tuple[int, int, int],
    slots_stride: int,
    max_decodes: int,
    options: Options,
) -> DirectDecode | None:
    """Launches by address for the decodes of a layer; None if vLLM's own code runs them. The log says why.

    Args:
        layer: a `MambaMixer2` that has the attributes of the contract.
        shape: of it.
        cache_sizes: the last three of `Sizes`.
        slots_stride: of the slots of a step, in elements.
        max_decodes: of a step.
        options: the user's.
    """
    if not (options.decode and options.direct) or shape.device.type != "cuda":
        return None
    try:
        other = _other_way(layer)
        if other:
            say_why_not(logging.INFO, other)
            return None
        layout = DecodeLayout(
            shape,
            cache_sizes[1] * SLOT_MULTIPLE,
            cache_sizes[2] * SLOT_MULTIPLE,
            tuple(sorted({1, slots_stride})),
            max_decodes,
            layer.is_blackwell,
            layer.mamba_config.stochastic_rounding_philox_rounds,
        )
        key = (layout, options.self_check)
        if key not in _made:
            if torch.cuda.is_current_stream_capturing():
                return None
            _made[key] = None  # unless all goes well
            _made[key] = _make(*key)
        return _made[key]
    except Exception as error:
        say_why_not(logging.WARNING, f"{type(error).__name__}: {error}")
        logger.debug("mamba_ops: how it failed", exc_info=True)
        return None


def say_why_not(level: int, reason: str) -> None:
    """Log why vLLM's own code runs decodes beside prefills."""
    say_once(level, f"vLLM's own code runs the decodes beside prefills: {reason}")


def _other_way(layer: Any) -> str:
    """Why vLLM's own code launches other kernels than those that are known here, or nothing."""
    from vllm.model_executor.layers.mamba.ops.ssu_dispatch import get_mamba_ssu_backend

    backend = get_mamba_ssu_backend().name
    if backend != "triton":
        return f"their backend is {backend}"
    if layer.num_spec:
        return "decoding is speculative"
    if layer.use_replayssm:
        return "ReplaySSM is on"
    if layer.mamba_config.enable_stochastic_rounding:
        return "states are rounded at random"
    return ""


def _make(layout: DecodeLayout, checked: bool) -> DirectDecode:
    with torch.inference_mode(False), torch.no_grad(), torch.accelerator.device_index(layout.shape.device.index):
        decode = DirectDecode(layout, vllm_kernels())
        if checked:
            check_decodes(decode)
            torch.accelerator.empty_cache()  # vLLM may be measuring how much memory there is
    logger.info("mamba_ops: up to %d decodes beside prefills are launched by address", layout.max_decodes)
    return decode
