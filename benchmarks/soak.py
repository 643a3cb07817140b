"""Thousands of requests of all sorts at two engines, with the plugin and without: the same answers to the end?

    python -m benchmarks.soak MODEL [--requests 2000] [--seed 1]

Both engines get one stream of requests with random lengths, shared prefixes, arrivals, priorities and ways to sample.
Some requests are given up while they wait, in the middle of their prefill or of their answer; the cache is so small
that others are preempted; on a GPU the engines sleep and wake in between. All of it counts in steps of the engine, so
that both run the same batches and can be compared bit by bit. Cases `responses`, `preemptions`, `aborts`, `compiles`
(reports of vLLM's JIT monitor that one engine has and the other not: vLLM compiles some kernels of its sampler when a
request first asks for them) and `memory` (bytes by which the process grew after the first fifth of the run) go into
results/soak.json after every tenth of the run. Without a GPU it runs on engines for CPUs, one after the other, in FP32
and within a tolerance.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.cache_blocks import blocks_for
from benchmarks.engine.pair import Side, run_pair
from benchmarks.engine.soak_comparison import rows
from benchmarks.results import FOLDER, Results, Row

# With async scheduling, when a step's tokens are seen depends on time.
COMMON = {"scheduling_policy": "priority", "async_scheduling": False}
GPU_ENGINE: dict[str, Any] = {
    **COMMON,
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 8 << 30,
    "gpu_memory_utilization": 0.3,  # both engines start at once
    "enable_prefix_caching": True,
    "enable_sleep_mode": True,
    "compilation_config": {"cudagraph_capture_sizes": [1, 4, 8, 16, 32]},
}
CPU_ENGINE: dict[str, Any] = {
    **COMMON,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 14,
    "enable_prefix_caching": False,
    "enforce_eager": True,
}


def main() -> None:
    options = parse()
    gpu = torch.cuda.is_available()
    tolerance = 0.0 if gpu else 2e-3
    # With blocks for two thirds of as many requests as may run, some are preempted as they grow.
    few = {**GPU_ENGINE, "num_gpu_blocks_override": blocks_for(options.model, 2 / 3)} if gpu else CPU_ENGINE
    engine = {**few, **options.engine}
    job = {"model": options.model, "engine": engine, "requests": options.requests, "seed": options.seed}
    results = Results("soak")

    def changed(ours: Side, stock: Side) -> None:
        results.rows = rows(ours, stock, tolerance)
        if results.rows:
            results.write(options.out)

    job |= {"damage": options.damage, "hold_choices": True}
    run_pair("benchmarks.engine.soak_side", job, changed, together=gpu)
    results.show()
    raise SystemExit("; ".join(failures(results.rows)) or 0)


def failures(made: list[Row]) -> list[str]:
    """What a row shows to be wrong, in words; a run without preemptions has not tried them."""
    by_case = {row.case: row for row in made}
    found = [f"{case}: {by_case[case].ours:g}" for case in ("responses", "compiles") if by_case[case].ours]
    tried = {case: by_case[case].ours and by_case[case].stock for case in ("preemptions", "aborts")}
    return found + [f"no {case}" for case, count in tried.items() if not count]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model, e.g. one that benchmarks/models.py made")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="of the stream")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON, further arguments of vLLM's LLM")
    parser.add_argument("--damage", type=int, help="a step from which on our engine loses cached states: it must fail")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
