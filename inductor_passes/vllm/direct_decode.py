"""Decodes beside prefills: vLLM's own two kernels, launched by address.

vLLM's way there makes some fifteen views and has Triton look at nearly a hundred arguments, in every layer of every
step. Its graphs save it that in steps of decodes alone, but not beside prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from inductor_passes.vllm.decode_launches import (
    CONV_VARYING,
    UPDATE_VARYING,
    DecodeLayout,
    VllmKernels,
    conv_launch,
    update_launch,
)
from inductor_passes.vllm.direct_kernel import Grid, NamedKernel
from inductor_passes.vllm.step import StepDecodes


class _Variant(NamedTuple):
    conv: NamedKernel
    conv_grid: Grid
    update: NamedKernel
    update_grid: Grid


class DirectDecode:
    """The decodes of layers of one layout, on a GPU.

    Args:
        layout: of the layers.
        kernels: vLLM's.

    Raises:
        ValueError: parts of a token's row are not aligned as the kernels are compiled for.
        Exception: the kernels have other parameters, or Triton cannot compile them.
    """

    def __init__(self, layout: DecodeLayout, kernels: VllmKernels) -> None:
        self.layout, self._kernels = layout, kernels
        shape = layout.shape
        self._inputs_at, self._dt_at, self._B_at, self._C_at = shape.aligned_parts()
        self._index = shape.device.index
        self._convs: dict[tuple[int, bool, bool], tuple[NamedKernel, int]] = {}
        self._updates: dict[tuple[int, bool, tuple[int, int]], tuple[NamedKernel, int]] = {}
        self._variants = {
            stride: (None, *(self._variant(ndecodes, stride) for ndecodes in range(1, layout.max_decodes + 1)))
            for stride in layout.slots_strides
        }

    def __call__(
        self, step: StepDecodes, projected: int, out: int, layer: Sequence[int | None], num_slots: int
    ) -> bool:
        """Run it, unless no kernel was compiled for such a step.

        Args:
            step: its decodes.
            projected, out: addresses, see `inductor_passes.vllm.region`.
            layer: addresses of `LayerTensors`. num_slots: of its caches.
        """
        variants = self._variants.get(step.slots_stride)
        if variants is None or step.ndecodes >= len(variants) or num_slots == 1:
            return False
        variant = variants[step.ndecodes]
        assert variant is not None
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if torch.cuda.current_device() == self._index:
            self._on(stream, variant, step, projected, out, layer, num_slots)
        else:
            with torch.accelerator.device_index(self._index):
                self._on(stream, variant, step, projected, out, layer, num_slots)
        return True

    def samples(self) -> list[tuple[int, int]]:
        """A number of decodes and a stride of slots for each pair of kernels that there is, few decodes first."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for stride, variants in self._variants.items():
            for ndecodes, variant in enumerate(variants):
                if variant is not None:
                    found.setdefault((id(variant.conv), id(variant.update)), (ndecodes, stride))
        return sorted(found.values())

    def _on(
        self,
        stream: int,
        variant: _Variant,
        step: StepDecodes,
        projected: int,
        out: int,
        layer: Sequence[int | None],
        num_slots: int,
    ) -> None:
        ndecodes, slots, _ = step
        weight, bias, A, D, dt_bias, conv_state, ssm_state = layer
        inputs = projected + self._inputs_at
        variant.conv(variant.conv_grid, stream, inputs, weight, bias, conv_state, slots, inputs, ndecodes, num_slots)
        variant.update(
            variant.update_grid,
            stream,
            ssm_state,
            inputs,
            projected + self._dt_at,
            dt_bias,
            A,
            inputs + self._B_at,
            inputs + self._C_at,
            D,
            out,
            slots,
            slots,
            ndecodes,
        )

    def _variant(self, ndecodes: int, stride: int) -> _Variant:
        """The kernels that Triton would choose for so many decodes, and how many programs of them."""
        layout, kernels = self.layout, self._kernels
        shape = layout.shape
        dtype = str(shape.state_dtype).removeprefix("torch.")
        config = kernels.config(shape.headdim, shape.dstate, ndecodes, shape.nheads, dtype, layout.is_blackwell)
        single = ndecodes == 1
        conv_key = (stride, single, ndecodes % 16 == 0)
        if conv_key not in self._convs:
            launch = conv_launch(kernels, layout, ndecodes, stride)
            self._convs[conv_key] = NamedKernel(launch, CONV_VARYING), launch.grid[1]
        update_key = (stride, single, config)
        if update_key not in self._updates:
            launch = update_launch(kernels, layout, ndecodes, stride, config)
            self._updates[update_key] = NamedKernel(launch, UPDATE_VARYING), launch.grid[0]
        conv, conv_blocks = self._convs[conv_key]
        update, update_blocks = self._updates[update_key]
        return _Variant(conv, (ndecodes, conv_blocks, 1), update, (update_blocks, ndecodes, shape.nheads))
