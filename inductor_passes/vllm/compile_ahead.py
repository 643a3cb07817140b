"""Kernels are compiled side by side: those of all regions of a shape, while Inductor is at work on the first region.

A region asks Triton for its kernels one after the other, and a server's start waits for each. Triton holds no lock
while it compiles, so here threads, one a kernel, ask for all of them before any region does, which then finds them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from inductor_passes.vllm.direct_kernel import compiled
from inductor_passes.vllm.direct_launches import (
    conv_launch,
    keep_launch,
    scan_launch,
    scan_of_heads_launch,
    sequences_for_heads,
    staged_launches,
)
from inductor_passes.vllm.region_inputs import LayerShape
from mamba_ops.ops.launch import Launch

logger = logging.getLogger("vllm.mamba_ops")

Make = Callable[[], Launch]


def launches(shape: LayerShape, forms: Iterable[tuple[int, bool]], checkpoints: bool) -> Iterator[Make]:
    """What makes each launch of the regions that are launched by address, the ones that compile longest first.

    Args:
        shape: of the layers, on a GPU.
        forms: the regions in one pass: the most tokens of a sequence, and whether each is one chunk.
        checkpoints: whether there are regions that keep them.
    """
    forms = sorted(forms, reverse=True)
    if checkpoints:
        for most in {most for most, one_chunk in forms if not one_chunk}:
            yield functools.partial(scan_launch, shape, most, False, True)
    yield functools.partial(conv_launch, shape)
    for most, one_chunk in forms:
        yield functools.partial(scan_launch, shape, most, one_chunk)
    for most in {most for most, one_chunk in forms if one_chunk}:
        yield functools.partial(_of_heads, shape, most)
    for stage in reversed(range(4)):
        yield functools.partial(_stage, shape, stage, False)
    if checkpoints:
        yield functools.partial(_stage, shape, 1, True)
        yield functools.partial(keep_launch, shape)


@contextlib.contextmanager
def compiled_beside(makes: Iterable[Make], device: torch.device) -> Iterator[None]:
    """Compile the kernels of launches for a device in threads while the context is open; it closes behind the last.

    One that fails is left: whoever launches it compiles it again and learns why.
    """

    def compile_one(make: Make) -> None:
        try:
            with torch.accelerator.device_index(device.index):
                compiled(make())
        except Exception:
            logger.debug("mamba_ops: a kernel is not compiled ahead", exc_info=True)

    makes = list(makes)
    with ThreadPoolExecutor(max(1, len(makes)), thread_name_prefix="mamba_ops") as pool:
        for make in makes:
            pool.submit(compile_one, make)
        yield


def _of_heads(shape: LayerShape, max_tokens: int) -> Launch:
    if sequences_for_heads(shape, max_tokens) is None:
        raise ValueError("layers of this shape have no such form")
    return scan_of_heads_launch(shape, max_tokens)


def _stage(shape: LayerShape, stage: int, checkpoints: bool) -> Launch:
    return staged_launches(shape, checkpoints)[stage]
