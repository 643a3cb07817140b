"""What a step means for the plugin, worked out once a step and not once a layer.

vLLM builds one metadata object for each group of layers whose caches share slots. The plan made from it is kept on that
object, so it lives as long as the step does. What all groups of a step have in common is kept on the table of tiles,
which they share; the builder of the metadata puts it there if it is ours.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inductor_passes.vllm.decline import Decline
from inductor_passes.vllm.region_inputs import NO_CHECKPOINTS, CheckpointTensors, StepTensors
from mamba_ops.kernels.causal_conv_tiled import BLOCK_TOKENS

# The name of both, among the metadata's attributes and in the table of tiles.
PLAN = "_mamba_ops_plan"
_SLOTS = StepTensors._fields.index("slots")
_ALIGNMENT = 16  # bytes; what the kernels of a decode are compiled for


class StepDecodes(NamedTuple):
    """The decodes in front of the prefills, of one token each.

    Attributes:
        ndecodes: how many. slots: address of theirs. slots_stride: of these, in elements.
    """

    ndecodes: int
    slots: int
    slots_stride: int


class _InCommon(NamedTuple):
    """Of all groups of layers in a step. Only slots differ from group to group; here are those of the first."""

    tensors: StepTensors
    checkpoints: CheckpointTensors | None
    addresses: tuple[int, ...]
    checkpoint_addresses: tuple[int | None, ...]
    sizes: tuple[int, int, int, int]
    max_tokens: int
    one_chunk: bool


class StepPlan:
    """How the layers of a group run in a step.

    Attributes:
        decline: why vLLM's own code runs, or None.
        tensors: of the sequences in prefill. checkpoints: of the states kept in the middle of them, or None.
        sizes: nseqs, nchunks, ntiles, slots_stride; see `Sizes`.
        addresses, checkpoint_addresses: of these tensors; None for those of checkpoints that there are not.
        max_tokens: no sequence is longer. one_chunk: whether each is one chunk.
        num_decode_tokens: tokens in front of those in prefill.
        decodes: those that may be launched by address, or None if there are none or they are something else.
    """

    __slots__ = (
        "_without_prefill",
        "addresses",
        "checkpoint_addresses",
        "checkpoints",
        "decline",
        "decodes",
        "max_tokens",
        "num_decode_tokens",
        "one_chunk",
        "sizes",
        "tensors",
    )

    def __init__(self, metadata: Any, device: torch.device) -> None:
        self.num_decode_tokens: int = metadata.num_decode_tokens
        self.checkpoints = _checkpoint_tensors(metadata)
        self.checkpoint_addresses: tuple[int | None, ...] = NO_CHECKPOINTS
        tiles, slots = metadata.nums_dict, _slots(metadata)
        found: _InCommon | None = tiles.get(PLAN) if tiles else None
        self.decline: Decline | None = None
        self.tensors: StepTensors
        self.addresses: tuple[int, ...] = ()
        if found and _is_another_group(metadata, slots, self.checkpoints, found, device):
            self.tensors = found.tensors._replace(slots=slots)
            self.addresses = (*found.addresses[:_SLOTS], slots.data_ptr(), *found.addresses[_SLOTS + 1 :])
            if self.checkpoints is not None:
                self.checkpoint_addresses = (*found.checkpoint_addresses[:-1], self.checkpoints.slots.data_ptr())
        else:
            self.tensors, found = _step_tensors(metadata, slots), None
            self.decline = _decline(self.tensors, self.checkpoints, device) or _decline_of_rows(metadata, device)
            if self.decline is None:
                found = _in_common(self.tensors, self.checkpoints, _longest(metadata))
                self.addresses, self.checkpoint_addresses = found.addresses, found.checkpoint_addresses
                if tiles:
                    tiles[PLAN] = found
        if found:
            self.sizes, self.max_tokens, self.one_chunk = found.sizes, found.max_tokens, found.one_chunk
        if device.type == "cpu" and self.decline is None and slots.unique().shape[0] != slots.shape[0]:
            self.decline = Decline.SHARED_SLOT  # only in warm-up runs, whose sequences have no slots of their own
        self.decodes = _decodes(metadata, device) if self.num_decode_tokens else None
        self._without_prefill: Any = None

    def without_prefill(self, metadata: Any) -> Any:
        """The metadata of the step, in which only the decodes are left."""
        if self._without_prefill is None:
            self._without_prefill = _without_prefill(metadata)
        return self._without_prefill


def plan_of(metadata: Any, device: torch.device) -> StepPlan:
    """The plan of a step that has sequences in prefill."""
    plan: StepPlan | None = metadata.__dict__.get(PLAN)
    if plan is None:
        plan = StepPlan(metadata, device)
        metadata.__dict__[PLAN] = plan
    return plan


def share(metadata: Any, max_tokens: int) -> None:
    """Keep with metadata what the plans of all groups begin with. Its tables must be as `StepTensors` has them.

    Args:
        metadata: of the first group.
        max_tokens: no sequence is longer.
    """
    tensors, checkpoints = _step_tensors(metadata, _slots(metadata)), _checkpoint_tensors(metadata)
    metadata.nums_dict[PLAN] = _in_common(tensors, checkpoints, max_tokens)


def copy_without_plan(metadata: Any) -> Any:
    """A copy of metadata for other layers or with fewer sequences, which have a plan of their own."""
    other = copy.copy(metadata)
    other.__dict__.pop(PLAN, None)
    return other


def _slots(metadata: Any) -> Tensor:
    slots: Tensor = metadata.state_indices_tensor_p
    return slots.to(torch.int32) if isinstance(slots, Tensor) and slots.dtype != torch.int32 else slots


def _is_another_group(
    metadata: Any, slots: Tensor, checkpoints: CheckpointTensors | None, first: _InCommon, device: torch.device
) -> bool:
    """Whether metadata has all but the slots of the first group's, whose form has been checked."""
    if metadata.cu_chunk_seqlen_p is not first.tensors.cu_chunk_seqlens or not _alike(
        slots, first.tensors.slots, device
    ):
        return False
    if checkpoints is None or first.checkpoints is None:
        return checkpoints is first.checkpoints
    same = checkpoints.chunks is first.checkpoints.chunks and checkpoints.offsets is first.checkpoints.offsets
    return same and _alike(checkpoints.slots, first.checkpoints.slots, device)


