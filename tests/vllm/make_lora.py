"""Writes a LoRA adapter for both projections of every Mamba2 layer of a Granite 4 model. Run where vLLM is.

python make_lora.py FAMILY FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from make_model import FAMILIES
from safetensors.torch import save_file

RANK = 4


def main(family: str, folder: str) -> None:
    torch.manual_seed(1)
    sizes = FAMILIES[family][1]
    inner = sizes["mamba_n_heads"] * sizes["mamba_d_head"]
    projected = 2 * inner + 2 * sizes["mamba_n_groups"] * sizes["mamba_d_state"] + sizes["mamba_n_heads"]
    weights = {}
    for number, kind in enumerate(sizes["layer_types"]):
        if kind != "mamba":
            continue
        for name, inputs, outputs in (("in_proj", 128, projected), ("out_proj", inner, 128)):
            prefix = f"base_model.model.model.layers.{number}.mamba.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.3
    Path(folder).mkdir()
    save_file(weights, f"{folder}/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["in_proj", "out_proj"]}
    Path(folder, "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
