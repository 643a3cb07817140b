"""The static checks of every op, under the op's name and with the op's arguments; the first line of each op's body.

See `mamba_ops.checks` for what a static check is. The order of the checks is that of the arguments, except that the
tensor which fixes the sizes goes first.
"""

import torch
from torch import Tensor

from mamba_ops.checks import (
    FLOATS,
    FP32,
    INT32,
    SLOT_DTYPES,
    check_apart,
    check_cache,
    check_chunk_size,
    check_dense,
    check_dense_rows,
    check_groups,
    check_tensor,
    check_token_stride,
    check_tokens,
    check_written_once,
)
from mamba_ops.kernels import one_pass

BOOL = (torch.bool,)
MAX_DSTATE = 256  # the one-pass kernel keeps a state of 64 x dstate in registers


def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    cu_chunk_seqlens: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_min: float | None,
    dt_max: float | None,
) -> None:
    """Check the arguments of `mamba_ops.ops.chunk_cumsum`."""
    check_tensor("dt", dt, {"ntokens": None, "nheads": None}, FLOATS, dt.device)
    check_token_stride("dt", dt)
    check_tensor("A", A, {"nheads": dt.shape[1]}, FP32, dt.device)
    _check_offsets(cu_chunk_seqlens, dt.device)
    check_chunk_size(chunk_size)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, {"nheads": dt.shape[1]}, FLOATS, dt.device)
    if dt_min is not None and dt_max is not None and dt_min > dt_max:
        raise ValueError(f"dt_min: {dt_min}; it must not exceed dt_max = {dt_max}")


def chunk_state(B: Tensor, x: Tensor, dt_out: Tensor, dA_cumsum: Tensor, cu_chunk_seqlens: Tensor) -> None:
    """Check the arguments of `mamba_ops.ops.chunk_state`."""
    _check_x(x)
    check_tokens("B", B, {"ntokens": x.shape[0], "ngroups": None, "dstate": None}, (x.dtype,), x.device)
    check_groups(x.shape[1], B.shape[1])
    _check_offsets(cu_chunk_seqlens, x.device)
    _check_steps(dt_out, dA_cumsum, cu_chunk_seqlens.shape[0] - 1, x.shape[1], x.device)


def bmm_chunk(C: Tensor, B: Tensor, cu_chunk_seqlens: Tensor, chunk_size: int) -> None:
    """Check the arguments of `mamba_ops.ops.bmm_chunk`."""
    check_tokens("C", C, {"ntokens": None, "ngroups": None, "dstate": None}, FLOATS, C.device)
    ntokens, ngroups, dstate = C.shape
    check_tokens("B", B, {"ntokens": ntokens, "ngroups": ngroups, "dstate": dstate}, (C.dtype,), C.device)
    _check_offsets(cu_chunk_seqlens, C.device)
    check_chunk_size(chunk_size)


def state_passing(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_dtype: torch.dtype,
) -> None:
    """Check the arguments of `mamba_ops.ops.state_passing`."""
    _check_states(states, dA_cumsum, last_chunk_indices)
    if initial_states is not None:
        nheads, headdim, dstate = states.shape[1:]
        dims = {"nseqs": last_chunk_indices.shape[0], "nheads": nheads, "headdim": headdim, "dstate": dstate}
        check_tensor("initial_states", initial_states, dims, FLOATS, states.device)
        check_dense_rows("initial_states", initial_states)
    if state_dtype not in FLOATS:
        raise TypeError(f"state_dtype: {state_dtype}; allowed: {', '.join(map(str, FLOATS))}")


def state_passing_update(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_cache: Tensor,
    write_slots: Tensor,
) -> None:
    """Check the arguments of `mamba_ops.ops.state_passing_update`."""
    state_passing(states, dA_cumsum, last_chunk_indices, initial_states, torch.float32)
    nheads, headdim, dstate = states.shape[1:]
    check_cache("state_cache", state_cache, {"nheads": nheads, "headdim": headdim, "dstate": dstate}, states.device)
    check_tensor("write_slots", write_slots, {"nseqs": last_chunk_indices.shape[0]}, SLOT_DTYPES, states.device)
    if initial_states is not None and last_chunk_indices.shape[0] > 1:  # a single sequence reads before it writes
        check_apart("initial_states", initial_states, "state_cache", state_cache)


