"""One engine, with the plugin or without: what it answers, captures, compiles and launches, as JSON.

    python -m benchmarks.engine.side JOB.json RESULT.json

`benchmarks/equality_vllm.py` starts it, once with MAMBA_OPS_VLLM=1 and once with 0. A job has `model`, `engine`
(arguments of vLLM's LLM), `responses`, `calls` and `tolerance`. The result is written again after each phase.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to the workers

import torch

from benchmarks.engine import in_worker
from benchmarks.engine.scenarios import Limits, Wave, continuations, scenarios


class Engine:
    """vLLM's engine, stepped by hand so that requests come when a schedule says."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        start = time.perf_counter()
        settings = {"skip_tokenizer_init": True, "seed": 0, "disable_log_stats": False, **job["engine"]}
        self.llm: Any = LLM(model=job["model"], **settings)
        self.seconds = time.perf_counter() - start
        self._steps = 0

    def limits(self) -> Limits:
        config = self.llm.llm_engine.vllm_config
        model, cache = config.model_config, config.cache_config
        budget = config.scheduler_config.max_num_batched_tokens
        return Limits(model.get_vocab_size(), model.max_model_len, budget, cache.block_size, cache.num_gpu_blocks)

    def answers(self, wave: Wave) -> list[Any]:
        """For each request its tokens and the log-probability of each."""
        from vllm import SamplingParams

        engine, found = self.llm.llm_engine, {}
        pending, step = dict(enumerate(wave)), 0
        while pending or engine.has_unfinished_requests():
            for number in [n for n, arrival in pending.items() if arrival.step <= step]:
                arrival = pending.pop(number)
                params = SamplingParams(
                    temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True, detokenize=False, logprobs=1
                )
                engine.add_request(f"{self._steps}-{number}", {"prompt_token_ids": arrival.prompt}, params)
            for output in engine.step():
                answer = output.outputs[0]
                tokens = list(answer.token_ids)
                logprobs = [entry[token].logprob for entry, token in zip(answer.logprobs, tokens, strict=True)]
                found[int(output.request_id.split("-")[1])] = [tokens, logprobs]
            step += 1
        self._steps += 1
        return [found[number] for number in range(len(wave))]

    def preemptions(self) -> int:
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")

    def in_workers(self, function: Any, **settings: Any) -> list[Any]:
        """The results of a function of the model, worker by worker."""
        return list(self.llm.apply_model(functools.partial(function, **settings)))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    result: dict[str, Any] = {}

    def write(**figures: Any) -> None:
        result.update(figures)
        part = Path(sys.argv[2] + ".part")
        part.write_text(json.dumps(result))
        part.replace(sys.argv[2])
        print("side:", *figures, file=sys.stderr, flush=True)

    if os.environ.get("MAMBA_OPS_VLLM") != "0":
        from inductor_passes.vllm import register

        register()  # also where the package is not installed, and vLLM finds no entry point
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
    write(gpu=torch.cuda.is_available(), seconds=engine.seconds, graphs=graphs, layers=layers[0], monitored=monitored)

    answers: dict[str, list[Any]] = {}
    for kind, waves in scenarios(engine.limits(), job["responses"]).items():
        before = engine.preemptions()
        answers[kind] = [answer for wave in waves for answer in engine.answers(wave)]
        preemptions = {**result.get("preemptions", {}), kind: engine.preemptions() - before}
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
