"""Runs vLLM's engine on schedules of requests, in the environment that has vLLM. Not a test: tests start it.

python engine.py JOB.json RESULT.json, with a job of `model`, `engine` (arguments of LLM), `schedules`, and whether to
`zero` cached states between steps. A schedule is a list of events [step, "add", id, prompt, max_tokens] and
[step, "abort", id]; steps count from 0 and a schedule ends when nothing is left to do. The result has, by schedule and
request, the tokens, the log-probability of each and whether it was aborted.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(model=job["model"], skip_tokenizer_init=True, seed=0, disable_log_stats=False, **job["engine"])
    results = [run_schedule(llm, number, events, job) for number, events in enumerate(job["schedules"])]
    layers: list[str] = []
    if job["engine"].get("tensor_parallel_size", 1) == 1:  # otherwise they are in other processes
        layers = llm.apply_model(
            lambda model: [type(m).__name__ for m in model.modules() if isinstance(m, MambaMixer2)]
        )[0]
    return {"schedules": results, "layers": layers, "preemptions": preemptions(llm), **plugin_state()}


def run_schedule(llm: LLM, number: int, events: list[Any], job: dict[str, Any]) -> dict[str, Any]:
    engine = llm.llm_engine
    if job.get("reset_prefix_cache", True):
        engine.reset_prefix_cache()
    found: dict[str, Any] = {}
    pending, step = sorted(events, key=lambda event: event[0]), 0
    while pending or engine.has_unfinished_requests():
        while pending and pending[0][0] <= step:
            _, kind, name, *rest = pending.pop(0)
            request = f"{number}-{name}"
            if kind == "abort":
                engine.abort_request([request])
                found.setdefault(name, {})["aborted"] = True
                continue
            prompt, max_tokens = rest
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=1)
            engine.add_request(request, {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            found.setdefault(output.request_id.split("-", 1)[1], {}).update(
                tokens=tokens,
                logprobs=[entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=False)],
                cached=output.num_cached_tokens,
            )
        if job.get("zero"):
            llm.apply_model(zero_states)
        step += 1
    return found


def zero_states(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, MambaMixer2):
            module.kv_cache[1].zero_()


def preemptions(llm: LLM) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def plugin_state() -> dict[str, Any]:
    if "inductor_passes.vllm.decline" not in sys.modules:
        return {}
    from inductor_passes.vllm.decline import COUNTED, counters

    state = {name: getattr(counters, name) for name in COUNTED}
    return {"counters": {**state, "declined": {reason.name: n for reason, n in counters.declined.items()}}}


if __name__ == "__main__":
    outcome = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(outcome))
