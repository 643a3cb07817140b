"""What a tensor argument must look like before anything is launched or written: dtype, device, shape, strides.

These checks read no values. Under `torch.compile` they run while the graph is traced and cost nothing afterwards.
Each error names the argument, what came and what is allowed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP32 = (torch.float32,)
INT32 = (torch.int32,)
SLOT_DTYPES = (torch.int32, torch.int64)
CHUNK_SIZES = (16, 32, 64, 128, 256)

# The kernels reach a token from the first one of its chunk by a 32-bit offset: 256 tokens of this stride at most.
MAX_TOKEN_STRIDE = 1 << 22


def check_tensor(
    name: str, tensor: Tensor, dims: Mapping[str, int | None], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise TypeError for a wrong type or dtype, ValueError for a wrong shape or device.

    Args:
        dims: the dimensions by name, with the size that each must have, or None if any will do.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}; expected a Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {tensor.dtype}; allowed: {_join(dtypes)}")
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}; the other tensors are on {device}")
    if tensor.dim() != len(dims) or any(
        want is not None and got != want for got, want in zip(tensor.shape, dims.values(), strict=True)
    ):
        wanted = ", ".join(dim if size is None else f"{dim}={size}" for dim, size in dims.items())
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}; expected ({wanted})")


def check_tokens(
    name: str, tensor: Tensor, dims: Mapping[str, int | None], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """`check_tensor` for what has a row for each token: the last dimension dense, the token stride within limits."""
    check_tensor(name, tensor, dims, dtypes, device)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: stride {tensor.stride(-1)} in the last dimension; it must be dense (stride 1)")
    check_token_stride(name, tensor)


def check_token_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError if the kernels cannot reach the tokens of a chunk by 32-bit offsets."""
    if tensor.shape[0] > 1 and tensor.stride(0) >= MAX_TOKEN_STRIDE:
        raise ValueError(f"{name}: token stride {tensor.stride(0)}; it must be less than {MAX_TOKEN_STRIDE}")


def check_written_once(name: str, tensor: Tensor) -> None:
    """Raise ValueError for an output with strides by which two of its elements may be one.

    Under `torch.compile`, where comparing sizes would fix them, only expanded dimensions are found.
    """
    layout = list(zip(tensor.stride(), tensor.shape, strict=True))
    if torch.compiler.is_compiling():
        if any(size > 1 and stride == 0 for stride, size in layout):
            raise ValueError(f"{name}: strides {tensor.stride()}; elements of an output may not overlap")
        return
    reach = 0  # how far the dimensions with smaller strides reach
    for stride, size in sorted(layout):
        if size > 1 and stride <= reach:
            raise ValueError(f"{name}: strides {tensor.stride()}; elements of an output may not overlap")
        reach += stride * max(0, size - 1)


def check_apart(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError for an input that shares memory with an output which programs write in no fixed order."""
    if not (_is_static(tensor) and _is_static(other)):
        return
    is_one_storage = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    (start, end), (other_start, other_end) = _extent(tensor), _extent(other)
    if is_one_storage and start < other_end and other_start < end:
        raise ValueError(f"{name}: shares memory with {other_name}; pass a copy, or slots of the cache to read")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start, size = int(tensor.storage_offset()) * tensor.itemsize, int(reach + 1) * tensor.itemsize
    return start, start + size if tensor.numel() else start


def _is_static(tensor: Tensor) -> bool:
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} for shape {tuple(tensor.shape)}; it must be contiguous")


def check_dense_rows(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a row (all dimensions but the first) is not contiguous; rows may lie anywhere."""
    row = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size > 1 and stride != row:
            raise ValueError(
                f"{name}: strides {tensor.stride()} for shape {tuple(tensor.shape)}; "
                "each slot or row must be dense (only stride(0) is free)"
            )
        row *= size


def check_cache(name: str, cache: Tensor, dims: Mapping[str, int | None], device: torch.device) -> None:
    """A state cache: dense slots, at any distance that keeps them apart, a FP16, BF16 or FP32 dtype."""
    check_tensor(name, cache, {"num_slots": None, **dims}, FLOATS, device)
    check_dense_rows(name, cache)
    if cache.shape[0] > 1 and cache.stride(0) < cache.shape[1:].numel():
        raise ValueError(
            f"{name}: stride(0) {cache.stride(0)}; slots of {cache.shape[1:].numel()} elements would overlap"
        )


def check_chunk_size(chunk_size: int) -> None:
    """Raise ValueError for a chunk size that the kernels do not take, TypeError for what is no integer."""
    if not isinstance(chunk_size, (int, torch.SymInt)):
        raise TypeError(f"chunk_size: {chunk_size!r}; it must be an integer")
    # Membership also makes a size that torch.compile traces as a symbol a constant, which the kernels need.
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: {chunk_size}; it must be a power of two, one of {_join(CHUNK_SIZES)}")


def check_groups(nheads: int, ngroups: int) -> None:
    """Raise ValueError unless every group serves the same number of heads."""
    if ngroups < 1 or nheads % ngroups:
        raise ValueError(f"B: {ngroups} groups for {nheads} heads; ngroups must divide nheads")


def _join(choices: tuple[object, ...]) -> str:
    return ", ".join(str(choice) for choice in choices)
