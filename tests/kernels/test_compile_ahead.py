"""What is compiled side by side is what the regions of a layer launch. Needs no GPU: nothing is loaded."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from inductor_passes.vllm import direct_kernel, direct_launches
from inductor_passes.vllm.compile_ahead import compiled_beside, launches
from inductor_passes.vllm.direct_region import InOnePass, InStages, OfHeads
from inductor_passes.vllm.region_inputs import LayerShape
from mamba_ops.ops.launch import Launch
from tests.compile_only_driver import compile_only

# No other test has kernels for so many heads.
SHAPE = LayerShape(
    nheads=24,
    headdim=64,
    ngroups=2,
    dstate=64,
    chunk_size=128,
    width=4,
    dtype=torch.bfloat16,
    state_dtype=torch.float32,
    parameter_dtypes=(torch.bfloat16, torch.float32, torch.float32),
    has_conv_bias=True,
    conv_strides=(1, 24 * 64 + 2 * 2 * 64),
    device=torch.device("cpu"),
)
FORMS = ((32, True), (32, False), (64, True), (64, False))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(direct_launches, "_multiprocessors", lambda _: 132)
    return tmp_path


def compiled(cache: Path) -> int:
    return len(list(cache.rglob("*.cubin")))


def test_regions_launch_nothing_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_kernel, "_launcher", lambda *_: None)  # loading a kernel takes a GPU
    with compile_only():
        for make in launches(SHAPE, FORMS, checkpoints=True):
            with contextlib.suppress(ValueError):  # of 64 tokens there is no form of several heads
                direct_kernel.compiled(make())
        ahead = compiled(cache)
        OfHeads(SHAPE, 32)
        for form in FORMS:
            InOnePass(SHAPE, *form)
        InStages(SHAPE)
        InStages(SHAPE, checkpoints=True)
        for most in (32, 64):
            InOnePass(SHAPE, most, one_chunk=False, checkpoints=True)
    # The convolution, five scans in one pass, four stages; with checkpoints two scans, a stage, inputs that are kept.
    assert ahead == compiled(cache) == 14


def test_a_launch_that_cannot_be_made_is_left_to_its_region(cache: Path) -> None:
    def fails() -> Launch:
        raise ValueError("no such form")

    shape = SHAPE._replace(nheads=SHAPE.nheads + 2)
    with compile_only(), compiled_beside([fails, lambda: direct_launches.conv_launch(shape)], shape.device):
        pass
    assert compiled(cache) == 1
