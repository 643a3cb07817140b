"""Two engines, with the plugin and without: the same tokens, graphs and bits, and nothing compiled while serving?

    python -m benchmarks.equality_vllm MODEL [--name nemotron_h] [--calls 1200] [--responses 500] [--tensor-parallel 1]
    python -m benchmarks.equality_vllm MODEL --control [--name nemotron_h] [--responses 500]

An engine with the plugin answers requests of four kinds (short continuations, chunked prefills, mixed ones, preempted
ones), profiles a step that continues one sequence, and runs layer calls both ways on the same inputs; an engine without
it answers the same requests. Cases `layers`, `responses`, `preemptions`, `graphs`, `compiles`, `launches`, each with
the name of the model behind it if one is given, go into results/equality_vllm.json after every phase; other cases in
the file stay. The exit status is 1 if there are mismatches, or if no request was preempted. Without a GPU it runs on an
engine for CPUs, with what such an engine can do.

With `--control` neither engine has the plugin, and each has caches on disk of its own, empty ones: vLLM's
(VLLM_CACHE_ROOT), Inductor's and Triton's (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR; `engine/pair.py` says why). Where
these two differ, so may any two starts of vLLM, and the plugin is not the reason. There is one case,
`responses/control`, and the exit status is 0 whatever it counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.engine.cache_blocks import blocks_for
from benchmarks.engine.comparison import control_rows, failures, rows
from benchmarks.engine.pair import Side, run_pair
from benchmarks.results import FOLDER, Results, Row

GPU_ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 16384,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 8 << 30,
    "gpu_memory_utilization": 0.3,  # several engines start at once
    "enable_prefix_caching": True,
    "compilation_config": {"cudagraph_capture_sizes": [1, 4, 8, 16, 32]},
}
CPU_ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 40,
    "enable_prefix_caching": False,
    "enforce_eager": True,
}


def main() -> None:
    options = parse()
    gpu = torch.cuda.is_available()
    tolerance = 0.0 if gpu else 2e-3
    # As many requests as may run fit into the cache at once with short sequences, and are preempted with longer ones.
    few = {**GPU_ENGINE, "num_gpu_blocks_override": blocks_for(options.model, 4 / 3)} if gpu else CPU_ENGINE
    engine = {**few, "tensor_parallel_size": options.tensor_parallel, **options.engine}
    job = {"model": options.model, "engine": engine, "responses": options.responses, "calls": options.calls}
    job |= {"tolerance": tolerance, "hold_choices": True}
    made: list[Row] = []

    def changed(ours: Side, stock: Side) -> None:
        known = control_rows if options.control else rows
        made[:] = known(ours, stock, options.name, tolerance)
        write(made, options)

    # A GPU has room for both.
    run_pair("benchmarks.engine.side", job, changed, together=gpu, control=options.control)
    write(made, options).show()
    raise SystemExit("; ".join([] if options.control else failures(made)) or 0)


def write(new: list[Row], options: argparse.Namespace) -> Results:
    """Write rows into the file in place of those of the same cases."""
    results = Results(options.out_name, Results.read(options.out_name, options.out).rows)
    cases = {row.case for row in new}
    results.rows = [row for row in results.rows if row.case not in cases] + new
    results.write(options.out)
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model, e.g. one that benchmarks/models.py made")
    parser.add_argument("--name", default="", help="of the model, behind the cases")
    parser.add_argument("--calls", type=int, default=1200, help="layer calls to compare")
    parser.add_argument("--responses", type=int, default=500, help="about so many are compared")
    parser.add_argument(
        "--control", action="store_true", help="no plugin on either side: what do two starts differ in?"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON, further arguments of vLLM's LLM")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    options = parser.parse_args()
    parallel = options.tensor_parallel
    options.out_name = "equality_vllm" if parallel == 1 else f"equality_vllm_tp{parallel}"
    return options


if __name__ == "__main__":
    main()
