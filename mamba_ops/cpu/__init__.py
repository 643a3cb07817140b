"""The CPU branch of every op: plain PyTorch in FP32, vectorised by chunk, that shows what the kernels compute."""

from mamba_ops.cpu.bmm_chunk import bmm_chunk
from mamba_ops.cpu.chunk_cumsum import chunk_cumsum
from mamba_ops.cpu.chunk_scan import chunk_scan
from mamba_ops.cpu.chunk_state import chunk_state
from mamba_ops.cpu.conv_checkpoint import conv_checkpoint
from mamba_ops.cpu.masked_gather import masked_gather
from mamba_ops.cpu.one_pass import one_pass_scan
from mamba_ops.cpu.state_passing import state_passing, state_passing_indexed, state_passing_update

__all__ = [
    "bmm_chunk",
    "chunk_cumsum",
    "chunk_scan",
    "chunk_state",
    "conv_checkpoint",
    "masked_gather",
    "one_pass_scan",
    "state_passing",
    "state_passing_indexed",
    "state_passing_update",
]
