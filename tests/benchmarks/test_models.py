"""The models for the benchmarks are made as small ones here, of the same layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.models import FAMILIES, make

SMALL: dict[str, dict[str, Any]] = {
    "granite": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "shared_intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
    "nemotron_h": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 512,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 64,
    },
}


@pytest.mark.parametrize(("family", "mamba_layers"), [("granite", 9), ("nemotron_h", 4)])
def test_configuration_and_weights(tmp_path: Path, family: str, mamba_layers: int) -> None:
    count = make(family, tmp_path, 10, **SMALL[family])
    assert count > 10**5
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == 512
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        states = [name for name in weights.keys() if name.endswith("A_log")]  # noqa: SIM118
        assert len(states) == mamba_layers
        projection = next(name for name in weights.keys() if name.endswith("in_proj.weight"))  # noqa: SIM118
        assert str(weights.get_tensor(projection).dtype) == "torch.bfloat16"
        assert weights.get_tensor(projection).float().std() > 0.01


def test_full_sizes_are_those_of_the_models() -> None:
    name, granite = FAMILIES["granite"][0](40)
    assert name == "GraniteMoeHybridConfig"
    assert granite["layer_types"].count("mamba") == 36
    assert granite["mamba_n_heads"] * granite["mamba_d_head"] == granite["mamba_expand"] * granite["hidden_size"]
    _, nemotron = FAMILIES["nemotron_h"][0](20)
    assert nemotron["hybrid_override_pattern"].count("M") == 8
