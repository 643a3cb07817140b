"""Writes a tiny model of a family, with weights as transformers initialises them. Run where vLLM is: same transformers.

python make_model.py FAMILY FOLDER, or FAMILY-N for a model of N layers.
"""

import sys
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "vocab_size": 512,
    "initializer_range": 0.2,  # so that the cached state decides which token comes next
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ATTENTION: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "GraniteMoeHybridConfig",
        {
            **ATTENTION,
            **MAMBA,
            "intermediate_size": 128,
            "shared_intermediate_size": 128,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **ATTENTION,
            **MAMBA,
            "head_dim": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **ATTENTION,
            "head_dim": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "n_groups": 2,
            "chunk_size": 64,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "num_hidden_layers": 2,
            "num_heads": 16,
            "head_dim": 16,
            "state_size": 64,
            "n_groups": 1,
            "chunk_size": 64,
            "expand": 2,
            "tie_word_embeddings": False,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "num_hidden_layers": 3,
            "hybrid_layer_ids": [1],
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "attention_head_dim": 128,
            "intermediate_size": 128,
            "n_mamba_heads": 4,
            "mamba_headdim": 64,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "chunk_size": 64,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
            "max_position_embeddings": 4096,
        },
    ),
}


# Heads and chunks of Granite-4.0-h's sizes, at which all choices of vLLM's tuner give the same bits: docs/accuracy.md.
_granite, _settings = FAMILIES["granite"]
_of_granite = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 4, "mamba_chunk_size": 256}
FAMILIES["granite_256"] = (_granite, {**_settings, **_of_granite})


def main(family: str, folder: str) -> None:
    torch.manual_seed(0)
    family, _, layers = family.partition("-")
    name, arguments = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **arguments})
    if layers:
        config.num_hidden_layers = int(layers)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
