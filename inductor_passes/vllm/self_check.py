"""A compiled region is tried before it is used: several sequences at once must equal the same ones one at a time.

The region was traced with symbols for the numbers of tokens, sequences and chunks. This runs it where such code is most
likely to be wrong (one token, one sequence, one chunk; slots that nobody owns hold NaN) and needs no second
implementation, so it compiles nothing else. The first runs also load the kernels.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from inductor_passes.vllm.compiled_region import CompiledRegion, present
from inductor_passes.vllm.example_inputs import SLOT_MULTIPLE
from inductor_passes.vllm.made_up_layers import random, random_layer, with_own_caches
from inductor_passes.vllm.region_inputs import CheckpointTensors, LayerShape, LayerTensors, StepTensors
from mamba_ops import build_chunk_metadata
from mamba_ops.kernels.causal_conv_tiled import BLOCK_TOKENS


class _Batch(NamedTuple):
    """What differs from sequence to sequence: new tokens, tokens before them, the checkpoint among them (0: none)."""

    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    checkpoints: tuple[int, ...]


_BATCH = _Batch((1, 3, 40, 2, 75), (0, 50, 0, 7, 16), (0, 0, 33, 1, 0))
_SLOTS = (4, 1, 6, 2, 5)
_CHECKPOINT_SLOTS = (3, 9, 7, 8, 10)
_NUM_SLOTS = 12


def self_check(region: CompiledRegion) -> None:
    """Raise RuntimeError if the region depends on what else is in a batch, or touches a slot that it does not own."""
    with torch.inference_mode(False), torch.no_grad(), torch.device(region.shape.device):
        generator = torch.Generator(region.shape.device).manual_seed(0)
        batch = _BATCH if region.checkpoints else _BATCH._replace(checkpoints=(0,) * len(_SLOTS))
        projected = random((sum(batch.lengths), region.shape.projected), region.shape.dtype, generator)
        together = _layer(region.shape, generator)
        alone = with_own_caches(together)
        out = _run(region, batch, projected, together, range(len(_SLOTS)))
        starts = torch.tensor((0, *batch.lengths)).cumsum(0).tolist()
        for sequence, (start, length) in enumerate(zip(starts, batch.lengths, strict=False)):
            rows = slice(start, start + length)
            alone_out = _run(region, batch, projected[rows].clone(), alone, (sequence,))
            _require_equal(f"the output of sequence {sequence}", out[rows], alone_out)
        _require_equal("the states", together.ssm_state, alone.ssm_state)
        _require_equal("the convolution's states", together.conv_state, alone.conv_state, copied=True)
        owned = (*_SLOTS, *_CHECKPOINT_SLOTS[2:4]) if region.checkpoints else _SLOTS
        unowned = [slot for slot in range(_NUM_SLOTS) if slot not in owned]
        if not together.ssm_state[unowned].isnan().all() or out.isnan().any():
            raise RuntimeError("self check: a slot that no sequence owns has been written, or has reached an output")


def check_against(region: CompiledRegion, general: CompiledRegion) -> None:
    """Raise RuntimeError if another region differs in a bit from the one that the pass was run on.

    The general region need not keep checkpoints: a checkpoint is what it leaves of a prefill that ends there.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.device(region.shape.device):
        generator = torch.Generator(region.shape.device).manual_seed(1)
        batches = _batches(region)
        ntokens = sum(batches[0].lengths)
        projected = random((ntokens, region.shape.projected), region.shape.dtype, generator)
        ours = _layer(region.shape, generator)
        theirs = with_own_caches(ours)
        for batch, sequences in itertools.product(batches, (range(5), range(1, 2))):
            start = 0 if len(sequences) > 1 else 1
            rows = projected[start : start + sum(batch.lengths[sequence] for sequence in sequences)].clone()
            ended = with_own_caches(theirs)
            out = _run(region, batch, rows, ours, sequences)
            _require_equal("the output", out, _run(general, batch, rows, theirs, sequences))
            if not general.checkpoints:
                _keep_checkpoints(general, batch, rows, theirs, ended, sequences)
            _require_equal("the states", ours.ssm_state, theirs.ssm_state)
            _require_equal("the convolution's states", ours.conv_state, theirs.conv_state, copied=True)


