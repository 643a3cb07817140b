"""The builder of metadata is tried before it is used: on made-up batches it must build what vLLM's own builder does.

Which fields there are, and what they mean, is vLLM's to change from version to version. Whatever is not the same in a
version has its metadata built by vLLM's code there.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from inductor_passes.vllm.once import say_once
from inductor_passes.vllm.step import PLAN

logger = logging.getLogger("vllm.mamba_ops")

_found: dict[Any, str | None] = {}


class _Batch(NamedTuple):
    """What differs from sequence to sequence; decodes first. Lengths and contexts in tokens, as (chunks, tokens)."""

    lengths: tuple[tuple[int, int], ...]
    contexts: tuple[tuple[int, int], ...]
    is_prefilling: tuple[bool, ...]


_ONE, _NONE = (0, 1), (0, 0)
_BATCHES = (
    _Batch(((1, 3),), (_NONE,), (True,)),
    _Batch(((0, 5),), ((1, 7),), (True,)),
    _Batch((_ONE, _ONE), ((0, 4), (1, 0)), (False, False)),
    _Batch((_ONE, _NONE), ((0, 4), _NONE), (False, False)),  # padded
    _Batch((_ONE, _ONE), ((0, 4), (2, 1)), (True, True)),  # the last tokens of prompts
    _Batch((_ONE,), (_NONE,), (True,)),
    _Batch(
        (_ONE, _ONE, _ONE, (0, 2), (1, 0), (3, 1), _ONE, _ONE),
        ((0, 9), (1, 0), (2, -1), (1, -2), (0, 1), _NONE, _NONE, (1, 1)),
        (False, False, True, True, True, True, True, False),
    ),
)


def why_not(builder: Any, stock: Any) -> str | None:
    """Why a builder may not be used, or None.

    Args:
        builder: ours. stock: the same object, whose methods are vLLM's.
    """
    cache = builder.vllm_config.cache_config
    keeps = tuple(getattr(cache, name, None) for name in ("hash_block_size", "cache_hit_alignment_tokens"))
    key = (type(builder), builder.kv_cache_spec, builder.chunk_size, builder.device, keeps)
    if key not in _found:
        with torch.inference_mode():
            try:
                _found[key] = _difference(builder, stock)
            except Exception as error:
                _found[key] = f"{error!r} in a trial"
                logger.debug("mamba_ops: how it failed", exc_info=True)
    reason = _found[key]
    if reason is not None:
        say_once(logging.WARNING, f"vLLM's own code builds the metadata of Mamba2 layers: {reason}")
    return reason


def _difference(builder: Any, stock: Any) -> str | None:
    for number, batch in enumerate(_batches(builder)):
        tables = [_block_table(builder, batch, first) for first in (1, 1000)]
        theirs, ours = (_common(builder, batch, tables[0]) for _ in range(2))
        expected = stock.build(0, theirs)
        expected_fields = _values(expected)  # taken now: both builders may fill the same buffer
        builder.mamba_aligned_state_indices = _slots(builder, ours)
        got = builder.build(0, ours)
        pairs = [(expected_fields, _values(got))]
        expected = _values(stock.update_block_table(expected, tables[1], ours.slot_mapping))
        builder.mamba_aligned_state_indices = _slots(builder, ours.replace(block_table_tensor=tables[1]))
        pairs.append((expected, _values(builder.update_block_table(got, tables[1], ours.slot_mapping))))
        del builder.mamba_aligned_state_indices
        for theirs, ours in pairs:
            wrong = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
            if wrong:
                return f"{', '.join(wrong)} of batch {number} would not be what it builds"
    return None


def _batches(builder: Any) -> tuple[_Batch, ...]:
    cache, spec = builder.vllm_config.cache_config, builder.kv_cache_spec
    if cache.mamba_cache_mode != "align" or not getattr(spec, "num_prefill_checkpoint_blocks", 0):
        return _BATCHES
    # States are kept on the way in prefills over several blocks, if these begin where a prefix may end.
    chunks = -(-2 * spec.block_size // builder.chunk_size)
    lengths = (_ONE, (chunks, 1), (chunks, 7), (0, 2), (2 * chunks, 3))
    contexts = ((0, 9), _NONE, (0, 5), _NONE, (0, spec.block_size))
    return (*_BATCHES, _Batch(lengths, contexts, (False, True, True, True, True)))


def _common(builder: Any, batch: _Batch, block_table: Tensor) -> Any:
    """What a runner gives to a builder."""
    lengths, contexts = _tokens(builder, batch)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    seq_lens = (torch.tensor(lengths) + torch.tensor(contexts)).to(torch.int32)
    ntokens = int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts.to(builder.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(builder.device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=ntokens,
        max_query_len=max(lengths),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=block_table,
        slot_mapping=torch.zeros(ntokens, dtype=torch.int64, device=builder.device),
        is_prefilling=torch.tensor(batch.is_prefilling),
    )


def _tokens(builder: Any, batch: _Batch) -> tuple[list[int], list[int]]:
    lengths, contexts = (
        [chunks * builder.chunk_size + tokens for chunks, tokens in entries]
        for entries in (batch.lengths, batch.contexts)
    )
    return lengths, contexts


def _block_table(builder: Any, batch: _Batch, first: int) -> Tensor:
    most = max(length + context for length, context in zip(*_tokens(builder, batch), strict=True))
    shape = (len(batch.lengths), 1 + -(-most // builder.kv_cache_spec.block_size))
    table = torch.arange(first, first + shape[0] * shape[1], dtype=torch.int32, device=builder.device)
    return table.view(shape)


def _slots(builder: Any, common: Any) -> Tensor | None:
    """What a runner would set on the builder."""
    mode = builder.vllm_config.cache_config.mamba_cache_mode
    if mode != "align":
        return None
    slots: Tensor = mamba_get_block_table_tensor(
        common.block_table_tensor, common.seq_lens, builder.kv_cache_spec, mode
    )
    return slots


def _values(value: Any) -> Any:
    """A copy that can be compared: a tensor with its type, place and form."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.shape, value.tolist()
    if isinstance(value, dict):
        return {name: _values(entry) for name, entry in value.items() if name != PLAN}
    if dataclasses.is_dataclass(value):
        return {field.name: _values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
