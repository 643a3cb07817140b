"""A whole hybrid language model that generates text from a cached prefix, with the tokens it gives without a cache.

Run it with `python examples/language_model.py`. Two Mamba2 layers and an attention layer over bytes, with random
weights, so the text is noise; what counts is that it is the same noise. A long prefix is read once and kept: Mamba2
keeps a state of fixed size in a slot, attention its keys and values. Then a question is added to it, and answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inductor_passes import eliminate_snapshots
from mamba_ops import ChunkMetadata, LayerState, Mamba2Layer, build_chunk_metadata

HIDDEN_SIZE, NUM_HEADS, CHUNK_SIZE, MAX_TOKENS, SLOT = 128, 4, 64, 1024, 1
PREFIX = b"You are a patient assistant. Answer in one short sentence. " * 8
QUESTION = b"Why is the sky blue?"
NEW_TOKENS = 24


class Cache(NamedTuple):
    """What the model remembers of one sequence: a slot of each Mamba2 layer, and keys and values of the attention."""

    first: LayerState
    second: LayerState
    keys_values: Tensor  # (2, NUM_HEADS, MAX_TOKENS, HIDDEN_SIZE // NUM_HEADS)

    def clone(self) -> Cache:
        """A cache that can be written without changing this one."""
        return Cache(
            LayerState(*(tensor.clone() for tensor in self.first)),
            LayerState(*(tensor.clone() for tensor in self.second)),
            self.keys_values.clone(),
        )


class Attention(nn.Module):
    """Causal attention over the cached tokens and the new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN_SIZE, 3 * HIDDEN_SIZE, bias=False)
        self.out = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False)

    def forward(self, hidden: Tensor, keys_values: Tensor, positions: Tensor) -> Tensor:
        """Write keys and values of the new tokens at their positions, and attend to all up to each."""
        q, k, v = self.qkv(hidden).view(-1, 3, NUM_HEADS, HIDDEN_SIZE // NUM_HEADS).permute(1, 2, 0, 3)
        keys_values[:, :, positions] = torch.stack((k, v))
        is_seen = torch.arange(MAX_TOKENS, device=hidden.device) <= positions[:, None]
        attended = F.scaled_dot_product_attention(q, keys_values[0], keys_values[1], attn_mask=is_seen)
        out: Tensor = self.out(attended.transpose(0, 1).flatten(1))
        return out


class HybridModel(nn.Module):
    """Mamba2, attention, Mamba2, each added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN_SIZE)
        nn.init.normal_(self.embedding.weight, std=0.05)  # small, so that what is remembered decides what comes next
        self.head = nn.Linear(HIDDEN_SIZE, 256, bias=False)
        # snapshot=True spells the cached state as existing models do: a gathered and masked copy of it.
        self.first, self.second = (
            Mamba2Layer(HIDDEN_SIZE, nheads=8, headdim=32, dstate=32, chunk_size=CHUNK_SIZE, snapshot=True)
            for _ in range(2)
        )
        self.attention = Attention()

    def forward(
        self, tokens: Tensor, positions: Tensor, metadata: ChunkMetadata, cache: Cache, slots: Tensor, has: Tensor
    ) -> Tensor:
        """Scores (256,) of the token that comes next; the cache is advanced in place."""
        hidden = self.embedding(tokens)
        hidden = hidden + self.first(_norm(hidden), metadata, *cache.first, slots, has, slots)
        hidden = hidden + self.attention(_norm(hidden), cache.keys_values, positions)
        hidden = hidden + self.second(_norm(hidden), metadata, *cache.second, slots, has, slots)
        scores: Tensor = self.head(_norm(hidden[-1]))
        return scores

    def empty_cache(self) -> Cache:
        """A cache that has seen nothing. Its Mamba2 slots hold NaN, to show that no fresh sequence reads them."""
        first, second = (layer.allocate_state(num_slots=3) for layer in (self.first, self.second))
        for tensor in (*first, *second):
            tensor.fill_(torch.nan)
        shape = (2, NUM_HEADS, MAX_TOKENS, HIDDEN_SIZE // NUM_HEADS)
        return Cache(first, second, torch.zeros(shape, device=self.embedding.weight.device))


def _norm(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:])


def read(model: Callable[..., Tensor], text: list[int], seen: int, cache: Cache) -> int:
    """Read tokens that follow `seen` others, and return the likeliest next one."""
    device = cache.keys_values.device
    scores = model(
        torch.tensor(text, device=device),
        torch.arange(seen, seen + len(text), device=device),
        build_chunk_metadata([0, len(text)], CHUNK_SIZE, context_lens=[seen], device=device),
        cache,
        torch.tensor([SLOT], device=device),
        torch.tensor([seen > 0], device=device),
    )
    return int(scores.argmax())


def generate(model: HybridModel, prefill: Callable[..., Tensor], text: list[int], seen: int, cache: Cache) -> list[int]:
    """Read a text that follows `seen` tokens with `prefill`, and go on with the likeliest tokens."""
    tokens = [read(prefill, text, seen, cache)]
    seen += len(text)
    while len(tokens) < NEW_TOKENS:
        tokens.append(read(model, tokens[-1:], seen, cache))
        seen += 1
    return tokens


def main() -> None:
    """Generate from scratch, from the cached prefix, and from there with the compiled model and the pass."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = HybridModel().to(device)
    prefix, question = list(PREFIX), list(QUESTION)

    from_scratch = generate(model, model, prefix + question, 0, model.empty_cache())

    cached = model.empty_cache()
    read(model, prefix, 0, cached)  # once; any number of questions may follow
    from_cache = generate(model, model, question, len(prefix), cached.clone())

    with eliminate_snapshots() as elimination:
        prefill = torch.compile(model, fullgraph=True)
        from_compiled = generate(model, prefill, question, len(prefix), cached.clone())

    forgotten = cached.clone()
    for state in (forgotten.first, forgotten.second):
        state.state_cache.zero_()
    without_states = generate(model, model, question, len(prefix), forgotten)

    report = elimination.report()
    print(report)
    print(f"\n{len(prefix)} tokens cached, {len(question)} read, {NEW_TOKENS} generated: {bytes(from_compiled)!r}")
    assert from_scratch == from_cache == from_compiled
    assert from_compiled != without_states, "the cached states play no part"
    if report.graphs:  # none: the finished code came from the compile cache, and was not compiled again
        assert report.eliminated == 2, "a layer kept its snapshot"
    print("The tokens are equal: from scratch, from the cache, and compiled with the pass.")
    print("With the cached states set to zero they are others.")


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
