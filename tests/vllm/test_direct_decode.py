"""Decodes beside prefills, launched by address: the bits of vLLM's own functions, or else vLLM's own way.

The tests on a GPU call vLLM's functions themselves, so they need vLLM 0.33 in the Python that runs them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl

from inductor_passes.vllm.decode_launches import DecodeLayout, vllm_kernels
from inductor_passes.vllm.direct_kernel import NamedKernel
from inductor_passes.vllm.region_inputs import LayerShape
from inductor_passes.vllm.step import StepDecodes
from mamba_ops.ops.launch import Launch
from tests.compile_only_driver import compile_only
from tests.vllm.answers import assert_same_answers
from tests.vllm.conftest import Run
from tests.vllm.schedules import add, prompt
from tests.vllm.test_region import shape_on

# The second prompt comes while the first one decodes, and is longer than a step.
BESIDE = [add(0, "a", prompt(0, 60), 12), add(3, "b", prompt(1, 300), 4)]


def test_on_a_cpu_vllms_own_code_runs_them_without_a_word(run: Run) -> None:
    ours = run("granite", [BESIDE], plugin=True, own_process="beside")
    assert_same_answers(ours, run("granite", [BESIDE], plugin=False))
    assert "layer_decodes" not in ours["counters"]
    assert "decodes beside prefills" not in ours["log"]


@triton.jit
def add_scalar(x_ptr, out_ptr, addend, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + addend)


@pytest.mark.parametrize("renamed", ["x_ptr", "addend", "BLOCK"])
def test_a_kernel_with_other_parameters_is_not_launched(renamed: str) -> None:
    x = torch.empty(16, device="meta")
    arguments = {"x_ptr": x, "out_ptr": x, "addend": 3, "BLOCK": 16}
    arguments[f"new_{renamed}"] = arguments.pop(renamed)
    with compile_only(), pytest.raises((TypeError, KeyError), match=renamed):
        NamedKernel(Launch(add_scalar, (1, 1, 1), (), arguments), ("out_ptr",))


def test_what_varies_must_be_a_parameter() -> None:
    with pytest.raises(ValueError, match="no parameter y_ptr"):
        NamedKernel(Launch(add_scalar, (1, 1, 1), (), {}), ("x_ptr", "y_ptr"))


@pytest.fixture
def vllm_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine would have set it up; its Triton backend is the only one with kernels of vLLM's own."""
    dispatch = pytest.importorskip("vllm.model_executor.layers.mamba.ops.ssu_dispatch")
    config = pytest.importorskip("vllm.config.mamba")
    monkeypatch.setattr(dispatch, "_mamba_ssu_backend", dispatch.TritonSSUBackend(config.MambaConfig()))


def layout_of(shape: LayerShape) -> DecodeLayout:
    """Both states of a slot in a page of its own, with something between the pages."""
    page = shape.conv_dim * (shape.width - 1) * shape.dtype.itemsize
    page += shape.nheads * shape.headdim * shape.dstate * shape.state_dtype.itemsize
    page = -(-page // 64) * 64 + 64
    return DecodeLayout(
        shape, page // shape.dtype.itemsize, page // shape.state_dtype.itemsize, (1, 3, 16), 40, False, 0
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("vllm_backend")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_conv_bias", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("sizes", [(64, 64, 1, 128), (24, 64, 8, 128), (48, 64, 1, 64)])
def test_the_same_bits_as_vllms_own_functions(
    state_dtype: torch.dtype, has_conv_bias: bool, channels_last: bool, sizes: tuple[int, int, int, int]
) -> None:
    """Outputs, what the convolution leaves in the activations, and caches with all that lies between their slots."""
    from inductor_passes.vllm.decode_check import equals_vllm
    from inductor_passes.vllm.direct_decode import DirectDecode

    nheads, headdim, ngroups, dstate = sizes
    shape = shape_on("cuda:0", torch.bfloat16)._replace(
        nheads=nheads,
        headdim=headdim,
        ngroups=ngroups,
        dstate=dstate,
        state_dtype=state_dtype,
        has_conv_bias=has_conv_bias,
    )
    strides = (1, shape.conv_dim) if channels_last else (shape.width - 1, 1)
    decode = DirectDecode(layout_of(shape._replace(conv_strides=strides)), vllm_kernels())
    for ndecodes in range(1, 41):
        seed = random.randrange(2**31)
        assert equals_vllm(decode, ndecodes, random.choice((1, 3, 16)), seed), f"{ndecodes} decodes, seed {seed}"


@pytest.mark.gpu
@pytest.mark.usefixtures("vllm_backend")
def test_the_check_finds_a_difference_and_other_steps_are_not_taken() -> None:
    from inductor_passes.vllm.decode_check import check_decodes
    from inductor_passes.vllm.direct_decode import DirectDecode

    class OneRowLate(DirectDecode):
        def __call__(
            self, step: StepDecodes, projected: int, out: int, layer: Sequence[int | None], num_slots: int
        ) -> bool:
            row = self.layout.shape.inner * self.layout.shape.dtype.itemsize
            return super().__call__(step, projected, out + row, layer, num_slots)

    layout = layout_of(shape_on("cuda:0", torch.bfloat16))
    check_decodes(DirectDecode(layout, vllm_kernels()))
    with pytest.raises(RuntimeError, match="self check: 1 decodes"):
        check_decodes(OneRowLate(layout, vllm_kernels()))
    decode = DirectDecode(layout, vllm_kernels())
    for step, num_slots in ((StepDecodes(41, 0, 1), 9), (StepDecodes(2, 0, 2), 9), (StepDecodes(2, 0, 1), 1)):
        assert not decode(step, 0, 0, [None] * 7, num_slots)
