"""Take over the Mamba2 mixers of transformers: their configuration names, and their weights.

transformers itself is not imported. A configuration is any object with the attributes that its `model_type` uses, and
the weights are a module or a state dict, so that a checkpoint can be loaded without building the model.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mamba_ops.layer import Mamba2Layer

_REQUIRED = {
    "in_proj.weight": "in_proj.weight",
    "conv1d.weight": "conv_weight",
    "A_log": "A_log",
    "D": "D",
    "dt_bias": "dt_bias",
    "out_proj.weight": "out_proj.weight",
}
_NORM = {"norm.weight": "norm_weight"}
_OPTIONAL = {
    "in_proj.bias": "in_proj.bias",
    "conv1d.bias": "conv_bias",
    "out_proj.bias": "out_proj.bias",
}


def _mamba2(config: Any) -> dict[str, Any]:
    return {
        "nheads": config.num_heads,
        "headdim": config.head_dim,
        "dstate": config.state_size,
        "ngroups": config.n_groups,
        "conv_width": config.conv_kernel,
        "norm_eps": config.layer_norm_epsilon,
        "dt_limit": tuple(config.time_step_limit),
        "chunk_size": config.chunk_size,
        "activation": config.hidden_act,
    }


def _bamba(config: Any) -> dict[str, Any]:
    return {
        "nheads": config.mamba_n_heads,
        "headdim": config.mamba_d_head,
        "dstate": config.mamba_d_state,
        "ngroups": config.mamba_n_groups,
        "conv_width": config.mamba_d_conv,
        "norm_eps": config.rms_norm_eps,
        "dt_limit": tuple(config.time_step_limit),
        "chunk_size": config.mamba_chunk_size,
        "activation": config.hidden_act,
    }


def _falcon_h1(config: Any) -> dict[str, Any]:
    return _bamba(config) | {
        "norm_before_gate": config.mamba_norm_before_gate,
        "rms_norm": config.mamba_rms_norm,
        "in_multiplier": config.ssm_in_multiplier,
        "proj_multipliers": tuple(config.ssm_multipliers),
    }


def _zamba2(config: Any) -> dict[str, Any]:
    # Constants here are constants in the mixer: they are not read from its configuration.
    return {
        "nheads": config.n_mamba_heads,
        "headdim": config.mamba_headdim,
        "dstate": config.mamba_d_state,
        "ngroups": config.mamba_ngroups,
        "conv_width": config.mamba_d_conv,
        "norm_eps": 1e-5,
        "dt_limit": (config.time_step_min, math.inf),
        "chunk_size": config.chunk_size,
        "activation": "silu",
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    return {
        "nheads": config.mamba_num_heads,
        "headdim": config.mamba_head_dim,
        "dstate": config.ssm_state_size,
        "ngroups": config.n_groups,
        "conv_width": config.conv_kernel,
        "norm_eps": config.layer_norm_epsilon,
        "dt_limit": (config.time_step_min, math.inf),
        "chunk_size": config.chunk_size,
        "activation": config.mamba_hidden_act,
    }


_FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _bamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
}


def layer_from_transformers(
    mixer: nn.Module | Mapping[str, Tensor], config: Any, *, prefix: str = "", snapshot: bool = False
) -> Mamba2Layer:
    """Build a `Mamba2Layer` with the weights of one of transformers' Mamba2 mixers.

    Args:
        mixer: the module (`Mamba2Mixer`, `BambaMixer`, `GraniteMoeHybridMambaLayer`, `FalconH1Mixer`,
            `Zamba2MambaMixer`, `NemotronHMamba2Mixer`), or a state dict that holds its weights under `prefix`.
            The weights are copied; the layer has the dtype and device of `in_proj.weight`.
        config: the model's configuration; its `model_type` names the family.
        prefix: such as "model.layers.3.mamba.", for the state dict of a whole model.
        snapshot: see `Mamba2Layer`.

    Raises:
        ValueError: an unknown family, an activation other than SiLU, a weight that is missing, unknown or of the
            wrong shape.
        AttributeError: the configuration lacks a field of its family.
    """
    family = getattr(config, "model_type", None)
    if family not in _FAMILIES:
        raise ValueError(f"config.model_type must be one of {', '.join(sorted(_FAMILIES))}, got {family!r}")
    fields = _FAMILIES[family](config)
    activation = fields.pop("activation")
    if activation not in ("silu", "swish"):
        raise ValueError(f"the activation of {family} must be silu, got {activation!r}")

    state_dict = mixer.state_dict() if isinstance(mixer, nn.Module) else mixer
    weights = _select(state_dict, prefix, fields.get("rms_norm", True))
    layer = Mamba2Layer(
        config.hidden_size,
        in_proj_bias="in_proj.bias" in weights,
        conv_bias="conv1d.bias" in weights,
        out_proj_bias="out_proj.bias" in weights,
        snapshot=snapshot,
        device=weights["in_proj.weight"].device,
        dtype=weights["in_proj.weight"].dtype,
        **fields,
    )
    _copy(weights, layer, prefix)
    return layer


def _select(state_dict: Mapping[str, Tensor], prefix: str, rms_norm: bool) -> dict[str, Tensor]:
    """The weights under the prefix by their names in the mixer, or an error that lists what does not fit."""
    weights = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    required = [*_REQUIRED, *(_NORM if rms_norm else ())]
    known = [*required, *_OPTIONAL]
    missing = [name for name in required if name not in weights]
    unknown = [name for name in weights if name not in known]
    if missing:
        raise ValueError(f"mixer lacks {', '.join(missing)} under the prefix {prefix!r}, where it has {list(weights)}")
    if unknown:
        raise ValueError(f"mixer has weights that this layer does not use: {', '.join(unknown)}")
    return weights


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], layer: Mamba2Layer, prefix: str) -> None:
    parameters = dict(layer.named_parameters())
    for name, target in (_REQUIRED | _NORM | _OPTIONAL).items():
        if name not in weights:
            continue
        value = weights[name].squeeze(1) if name == "conv1d.weight" else weights[name]
        if value.shape != parameters[target].shape:
            raise ValueError(
                f"{prefix}{name} must have shape {tuple(parameters[target].shape)} with this configuration, "
                f"got {tuple(value.shape)}"
            )
        parameters[target].copy_(value)