def state_passing_indexed(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    state_cache: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    checkpoint_chunks: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
) -> None:
    """Check the arguments of `mamba_ops.ops.state_passing_indexed`."""
    state_passing_update(states, dA_cumsum, last_chunk_indices, None, state_cache, write_slots)
    nseqs = last_chunk_indices.shape[0]
    check_reads(read_slots, has_initial_state, nseqs, states.device)
    _check_checkpoints(checkpoint_chunks, checkpoint_offsets, checkpoint_slots, nseqs, states.device)


def chunk_scan(
    cb: Tensor,
    x: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    entering: Tensor,
    cu_chunk_seqlens: Tensor,
    out: Tensor,
    D: Tensor | None,
    z: Tensor | None,
) -> None:
    """Check the arguments of `mamba_ops.ops.chunk_scan`."""
    _check_x(x)
    ntokens, nheads, headdim = x.shape
    check_tokens("C", C, {"ntokens": ntokens, "ngroups": None, "dstate": None}, (x.dtype,), x.device)
    ngroups, dstate = C.shape[1:]
    check_groups(nheads, ngroups)
    _check_offsets(cu_chunk_seqlens, x.device)
    nchunks = cu_chunk_seqlens.shape[0] - 1
    _check_steps(dt_out, dA_cumsum, nchunks, nheads, x.device)
    chunk_size = dt_out.shape[2]
    cb_dims = {"nchunks": nchunks, "ngroups": ngroups, "chunk_size (m)": chunk_size, "chunk_size (k)": chunk_size}
    check_tensor("cb", cb, cb_dims, FP32, x.device)
    check_dense("cb", cb)
    dims = {"nchunks": nchunks, "nheads": nheads, "headdim": headdim, "dstate": dstate}
    check_tensor("entering", entering, dims, FLOATS, x.device)
    check_dense("entering", entering)
    check_outputs(x, out, D, z)


def one_pass_scan(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    cu_chunk_seqlens: Tensor,
    state_cache: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    out: Tensor,
    max_tokens: int,
    D: Tensor | None,
    last_chunk_indices: Tensor | None,
    checkpoint_chunks: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
) -> None:
    """Check the arguments of `mamba_ops.ops.one_pass_scan`."""
    _check_x(x)
    ntokens, nheads, headdim = x.shape
    check_tokens("B", B, {"ntokens": ntokens, "ngroups": None, "dstate": None}, (x.dtype,), x.device)
    ngroups, dstate = B.shape[1:]
    check_groups(nheads, ngroups)
    if dstate > MAX_DSTATE:
        raise ValueError(f"B: dstate {dstate}; allowed: up to {MAX_DSTATE}")
    check_tokens("C", C, {"ntokens": ntokens, "ngroups": ngroups, "dstate": dstate}, (x.dtype,), x.device)
    _check_steps(dt_out, dA_cumsum, None, nheads, x.device)
    nseqs = nchunks = dt_out.shape[0]
    check_tensor("cu_chunk_seqlens", cu_chunk_seqlens, {"nchunks + 1": nchunks + 1}, INT32, x.device)
    check_dense("cu_chunk_seqlens", cu_chunk_seqlens)
    if last_chunk_indices is not None:
        check_tensor("last_chunk_indices", last_chunk_indices, {"nseqs": None}, INT32, x.device)
        check_dense("last_chunk_indices", last_chunk_indices)
        nseqs = last_chunk_indices.shape[0]
    check_cache("state_cache", state_cache, {"nheads": nheads, "headdim": headdim, "dstate": dstate}, x.device)
    check_tensor("slots", slots, {"nseqs": nseqs}, SLOT_DTYPES, x.device)
    check_tensor("has_initial_state", has_initial_state, {"nseqs": nseqs}, BOOL, x.device)
    most = min(one_pass.most_tokens(dstate * B.element_size(), last_chunk_indices is None), dt_out.shape[2])
    if not 1 <= max_tokens <= most:
        raise ValueError(f"max_tokens: {max_tokens}; allowed: 1 to {most}, and at most chunk_size")
    check_outputs(x, out, D, None)
    _check_checkpoints(checkpoint_chunks, checkpoint_offsets, checkpoint_slots, nseqs, x.device)
    if checkpoint_chunks is not None and last_chunk_indices is None:
        raise ValueError("checkpoint_chunks: given without last_chunk_indices; checkpoints lie at the edges of chunks")


def masked_gather(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor | None) -> None:
    """Check the arguments of `mamba_ops.ops.masked_gather`."""
    check_dense_rows("state_cache", state_cache)
    check_reads(slots, has_initial_state, slots.shape[0], state_cache.device, "slots")


