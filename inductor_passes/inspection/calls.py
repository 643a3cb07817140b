"""What each call of a compiled function computes and changes, as a digest: two runs did the same if these are equal."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from inductor_passes.inspection.comparison import as_bytes

LIMIT = 64  # calls; a program that goes on for hours is to be looked at, not held up


@contextlib.contextmanager
def calls_noted(digests: list[str], problems: list[str]) -> Iterator[None]:
    """Note a digest for each of the first calls of functions that Inductor compiles in this block."""
    compiler: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if "__call__" not in vars(compiler or object):
        problems.append("calls of compiled functions were not compared: this PyTorch compiles in another way")
        yield
        return
    original: Any = compiler.__call__

    @functools.wraps(original)
    def compile_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _noting(original(self, *args, **kwargs), digests, problems)

    compiler.__call__ = compile_and_note
    try:
        yield
    finally:
        compiler.__call__ = original


def _noting(compiled: Any, digests: list[str], problems: list[str]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        # Some callers hand over a list, which is emptied so that memory is freed early.
        inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        results = compiled(*args)
        if len(digests) < LIMIT:
            try:
                digests.append(_digest(inputs, results))
            except Exception as error:
                problems.append(f"a call of a compiled function was not compared: {error!r}")
        return results

    return call


def _digest(inputs: list[Tensor], results: Any) -> str:
    """Of the results, and of the arguments as the call has left them; weights do not change."""
    digest = hashlib.blake2b(digest_size=16)
    left = [tensor for tensor in inputs if not isinstance(tensor, nn.Parameter)]
    for tensor in (*pytree.tree_leaves(results), *left):
        if isinstance(tensor, Tensor):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(as_bytes(tensor).numpy().data)
    return digest.hexdigest()
