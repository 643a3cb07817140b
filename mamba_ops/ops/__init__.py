"""The stages of the SSD prefill as PyTorch ops, each usable on its own and under `torch.compile`.

The convolution before them is in modules of its own, as its plain PyTorch form needs this package; only the op that
keeps its checkpoints is here.
"""

from mamba_ops.ops.bmm_chunk import bmm_chunk
from mamba_ops.ops.chunk_cumsum import chunk_cumsum
from mamba_ops.ops.chunk_scan import chunk_scan
from mamba_ops.ops.chunk_state import chunk_state
from mamba_ops.ops.conv_checkpoint import conv_checkpoint
from mamba_ops.ops.masked_gather import masked_gather
from mamba_ops.ops.one_pass import one_pass_scan
from mamba_ops.ops.opaque import read_before_write
from mamba_ops.ops.state_passing import state_passing, state_passing_indexed, state_passing_update

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

read_before_write(f"{name}_cpu" for name in __all__)