def check_reads(
    slots: Tensor, has_initial_state: Tensor | None, nseqs: int, device: torch.device, name: str = "read_slots"
) -> None:
    """Check where entering states are read."""
    check_tensor(name, slots, {"nseqs": nseqs}, SLOT_DTYPES, device)
    if has_initial_state is not None:
        check_tensor("has_initial_state", has_initial_state, {"nseqs": nseqs}, BOOL, device)


def check_checkpoint_marks(offsets: Tensor, slots: Tensor, nseqs: int, device: torch.device) -> None:
    """Check which sequences keep a state on the way, and where it goes."""
    check_tensor("checkpoint_offsets", offsets, {"nseqs": nseqs}, INT32, device)
    check_dense("checkpoint_offsets", offsets)
    check_tensor("checkpoint_slots", slots, {"nseqs": nseqs}, SLOT_DTYPES, device)


def check_outputs(x: Tensor, out: Tensor, D: Tensor | None, z: Tensor | None) -> None:
    """Check what only the last stage sees."""
    ntokens, nheads, headdim = x.shape
    dims = {"ntokens": ntokens, "nheads": nheads, "headdim": headdim}
    check_tokens("out", out, dims, FLOATS, x.device)
    check_written_once("out", out)
    if D is not None:
        check_tensor(
            "D", D, {"nheads": nheads} if D.dim() == 1 else {"nheads": nheads, "headdim": headdim}, FLOATS, x.device
        )
        if D.dim() == 2 and headdim > 1 and D.stride(1) != 1:
            raise ValueError(f"D: stride {D.stride(1)} in the last dimension; it must be dense (stride 1)")
    if z is not None:
        check_tokens("z", z, dims, FLOATS, x.device)


def _check_x(x: Tensor) -> None:
    check_tokens("x", x, {"ntokens": None, "nheads": None, "headdim": None}, FLOATS, x.device)


def _check_offsets(cu_chunk_seqlens: Tensor, device: torch.device) -> None:
    check_tensor("cu_chunk_seqlens", cu_chunk_seqlens, {"nchunks + 1": None}, INT32, device)
    check_dense("cu_chunk_seqlens", cu_chunk_seqlens)
    if cu_chunk_seqlens.shape[0] < 1:
        raise ValueError("cu_chunk_seqlens: shape (0,); it holds at least the offset 0")


def _check_steps(dt_out: Tensor, dA_cumsum: Tensor, nchunks: int | None, nheads: int, device: torch.device) -> None:
    check_tensor("dt_out", dt_out, {"nchunks": nchunks, "nheads": nheads, "chunk_size": None}, FP32, device)
    check_chunk_size(dt_out.shape[2])
    dims = {"nchunks": dt_out.shape[0], "nheads": nheads, "chunk_size": dt_out.shape[2]}
    check_tensor("dA_cumsum", dA_cumsum, dims, FP32, device)
    check_dense("dt_out", dt_out)
    check_dense("dA_cumsum", dA_cumsum)


def _check_checkpoints(
    chunks: Tensor | None, offsets: Tensor | None, slots: Tensor | None, nseqs: int, device: torch.device
) -> None:
    if chunks is None and offsets is None and slots is None:
        return
    for name, tensor in (("chunks", chunks), ("offsets", offsets), ("slots", slots)):
        if tensor is None:
            raise ValueError(f"checkpoint_{name}: None; checkpoint_chunks, _offsets and _slots are given together")
    assert chunks is not None
    assert offsets is not None
    assert slots is not None
    check_tensor("checkpoint_chunks", chunks, {"nseqs": nseqs}, SLOT_DTYPES, device)
    check_dense("checkpoint_chunks", chunks)
    check_checkpoint_marks(offsets, slots, nseqs, device)


def _check_states(states: Tensor, dA_cumsum: Tensor, last_chunk_indices: Tensor) -> None:
    check_tensor(
        "states", states, {"nchunks": None, "nheads": None, "headdim": None, "dstate": None}, FP32, states.device
    )
    check_dense("states", states)
    nchunks, nheads = states.shape[:2]
    check_tensor(
        "dA_cumsum", dA_cumsum, {"nchunks": nchunks, "nheads": nheads, "chunk_size": None}, FP32, states.device
    )
    check_dense("dA_cumsum", dA_cumsum)
    check_tensor("last_chunk_indices", last_chunk_indices, {"nseqs": None}, INT32, states.device)
    check_dense("last_chunk_indices", last_chunk_indices)
