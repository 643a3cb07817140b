"""The one-pass continuation as an op: one launch for sequences of few new tokens."""

import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from mamba_ops import cpu, op_checks
from mamba_ops.kernels import one_pass as kernel
from mamba_ops.ops.dispatch import compiles_for_nvidia, runs_kernels
from mamba_ops.ops.launch import Launch
from mamba_ops.ops.one_pass_heads import heads_of_a_program, one_pass_heads_launch


@triton_op("mamba_ops::one_pass_scan", mutates_args={"state_cache", "out"})
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
    D: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
    checkpoint_chunks: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> None:
    """Outputs and final states of sequences of few tokens, continued from their slots in place.

    The same bits as `chunk_state`, `state_passing_indexed`, `bmm_chunk` and `chunk_scan` in turn. An empty sequence is
    padding: nothing is read or written for it.

    Args:
        x: (ntokens, nheads, headdim), last dimension dense.
        B, C: (ntokens, ngroups, dstate), last dimension dense, dtype of x.
        dt_out, dA_cumsum: (nchunks, nheads, chunk_size) FP32, from `chunk_cumsum`.
        cu_chunk_seqlens: (nchunks + 1,) int32, token offsets of the chunks. Tokens beyond its last are not written.
        state_cache: (num_slots, nheads, headdim, dstate), rows dense, slots at any distance. Updated in place.
        slots: (nseqs,) int32 or int64, any stride, no slot twice.
        has_initial_state: (nseqs,) bool; a sequence without one starts from zeros and its slot is not read.
        out: (ntokens, nheads, headdim), last dimension dense. Written.
        max_tokens: no chunk is longer; at most 64 and chunk_size, and at most 32 for FP32 and a dstate above 128 with
            `last_chunk_indices`. A tighter bound means a faster kernel.
        D: (nheads,) or (nheads, headdim), the skip connection.
        last_chunk_indices: (nseqs,) int32, the last chunk of each sequence; that of its predecessor (-1 for the first)
            if it is empty. None: chunk i is sequence i, for which the kernel is faster.
        checkpoint_chunks, checkpoint_offsets, checkpoint_slots: as of `state_passing_indexed`; only with
            `last_chunk_indices`.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing has been written. On a GPU the values in
            `cu_chunk_seqlens`, `last_chunk_indices`, `slots` and of checkpoints are not looked at.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
    """
    op_checks.one_pass_scan(
        x,
        B,
        C,
        dt_out,
        dA_cumsum,
        cu_chunk_seqlens,
        state_cache,
        slots,
        has_initial_state,
        out,
        max_tokens,
        D,
        last_chunk_indices,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
    )
    if not runs_kernels(x):
        _one_pass_scan_cpu(
            x,
            B,
            C,
            dt_out,
            dA_cumsum,
            cu_chunk_seqlens,
            state_cache,
            slots,
            has_initial_state,
            out,
            max_tokens,
            D,
            last_chunk_indices,
            checkpoint_chunks,
            checkpoint_offsets,
            checkpoint_slots,
        )
        return
    required = (x, B, C, dt_out, dA_cumsum, cu_chunk_seqlens, state_cache, slots, has_initial_state, out, max_tokens, D)
    heads = heads_of_a_program(x, B, slots, max_tokens) if last_chunk_indices is None else 1
    if heads > 1:
        one_pass_heads_launch(*required, heads).run()
        return
    one_pass_launch(*required, last_chunk_indices, checkpoint_chunks, checkpoint_offsets, checkpoint_slots).run()


def one_pass_launch(
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
    checkpoint_chunks: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Launch:
    """The launch behind `one_pass_scan` with a program for each head, with the same arguments."""
    _, nheads, headdim = x.shape
    _, ngroups, dstate = B.shape
    most_headdim = kernel.block_headdim(dstate * B.element_size(), last_chunk_indices is None)
    block_headdim = min(most_headdim, max(16, triton.next_power_of_2(headdim)))
    block_tokens = max(16, triton.next_power_of_2(max_tokens))
    if last_chunk_indices is None and state_cache.element_size() < x.element_size():
        # A small product with states that were narrower in memory would be summed in another order.
        block_tokens = max(block_tokens, min(kernel.MAX_TOKENS, dt_out.shape[2]))
    arguments = (
        x,
        B,
        C,
        dt_out,
        dA_cumsum,
        cu_chunk_seqlens,
        last_chunk_indices,
        D,
        state_cache,
        slots,
        has_initial_state,
        out,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
        state_cache.shape[0],
        state_cache.stride(0),
        slots.stride(0),
        has_initial_state.stride(0),
        0 if checkpoint_slots is None else checkpoint_slots.stride(0),
        x.stride(0),
        x.stride(1),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        0 if D is None else D.stride(0),
        out.stride(0),
        out.stride(1),
    )
    constants = {
        "nheads": nheads,
        "heads_per_group": nheads // ngroups,
        "headdim": headdim,
        "dstate": dstate,
        "chunk_size": dt_out.shape[2],
        "ONE_CHUNK": last_chunk_indices is None,
        "HAS_CHECKPOINTS": checkpoint_slots is not None,
        "HAS_D": D is not None,
        "D_HAS_HEADDIM": D is not None and D.dim() == 2,
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_HEADDIM": block_headdim,
        "BLOCK_DSTATE": max(16, triton.next_power_of_2(dstate)),
        "num_warps": kernel.NUM_WARPS,
        "num_stages": 1,  # two chunks at a time would not fit into the shared memory of every GPU
    }
    # Three programs at once, not two, are worth the few registers that then go to memory: for a layer of
    # Granite-4.0-h-micro on an H200 58.9 us in place of 65.8 (32 sequences of 32 tokens, with the convolution). With
    # more tokens, a chunk edge, FP32 anywhere or a larger tile many would; a smaller tile needs fewer anyway.
    few = last_chunk_indices is None and block_tokens <= 32 and x.element_size() == state_cache.element_size() == 2
    if few and (headdim, dstate) == (64, 128) and compiles_for_nvidia():
        constants["maxnreg"] = kernel.MAX_REGISTERS
    grid = (triton.cdiv(headdim, block_headdim), nheads, slots.shape[0])
    return Launch(kernel.one_pass_kernel, grid, arguments, constants)


@custom_op("mamba_ops::one_pass_scan_cpu", mutates_args={"state_cache", "out"}, device_types="cpu")
def _one_pass_scan_cpu(
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
    cpu.one_pass_scan(
        x,
        B,
        C,
        dt_out,
        dA_cumsum,
        cu_chunk_seqlens,
        state_cache,
        slots,
        has_initial_state,
        out,
        max_tokens,
        D,
        last_chunk_indices,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
    )


@_one_pass_scan_cpu.register_fake
def _(
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
    return
