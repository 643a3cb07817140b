"""When the one-pass continuation goes through several heads in a program, and the launch of that form."""

import torch
import triton
from torch import Tensor

from mamba_ops.kernels import one_pass_heads as kernel
from mamba_ops.ops.dispatch import compiles_for_nvidia
from mamba_ops.ops.launch import Launch

MAX_TOKENS = 32  # with more, what a program holds does not fit into its registers
MAX_HEADDIM = 64
MAX_DSTATE = 128


def has_form_of_heads(x: Tensor, B: Tensor, max_tokens: int) -> bool:
    """Whether layers of this shape have the form, on a GPU; arguments as of `one_pass_scan`."""
    fits = x.shape[2] <= MAX_HEADDIM and B.shape[2] <= MAX_DSTATE and max_tokens <= MAX_TOKENS
    return fits and x.shape[1] > B.shape[1] and x.element_size() == 2 and compiles_for_nvidia()


def heads_of_a_program(x: Tensor, B: Tensor, slots: Tensor, max_tokens: int) -> int:
    """How many heads a program should take; 1: use the other form. Arguments as of `one_pass_scan`, on any device."""
    nseqs = slots.shape[0]
    if not isinstance(nseqs, int) or x.device.type != "cuda" or not has_form_of_heads(x, B, max_tokens):
        return 1  # a number of sequences that is a symbol: PyTorch is tracing for any of them
    nheads, multiprocessors = x.shape[1], torch.cuda.get_device_properties(x.device).multi_processor_count
    if nseqs < kernel.least_sequences(nheads, multiprocessors):
        return 1
    return kernel.heads_of_a_program(nseqs, nheads, nheads // B.shape[1], multiprocessors)


def one_pass_heads_launch(
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
    heads: int,
) -> Launch:
    """The launch behind `one_pass_scan` where each sequence is one chunk, with its arguments.

    Args:
        heads: of a program; divides the heads of a group.
    """
    _, nheads, headdim = x.shape
    _, ngroups, dstate = B.shape
    block_headdim = max(16, triton.next_power_of_2(headdim))
    arguments = (
        x,
        B,
        C,
        dt_out,
        dA_cumsum,
        cu_chunk_seqlens,
        D,
        state_cache,
        slots,
        has_initial_state,
        out,
        state_cache.shape[0],
        state_cache.stride(0),
        slots.stride(0),
        has_initial_state.stride(0),
        heads,
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
        "HAS_D": D is not None,
        "D_HAS_HEADDIM": D is not None and D.dim() == 2,
        "BLOCK_TOKENS": max(16, triton.next_power_of_2(max_tokens)),
        "BLOCK_HEADDIM": block_headdim,
        "BLOCK_DSTATE": max(16, triton.next_power_of_2(dstate)),
        # States of four bytes take twice the shared memory.
        "STAGES": kernel.STAGES if state_cache.element_size() == 2 else kernel.STAGES - 1,
        "num_warps": kernel.NUM_WARPS,
        "num_stages": 1,
    }
    grid = (triton.cdiv(headdim, block_headdim), nheads // heads, slots.shape[0])
    return Launch(kernel.one_pass_heads_kernel, grid, arguments, constants)
