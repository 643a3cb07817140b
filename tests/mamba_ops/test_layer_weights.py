"""Loading weights: what is accepted besides the mixer itself, and what is refused with which words."""

from types import SimpleNamespace

import pytest
import torch

from mamba_ops.weights import layer_from_transformers
from tests.mamba_ops.mixers import Mixer, make_mixer


@pytest.fixture
def mixer() -> Mixer:
    return make_mixer("bamba")


def test_a_checkpoint_of_a_whole_model_gives_the_same_layer(mixer: Mixer) -> None:
    prefix = "model.layers.3.mamba."
    checkpoint = {prefix + name: value for name, value in mixer.module.state_dict().items()}
    checkpoint["model.layers.30.mamba.A_log"] = checkpoint["model.norm.weight"] = torch.zeros(1)
    layer = layer_from_transformers(checkpoint, mixer.config, prefix=prefix)
    expected = layer_from_transformers(mixer.module, mixer.config)
    torch.testing.assert_close(layer.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_the_layer_has_its_own_weights_in_the_dtype_of_the_mixer(mixer: Mixer) -> None:
    layer = layer_from_transformers(mixer.module.to(torch.bfloat16), mixer.config)
    expected = layer.out_proj.weight.clone()
    mixer.module.out_proj.weight.fill_(torch.nan)
    torch.testing.assert_close(layer.out_proj.weight, expected, rtol=0, atol=0)
    assert layer.out_proj.weight.dtype == torch.bfloat16
    assert layer.chunk_size == mixer.config.mamba_chunk_size


def test_an_unknown_family_is_refused(mixer: Mixer) -> None:
    with pytest.raises(ValueError, match=r"model_type.*granitemoehybrid.*'jamba'"):
        layer_from_transformers(mixer.module, SimpleNamespace(model_type="jamba"))


def test_another_activation_is_refused(mixer: Mixer) -> None:
    mixer.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match=r"activation.*'gelu'"):
        layer_from_transformers(mixer.module, mixer.config)


@pytest.mark.parametrize("name", ["A_log", "norm.weight", "in_proj.weight"])
def test_a_missing_weight_is_named(mixer: Mixer, name: str) -> None:
    weights = mixer.module.state_dict()
    del weights[name]
    with pytest.raises(ValueError, match=f"lacks {name}"):
        layer_from_transformers(weights, mixer.config)


def test_a_weight_of_something_else_is_named(mixer: Mixer) -> None:
    weights = mixer.module.state_dict() | {"in_proj.weight_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"does not use: in_proj\.weight_scale"):
        layer_from_transformers(weights, mixer.config)


def test_a_weight_of_the_wrong_shape_is_named(mixer: Mixer) -> None:
    mixer.config.mamba_d_state = 8
    with pytest.raises(ValueError, match=r"in_proj\.weight must have shape \(164, 32\).*got \(228, 32\)"):
        layer_from_transformers(mixer.module, mixer.config)
