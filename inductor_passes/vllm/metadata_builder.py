"""What vLLM builds for its Mamba2 layers in each step, with less of the host's time.

A subclass of vLLM's builder, whose metadata has the same values in every field. vLLM's own code still builds it with
drafts, with ReplaySSM, and for a batch of another form than expected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend, Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from inductor_passes.vllm.full_steps import FULL_STEP, FullSteps, GroupSlots, full_steps_for, known_steps
from inductor_passes.vllm.full_tables import PaddedSizes
from inductor_passes.vllm.metadata_check import why_not
from inductor_passes.vllm.step import copy_without_plan, share
from inductor_passes.vllm.step_tables import step_tables

# Bytes. Kernels are compiled anew for an address that is not a multiple of it, as that of a row of the runner's may be.
_ALIGNMENT = 16
# The name of the mark of metadata that has been written where a captured step finds it.
_FILLED = "_mamba_ops_full_tables_are_filled"


class FastMamba2Backend(Mamba2AttentionBackend):  # type: ignore[misc]
    """vLLM's backend with the builder below; vLLM groups layers by its name."""

    @staticmethod
    def get_builder_cls() -> type[FastMamba2MetadataBuilder]:
        """What vLLM makes for each group of layers."""
        return FastMamba2MetadataBuilder


class FastMamba2MetadataBuilder(Mamba2AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata of a group of layers whose caches share slots.

    Attributes:
        mamba_aligned_state_indices: (num_reqs, 1) slots of the next step; a runner that sees the attribute computes
            those of all groups at once, and sets it before each call. What has been used is forgotten. There is no
            such attribute where slots are found in another way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cache_mode: str = self.vllm_config.cache_config.mamba_cache_mode
        self._pinned = self.device.type == "cuda" and is_pin_memory_available()
        self._full: FullSteps | None = None
        self._is_fast = not (self.use_spec_decode or self.use_replayssm)
        self._is_fast = self._is_fast and why_not(self, super()) is None
        if self._is_fast and self._cache_mode == "align" and self.device.type == "cuda":
            self.mamba_aligned_state_indices: Tensor | None = None
        if self._is_fast:
            self._full = full_steps_for(self.vllm_config, self.kv_cache_spec.block_size, self.device, self._pinned)
        if self._full is not None:
            with torch.inference_mode(False):
                self._full_slots = GroupSlots(self._full, self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """What kinds of steps can be captured whole."""
        if vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL and known_steps(vllm_config) is not None:
            return AttentionCGSupport.ALWAYS
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata of a whole step that is captured: of decodes as vLLM has it, of any other at fixed addresses."""
        if self._full is None or self._full.has_graph_of_decodes(common_attn_metadata.max_query_len):
            return super().build_for_cudagraph_capture(common_attn_metadata)
        # What runs before the capture, or is replayed for a step that is made up, is to find nothing to do.
        self._full.tables.fill([], [], 0)
        self._full_slots.clear()
        self._take_slots()
        num_reqs = common_attn_metadata.num_reqs
        metadata = self.metadata_cls(
            num_reqs=num_reqs,
            num_decodes=num_reqs,
            num_decode_tokens=num_reqs,
            num_prefills=0,
            num_prefill_tokens=0,
            state_indices_tensor_d=None,
            state_indices_tensor_p=None,
            has_initial_states_p=None,
            query_start_loc_p=None,
            query_start_loc_d=None,
            num_accepted_tokens=None,
            seq_lens=common_attn_metadata.seq_lens,
            chunk_size=self.chunk_size,
        )
        return self._captured(metadata, self._full.tables.sizes(common_attn_metadata.num_actual_tokens, num_reqs))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any) -> Any:
        """Metadata of a step for the first group of layers."""
        metadata = None
        if self._is_fast and all(value is None for value in kwargs.values()):
            metadata = self._build(common_attn_metadata)
        if metadata is None:
            self._take_slots()
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        if self._full is not None and metadata.num_prefills:
            self._fill(metadata, common_attn_metadata)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """The same for another group: only its slots are others."""
        if not self._is_fast:
            return super().update_block_table(metadata, blk_table, slot_mapping)
        if FULL_STEP in metadata.__dict__:
            self._take_slots()
            self._full_slots.clear()
            return self._captured(copy_without_plan(metadata), metadata.__dict__[FULL_STEP].sizes)
        decodes, prefills = self._slots(metadata.num_decodes, metadata.num_prefills, blk_table, metadata.seq_lens)
        other = copy_without_plan(metadata)
        other.state_indices_tensor_d, other.state_indices_tensor_p = decodes, prefills
        if metadata.checkpoint_meta is not None:
            other.checkpoint_meta = metadata.checkpoint_meta.regather_state_indices(blk_table)
        self._fill_slots(other)
        return other if other.num_prefills else self._update_metadata_for_cudagraph_capture(other)

    def _build(self, common: Any) -> Any:
        """The metadata, or None for what vLLM's own code has to build."""
        offsets, seq_lens, is_prefilling = (
            common.query_start_loc_cpu,
            common.seq_lens_cpu_upper_bound,
            common.is_prefilling,
        )
        num_reqs = common.num_reqs
        if seq_lens is None or is_prefilling is None or offsets.dtype != torch.int32:
            return None
        if not offsets.shape[0] - 1 == seq_lens.shape[0] == is_prefilling.shape[0] == num_reqs > 0:
            return None
        starts = offsets.numpy()
        lengths = starts[1:] - starts[:-1]
        contexts = seq_lens.numpy() - lengths
        # One token that continues a prompt is decoded, as long as no longer prefill stands before it.
        is_prefill = (lengths > 1) | (is_prefilling.numpy() & ((contexts <= 0) | (lengths != 1)))
        num_decodes, num_tokens = num_reqs, common.num_actual_tokens
        num_decode_tokens = num_tokens
        if is_prefill.any():
            num_decodes = int(np.argmax(is_prefill))
            num_decode_tokens = int(starts[num_decodes])
            if self._full is not None:  # behind the last request there may be padding, up to the size of a graph
                num_reqs = int(np.flatnonzero(lengths)[-1]) + 1
                num_tokens = int(starts[num_reqs])
                lengths, contexts = lengths[:num_reqs], contexts[:num_reqs]
        num_prefills = num_reqs - num_decodes
        decodes, prefills = self._slots(num_decodes, num_prefills, common.block_table_tensor, common.seq_lens)
        fields: dict[str, Any] = {
            "num_reqs": num_reqs,
            "num_decodes": num_decodes,
            "num_decode_tokens": num_decode_tokens,
            "num_prefills": num_prefills,
            "num_prefill_tokens": num_tokens - num_decode_tokens,
            "state_indices_tensor_d": decodes,
            "state_indices_tensor_p": prefills,
            "query_start_loc_d": None,
            "num_accepted_tokens": None,
            "seq_lens": common.seq_lens,
            "chunk_size": self.chunk_size,
        }
        if not num_prefills:
            metadata = self.metadata_cls(query_start_loc_p=None, has_initial_states_p=None, **fields)
            return self._update_metadata_for_cudagraph_capture(metadata)
        device = common.query_start_loc.device
        checkpoint = self.checkpoint_builder.build(common, list(range(num_decodes, num_reqs)))
        offsets_p = None if checkpoint is None else checkpoint.offsets
        lengths_p, contexts_p = lengths[num_decodes:].tolist(), contexts[num_decodes:].tolist()
        tables = step_tables(lengths_p, contexts_p, offsets_p, self.chunk_size, device, self._pinned)
        metadata = self.metadata_cls(
            query_start_loc_p=tables.query_start_loc,
            has_initial_states_p=tables.has_initial_states,
            prep_initial_states=max(contexts_p) > 0,
            cu_chunk_seqlen_p=tables.cu_chunk_seqlen,
            seq_idx_p=tables.seq_idx,
            last_chunk_indices_p=tables.last_chunk_indices,
            checkpoint_chunk_idx=tables.checkpoint_chunks,
            checkpoint_meta=checkpoint,
            nums_dict=tables.nums_dict,
            batch_ptr=tables.batch_ptr,
            token_chunk_offset_ptr=tables.token_chunk_offset_ptr,
            **fields,
        )
        if checkpoint is None and min(lengths_p) > 0:
            share(metadata, tables.max_tokens)
        return metadata

    def _fill(self, metadata: Any, common: Any) -> None:
        """Write a step where a captured one finds it: what all groups share, and the slots of this one.

        The graph was chosen before anyone knew who would build the metadata, so this does not ask who has.
        """
        assert self._full is not None
        num_reqs = metadata.num_decodes + metadata.num_prefills
        starts = common.query_start_loc_cpu[: num_reqs + 1].numpy()
        lengths = starts[1:] - starts[:-1]
        if not self._full.may_run(int(starts[-1]), int(lengths.max())):
            return
        assert metadata.checkpoint_meta is None  # see `full_steps_for`
        contexts = common.seq_lens_cpu_upper_bound[:num_reqs].numpy() - lengths
        self._full.tables.fill(lengths.tolist(), contexts.tolist(), metadata.num_decodes)
        metadata.__dict__[_FILLED] = True
        self._fill_slots(metadata)

    def _fill_slots(self, metadata: Any) -> None:
        if _FILLED in metadata.__dict__:
            decodes = metadata.state_indices_tensor_d[: metadata.num_decodes, 0]
            self._full_slots.fill(decodes, metadata.state_indices_tensor_p)

    def _captured(self, metadata: Any, sizes: PaddedSizes) -> Any:
        """Metadata of this group for the layers that are being captured; vLLM's code there finds decodes alone."""
        metadata.state_indices_tensor_d = self._full_slots.of_decodes[: sizes.nseqs, None]
        metadata.__dict__[FULL_STEP] = self._full_slots.step(sizes)
        return metadata

    def _slots(
        self, num_decodes: int, num_prefills: int, block_table: Tensor, seq_lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Slots of the decodes, (num_decodes, 1), and of the prefills, (num_prefills,)."""
        num_reqs = num_decodes + num_prefills
        slots = self._take_slots()
        if slots is None or slots.shape[0] not in (num_reqs, seq_lens.shape[0]):
            slots = mamba_get_block_table_tensor(block_table, seq_lens, self.kv_cache_spec, self._cache_mode)
        elif slots.data_ptr() % _ALIGNMENT:
            slots = slots.clone()
        assert slots.shape[0] >= num_reqs
        if slots.dim() == 1:
            slots = slots.unsqueeze(-1)
        return slots[:num_decodes, :1], slots[num_decodes:num_reqs, 0]

    def _take_slots(self) -> Tensor | None:
        """What the runner has set for this step. A step for which it sets nothing has other slots: forget them."""
        slots: Tensor | None = getattr(self, "mamba_aligned_state_indices", None)
        if slots is not None:
            self.mamba_aligned_state_indices = None
        return slots
