"""One engine, with the plugin or without: what it answers, captures, compiles and launches, as JSON.

    python -m benchmarks.engine.side JOB.json RESULT.json

`benchmarks/equality_vllm.py` starts it, once with MAMBA_OPS_VLLM=1 and once with 0; for a control twice with 0. A job
has `model`, `engine` (arguments of vLLM's LLM), `responses`, `calls`, `tolerance` and `hold_choices` (see
`held_choices.py`). The result is written again after each phase.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import in_worker
from benchmarks.engine.scenarios import continuations, scenarios
from benchmarks.engine.stepped import Engine
from benchmarks.engine.written import ResultFile


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    write = ResultFile(Path(sys.argv[2]))
    engine = Engine(job)
    compilation = engine.llm.llm_engine.vllm_config.compilation_config
    graphs = {
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "capture_sizes": list(compilation.cudagraph_capture_sizes or []),
        "splitting_ops": sorted(compilation.splitting_ops or []),
        "workers": engine.llm.collective_rpc(in_worker.graph_figures),
    }
    layers = engine.in_workers(in_worker.layer_names)
    monitored = engine.in_workers(in_worker.listen_to_jit_monitor)
    about = {"gpu": torch.cuda.is_available(), "seconds": engine.seconds, "dropped": engine.dropped}
    write(**about, graphs=graphs, layers=layers[0], monitored=monitored)

    answers: dict[str, list[Any]] = {}
    for kind, waves in scenarios(engine.limits(), job["responses"]).items():
        before = engine.preemptions()
        answers[kind] = [answer for wave in waves for answer in engine.answers(wave)]
        preemptions = {**write.result.get("preemptions", {}), kind: engine.preemptions() - before}
        compiles = [message for worker in engine.in_workers(in_worker.jit_reports) for message in worker]
        write(answers=answers, preemptions=preemptions, compiles=compiles)
    captured = engine.llm.collective_rpc(in_worker.graph_figures)
    write(captured_while_serving=captured != graphs["workers"])
    if os.environ.get("MAMBA_OPS_VLLM") != "0":
        write(served=engine.in_workers(in_worker.plugin_counters))
        compare_layers(engine, job, write)
        engine.in_workers(in_worker.restore)
    write(profile=profile_continuation(engine))


def compare_layers(engine: Engine, job: dict[str, Any], write: Callable[..., None]) -> None:
    """Answer requests of all kinds in turn until enough layer calls have been run both ways."""
    engine.in_workers(in_worker.compare_layers, calls=job["calls"], tolerance=job["tolerance"])
    for waves in itertools.zip_longest(*scenarios(engine.limits(), 400).values()):
        for wave in waves:
            if wave is not None:
                engine.answers(wave)
                counted = engine.in_workers(in_worker.plugin_counters)
                write(compared=counted)
                if min(count["verified"] for count in counted) >= job["calls"]:
                    return


def profile_continuation(engine: Engine) -> list[Any]:
    """What the layers launch in a step that continues one sequence, worker by worker."""
    *before, profiled = continuations(engine.limits(), 4)
    for wave in before:
        engine.answers(wave)
    engine.in_workers(in_worker.start_profile)
    engine.answers(profiled)
    return engine.in_workers(in_worker.stop_profile)


if __name__ == "__main__":
    main()
