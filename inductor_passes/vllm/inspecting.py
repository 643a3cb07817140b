"""`inspect --vllm MODEL`: an offline engine with random weights continues one sequence, and its regions are shown.

python -m inductor_passes.vllm.inspecting MODEL FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# The prompt is prefilled in two steps, so that the second one starts from cached states.
STEP_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 256, 32, 2
# vLLM's layer has other kernels on a CPU: the largest difference accepted there, relative to the largest value.
CPU_TOLERANCE = 0.02


def main(arguments: Sequence[str]) -> int:
    """Run the engine and write the folder; return the exit status."""
    model, folder = arguments
    on_gpu = torch.cuda.is_available()
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the regions are compiled in this process
        "MAMBA_OPS_VLLM": "1",
        "MAMBA_OPS_VLLM_VERIFY": "1000000",
        "MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "0" if on_gpu else str(CPU_TOLERANCE),
    }
    os.environ.update(settings)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    _continue_once(model)

    import vllm

    from inductor_passes.inspection.command import show
    from inductor_passes.inspection.folder import Inspected
    from inductor_passes.inspection.recorded import merged
    from inductor_passes.vllm.decline import counters
    from inductor_passes.vllm.regions import recordings

    seen = merged(recordings())
    how = "bit for bit" if on_gpu else f"within {CPU_TOLERANCE:g} of the largest value"
    equal = counters.verified - counters.mismatches
    comparison = f"{equal} of {counters.verified} prefills of a layer equal vLLM's own code {how}"
    if counters.declined:
        reasons = ", ".join(f"{reason.value} ({count})" for reason, count in counters.declined.items())
        comparison += f"; vLLM's own code ran other prefills: {reasons}"
    no_graph = "No Mamba2 layer of this model was compiled by the plugin; the log says why."
    show(Path(folder), Inspected(f"{model} in vLLM {vllm.__version__}", seen, comparison=comparison, no_graph=no_graph))
    return int(not counters.verified or counters.mismatches > 0 or bool(counters.declined))


def _continue_once(model: str) -> None:
    """Prefill a prompt in two steps and take a few tokens, without a tokenizer or real weights."""
    import vllm

    from inductor_passes.vllm import register

    register()
    engine: Any = vllm.LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,  # a step that keeps states in its middle is not compared
        max_model_len=2 * STEP_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=4,
        seed=0,
    )
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (STEP_TOKENS + NEW_TOKENS,), generator=generator).tolist()
    sampling = vllm.SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
