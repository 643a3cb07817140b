"""Regions launched by address: nothing but arithmetic between the layer and the driver.

Inductor's code for the same launches makes a tensor for every intermediate result and every view, and Triton asks each
of them for its address and the driver for what that address is. Here one buffer holds all intermediate results, and a
kernel gets numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from inductor_passes.inspection.recorded import Recording
from inductor_passes.vllm.compiled_region import CompiledRegion
from inductor_passes.vllm.direct_kernel import DirectKernel
from inductor_passes.vllm.direct_launches import (
    conv_launch,
    heads_of_a_program,
    keep_launch,
    scan_launch,
    scan_of_heads_launch,
    staged_launches,
)
from inductor_passes.vllm.example_inputs import SLOT_MULTIPLE
from inductor_passes.vllm.region_inputs import ALIGNMENT, NO_CHECKPOINTS, LayerShape, LayerTensors, StepTensors
from inductor_passes.vllm.workspace import workspace

Addresses = Sequence[int | None]


class DirectCall(NamedTuple):
    """What a region takes of a step and a layer.

    Attributes:
        ntokens: of the activations.
        step_sizes, layer_sizes: the first and the last of `Sizes` behind ntokens.
        projected, out: addresses, see `inductor_passes.vllm.region`.
        layer, step: addresses of `LayerTensors` and `StepTensors`.
        checkpoints: those of `CheckpointTensors`, for a region with checkpoints.
    """

    ntokens: int
    step_sizes: tuple[int, int, int, int]
    layer_sizes: tuple[int, int, int]
    projected: int
    out: int
    layer: Addresses
    step: Addresses
    checkpoints: Addresses = NO_CHECKPOINTS


class DirectRegion:
    """A region for the layers of one shape, on a GPU.

    Args:
        shape: of the layers.
        checkpoints: whether it keeps states in the middle of sequences, with one launch more.

    Raises:
        ValueError: parts of a token's row are not aligned as the kernels need it.
        Exception: whatever Triton raises when it cannot compile.
    """

    def __init__(self, shape: LayerShape, checkpoints: bool = False) -> None:
        self._inputs_at, self._dt_at, self._B_at, self._C_at = shape.aligned_parts()
        launch = conv_launch(shape)
        self._conv, self._channel_blocks = DirectKernel(launch, "stride_has"), launch.grid[1]
        self._keep, self._kept_blocks = None, 0
        if checkpoints:
            launch = keep_launch(shape)
            self._keep, self._kept_blocks = DirectKernel(launch, "stride_checkpoint_slots"), launch.grid[1]
        self._row_bytes = shape.conv_dim * shape.dtype.itemsize
        self._steps_bytes = shape.nheads * shape.chunk_size * 4
        self._device, self._index = shape.device, shape.device.index
        self._chunk_bytes = 2 * self._steps_bytes

    def __call__(self, call: DirectCall) -> None:
        """Run it."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if torch.cuda.current_device() == self._index:
            self.on(stream, call)
        else:
            with torch.accelerator.device_index(self._index):
                self.on(stream, call)

    def on(self, stream: int, call: DirectCall) -> None:
        """Run it on a stream of the current device."""
        ntokens, step_sizes, layer_sizes, projected, _, layer, step, (_, kept_offsets, kept_slots) = call
        nseqs, nchunks, ntiles, slots_stride = step_sizes
        num_slots, conv_step, _ = layer_sizes
        weight, bias, A, _, dt_bias, conv_state, _ = layer
        cu_seqlens, cu_chunk_seqlens, _, _, slots, has, sequence, offset = step
        dt_from = -(-ntokens * self._row_bytes // ALIGNMENT) * ALIGNMENT
        buffer = workspace(self._device, stream, dt_from + nchunks * self._chunk_bytes)
        convolved = buffer.data_ptr()
        dt_out = convolved + dt_from
        dA_cumsum = dt_out + nchunks * self._steps_bytes
        if self._keep is not None:  # before the convolution writes over what a checkpoint may need
            self._keep(
                (nseqs, self._kept_blocks, 1),
                stream,
                projected + self._inputs_at,
                cu_seqlens,
                conv_state,
                slots,
                has,
                kept_offsets,
                kept_slots,
                num_slots,
                conv_step * SLOT_MULTIPLE,
                slots_stride,
                1,
                1,
            )
        self._conv(
            (ntiles + nchunks, self._channel_blocks, 1),
            stream,
            projected + self._inputs_at,
            weight,
            bias,
            cu_seqlens,
            conv_state,
            slots,
            has,
            sequence,
            offset,
            convolved,
            projected + self._dt_at,
            A,
            dt_bias,
            cu_chunk_seqlens,
            dt_out,
            dA_cumsum,
            ntiles,
            num_slots,
            conv_step * SLOT_MULTIPLE,
            slots_stride,
            1,
        )
        self._scan(stream, call, convolved, dt_out, dA_cumsum)

    def _scan(self, stream: int, call: DirectCall, convolved: int, dt_out: int, dA_cumsum: int) -> None:
        """Launch what follows the convolution and the sums. Its own results go behind `dA_cumsum`."""
        raise NotImplementedError


class InOnePass(DirectRegion):
    """`prefill_in_one_pass`: two launches, three with checkpoints."""

    def __init__(self, shape: LayerShape, max_tokens: int, one_chunk: bool, checkpoints: bool = False) -> None:
        super().__init__(shape, checkpoints)
        launch = scan_launch(shape, max_tokens, one_chunk, checkpoints)
        self._kernel = DirectKernel(launch, "stride_checkpoint_slots")
        self._headdim_blocks, self._nheads, _ = launch.grid
        self._one_chunk = one_chunk

    def _scan(self, stream: int, call: DirectCall, convolved: int, dt_out: int, dA_cumsum: int) -> None:
        _, step_sizes, layer_sizes, _, out, layer, step, checkpoints = call
        nseqs, _, _, slots_stride = step_sizes
        num_slots, _, ssm_step = layer_sizes
        _, cu_chunk_seqlens, last_chunk_indices, _, slots, has, _, _ = step
        self._kernel(
            (self._headdim_blocks, self._nheads, nseqs),
            stream,
            convolved,
            convolved + self._B_at,
            convolved + self._C_at,
            dt_out,
            dA_cumsum,
            cu_chunk_seqlens,
            None if self._one_chunk else last_chunk_indices,
            layer[3],
            layer[6],
            slots,
            has,
            out,
            *checkpoints,
            num_slots,
            ssm_step * SLOT_MULTIPLE,
            slots_stride,
            1,
            1,
        )


class OfHeads(DirectRegion):
    """The same for many sequences of one chunk each: a program goes through several heads."""

    def __init__(self, shape: LayerShape, max_tokens: int, heads: int | None = None) -> None:
        super().__init__(shape)
        launch = scan_of_heads_launch(shape, max_tokens)
        self._kernel, self._headdim_blocks = DirectKernel(launch, "heads"), launch.grid[0]
        self._shape, self._heads = shape, heads
        self._grids: dict[int, tuple[int, int]] = {}  # by the number of sequences: programs of one, heads of a program

    def _scan(self, stream: int, call: DirectCall, convolved: int, dt_out: int, dA_cumsum: int) -> None:
        _, step_sizes, layer_sizes, _, out, layer, step, _ = call
        nseqs, _, _, slots_stride = step_sizes
        num_slots, _, ssm_step = layer_sizes
        _, cu_chunk_seqlens, _, _, slots, has, _, _ = step
        programs, heads = self._grids.get(nseqs) or self._choose(nseqs)
        self._kernel(
            (self._headdim_blocks, programs, nseqs),
            stream,
            convolved,
            convolved + self._B_at,
            convolved + self._C_at,
            dt_out,
            dA_cumsum,
            cu_chunk_seqlens,
            layer[3],
            layer[6],
            slots,
            has,
            out,
            num_slots,
            ssm_step * SLOT_MULTIPLE,
            slots_stride,
            1,
            heads,
        )

    def _choose(self, nseqs: int) -> tuple[int, int]:
        heads = self._heads or heads_of_a_program(nseqs, self._shape)
        chosen = self._grids[nseqs] = (self._shape.nheads // heads, heads)
        return chosen


class InStages(DirectRegion):
    """`prefill`: five launches, those that are left once the snapshot is gone; with checkpoints one more."""

    def __init__(self, shape: LayerShape, checkpoints: bool = False) -> None:
        super().__init__(shape, checkpoints)
        state, passing, bmm, scan = staged_launches(shape, checkpoints)
        self._state, self._state_grid = DirectKernel(state, "states_ptr"), state.grid
        self._passing, self._passing_grid = DirectKernel(passing, "stride_checkpoint_slots"), passing.grid
        self._bmm, self._bmm_grid = DirectKernel(bmm, "cb_ptr"), bmm.grid
        self._outputs, self._outputs_grid = DirectKernel(scan, "out_ptr"), scan.grid
        elements = shape.nheads * shape.headdim * shape.dstate
        self._states_bytes = elements * 4
        self._entering_bytes = elements * shape.state_dtype.itemsize
        if self._entering_bytes % ALIGNMENT:
            raise ValueError("a state is too small")
        self._chunk_bytes += self._states_bytes + self._entering_bytes + shape.ngroups * shape.chunk_size**2 * 4

    def _scan(self, stream: int, call: DirectCall, convolved: int, dt_out: int, dA_cumsum: int) -> None:
        _, step_sizes, layer_sizes, _, out, layer, step, checkpoints = call
        nseqs, nchunks, _, slots_stride = step_sizes
        num_slots, _, ssm_step = layer_sizes
        _, chunks, last_chunk_indices, _, slots, has, _, _ = step
        x, B, C = convolved, convolved + self._B_at, convolved + self._C_at
        states = dA_cumsum + nchunks * self._steps_bytes
        entering = states + nchunks * self._states_bytes
        cb = entering + nchunks * self._entering_bytes
        cache, stride = layer[6], ssm_step * SLOT_MULTIPLE
        self._state(_over(self._state_grid, nchunks), stream, x, B, dt_out, dA_cumsum, chunks, states)
        self._passing(
            (*self._passing_grid[:2], nseqs),
            stream,
            states,
            dA_cumsum,
            last_chunk_indices,
            entering,
            cache,
            slots,
            has,
            cache,
            slots,
            *checkpoints,
            num_slots,
            stride,
            stride,
            slots_stride,
            1,
            slots_stride,
            1,
        )
        self._bmm(_over(self._bmm_grid, nchunks), stream, C, B, chunks, cb)
        grid = _over(self._outputs_grid, nchunks)
        self._outputs(grid, stream, cb, x, dt_out, dA_cumsum, C, entering, chunks, layer[3], None, out)


def direct_region_in_one_pass(
    shape: LayerShape, max_tokens: int, one_chunk: bool, checkpoints: bool = False
) -> CompiledRegion:
    """`prefill_in_one_pass`, launched by address.

    Args:
        shape: of the layers, on a GPU.
        max_tokens: no sequence is longer.
        one_chunk: whether each sequence is one chunk.
        checkpoints: whether it does what `keep_inputs` and `prefill_with_checkpoints` do. A chunk ends at a checkpoint,
            so not with `one_chunk`.

    Raises:
        See `DirectRegion`.
    """
    return _region(
        shape, lambda: InOnePass(shape, max_tokens, one_chunk, checkpoints), max_tokens, one_chunk, checkpoints
    )


def direct_region_of_heads(shape: LayerShape, max_tokens: int, heads: int | None = None) -> CompiledRegion:
    """`direct_region_in_one_pass` for steps of many sequences, of one chunk each; see `sequences_for_heads`.

    Args:
        heads: of a program, a part of a group. None: what is fastest for the number of sequences.
    """
    return _region(shape, lambda: OfHeads(shape, max_tokens, heads), max_tokens, True, False)


def direct_region(shape: LayerShape, checkpoints: bool = False) -> CompiledRegion:
    """`prefill`, launched by address.

    Args:
        shape: of the layers, on a GPU.
        checkpoints: whether it does what `keep_inputs` and `prefill_with_checkpoints` do.

    Raises:
        See `DirectRegion`.
    """
    return _region(shape, lambda: InStages(shape, checkpoints), None, False, checkpoints)


def _over(grid: tuple[Any, ...], nchunks: int) -> tuple[int, int, int]:
    return grid[0], nchunks, grid[2]


def _region(
    shape: LayerShape, make: Callable[[], DirectRegion], max_tokens: int | None, one_chunk: bool, checkpoints: bool
) -> CompiledRegion:
    with torch.inference_mode(False), torch.accelerator.device_index(shape.device.index):
        direct = make()
    note = "the kernels are launched by address: there is no graph and no generated code"
    recording = Recording(problems=[note])
    return CompiledRegion(shape, checkpoints, max_tokens, one_chunk, over_tensors(shape, direct), recording, direct)


def over_tensors(shape: LayerShape, direct: Callable[[DirectCall], None]) -> Callable[[list[Any]], None]:
    """What takes sizes and tensors, as `CompiledRegion.run` does, and calls a `DirectRegion` with addresses."""
    bias_at = LayerTensors._fields.index("conv_bias")
    nlayer = len(LayerTensors._fields) - (not shape.has_conv_bias)
    nstep = len(StepTensors._fields)

    def run(arguments: list[Any]) -> None:
        ntokens, *sizes = arguments[:8]
        projected, out, *rest = (tensor.data_ptr() for tensor in arguments[8:])
        layer: list[int | None] = rest[:nlayer]
        step = rest[nlayer : nlayer + nstep]
        kept: Addresses = rest[nlayer + nstep :] or NO_CHECKPOINTS
        if not shape.has_conv_bias:
            layer.insert(bias_at, None)
        nseqs, nchunks, ntiles, slots_stride, *layer_sizes = sizes
        num_slots, conv_step, ssm_step = layer_sizes
        of_step, of_layer = (nseqs, nchunks, ntiles, slots_stride), (num_slots, conv_step, ssm_step)
        direct(DirectCall(ntokens, of_step, of_layer, projected, out, layer, step, kept))

    return run
