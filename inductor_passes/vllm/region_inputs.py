"""What a region takes: the constants of a layer's shape, a layer's tensors, and those of a step."""

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; of all addresses for which kernels are compiled, but for those of metadata


class LayerShape(NamedTuple):
    """What is constant in the compiled region; layers that agree share one.

    Attributes:
        nheads, headdim, ngroups, dstate: of this rank's shard.
        chunk_size: tokens.
        width: taps of the convolution.
        dtype: of activations and of the convolution's cache. state_dtype: of the state cache. parameter_dtypes: of the
            convolution's weight, D and dt_bias.
        has_conv_bias: whether the convolution has a bias.
        conv_strides: of channel and token in the convolution's cache, in elements.
        device: where it runs.
    """

    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    chunk_size: int
    width: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    parameter_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    has_conv_bias: bool
    conv_strides: tuple[int, int]
    device: torch.device

    @property
    def inner(self) -> int:
        """Width of x, of the gate and of the output."""
        return self.nheads * self.headdim

    @property
    def conv_dim(self) -> int:
        """Width of x, B and C together."""
        return self.inner + 2 * self.ngroups * self.dstate

    @property
    def projected(self) -> int:
        """Width of gate, x, B, C and dt together."""
        return self.inner + self.conv_dim + self.nheads

    def aligned_parts(self) -> tuple[int, int, int, int]:
        """Bytes in front of parts of a token's row: of x, B and C together; of dt; of B and of C from x on.

        Raises:
            ValueError: a part is not aligned.
        """
        itemsize = self.dtype.itemsize
        inputs_at = B_at = self.inner * itemsize  # the gate is as wide as x
        dt_at = inputs_at + self.conv_dim * itemsize
        C_at = B_at + self.ngroups * self.dstate * itemsize
        if (inputs_at | dt_at | C_at) % ALIGNMENT:
            raise ValueError("parts of a token's row are not aligned")
        return inputs_at, dt_at, B_at, C_at


class LayerTensors(NamedTuple):
    """What a layer brings, the same in every step.

    Attributes:
        conv_weight: (conv_dim, width). conv_bias: (conv_dim,) or None. A, D, dt_bias: (nheads,).
        conv_state: (num_slots, conv_dim, width - 1). ssm_state: (num_slots, nheads, headdim, dstate).
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor
    dt_bias: Tensor
    conv_state: Tensor
    ssm_state: Tensor


class StepTensors(NamedTuple):
    """What a step brings, the same for every layer whose caches have the same slots.

    Attributes:
        cu_seqlens: (nseqs + 1,) int32. cu_chunk_seqlens: (nchunks + 1,) int32. last_chunk_indices: (nseqs,) int32.
        seq_idx: (nchunks,) int32.
        slots: (nseqs,) int32, any stride. has_initial_state: (nseqs,) bool.
        tile_sequence, tile_offset: (ntiles,) int32, see `causal_conv_tiled`.
    """

    cu_seqlens: Tensor
    cu_chunk_seqlens: Tensor
    last_chunk_indices: Tensor
    seq_idx: Tensor
    slots: Tensor
    has_initial_state: Tensor
    tile_sequence: Tensor
    tile_offset: Tensor


class CheckpointTensors(NamedTuple):
    """Which states a step keeps in the middle of its prefills, for prefix caching.

    Attributes:
        chunks: (nseqs,) int64, the chunk that ends at the checkpoint.
        offsets: (nseqs,) int32, tokens of the sequence in this step up to the checkpoint; 0 for no checkpoint.
        slots: (nseqs,) int32, where the states there go; a slot that no sequence of the step owns.
    """

    chunks: Tensor
    offsets: Tensor
    slots: Tensor


# In place of the addresses of `CheckpointTensors`, where a step has none.
NO_CHECKPOINTS = (None, None, None)
