"""One engine under a stream of requests: what it answers, compiles and holds in memory, as JSON.

    python -m benchmarks.engine.soak_side JOB.json RESULT.json

`benchmarks/soak.py` starts it, once with MAMBA_OPS_VLLM=1 and once with 0. A job has `model`, `engine` (arguments of
vLLM's LLM), `requests`, `seed`, `damage` and `hold_choices`. The result is written again after each part of the stream.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.engine import in_worker
from benchmarks.engine.scenarios import Arrival
from benchmarks.engine.stepped import Engine
from benchmarks.engine.stream import Request, stream
from benchmarks.engine.written import ResultFile

PARTS = 10
IN_A_PART = 20  # so many at least, or requests would not meet


class Soak:
    """An engine, and what it has answered.

    Attributes:
        answers: for each request, in the order in which they came, its tokens and their log-probabilities: for each
            token its own, then those of the likeliest, in falling order.
        aborted: how many were given up, by when.
        damage: the step from which on cached states are lost; None for never.
    """

    def __init__(self, engine: Engine, damage: int | None, progress: tqdm[Any]) -> None:
        self.answers: list[Any] = []
        self.aborted: Counter[str] = Counter()
        self._engine = engine
        self._damage = damage
        self._progress = progress
        self._steps = 0

    def part(self, requests: list[Request]) -> None:
        """Answer these and come to rest."""
        engine = self._engine.llm.llm_engine
        first, step = len(self.answers), 0
        self.answers += [[[], []] for _ in requests]
        coming = list(enumerate(requests, first))
        running: dict[int, Request] = {}
        while coming or engine.has_unfinished_requests():
            while coming and coming[0][1].step <= step:
                number, request = coming.pop(0)
                running[number] = request
                self._add(number, request)
            self._abort(running, "waiting", {n for n, request in running.items() if request.abort == "waiting"})
            for output in engine.step():
                self._keep(output, running)
            self._abort(running, "prefill", self._in_mid_prefill())
            answered = {number for number in running if self._length(number) >= running[number].abort_after}
            self._abort(running, "decode", answered)
            if self._damage is not None and self._steps >= self._damage:
                self._engine.in_workers(in_worker.zero_states)
            step += 1
            self._steps += 1

    def _add(self, number: int, request: Request) -> None:
        from vllm import SamplingParams

        sampling = dict(request.sampling)
        if not torch.cuda.is_available():
            # vLLM sets a request's generator back after a part of a prefill, which that of a CPU cannot do. Drawn from
            # the generator of the process, as `main` seeds it, tokens are the same in the same batches.
            sampling.pop("seed", None)
        params = SamplingParams(ignore_eos=True, detokenize=False, **sampling)
        prompt = {"prompt_token_ids": request.prompt}
        # Among those of one priority the scheduler goes by the time, which must be the same for both engines.
        self._engine.llm.llm_engine.add_request(
            str(number), prompt, params, arrival_time=float(number), priority=request.priority
        )

    def _keep(self, output: Any, running: dict[int, Request]) -> None:
        number, answer = int(output.request_id), output.outputs[0]
        tokens = list(answer.token_ids)
        logprobs = []
        for entry, token in zip(answer.logprobs, tokens, strict=True):
            logprobs += [entry[token].logprob, *sorted((each.logprob for each in entry.values()), reverse=True)]
        self.answers[number] = [tokens, logprobs]
        if output.finished:
            del running[number]
            self._progress.update()

    def _abort(self, running: dict[int, Request], when: str, numbers: set[int]) -> None:
        for number in sorted(n for n in numbers if n in running and running[n].abort == when):
            self._engine.llm.llm_engine.abort_request([str(number)])
            del running[number]
            self.aborted[when] += 1
            self._progress.update()

    def _in_mid_prefill(self) -> set[int]:
        core = self._engine.llm.llm_engine.engine_core.engine_core
        return {
            int(request.request_id.split("-")[0])  # vLLM puts random characters behind it
            for request in core.scheduler.running
            if 0 < request.num_computed_tokens < request.num_prompt_tokens and not request.num_output_tokens
        }

    def _length(self, number: int) -> int:
        return len(self.answers[number][0])


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    plugin = os.environ.get("MAMBA_OPS_VLLM") != "0"
    write = ResultFile(Path(sys.argv[2]))
    memory_lock = Path(sys.argv[1]).with_suffix(".lock")
    with locked(memory_lock, fcntl.LOCK_SH):
        engine = Engine(job)
    limits = engine.limits()
    if not torch.cuda.is_available():  # an eager engine for CPUs runs no layer before the first request
        engine.answers([Arrival(0, [1], 1)])
    monitored = engine.in_workers(in_worker.listen_to_jit_monitor)
    before = engine.llm.collective_rpc(in_worker.graph_figures)
    regions = _counted(engine, "regions") if plugin else 0
    about = {"seconds": engine.seconds, "dropped": engine.dropped, "blocks": limits.blocks, "block": limits.block}
    write(**about, monitored=monitored)
    torch.manual_seed(job["seed"])
    memory: list[dict[str, int]] = []
    sleeps = 0
    parts = max(1, min(PARTS, job["requests"] // IN_A_PART))
    label = "ours" if plugin else "stock"
    with tqdm(total=job["requests"], desc=label, position=int(plugin), unit="request") as progress:
        soak = Soak(engine, job["damage"] if plugin else None, progress)
        for number, requests in enumerate(stream(limits, job["requests"], parts, job["seed"])):
            soak.part(requests)
            if job["engine"].get("enable_sleep_mode") and number % 3 == 1:
                with locked(memory_lock, fcntl.LOCK_EX):
                    sleep_and_wake(engine)
                sleeps += 1
            memory.append(dict(sum((Counter(each) for each in engine.in_workers(in_worker.memory)), Counter())))
            compiles = [message for worker in engine.in_workers(in_worker.jit_reports) for message in worker]
            if engine.llm.collective_rpc(in_worker.graph_figures) != before:
                compiles.append("graphs were captured")
            if plugin:
                compiles += ["a region was compiled"] * (_counted(engine, "regions") - regions)
                write.result["served"] = engine.in_workers(in_worker.plugin_counters)
            write(
                answers=soak.answers,
                aborted=soak.aborted,
                preemptions=engine.preemptions(),
                compiles=compiles,
                memory=memory,
                sleeps=sleeps,
            )


@contextlib.contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Hold a lock that both sides know: vLLM fails if less memory of the GPU is free once an engine sleeps, as when the
    other one starts or wakes at that moment.
    """
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


def sleep_and_wake(engine: Engine) -> None:
    """Give the weights and the cache up for a moment; what the prefix cache knows is void then."""
    engine.llm.reset_prefix_cache()
    engine.llm.sleep(level=1)
    engine.llm.wake_up()


def _counted(engine: Engine, name: str) -> int:
    return sum(int(worker[name]) for worker in engine.in_workers(in_worker.plugin_counters))


if __name__ == "__main__":
    main()
