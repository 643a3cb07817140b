"""Tiny Mamba2 mixers of transformers, with fresh random weights. Their forward without kernels is plain PyTorch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Mamba2Config,
    NemotronHConfig,
    Zamba2Config,
)
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer

HIDDEN = 32
# d_inner = 64 in all of them.
_BAMBA: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "mamba_n_heads": 4, "mamba_d_head": 16}
_BAMBA |= {"mamba_d_state": 24, "mamba_chunk_size": 16}
_FALCON = _BAMBA | {"mamba_d_ssm": 64, "ssm_in_multiplier": 0.8, "ssm_multipliers": [0.5, 0.7, 1.3, 0.9, 1.1]}


class Mixer(NamedTuple):
    """A mixer, and the configuration it was made from."""

    module: nn.Module
    config: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The whole of one sequence, (ntokens, HIDDEN)."""
        with torch.no_grad():
            out: Tensor = self.module(hidden_states[None])[0]
        return out


def _mamba2() -> Mixer:
    sizes = {"num_heads": 4, "head_dim": 16, "state_size": 24, "n_groups": 4, "chunk_size": 16, "conv_kernel": 3}
    config = Mamba2Config(hidden_size=HIDDEN, num_hidden_layers=1, use_bias=True, time_step_limit=(0.01, 0.2), **sizes)
    return Mixer(Mamba2Mixer(config, layer_idx=0), config)


def _bamba() -> Mixer:
    config = BambaConfig(mamba_n_groups=2, **_BAMBA)
    return Mixer(BambaMixer(config, layer_idx=0), config)


def _granite() -> Mixer:
    config = GraniteMoeHybridConfig(mamba_n_groups=1, mamba_conv_bias=False, **_BAMBA)
    return Mixer(GraniteMoeHybridMambaLayer(config, layer_idx=0), config)


def _falcon(**options: bool) -> Mixer:
    config = FalconH1Config(mamba_n_groups=2, **_FALCON, **options)
    module = FalconH1Mixer(config, layer_idx=0)
    module.register_buffer("mup_vector", compute_mup_vector(config), persistent=False)  # as the whole model does
    return Mixer(module, config)


def _zamba2() -> Mixer:
    sizes = {"n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 24, "chunk_size": 16, "hidden_size": HIDDEN}
    config = Zamba2Config(num_hidden_layers=1, layers_block_type=["linear_attention"], **sizes)
    return Mixer(Zamba2MambaMixer(config, layer_idx=0), config)


def _nemotron() -> Mixer:
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 16}
    config = NemotronHConfig(hidden_size=HIDDEN, **sizes)
    return Mixer(NemotronHMamba2Mixer(config, layer_idx=0), config)


FAMILIES: dict[str, Callable[[], Mixer]] = {
    "mamba2": _mamba2,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "falcon_h1": lambda: _falcon(mamba_rms_norm=False),
    "falcon_h1_norm_first": lambda: _falcon(mamba_rms_norm=True, mamba_norm_before_gate=True),
    "falcon_h1_gate_first": lambda: _falcon(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "zamba2": _zamba2,
    "nemotron_h": _nemotron,
}


def make_mixer(family: str) -> Mixer:
    """A fresh mixer. Its scalars of each head are spread out too, which their initial values are not."""
    mixer = FAMILIES[family]()
    mixer.module.eval().requires_grad_(False)
    for name, parameter in mixer.module.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * (0.5 if name != "norm.weight" else 0.1))
    return mixer
