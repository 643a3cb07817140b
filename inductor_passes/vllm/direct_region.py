"""The region for short sequences, launched by address: nothing but arithmetic between the layer and the driver.

Inductor's code for the same two launches makes a tensor for every intermediate result and every view, and Triton asks
each of them for its address and the driver for what that address is. Here one buffer holds all intermediate results,
and a kernel gets numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inductor_passes.inspection.recorded import Recording
from inductor_passes.vllm.compiled_region import CompiledRegion
from inductor_passes.vllm.example_inputs import SLOT_MULTIPLE
from inductor_passes.vllm.region_inputs import LayerShape
from mamba_ops.ops.conv_cumsum import conv_cumsum_launch
from mamba_ops.ops.launch import Launch
from mamba_ops.ops.one_pass import one_pass_launch

_ALIGNMENT = 16  # bytes; what the kernels are compiled for


class DirectKernel:
    """A Triton kernel compiled for one launch's arguments, of which the first ones may then vary.

    Args:
        launch: its arguments stand for all later ones: the same types, the same divisibility by 16, the same ones.
        varying: how many of the kernel's parameters are given in each call, tensors as addresses.
    """

    def __init__(self, launch: Launch, varying: int) -> None:
        names: list[str] = launch.kernel.arg_names
        given = dict(zip(names, launch.arguments, strict=False)) | launch.constants
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
        self._fixed = tuple(given[name] for name in names[varying:])
        self._run: Callable[..., None] = compiled.run  # loads the kernel
        self._function, self._metadata = compiled.function, compiled.packed_metadata

    def __call__(self, grid: tuple[int, int, int], stream: int, *varying: int | None) -> None:
        """Launch it."""
        self._run(*grid, stream, self._function, self._metadata, None, None, None, *varying, *self._fixed)


def direct_region_in_one_pass(shape: LayerShape, max_tokens: int, one_chunk: bool) -> CompiledRegion:
    """`prefill_in_one_pass`, launched by address.

    Args:
        shape: of the layers, on a GPU.
        max_tokens: no sequence is longer.
        one_chunk: whether each sequence is one chunk.

    Raises:
        ValueError: parts of a token's row are not aligned as the kernels need it.
        Exception: whatever Triton raises when it cannot compile.
    """
    itemsize = shape.dtype.itemsize
    x_at, dt_at = shape.inner * itemsize, (shape.inner + shape.conv_dim) * itemsize
    B_at, C_at = x_at, x_at + shape.ngroups * shape.dstate * itemsize
    if (x_at | dt_at | C_at) % _ALIGNMENT:
        raise ValueError("parts of a token's row are not aligned")
    with torch.inference_mode(False), torch.accelerator.device_index(shape.device.index):
        conv, scan = _launches(shape, max_tokens, one_chunk)
        conv_kernel, scan_kernel = DirectKernel(conv, 21), DirectKernel(scan, 16)
    channel_blocks, (headdim_blocks, nheads, _) = conv.grid[1], scan.grid
    row_bytes, steps_bytes = shape.conv_dim * itemsize, shape.nheads * shape.chunk_size * 4
    device, index, has_conv_bias = shape.device, shape.device.index, shape.has_conv_bias
    current_stream = torch._C._cuda_getCurrentRawStream

    def launch(arguments: list[Any]) -> None:
        ntokens, nseqs, nchunks, ntiles, slots_stride, num_slots, conv_step, ssm_step, projected, out, *rest = arguments
        addresses = [tensor.data_ptr() for tensor in rest]
        if not has_conv_bias:
            addresses.insert(1, None)
        weight, bias, A, D, dt_bias, conv_state, ssm_state, *step = addresses
        cu_seqlens, cu_chunk_seqlens, last_chunk_indices, _, slots, has, sequence, offset = step
        dt_from = -(-ntokens * row_bytes // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.empty(dt_from + 2 * nchunks * steps_bytes, dtype=torch.uint8, device=device)
        convolved, x = buffer.data_ptr(), projected.data_ptr()
        dt_out = convolved + dt_from
        dA_cumsum = dt_out + nchunks * steps_bytes
        stream = current_stream(index)
        conv_kernel(
            (ntiles + nchunks, channel_blocks, 1),
            stream,
            x + x_at,
            weight,
            bias,
            cu_seqlens,
            conv_state,
            slots,
            has,
            sequence,
            offset,
            convolved,
            x + dt_at,
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
        scan_kernel(
            (headdim_blocks, nheads, nseqs),
            stream,
            convolved,
            convolved + B_at,
            convolved + C_at,
            dt_out,
            dA_cumsum,
            cu_chunk_seqlens,
            None if one_chunk else last_chunk_indices,
            D,
            ssm_state,
            slots,
            has,
            out.data_ptr(),
            num_slots,
            ssm_step * SLOT_MULTIPLE,
            slots_stride,
            1,
        )

    def run(arguments: list[Any]) -> None:
        if torch.cuda.current_device() == index:
            launch(arguments)
        else:
            with torch.accelerator.device_index(index):
                launch(arguments)

    note = "two kernels are launched by address: there is no graph and no generated code"
    return CompiledRegion(shape, False, max_tokens, one_chunk, run, Recording(problems=[note]))


def _launches(shape: LayerShape, max_tokens: int, one_chunk: bool) -> tuple[Launch, Launch]:
    """Both launches on tensors without memory, which stand for all later ones."""
    groups = shape.ngroups * shape.dstate
    conv_dtype, d_dtype, dt_bias_dtype = shape.parameter_dtypes
    with torch.device("meta"):
        # Two tokens, as a view of a single one forgets the distance between tokens.
        projected = torch.empty(2, shape.projected, dtype=shape.dtype)
        _, inputs, dt = projected.split([shape.inner, shape.conv_dim, shape.nheads], dim=1)
        convolved = torch.empty(2, shape.conv_dim, dtype=shape.dtype)
        x, B, C = convolved.split([shape.inner, groups, groups], dim=1)
        out = torch.empty(2, shape.nheads, shape.headdim, dtype=shape.dtype)
        steps = torch.empty(1, shape.nheads, shape.chunk_size)
        A = torch.empty(shape.nheads)
        conv_state = torch.empty_strided(
            (1, shape.conv_dim, shape.width - 1), (2 * SLOT_MULTIPLE, *shape.conv_strides), dtype=shape.dtype
        )
        row = (1, shape.nheads, shape.headdim, shape.dstate)
        row_strides = (2 * SLOT_MULTIPLE, shape.headdim * shape.dstate, shape.dstate, 1)
        ssm_state = torch.empty_strided(row, row_strides, dtype=shape.state_dtype)
        integers, has = torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.bool)
        conv = conv_cumsum_launch(
            inputs,
            torch.empty(shape.conv_dim, shape.width, dtype=conv_dtype),
            torch.empty(shape.conv_dim, dtype=conv_dtype) if shape.has_conv_bias else None,
            integers,
            conv_state,
            integers[:1],
            has,
            integers[:1],
            integers[:1],
            convolved,
            dt,
            A,
            torch.empty(shape.nheads, dtype=dt_bias_dtype),
            integers,
            steps,
            steps,
            True,
        )
        scan = one_pass_launch(
            x.unflatten(1, (shape.nheads, shape.headdim)),
            B.unflatten(1, (shape.ngroups, shape.dstate)),
            C.unflatten(1, (shape.ngroups, shape.dstate)),
            steps,
            steps,
            integers,
            ssm_state,
            integers[:1],
            has,
            out,
            max_tokens,
            torch.empty(shape.nheads, dtype=d_dtype),
            None if one_chunk else integers[:1],
        )
    return conv, scan