def _alike(a: Tensor, b: Tensor, device: torch.device) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.device == b.device == device


def _in_common(tensors: StepTensors, checkpoints: CheckpointTensors | None, max_tokens: int) -> _InCommon:
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    kept = NO_CHECKPOINTS if checkpoints is None else tuple(tensor.data_ptr() for tensor in checkpoints)
    nseqs, nchunks = tensors.slots.shape[0], tensors.seq_idx.shape[0]
    sizes = (nseqs, nchunks, tensors.tile_sequence.shape[0], tensors.slots.stride(0))
    return _InCommon(tensors, checkpoints, addresses, kept, sizes, max_tokens, nseqs == nchunks)


def _step_tensors(metadata: Any, slots: Tensor) -> StepTensors:
    tile_sequence = tile_offset = metadata.seq_idx_p  # a CPU needs none
    tiles = metadata.nums_dict and metadata.nums_dict.get(BLOCK_TOKENS)
    if tiles:
        tile_sequence = tiles["batch_ptr"][: tiles["tot"]]
        tile_offset = tiles["token_chunk_offset_ptr"][: tiles["tot"]]
    return StepTensors(
        metadata.query_start_loc_p,
        metadata.cu_chunk_seqlen_p,
        metadata.last_chunk_indices_p,
        metadata.seq_idx_p,
        slots,
        metadata.has_initial_states_p,
        tile_sequence,
        tile_offset,
    )


