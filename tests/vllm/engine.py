"""Runs vLLM's engine on jobs, in the environment that has vLLM. Not a test: tests start it, see `processes`.

It reads lines of standard input until that ends: the file of a job, a tab, the file for its result. Importing vLLM
takes longer than most jobs, so one process runs many of them, each in an engine of its own.

A job has
    model, engine: arguments of LLM;
    environment: variables that hold while it runs;
    schedules: each a list of events [step, "add", id, prompt, max_tokens, adapter] and [step, "abort", id]; steps count
        from 0, and a schedule ends when nothing is left to do;
    logprobs: of how many other tokens there are log-probabilities, or null for none at all;
    zero: the numbers of schedules in which cached states are zeroed after every step;
    reset_prefix_cache, sleep: whether that is done before each schedule (the latter with waking up);
    disturb: "" or the name of a function of this file that makes layers different from what the plugin expects.

The result has, by schedule and request, the tokens, the log-probability of each, and whether it was aborted; or else
an error.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2


def run(job: dict[str, Any]) -> dict[str, Any]:
    before, captured = counted(), compilation_counter.num_cudagraph_captured
    if job["disturb"]:
        globals()[job["disturb"]]()
    llm = LLM(model=job["model"], skip_tokenizer_init=True, seed=0, disable_log_stats=False, **job["engine"])
    try:
        results = [run_schedule(llm, number, events, job) for number, events in enumerate(job["schedules"])]
        layers: list[str] = []
        backends: list[str] = []
        if job["engine"].get("tensor_parallel_size", 1) == 1:  # otherwise they are in other processes
            layers, backends = llm.apply_model(names_of_mixers)[0], llm.apply_model(names_of_backends)[0]
        after = counted()
        after.subtract(before)
        metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    return {
        "schedules": results,
        "layers": layers,
        "backends": backends,
        "counters": {name: n for name, n in after.items() if n},
        "captured": compilation_counter.num_cudagraph_captured - captured,
        "preemptions": int(metrics.get("vllm:num_preemptions", 0)),
    }


def run_schedule(llm: LLM, number: int, events: list[Any], job: dict[str, Any]) -> dict[str, Any]:
    engine = llm.llm_engine
    if job["sleep"]:
        llm.sleep()
        llm.wake_up()
    if job["reset_prefix_cache"]:
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
            prompt, max_tokens, *adapter = rest
            params = SamplingParams(
                temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=job["logprobs"]
            )
            lora = LoRARequest("adapter", 1, adapter[0]) if adapter else None
            engine.add_request(request, {"prompt_token_ids": prompt}, params, lora_request=lora)
        for output in engine.step():
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            found.setdefault(output.request_id.split("-", 1)[1], {}).update(
                tokens=tokens,
                logprobs=[
                    entry[token].logprob for entry, token in zip(completion.logprobs or (), tokens, strict=False)
                ],
                cached=output.num_cached_tokens,
            )
        if number in job["zero"]:
            llm.apply_model(zero_states)
        step += 1
    return found


def names_of_mixers(model: Any) -> list[str]:
    return [type(module).__name__ for module in model.modules() if isinstance(module, MambaMixer2)]


def names_of_backends(model: Any) -> list[str]:
    return [module.get_attn_backend().__name__ for module in model.modules() if isinstance(module, MambaMixer2)]


def before_each_call(change: Callable[..., None]) -> None:
    """Have `change` called with every layer and the arguments of its forward, which it calls."""
    from inductor_passes.vllm.layer import SnapshotFreeMixer2

    forward = SnapshotFreeMixer2.conv_ssm_forward
    SnapshotFreeMixer2.conv_ssm_forward = lambda layer, **arguments: change(layer, forward, **arguments)


def take_attributes() -> None:
    """Another attribute of the contract from each layer. It is given back after the first call, for vLLM's own code."""
    from inductor_passes.vllm.contract import LAYER_ATTRIBUTES

    taken: dict[str, str] = {}

    def first_without(layer: Any, forward: Callable[..., None], **arguments: Any) -> None:
        if layer.prefix not in taken and len(taken) < len(LAYER_ATTRIBUTES):
            name = taken[layer.prefix] = LAYER_ATTRIBUTES[len(taken)]
            kept = getattr(layer, name)
            delattr(layer, name)
            with contextlib.suppress(AttributeError):
                forward(layer, **arguments)
            object.__setattr__(layer, name, kept)
        forward(layer, **arguments)

    before_each_call(first_without)


def other_caches() -> None:
    """Caches whose slots lie at a distance that the plugin has not compiled for."""
    moved = set()

    def with_other_caches(layer: Any, forward: Callable[..., None], **arguments: Any) -> None:
        if layer.prefix not in moved and len(layer.kv_cache) > 1 and layer.kv_cache[1].shape[0] > 1:
            moved.add(layer.prefix)
            layer.kv_cache = tuple(farther_apart(cache) for cache in layer.kv_cache)
        forward(layer, **arguments)

    before_each_call(with_other_caches)


def farther_apart(cache: torch.Tensor) -> torch.Tensor:
    step = cache[0].numel() + 1
    moved = cache.new_zeros(cache.shape[0], step)[:, : step - 1].view(cache.shape)
    return moved.copy_(cache)


def sparse_activations() -> None:
    """Activations that are columns of a wider tensor."""

    def with_sparse(layer: Any, forward: Callable[..., None], projected_states: torch.Tensor, output: Any) -> None:
        wide = projected_states.new_zeros(projected_states.shape[0], projected_states.shape[1] + 8)
        wide[:, :-8] = projected_states
        forward(layer, projected_states=wide[:, :-8], output=output)

    before_each_call(with_sparse)


def zero_states(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, MambaMixer2):
            module.kv_cache[1].zero_()


def counted() -> Counter[str]:
    """What the plugin has counted in this process, a declined prefill under its reason."""
    if "inductor_passes.vllm.decline" not in sys.modules:
        return Counter()
    from inductor_passes.vllm.decline import COUNTED, counters

    numbers = {name: getattr(counters, name) for name in COUNTED}
    return Counter(numbers | {f"declined {reason.name}": n for reason, n in counters.declined.items()})


@contextlib.contextmanager
def variables(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


def serve() -> None:
    for line in sys.stdin:
        job_file, result_file = map(Path, line.strip().split("\t"))
        job = json.loads(job_file.read_text())
        try:
            with variables(job["environment"]):
                result = run(job)
        except Exception:
            result = {"error": traceback.format_exc()}
        part = result_file.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(result_file)


if __name__ == "__main__":
    serve()
