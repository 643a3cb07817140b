"""One cached prefix, several continuations: all of them read the same slot, and each writes its own.

Run it with `python examples/fork_prefix.py`. A server does this for every system prompt, a search for every branch.
The scan reads one slot for each sequence and writes another, so the prefix needs no copy for each fork, and stays as it
is for the next ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_ops import LayerState, Mamba2Layer, build_chunk_metadata

HIDDEN_SIZE, CHUNK_SIZE, NUM_SLOTS = 256, 64, 8
PREFIX_TOKENS, PREFIX_SLOT = 300, 5
FORKS = {0: 40, 3: 1, 7: 90}  # the slot of each continuation, and how many tokens it has


def main() -> None:
    """Fork in place, and compare with forks that start from copies of the prefix."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = Mamba2Layer(HIDDEN_SIZE, nheads=8, headdim=32, dstate=64, chunk_size=CHUNK_SIZE, device=device)
    state = layer.allocate_state(NUM_SLOTS)

    prefix = torch.randn(PREFIX_TOKENS, HIDDEN_SIZE, device=device)
    prefix_slot = torch.tensor([PREFIX_SLOT], device=device)
    metadata = build_chunk_metadata([0, PREFIX_TOKENS], CHUNK_SIZE, device=device)
    layer(prefix, metadata, *state, prefix_slot, torch.tensor([False], device=device), prefix_slot)
    kept = [cache[PREFIX_SLOT].clone() for cache in state]

    slots = torch.tensor(list(FORKS), device=device)
    tokens = torch.randn(sum(FORKS.values()), HIDDEN_SIZE, device=device)
    offsets = torch.tensor([0, *FORKS.values()]).cumsum(0).tolist()
    metadata = build_chunk_metadata(offsets, CHUNK_SIZE, context_lens=[PREFIX_TOKENS] * len(FORKS), device=device)

    def continue_from(read_slots: Tensor, caches: LayerState) -> Tensor:
        out: Tensor = layer(tokens, metadata, *caches, read_slots, None, slots)  # None: all continue
        return out

    # The usual way: copy the prefix into the slot of each fork, then continue them where they are.
    copied = LayerState(*(cache.clone() for cache in state))
    for cache in copied:
        cache[slots] = cache[PREFIX_SLOT].clone()
    expected = continue_from(slots, copied)

    # In place: every fork reads the prefix. One that went to the prefix's own slot would be an error, as the others
    # could read it too late.
    out = continue_from(prefix_slot.expand(len(FORKS)), state)

    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, copied, rtol=0, atol=0)
    torch.testing.assert_close([cache[PREFIX_SLOT] for cache in state], kept, rtol=0, atol=0)
    size = sum(cache.nbytes for cache in kept) * len(FORKS)
    print(f"{len(FORKS)} continuations of one prefix, {size} bytes not copied; the prefix is as it was.")
    print("The output and the caches are equal bit for bit.")


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
