"""Memory for what lies between the launches of a region, kept from call to call where asking for it again would show.

A step of few tokens waits for the host, and every layer of it needs the same small buffer. A step of many waits for the
GPU: PyTorch's allocator then lends what vLLM's own layers would take, so that the server holds no more than without.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 4 << 20  # bytes; what is larger is allocated for its call alone

_kept: dict[tuple[torch.device, int], Tensor] = {}
_captured: dict[int, Tensor] = {}


def workspace(device: torch.device, stream: int, size: int) -> Tensor:
    """A buffer of at least so many bytes, for launches on a stream of this GPU that follow at once.

    Calls on one stream may share it, since a GPU runs them one after the other; each stream has its own.
    """
    if size > KEPT:
        return torch.empty(size, dtype=torch.uint8, device=device)
    key = (device, stream)
    buffer = _kept.get(key)
    if buffer is None or buffer.shape[0] < size:
        # A power of two, so that it grows a few times only.
        buffer = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=device)
        _kept[key] = buffer
    return buffer


def keep_workspaces() -> None:
    """Never let go of the buffers that there are: their addresses are in a captured graph."""
    _captured.update((buffer.data_ptr(), buffer) for buffer in _kept.values())
