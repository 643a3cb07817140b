"""A tiny hybrid model with random weights, for the examples with vLLM: they then need no download and no GPU."""

from __future__ import annotations

import torch
import transformers


def save_tiny_model(folder: str) -> str:
    """Write a Granite 4 hybrid of three small layers to a folder, and return the folder."""
    torch.manual_seed(0)
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        shared_intermediate_size=128,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_attention_heads=2,
        num_key_value_heads=1,
        position_embedding_type="nope",
        max_position_embeddings=4096,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        initializer_range=0.2,  # large, so that the cached state decides which token comes next
        tie_word_embeddings=True,
    )
    transformers.GraniteMoeHybridForCausalLM(config).save_pretrained(folder)
    return folder
