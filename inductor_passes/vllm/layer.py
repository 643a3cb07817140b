"""The layer that vLLM builds instead of its own `MambaMixer2`: the same layer with another way through a prefill.

Only `conv_ssm_forward` differs, and of it only steps with prefills. Steps of decodes alone, captured graphs, ReplaySSM
and whatever the compiled region does not take go through vLLM's own method. Decodes beside prefills are vLLM's own
kernels, launched by address where that is known to be the same.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, is_conv_state_dim_first

from inductor_passes.vllm.contract import missing_from_layer
from inductor_passes.vllm.decline import Decline, counters
from inductor_passes.vllm.decodes import direct_decode_for, say_why_not
from inductor_passes.vllm.direct_decode import DirectDecode
from inductor_passes.vllm.direct_region import DirectCall
from inductor_passes.vllm.full_steps import FULL_STEP, FullStep
from inductor_passes.vllm.layer_tensors import BoundLayer, bind, layer_shape
from inductor_passes.vllm.metadata_backend import backend_for
from inductor_passes.vllm.options import Options, read_options
from inductor_passes.vllm.regions import Region, region_for
from inductor_passes.vllm.step import StepPlan, plan_of
from inductor_passes.vllm.verify import verified
from inductor_passes.vllm.workspace import keep_workspaces
from inductor_passes.vllm.writing import debug_dump_folder

logger = logging.getLogger("vllm.mamba_ops")

_said: set[str] = set()


class SnapshotFreeMixer2(MambaMixer2):  # type: ignore[misc]
    """vLLM's Mamba2 mixer whose prefill is one compiled region that reads cached states in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        counters.share()
        config = get_current_vllm_config()
        self._options: Options = read_options(config.additional_config)
        if not self._options.dump:
            self._options = dataclasses.replace(self._options, dump=debug_dump_folder(config))
        self._region: Region | None = None
        self._region_tried = not self._options.enabled
        self._direct_decode: DirectDecode | None = None
        self._decodes_tried = False
        self._max_decodes: int = getattr(getattr(config, "scheduler_config", None), "max_num_seqs", 0)
        if self._options.enabled and self._options.verify:
            both = verified(self, super().conv_ssm_forward, self.conv_ssm_forward)
            self.conv_ssm_forward = both  # type: ignore[method-assign,assignment]

    @property
    def kv_cache(self) -> Any:
        """The caches that vLLM has given to the layer. With others, or none, it lets go of what it knew of these."""
        try:
            return self.__dict__["kv_cache"]
        except KeyError:
            raise AttributeError("kv_cache") from None

    @kv_cache.setter
    def kv_cache(self, caches: Any) -> None:
        self.__dict__["kv_cache"] = caches
        self._bound: BoundLayer | None = None
        self._binding_tried = False

    @kv_cache.deleter
    def kv_cache(self) -> None:
        del self.__dict__["kv_cache"]

    def get_attn_backend(self, *args: Any, **kwargs: Any) -> Any:
        """What builds the metadata of a step for this layer."""
        stock = super().get_attn_backend(*args, **kwargs)
        return backend_for(stock) if self._options.enabled and self._options.builds_metadata else stock

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """Convolution and SSD of one step; vLLM's custom op calls this.

        Args:
            projected_states: (ntokens, projected) gate, x, B, C and dt of the decodes, then of the prefills, then
                padding.
            output: (ntokens, inner). Written.
        """
        context = get_forward_context()
        by_layer = context.attn_metadata
        name = getattr(self, "prefix", None)
        if by_layer is None or name is None:  # the profile run, before the caches are allocated; or another vLLM
            self._prepare(projected_states)
        metadata = by_layer.get(name) if isinstance(by_layer, dict) else None
        if metadata is not None and FULL_STEP in metadata.__dict__:
            super().conv_ssm_forward(projected_states, output)  # the decodes
            self._prefill_of_full_step(projected_states, output, metadata.__dict__[FULL_STEP])
            return
        if metadata is None or metadata.num_prefills == 0:
            if metadata is not None and not self._decodes_tried:
                self._prepare_decodes()
            super().conv_ssm_forward(projected_states, output)
            return
        if not self._region_tried:
            self._prepare(projected_states)
        plan = plan_of(metadata, projected_states.device)
        decline = self._decline(plan, projected_states, output)
        if decline is not None:
            counters.decline(decline)
            super().conv_ssm_forward(projected_states, output)
            return
        if plan.num_decode_tokens and not self._decode(projected_states, output, plan):
            context.attn_metadata = {self.prefix: plan.without_prefill(metadata)}
            try:
                super().conv_ssm_forward(projected_states, output)
            finally:
                context.attn_metadata = by_layer
        self._prefill(projected_states, output, plan)

    @property
    def full_step_tokens(self) -> int:
        """How many tokens a step with a prefill may have that is captured as one graph; 0 if none can be."""
        region = self._region
        return 0 if region is None or region.in_full_step is None else region.in_full_step.max_tokens or 0

    def _prefill_of_full_step(self, projected: Tensor, output: Tensor, step: FullStep) -> None:
        """The prefills of a step that is being captured, or is tried before; what they are is in the step's tables.

        A graph in which a layer has failed is thrown away, so this does not have to do the prefill in another way.
        """
        try:
            region = self._region
            assert region is not None
            self._bind(region, 1)
            if self._bound is None:
                raise RuntimeError(Decline.CACHE.value)
            if (projected.data_ptr() | output.data_ptr()) & region.misaligned:
                raise RuntimeError(Decline.ALIGNMENT.value)
            assert region.in_full_step is not None
            assert region.in_full_step.direct is not None
            ntokens, nseqs, nchunks, ntiles = step.sizes
            call = DirectCall(
                ntokens,
                (nseqs, nchunks, ntiles, 1),
                self._bound.sizes,
                projected.data_ptr(),
                output.data_ptr(),
                self._bound.addresses,
                step.addresses,
            )
            region.in_full_step.direct(call)
            keep_workspaces()  # their addresses are in the graph
        except Exception as error:
            step.steps.failure = f"{type(error).__name__}: {error}"
            logger.debug("mamba_ops: how it failed", exc_info=True)

    def _decode(self, projected: Tensor, output: Tensor, plan: StepPlan) -> bool:
        """Launch the decodes by address, if that is known to be the same as vLLM's own code."""
        direct, bound, decodes = self._direct_decode, self._bound, plan.decodes
        if direct is None or bound is None:
            return False
        if decodes is None or not direct(
            decodes, projected.data_ptr(), output.data_ptr(), bound.addresses, bound.sizes[0]
        ):
            say_why_not(logging.WARNING, "a step has others than were compiled for")
            return False
        counters.layer_decodes += 1
        return True

    def _prefill(self, projected: Tensor, output: Tensor, plan: StepPlan) -> None:
        region, bound = self._region, self._bound
        assert region is not None
        assert bound is not None
        decodes = plan.num_decode_tokens
        if plan.checkpoints is None:
            counters.layer_prefills += 1
            compiled = region.for_step(plan.max_tokens, plan.one_chunk, plan.sizes[1])
        else:
            counters.layer_checkpoints += 1
            compiled = region.for_step_with_checkpoints(plan.max_tokens)
        if compiled.direct is not None:
            call = DirectCall(
                projected.shape[0] - decodes,
                plan.sizes,
                bound.sizes,
                projected.data_ptr() + decodes * region.projected_bytes,
                output.data_ptr() + decodes * region.out_bytes,
                bound.addresses,
                plan.addresses,
                plan.checkpoint_addresses,
            )
            compiled.direct(call)
            return
        projected, output = projected[decodes:], output[decodes:].view(-1, region.shape.nheads, region.shape.headdim)
        arguments = [projected.shape[0], *plan.sizes, *bound.sizes, projected, output]
        arguments += bound.tensors
        arguments += plan.tensors
        arguments += plan.checkpoints or ()
        compiled.run(arguments)

    def _decline(self, plan: StepPlan, projected: Tensor, output: Tensor) -> Decline | None:
        region = self._region
        if region is None:
            return Decline.NOT_BUILT
        if plan.decline is not None:
            return plan.decline
        if plan.checkpoints is not None and not region.keeps_checkpoints:
            return Decline.CHECKPOINTS
        self._bind(region, plan.sizes[3])
        if self._bound is None:
            return Decline.CACHE
        if not (projected.is_contiguous() and output.is_contiguous()):
            return Decline.ALIGNMENT
        offset = plan.num_decode_tokens * region.row_bytes
        return Decline.ALIGNMENT if (projected.data_ptr() | output.data_ptr() | offset) & region.misaligned else None

    def _bind(self, region: Region, slots_stride: int) -> None:
        """Find out once where the caches are. They are allocated after the profile run, and may be again."""
        if not self._binding_tried:
            self._binding_tried = True
            self._bound = bind(self, region.shape, not is_conv_state_dim_first())
            self._direct_decode = self._decodes_of(self._bound, slots_stride)

    def _prepare(self, projected: Tensor) -> None:
        """Compile the region for this layer, or find out why there is none."""
        if self._region_tried:
            return
        self._region_tried = True
        try:
            missing = missing_from_layer(self)
            if missing:
                raise RuntimeError(f"this vLLM lacks {', '.join(missing)}")
            if self.use_replayssm:
                raise RuntimeError("ReplaySSM is on")
            shape = layer_shape(self, projected.dtype, projected.device, not is_conv_state_dim_first())
            self._region = region_for(shape, bool(self.cache_config.enable_prefix_caching), self._options)
            # What vLLM would tune here, for a minute, is then used by no step.
            self._ssd_kernels_warmed_up |= not self._region.row_bytes & self._region.misaligned
        except Exception as error:
            if str(error) not in _said:  # layers of one shape fail alike
                _said.add(str(error))
                name = getattr(self, "prefix", "without a name")
                logger.warning("mamba_ops: vLLM's own code runs layer %s and those like it: %s", name, error)
            logger.debug("mamba_ops: how it failed", exc_info=True)

    def _prepare_decodes(self) -> None:
        """Compile in a step of decodes alone: vLLM's warm-up may have no other. No cache is kept, it may be a trial."""
        region = self._region
        if region is None or region.shape.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._decodes_tried = True
        self._decodes_of(bind(self, region.shape, not is_conv_state_dim_first()), 1)

    def _decodes_of(self, bound: BoundLayer | None, slots_stride: int) -> DirectDecode | None:
        if bound is None:
            return None
        assert self._region is not None
        return direct_decode_for(self, self._region.shape, bound.sizes, slots_stride, self._max_decodes, self._options)
