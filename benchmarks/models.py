"""Make a full-size model with random weights, for the benchmarks that run vLLM's engine.

    python -m benchmarks.models {granite,nemotron_h} FOLDER [--layers 40]

The weights are those that transformers initialises, in BF16, made on the GPU if there is one: with vLLM's own dummy
weights, which are tiny, the cached state would not matter to what the model answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

# The shape of Granite-4.0-h-micro: four attention layers among 36 Mamba2 layers.
GRANITE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
    "attention_multiplier": 1 / 64,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}

# The shape of Nemotron-H-8B's layers.
NEMOTRON_H: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 8192 * 4,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_groups": 8,
    "chunk_size": 128,
    "tie_word_embeddings": False,
}


def granite(layers: int) -> tuple[str, dict[str, Any]]:
    """Configuration class and arguments; every tenth layer is attention, from the sixth on."""
    types = ["attention" if index % 10 == 5 else "mamba" for index in range(layers)]
    return "GraniteMoeHybridConfig", {**GRANITE, "num_hidden_layers": layers, "layer_types": types}


def nemotron_h(layers: int) -> tuple[str, dict[str, Any]]:
    """Two Mamba2 layers, two feed-forward ones and one of attention in turn."""
    pattern = "".join("M-M*-"[index % 5] for index in range(layers))
    return "NemotronHConfig", {**NEMOTRON_H, "num_hidden_layers": layers, "hybrid_override_pattern": pattern}


FAMILIES = {"granite": (granite, 40), "nemotron_h": (nemotron_h, 20)}


def make(family: str, folder: Path, layers: int, **changes: Any) -> int:
    """Write configuration and weights; returns the number of parameters.

    Args:
        family: one of `FAMILIES`. folder: where to. layers: of the model.
        changes: other arguments of the configuration, e.g. a smaller size for a trial.
    """
    import transformers

    name, arguments = FAMILIES[family][0](layers)
    config = getattr(transformers, name)(**{**arguments, **changes})
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="40 for granite, 20 for nemotron_h unless given")
    options = parser.parse_args()
    count = make(options.family, options.folder, options.layers or FAMILIES[options.family][1])
    print(f"{options.folder}: {count / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
