"""Running both a layer's own code and vLLM's on the same inputs, for tests: option `verify`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from inductor_passes.vllm.decline import counters

logger = logging.getLogger("vllm.mamba_ops")

Forward = Callable[[Tensor, Tensor], None]

# Rows that neither writes are equal, whatever was in memory: vLLM's trial runs have such, counted as tokens.
_UNWRITTEN = -7.25
_NULL_SLOT = 0  # nobody's: of several sequences that write it nobody knows which is last


def verified(layer: Any, stock: Forward, ours: Forward) -> Forward:
    """A forward that runs `ours`, and in front of it, on the first prefills of the process, `stock` to compare.

    Outputs and the slots of every sequence of the step, with those of its checkpoints, are compared; `counters` has the
    result. What is left in the cache and in the output comes from `ours`.
    """
    options = layer._options

    def forward(projected_states: Tensor, output: Tensor) -> None:
        by_layer = get_forward_context().attn_metadata
        metadata = by_layer.get(layer.prefix) if isinstance(by_layer, dict) else None
        if metadata is None or metadata.num_prefills == 0 or counters.verified >= options.verify:
            ours(projected_states, output)
            return
        ntokens = metadata.num_prefill_tokens + metadata.num_decode_tokens
        slots = [metadata.state_indices_tensor_p.flatten()]
        if metadata.num_decodes:
            slots.append(metadata.state_indices_tensor_d.flatten())
        if metadata.checkpoint_chunk_idx is not None:
            kept = metadata.checkpoint_meta
            slots.append(kept.state_indices[kept.checkpoint_offsets > 0])
        rows = torch.cat(slots).long().unique()
        owned = rows != _NULL_SLOT
        before = [cache[rows].clone() for cache in layer.kv_cache]
        expected = output.fill_(_UNWRITTEN).clone()
        stock(projected_states.clone(), expected)  # a decode's convolution writes into its input
        after = [cache[rows].clone() for cache in layer.kv_cache]
        for cache, saved in zip(layer.kv_cache, before, strict=True):
            cache[rows] = saved
        ours(projected_states, output)
        counters.verified += 1
        pairs = [("output", output[:ntokens], expected[:ntokens])]
        states = enumerate(zip(layer.kv_cache, after, strict=True))
        pairs += [(f"state {i}", cache[rows[owned]], wanted[owned]) for i, (cache, wanted) in states]
        wrong = [text for name, got, want in pairs if (text := _difference(name, got, want, options.verify_tolerance))]
        if wrong:
            counters.mismatches += 1
            logger.error("mamba_ops: layer %s differs from vLLM's own code: %s", layer.prefix, "; ".join(wrong))

    return forward


def _difference(name: str, got: Tensor, want: Tensor, tolerance: float) -> str:
    if torch.equal(got, want):
        return ""
    difference = (got.float() - want.float()).abs().max().item()
    scale = want.float().abs().max().item()
    return "" if difference <= tolerance * scale else f"{name} by {difference:.3g} of {scale:.3g}"