def _batches(region: CompiledRegion) -> list[_Batch]:
    chunk = region.shape.chunk_size
    most = region.max_tokens or 2 * chunk + 5
    contexts = (0, chunk, 0, 2 * chunk, chunk) if region.one_chunk else (0, chunk - 1, chunk - 7, 2 * chunk - 2, 0)
    lengths = (1, most, most // 2, 3, most - 1)
    if not region.checkpoints:
        return [_Batch(lengths, contexts, (0,) * 5)]
    # With and without enough tokens before the checkpoint for the convolution, at the edge of a chunk, at the last
    # token; and a sequence without.
    history = region.shape.width - 1
    return [
        _Batch(lengths, contexts, (1, most // 2, 0, 2, min(history, most - 1))),
        _Batch(lengths, contexts, (0, most, 1, 3, min(history + 1, most - 1))),
    ]


def _keep_checkpoints(
    general: CompiledRegion,
    batch: _Batch,
    rows: Tensor,
    layer: LayerTensors,
    ended: LayerTensors,
    sequences: range | tuple[int, ...],
) -> None:
    """Keep the checkpoints of a batch, by way of prefills that end there; `ended`: the layer before the batch."""
    starts = torch.tensor((0, *(batch.lengths[sequence] for sequence in sequences))).cumsum(0).tolist()
    kept = [
        (sequence, start) for sequence, start in zip(sequences, starts, strict=False) if batch.checkpoints[sequence]
    ]
    if not kept:
        return
    until = torch.cat([rows[start : start + batch.checkpoints[sequence]] for sequence, start in kept])
    shorter = batch._replace(lengths=batch.checkpoints, checkpoints=(0,) * len(batch.lengths))
    _run(general, shorter, until, ended, tuple(sequence for sequence, _ in kept))
    for sequence, _ in kept:
        for cache, ended_cache in ((layer.conv_state, ended.conv_state), (layer.ssm_state, ended.ssm_state)):
            cache[_CHECKPOINT_SLOTS[sequence]] = ended_cache[_SLOTS[sequence]]


def _run(
    region: CompiledRegion, batch: _Batch, projected: Tensor, layer: LayerTensors, sequences: range | tuple[int, ...]
) -> Tensor:
    shape = region.shape
    lengths = [batch.lengths[sequence] for sequence in sequences]
    contexts = [batch.contexts[sequence] for sequence in sequences]
    offsets = torch.tensor((0, *lengths)).cumsum(0).tolist()
    splits = [batch.checkpoints[sequence] for sequence in sequences]  # a chunk ends there, whether it is kept or not
    metadata = build_chunk_metadata(offsets, shape.chunk_size, contexts, splits, shape.device)
    tiles = [(row, tile) for row, length in enumerate(lengths) for tile in range(-(-length // BLOCK_TOKENS))]
    # The slots are a column of a table, and everything is at an odd address, as vLLM's may be.
    table = torch.zeros(len(lengths), 3, dtype=torch.int32)
    table[:, 1] = torch.tensor([_SLOTS[sequence] for sequence in sequences])
    step = StepTensors(
        _odd(metadata.cu_seqlens),
        _odd(metadata.cu_chunk_seqlens),
        _odd(metadata.last_chunk_indices),
        _odd(metadata.seq_idx),
        table[:, 1],
        _odd(torch.tensor(contexts) > 0),
        _odd(torch.tensor([row for row, _ in tiles], dtype=torch.int32)),
        _odd(torch.tensor([tile for _, tile in tiles], dtype=torch.int32)),
    )
    out = torch.full((projected.shape[0], shape.nheads, shape.headdim), torch.nan, dtype=shape.dtype)
    sizes = (
        projected.shape[0],
        len(lengths),
        step.seq_idx.shape[0],
        len(tiles),
        step.slots.stride(0),
        _NUM_SLOTS,
        layer.conv_state.stride(0) // SLOT_MULTIPLE,
        layer.ssm_state.stride(0) // SLOT_MULTIPLE,
    )
    kept = _checkpoints(splits, sequences, metadata.cu_chunk_seqlens.tolist(), offsets) if region.checkpoints else ()
    region(sizes, projected, out, present(layer), (*step, *kept))
    return out


def _checkpoints(
    splits: list[int], sequences: range | tuple[int, ...], chunk_starts: list[int], starts: list[int]
) -> CheckpointTensors:
    ends = [chunk_starts.index(start + split) - 1 if split else 0 for start, split in zip(starts, splits, strict=False)]
    slots = [_CHECKPOINT_SLOTS[sequence] if split else 0 for sequence, split in zip(sequences, splits, strict=True)]
    return CheckpointTensors(
        _odd(torch.tensor(ends)),
        _odd(torch.tensor(splits, dtype=torch.int32)),
        _odd(torch.tensor(slots, dtype=torch.int32)),
    )


def _layer(shape: LayerShape, generator: torch.Generator) -> LayerTensors:
    channel, token = shape.conv_strides
    length = shape.conv_dim * channel if token == 1 else shape.conv_dim * (shape.width - 1)
    steps = (_padded(length), _padded(shape.inner * shape.dstate))
    layer = random_layer(shape, _NUM_SLOTS, *steps, generator)
    for cache in (layer.conv_state, layer.ssm_state):
        cache[[slot for slot in range(_NUM_SLOTS) if slot not in _SLOTS]] = torch.nan
    return layer


def _padded(size: int) -> int:
    return -(-size // SLOT_MULTIPLE) * SLOT_MULTIPLE + SLOT_MULTIPLE


def _odd(tensor: Tensor) -> Tensor:
    return torch.cat((tensor.new_zeros(1), tensor.to(torch.get_default_device())))[1:]


def _require_equal(name: str, a: Tensor, b: Tensor, *, copied: bool = False) -> None:
    """Bit for bit what is `copied`, and on a GPU everything: on a CPU matrix products depend on the size of the batch.

    Elements may be small because large terms cancel, so differences are measured by the largest element, of each token
    or slot by itself: one token's outputs may be a thousand times another's. Sums were seen to differ by up to 22
    roundings of that; what a fault leaves out or adds is thousands of them.
    """
    dtype, read = a.dtype, ~b.isnan()
    same = torch.equal(~a.isnan(), read)
    if a.device.type == "cpu" and not copied:
        a, b = (tensor.float().nan_to_num(nan=0.0).flatten(1) for tensor in (a, b))
        rounding = 256 * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps  # of sums, and of what is stored
        same = same and bool(((a - b).abs() <= rounding * b.abs().amax(1, keepdim=True)).all())
    else:
        same = same and torch.equal(a[read], b[read])
    if not same:
        raise RuntimeError(f"self check: {name} differs between two ways to run them")
