"""One engine on a GPU: do the plugin's layers compute what vLLM's own compute, bit for bit?

    python -m benchmarks.equality_vllm MODEL [--calls 1000] [--responses 500]

In one process and one engine: responses with the plugin's layers, the same ones with vLLM's code in the same layers,
then layer calls of which each runs both ways on the same inputs and is compared, outputs and cache slots. Writes
results/equality_vllm.json with the cases layers, responses, graphs, compiles.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("MAMBA_OPS_VLLM", "1")

from benchmarks.results import Results, Row


class Compiles(logging.Handler):
    """Counts what vLLM's JIT monitor reports."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.endswith("jit_monitor") and record.levelno >= logging.WARNING:
            self.messages.append(record.getMessage())


def main() -> None:
    options = parse()
    from inductor_passes.vllm import register

    register()  # also where the package is not installed, and vLLM finds no entry point
    from vllm import LLM
    from vllm.compilation.counter import compilation_counter

    from inductor_passes.vllm.decline import counters
    from inductor_passes.vllm.layer import SnapshotFreeMixer2
    from inductor_passes.vllm.verify import verified

    start = time.perf_counter()
    llm = LLM(
        model=options.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=16384,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=8 << 30,
        enable_prefix_caching=True,
        block_size=options.block_size or None,
        seed=0,
        compilation_config={"cudagraph_capture_sizes": [1, 4, 8, 16, 32]},
    )
    print(f"engine start {time.perf_counter() - start:.1f} s; {counters}", flush=True)
    layers = llm.apply_model(lambda model: [m for m in model.modules() if isinstance(m, SnapshotFreeMixer2)])[0]
    compiles = Compiles()
    logging.getLogger("vllm.utils.jit_monitor").addHandler(compiles)

    ours = responses(llm, options)
    compiled = len(compiles.messages)
    print(f"plugin: {len(ours)} responses; {counters}; JIT monitor: {compiles.messages}", flush=True)
    declined = sum(counters.declined.values())

    regions = [layer._region for layer in layers]
    for layer in layers:
        layer._region = None  # vLLM's own code, in the same engine
    theirs = responses(llm, options)
    for layer, region in zip(layers, regions, strict=True):
        layer._region = region
    different = sum(a != b for a, b in zip(ours, theirs, strict=True))
    print(f"stock: {len(theirs)} responses, {different} differ", flush=True)

    counters.verified = counters.mismatches = 0
    for layer in layers:
        layer._options = layer._options.__class__(verify=options.calls)
        stock = super(SnapshotFreeMixer2, layer).conv_ssm_forward
        layer.conv_ssm_forward = verified(layer, stock, layer.conv_ssm_forward)
    options.responses = min(options.responses, 100)
    responses(llm, options)
    print(f"layers: {counters}", flush=True)

    captured = float(compilation_counter.num_cudagraph_captured)
    results = Results("equality_vllm")
    results.rows += [
        row("layers", counters.mismatches, counters.verified, "layer calls, bit for bit: output and cache slots"),
        row("responses", different, len(ours), "tokens and log-probabilities"),
        Row(
            "graphs",
            "captured",
            "1",
            None,
            captured,
            None,
            None,
            None,
            1,
            "with the plugin; not compared with stock here",
        ),
        row("compiles", compiled, len(ours), f"while serving with the plugin; prefills declined: {declined}"),
    ]
    results.show()
    print(results.write())


def row(case: str, mismatches: int, n: int, note: str) -> Row:
    return Row(case, "mismatches", "", None, float(mismatches), None, None, None, n, note)


def responses(llm: Any, options: argparse.Namespace) -> list[Any]:
    """Continuations of a cached prefix, long prompts in several chunks, mixed with decodes."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    rng = random.Random(1)
    prefix = rng.choices(range(1, 100000), k=4224)
    found: list[Any] = []
    batches = (32, 1, 2, 17)
    while len(found) < options.responses:
        size = batches[len(found) % len(batches)]
        lengths = [32] * size if len(found) % 2 else rng.choices((1, 33, 255, 256, 257, 700, 2500), k=size)
        prompts = [(prefix if rng.random() < 0.7 else []) + rng.choices(range(1, 100000), k=n) for n in lengths]
        params = SamplingParams(
            temperature=0, max_tokens=rng.choice((1, 4)), ignore_eos=True, detokenize=False, logprobs=1
        )
        for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            found.append((tokens, [entry[t].logprob for entry, t in zip(completion.logprobs, tokens, strict=True)]))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--calls", type=int, default=1200)
    parser.add_argument("--responses", type=int, default=500)
    parser.add_argument("--block-size", type=int, default=528)
    return parser.parse_args()


if __name__ == "__main__":
    main()
