"""Fake tensors that the region is traced with: what may vary while serving is a symbol, what is constant a number.

Symbols are shared between tensors that agree by construction (every per-sequence tensor has one entry a sequence), and
the distance of cache slots is a multiple of 16 elements by construction, which lets the kernels use wide loads.
Tensors of metadata are views at an odd offset, so that the compiled code assumes no alignment of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from inductor_passes.vllm.made_up_layers import empty_layer
from inductor_passes.vllm.region_inputs import CheckpointTensors, LayerShape, LayerTensors, StepTensors

# Elements; see `LayerShape` for the tensors. Allocators hand out more than this, so a cache that has less is unusual.
SLOT_MULTIPLE = 16


class Sizes(NamedTuple):
    """What varies while serving, in the order in which the compiled region takes it.

    Attributes:
        ntokens, nseqs, nchunks, ntiles: of the step.
        slots_stride: of `slots`, in elements.
        num_slots: of the caches.
        conv_step, ssm_step: distance of two slots, in units of SLOT_MULTIPLE elements.
    """

    ntokens: int
    nseqs: int
    nchunks: int
    ntiles: int
    slots_stride: int
    num_slots: int
    conv_step: int
    ssm_step: int


class Example(NamedTuple):
    """Everything the region is traced with, all of `mode`."""

    mode: FakeTensorMode
    sizes: Sizes
    projected: Tensor
    out: Tensor
    layer: LayerTensors
    step: StepTensors
    checkpoints: CheckpointTensors


def example_inputs(shape: LayerShape) -> Example:
    """Fake inputs for layers of this shape."""
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    row = shape.nheads * shape.headdim * shape.dstate
    conv_row = shape.conv_dim * (shape.width + 1)
    # Only hints: no two are equal or a multiple of each other. Inductor takes 32-bit indices wherever the hints allow
    # it, and real caches have more elements than that.
    hints = Sizes(1009, 13, 41, 131, 7, (1 << 31) + 11, conv_row // SLOT_MULTIPLE + 3, row // SLOT_MULTIPLE + 5)
    sizes = Sizes(*(_symbol(env, name, hint) for name, hint in hints._asdict().items()))
    mode = FakeTensorMode(shape_env=env)
    with mode, torch.device(shape.device):
        int32 = torch.int32
        steps = (sizes.conv_step * SLOT_MULTIPLE, sizes.ssm_step * SLOT_MULTIPLE)
        layer = empty_layer(shape, sizes.num_slots, *steps)
        step = StepTensors(
            cu_seqlens=_unaligned(sizes.nseqs + 1, 1, int32),
            cu_chunk_seqlens=_unaligned(sizes.nchunks + 1, 1, int32),
            last_chunk_indices=_unaligned(sizes.nseqs, 1, int32),
            seq_idx=_unaligned(sizes.nchunks, 1, int32),
            slots=_unaligned(sizes.nseqs, sizes.slots_stride, int32),
            has_initial_state=_unaligned(sizes.nseqs, 1, torch.bool),
            tile_sequence=_unaligned(sizes.ntiles, 1, int32),
            tile_offset=_unaligned(sizes.ntiles, 1, int32),
        )
        checkpoints = CheckpointTensors(
            chunks=_unaligned(sizes.nseqs, 1, torch.int64),
            offsets=_unaligned(sizes.nseqs, 1, int32),
            slots=_unaligned(sizes.nseqs, 1, int32),
        )
        projected = torch.empty(sizes.ntokens, shape.projected, dtype=shape.dtype)
        out = torch.empty(sizes.ntokens, shape.nheads, shape.headdim, dtype=shape.dtype)
    return Example(mode, sizes, projected, out, layer, step, checkpoints)


def _symbol(env: ShapeEnv, name: str, hint: int) -> int:
    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    node: int = env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[assignment]
    return node


def _unaligned(size: int, stride: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size * stride + 1, dtype=dtype).as_strided((size,), (stride,), 1)
