"""vLLM's manager of graphs with some more of them: whole steps of few tokens that have a prefill."""

from __future__ import annotations

import logging
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from inductor_passes.vllm.decline import counters
from inductor_passes.vllm.full_steps import FullSteps, known_steps

logger = logging.getLogger("vllm.mamba_ops")

# A graph runs the programs of as many decodes and sequences as it is captured for, whether they are there or not.
FEW_REQUESTS = (1, 4)


class FullStepManager(ModelCudaGraphManager):  # type: ignore[misc]
    """Chooses a graph of decodes first, then a whole step, then vLLM's graphs between the layers."""

    cudagraph_mode: Any
    _candidates: dict[tuple[int, int], list[Any]]

    def _init_candidates(self) -> None:
        self._steps: FullSteps | None = known_steps(self.vllm_config)
        self._ours: set[Any] = set()
        self._offered = True
        mode = self.cudagraph_mode
        if self._steps is not None and mode == CUDAGraphMode.FULL:
            # vLLM's graphs are then for any step, but kernels of attention are chosen anew where no query is longer
            # than a token, so that decodes need graphs of their own.
            self.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        super()._init_candidates()
        self.cudagraph_mode = mode
        self._without = self._candidates
        self._with_ours = {key: [*graphs] for key, graphs in self._candidates.items()}
        if self._steps is None or self.ubatch_runner is not None or self.use_breakable_cg:
            return
        if mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE):
            self._add(self._steps.captured)

    def offer(self, whole_steps: bool) -> bool:
        """Choose whole steps with a prefill from now on, or do not; whether there are any."""
        self._offered = whole_steps
        return bool(self._ours)

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """The graph of a step. Ours were captured for longer queries, so some request has to have one."""
        ours = self._offered and num_tokens > num_reqs
        self._candidates = self._with_ours if ours else self._without
        return super().dispatch(num_reqs, num_tokens, *args, **kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture all, and do without ours if a layer could not be captured."""
        super().capture(*args, **kwargs)
        if self._steps is None or not self._ours:
            return
        if self._steps.failure is not None:
            logger.warning("mamba_ops: no whole step with a prefill is captured: %s", self._steps.failure)
            self._with_ours = self._without
            for graph in self._ours:
                self.graphs.pop(graph, None)
            self._ours = set()
        elif self._max_full_descs_to_capture is None:  # not while vLLM measures what graphs take
            counts = len(self._ours & self.graphs.keys()), self._steps.captured[-1]
            logger.info("mamba_ops: %d graphs of whole steps with a prefill, of up to %d tokens", *counts)

    def run_fullgraph(self, desc: Any) -> Any:
        """Replay."""
        counters.full_steps += desc in self._ours
        return super().run_fullgraph(desc)

    def _add(self, captured: list[int]) -> None:
        """Behind the graphs of decodes and in front of those between the layers."""
        for loras in self.lora_capture_cases:
            first = 1
            for ntokens in captured:
                most = min(ntokens, self.max_num_reqs)
                graphs = [
                    BatchExecutionDescriptor(
                        cg_mode=CUDAGraphMode.FULL, num_tokens=ntokens, num_reqs=num_reqs, num_active_loras=loras
                    )
                    for num_reqs in sorted({*(few for few in FEW_REQUESTS if few < most), most})
                ]
                self._ours.update(graphs)
                for count in range(first, ntokens + 1):
                    candidates = self._with_ours.setdefault((count, loras), [])
                    decodes = sum(each.cg_mode == CUDAGraphMode.FULL for each in candidates)
                    candidates[decodes:decodes] = graphs
                first = ntokens + 1
        full = [*self._capture_descs.get(CUDAGraphMode.FULL, []), *self._ours]
        self._capture_descs[CUDAGraphMode.FULL] = sorted(
            full, key=lambda graph: (graph.num_tokens, graph.num_reqs), reverse=True
        )
