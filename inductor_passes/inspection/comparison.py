"""Whether a program did the same without and with the pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from inductor_passes.inspection.noting import noting

SHOWN = 8


@dataclasses.dataclass
class Outcome:
    """What one run of a program left.

    Attributes:
        tensors: on the CPU, by what they are called.
        calls: for each call of a compiled function, a digest of its results and of its arguments afterwards.
        kernels: how many kernels Inductor generated.
    """

    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    calls: list[str] = dataclasses.field(default_factory=list)
    kernels: int = 0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came of comparing two runs.

    Attributes:
        tensors, calls: how many were compared.
        differences: what is not equal bit for bit, in words.
    """

    tensors: int
    calls: int
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.differences:
            return "The runs differ: " + "; ".join(self.differences)
        if not self.tensors + self.calls:
            return "Nothing to compare: the program left no tensor and called no compiled function"
        compared = [
            f"{count} {what if count == 1 else several}"
            for count, what, several in (
                (self.tensors, "tensor that it left", "tensors that it left"),
                (self.calls, "call of a compiled function", "calls of compiled functions"),
            )
            if count
        ]
        return f"Equal bit for bit: {' and '.join(compared)}"


def tensors_in(results: Any, problems: list[str]) -> dict[str, Tensor]:
    """Copies of all tensors in nested results, and of the buffers of modules there, by where they are.

    Args:
        results: what to look through.
        problems: takes a line for each tensor without bytes to compare, such as a sparse one, which is left out.
    """
    found: dict[str, Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(results)[0]:
        name = pytree.keystr(path) or "result"
        if isinstance(leaf, torch.nn.Module):
            found |= {f"{name}.{key}": buffer for key, buffer in leaf.named_buffers()}
        elif isinstance(leaf, Tensor):
            found[name] = leaf
    copies = {}
    for name, tensor in found.items():
        with noting(problems, f"{name} was not compared", first_line=True):
            copy = tensor.detach().to("cpu", copy=True)
            as_bytes(copy)
            copies[name] = copy
    return copies


def compare(without: Outcome, with_pass: Outcome) -> Comparison:
    """Compare all that two runs left, bit for bit."""
    differences = [
        f"{name} is there in one run only" for name in sorted(without.tensors.keys() ^ with_pass.tensors.keys())
    ]
    shared = [name for name in without.tensors if name in with_pass.tensors]
    for name in shared:
        difference = _difference(without.tensors[name], with_pass.tensors[name])
        if difference:
            differences.append(f"{name} {difference}")
    if len(without.calls) != len(with_pass.calls):
        differences.append(f"{len(without.calls)} calls of compiled functions became {len(with_pass.calls)}")
    pairs = list(zip(without.calls, with_pass.calls, strict=False))
    unequal = [number for number, (a, b) in enumerate(pairs) if a != b]
    if unequal:
        differences.append(f"{len(unequal)} of {len(pairs)} calls of compiled functions, first number {unequal[0]}")
    if len(differences) > SHOWN:
        differences = [*differences[:SHOWN], f"and {len(differences) - SHOWN} more"]
    return Comparison(len(shared), len(pairs), tuple(differences))


def _difference(a: Tensor, b: Tensor) -> str:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"was {a.dtype} {tuple(a.shape)} and became {b.dtype} {tuple(b.shape)}"
    if torch.equal(as_bytes(a), as_bytes(b)):
        return ""
    if not a.is_floating_point():
        return "differs"
    both_nan = a.isnan() & b.isnan()
    largest = (a.double() - b.double()).abs().masked_fill(both_nan, 0.0).max().item()
    return f"differs by up to {largest:g}"


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its elements.

    Raises:
        TypeError: it is sparse or quantized.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:  # PyTorch dies when it reads a quantized one as bytes
        raise TypeError(f"a {tensor.dtype} tensor of layout {tensor.layout} cannot be read as bytes")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
