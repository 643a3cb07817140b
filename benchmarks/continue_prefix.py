"""vLLM with the plugin: nothing to call, only to install and switch on. Here, what it did is printed at the end.

    python -m benchmarks.continue_prefix MODEL

Needs vLLM and this package in one environment; `vllm serve MODEL` works the same way.
"""

import os
import sys

os.environ["MAMBA_OPS_VLLM"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the counters are those of this process

from vllm import LLM, SamplingParams

from inductor_passes.vllm.decline import counters


def main(model: str) -> None:
    """Continue a shared prefix twice: the second time from cached states."""
    llm = LLM(model=model, skip_tokenizer_init=True, enable_prefix_caching=True)
    prefix = [7 * token % 500 for token in range(2000)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    for tail in ([1, 2, 3], [4, 5, 6]):
        (output,) = llm.generate([{"prompt_token_ids": prefix + tail}], params, use_tqdm=False)
        print(f"{output.num_cached_tokens} tokens cached, answer {list(output.outputs[0].token_ids)}")
    print(counters)


if __name__ == "__main__":
    main(sys.argv[1])
