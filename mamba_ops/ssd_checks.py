"""The static checks of `ssd_chunk_scan`: its first stages write nothing, so what later ones need is checked up front.

See `mamba_ops.checks` for what a static check is. All sizes follow from x and B.
"""

import torch
from torch import Tensor

from mamba_ops.checks import (
    FLOATS,
    FP32,
    INT32,
    SLOT_DTYPES,
    check_cache,
    check_chunk_size,
    check_dense,
    check_dense_rows,
    check_groups,
    check_tensor,
    check_token_stride,
    check_tokens,
)
from mamba_ops.metadata import ChunkMetadata
from mamba_ops.op_checks import check_outputs, check_reads


def check_inputs(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    metadata: ChunkMetadata,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    out: Tensor,
) -> None:
    """Check everything but the states."""
    device = x.device
    check_tokens("x", x, {"ntokens": None, "nheads": None, "headdim": None}, FLOATS, device)
    ntokens, nheads = x.shape[:2]
    check_tensor("dt", dt, {"ntokens": ntokens, "nheads": nheads}, FLOATS, device)
    check_token_stride("dt", dt)
    check_tensor("A", A, {"nheads": nheads}, FP32, device)
    check_tokens("B", B, {"ntokens": ntokens, "ngroups": None, "dstate": None}, (x.dtype,), device)
    ngroups, dstate = B.shape[1:]
    check_groups(nheads, ngroups)
    check_tokens("C", C, {"ntokens": ntokens, "ngroups": ngroups, "dstate": dstate}, (x.dtype,), device)
    check_metadata(metadata, device)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, {"nheads": nheads}, FLOATS, device)
    if not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit: {dt_limit}; the lower limit must not exceed the upper one")
    check_outputs(x, out, D, z)


def check_states(
    x: Tensor,
    B: Tensor,
    metadata: ChunkMetadata,
    initial_states: Tensor | None,
    state_cache: Tensor | None,
    read_slots: Tensor | None,
    has_initial_state: Tensor | None,
    write_slots: Tensor | None,
    state_dtype: torch.dtype | None,
) -> None:
    """Check where states come from and where they go."""
    _check_combination(initial_states, state_cache, read_slots, has_initial_state, write_slots)
    nseqs = metadata.last_chunk_indices.shape[0]
    row = {"nheads": x.shape[1], "headdim": x.shape[2], "dstate": B.shape[2]}
    if initial_states is not None:
        check_tensor("initial_states", initial_states, {"nseqs": nseqs, **row}, FLOATS, x.device)
        check_dense_rows("initial_states", initial_states)
    if state_dtype is not None and state_dtype not in FLOATS:
        raise TypeError(f"state_dtype: {state_dtype}; allowed: {', '.join(map(str, FLOATS))}")
    if state_cache is not None and write_slots is not None:
        check_cache("state_cache", state_cache, row, x.device)
        check_tensor("write_slots", write_slots, {"nseqs": nseqs}, SLOT_DTYPES, x.device)
        if state_dtype is not None and state_dtype != state_cache.dtype:
            raise TypeError(f"state_dtype: {state_dtype}; with a state_cache it is that of the cache, or None")
    if read_slots is not None:
        check_reads(read_slots, has_initial_state, nseqs, x.device)


def _check_combination(
    initial_states: Tensor | None,
    state_cache: Tensor | None,
    read_slots: Tensor | None,
    has_initial_state: Tensor | None,
    write_slots: Tensor | None,
) -> None:
    if (state_cache is None) != (write_slots is None):
        given, missing = ("state_cache", "write_slots") if write_slots is None else ("write_slots", "state_cache")
        raise ValueError(f"{missing}: missing; {given} was given, and they go together")
    if read_slots is not None and state_cache is None:
        raise ValueError("state_cache: missing; read_slots was given, and it names slots of the cache")
    if read_slots is not None and initial_states is not None:
        raise ValueError("initial_states: given beside read_slots; the states come from one or the other")
    if has_initial_state is not None and read_slots is None:
        raise ValueError("has_initial_state: given without read_slots; it says which of them are read")


def check_metadata(metadata: ChunkMetadata, device: torch.device) -> None:
    """Check the tensors of the metadata."""
    check_tensor("metadata.cu_seqlens", metadata.cu_seqlens, {"nseqs + 1": None}, SLOT_DTYPES, device)
    for name, tensor, size in (
        ("metadata.cu_chunk_seqlens", metadata.cu_chunk_seqlens, "nchunks + 1"),
        ("metadata.last_chunk_indices", metadata.last_chunk_indices, "nseqs"),
        ("metadata.seq_idx", metadata.seq_idx, "nchunks"),
    ):
        check_tensor(name, tensor, {size: None}, INT32, device)
        check_dense(name, tensor)
    if metadata.cu_chunk_seqlens.shape[0] != metadata.seq_idx.shape[0] + 1:
        raise ValueError(
            f"metadata.cu_chunk_seqlens: shape {tuple(metadata.cu_chunk_seqlens.shape)}; expected one offset more than "
            f"the {metadata.seq_idx.shape[0]} chunks of metadata.seq_idx"
        )
    if metadata.cu_seqlens.shape[0] != metadata.last_chunk_indices.shape[0] + 1:
        raise ValueError(
            f"metadata.cu_seqlens: shape {tuple(metadata.cu_seqlens.shape)}; expected one offset more than the "
            f"{metadata.last_chunk_indices.shape[0]} sequences of metadata.last_chunk_indices"
        )
    check_chunk_size(metadata.chunk_size)