def _longest(metadata: Any) -> int:
    """The number of tokens of the longest sequence, or a little more, without waiting for a GPU."""
    tiles = metadata.nums_dict and metadata.nums_dict.get(BLOCK_TOKENS)
    if tiles and "nums" in tiles:
        return int(tiles["nums"].max()) * BLOCK_TOKENS
    return int(metadata.num_prefill_tokens - metadata.num_prefills + 1)  # a CPU has no tiles


def _checkpoint_tensors(metadata: Any) -> CheckpointTensors | None:
    if metadata.checkpoint_chunk_idx is None:
        return None
    meta = metadata.checkpoint_meta
    slots = meta.state_indices.to(torch.int32).contiguous()
    return CheckpointTensors(metadata.checkpoint_chunk_idx, meta.checkpoint_offsets.to(torch.int32), slots)


def _decline_of_rows(metadata: Any, device: torch.device) -> Decline | None:
    """A sequence without tokens may have a chunk without tokens, or none: what belongs to which is not known then."""
    if device.type == "cpu":
        lengths = metadata.query_start_loc_p.diff()
    else:
        tiles = metadata.nums_dict and metadata.nums_dict.get(BLOCK_TOKENS)
        if not tiles or "nums" not in tiles:
            return Decline.METADATA
        lengths = tiles["nums"]
    return Decline.METADATA if lengths.min() <= 0 else None


def _decline(tensors: StepTensors, checkpoints: CheckpointTensors | None, device: torch.device) -> Decline | None:
    """What the compiled code takes for granted about the step."""
    kept = {} if checkpoints is None else checkpoints._asdict()
    kept["checkpoint_slots"] = kept.pop("slots", tensors.cu_seqlens)
    for name, tensor in (tensors._asdict() | kept).items():
        dtype = {"has_initial_state": torch.bool, "chunks": torch.int64}.get(name, torch.int32)
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.dim() != 1:
            return Decline.METADATA
        if tensor.device != device:
            return Decline.DEVICE
        if name != "slots" and not tensor.is_contiguous():
            return Decline.METADATA
    nseqs, nchunks = tensors.slots.shape[0], tensors.seq_idx.shape[0]
    sizes = [(tensors.cu_seqlens, nseqs + 1), (tensors.cu_chunk_seqlens, nchunks + 1)]
    sizes += [
        (tensor, nseqs) for tensor in (tensors.last_chunk_indices, tensors.has_initial_state, *(checkpoints or ()))
    ]
    if any(tensor.shape[0] != size for tensor, size in sizes):
        return Decline.METADATA
    return None


def _decodes(metadata: Any, device: torch.device) -> StepDecodes | None:
    """The decodes, if vLLM's code would launch for them what `inductor_passes.vllm.decode_launches` launches."""
    ndecodes: int = metadata.num_decodes
    slots = getattr(metadata, "state_indices_tensor_d", None)
    if any(getattr(metadata, name, None) is not None for name in ("num_accepted_tokens", "query_start_loc_d")):
        return None  # decoding is speculative
    if ndecodes != metadata.num_decode_tokens or not isinstance(slots, Tensor):
        return None
    if slots.shape != (ndecodes, 1) or slots.dtype != torch.int32 or slots.device != device or slots.stride(1) != 1:
        return None
    address = slots.data_ptr()
    return None if address % _ALIGNMENT else StepDecodes(ndecodes, address, slots.stride(0))


def _without_prefill(metadata: Any) -> Any:
    decodes = copy_without_plan(metadata)
    decodes.num_prefills = 0
    decodes.num_prefill_tokens = 0
    decodes.has_initial_states_p = None
    decodes.query_start_loc_p = None
    decodes.state_indices_tensor_p = None
    decodes.checkpoint_chunk_idx = None
    decodes.checkpoint_meta = None
    return decodes
