"""vLLM's engine in this process, stepped by hand: what it computes in a step depends on the schedule alone."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to the workers

from benchmarks.engine.held_choices import chunk_size, hold_sums, without_combo_kernels
from benchmarks.engine.scenarios import Limits, Wave


class Engine:
    """vLLM's engine, stepped by hand so that requests come when a schedule says.

    Attributes:
        llm: vLLM's own object. seconds: that it took to start.
        dropped: how many choices of vLLM's tuner a job with `hold_choices` left out, worker by worker.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        if os.environ.get("MAMBA_OPS_VLLM") != "0":
            from inductor_passes.vllm import register

            register()  # also where the package is not installed, and vLLM finds no entry point
        from vllm import LLM

        held = job.get("hold_choices", False)
        if held:
            hold_sums(None, chunk_size(job["model"]))
        engine = without_combo_kernels(job["engine"]) if held else job["engine"]
        start = time.perf_counter()
        settings = {"skip_tokenizer_init": True, "seed": 0, "disable_log_stats": False, **engine}
        self.llm: Any = LLM(model=job["model"], **settings)
        self.seconds = time.perf_counter() - start
        self._steps = 0
        self.dropped = self._hold_sums() if held else []

    def _hold_sums(self) -> list[int]:
        """How many of the tuner's choices are left out, worker by worker."""
        known = self.llm.llm_engine.vllm_config.model_config.get_mamba_chunk_size()
        return self.in_workers(hold_sums, chunk_size=known)

    def limits(self) -> Limits:
        config = self.llm.llm_engine.vllm_config
        model, cache = config.model_config, config.cache_config
        budget = config.scheduler_config.max_num_batched_tokens
        groups = len(self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)
        vocabulary = model.get_vocab_size()
        return Limits(vocabulary, model.max_model_len, budget, cache.block_size, cache.num_gpu_blocks, groups)

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
