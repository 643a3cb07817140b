"""Regions launched by address, in Triton's interpreter: which number goes where, and where results lie in between."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from torch import Tensor

from inductor_passes.inspection.recorded import Recording
from inductor_passes.vllm import direct_region, workspace
from inductor_passes.vllm.compiled_region import CompiledRegion, compile_region_with_checkpoints
from inductor_passes.vllm.direct_region import DirectCall, DirectRegion, InOnePass, InStages, OfHeads, over_tensors
from inductor_passes.vllm.full_tables import FullTables
from inductor_passes.vllm.region_inputs import LayerShape
from inductor_passes.vllm.self_check import check_against
from mamba_ops.ops.launch import Launch
from tests.vllm.full_step_cases import Captured, Step, random_step
from tests.vllm.test_region import assert_equals_uncompiled, shape_on


class InterpretedKernel:
    """Takes what a `DirectKernel` takes, and gives the interpreter tensors over those addresses."""

    def __init__(self, launch: Launch, last_varying: str) -> None:
        self._launch, self._varying = launch, launch.kernel.arg_names.index(last_varying) + 1
        assert not any(isinstance(argument, Tensor) for argument in launch.arguments[self._varying :])

    def __call__(self, grid: tuple[int, int, int], stream: int, *varying: int | None) -> None:
        assert len(varying) == self._varying
        given = zip(varying, self._launch.arguments, strict=False)
        arguments = [tensor_at(value, like) if isinstance(like, Tensor) else value for value, like in given]
        arguments += self._launch.arguments[self._varying :]
        self._launch.kernel[grid](*arguments, **self._launch.constants)


def tensor_at(address: int | None, like: Tensor) -> Tensor:
    assert address
    assert address % like.itemsize == 0
    memory = (ctypes.c_byte * like.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype)


@pytest.fixture(params=[torch.float16, torch.float32])
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerShape:
    monkeypatch.setattr(direct_region, "DirectKernel", InterpretedKernel)
    small = {"nheads": 4, "headdim": 16, "chunk_size": 16, "conv_strides": (1, 4 * 16 + 2 * 2 * 16)}
    return shape_on("cpu", request.param)._replace(**small, has_conv_bias=random.random() < 0.5)


def region_of(
    direct: DirectRegion, shape: LayerShape, max_tokens: int | None, one_chunk: bool, checkpoints: bool = False
) -> CompiledRegion:
    def on_no_stream(call: DirectCall) -> None:
        workspace.workspace(shape.device, 0, 1 << 20).fill_(0xFF)  # NaN in every dtype
        direct.on(0, call)

    run = over_tensors(shape, on_no_stream)
    return CompiledRegion(shape, checkpoints, max_tokens, one_chunk, run, Recording(), on_no_stream)


def test_in_stages(shape: LayerShape) -> None:
    region = region_of(InStages(shape), shape, None, one_chunk=False)
    for lengths, contexts in (([1], [0]), ([20], [15]), ([5, 20, 1, 33], [0, 16, 3, 1]), ([16, 2], [16, 15])):
        assert_equals_uncompiled(region, lengths, contexts)


@pytest.mark.parametrize("one_chunk", [True, False])
def test_in_one_pass(shape: LayerShape, one_chunk: bool) -> None:
    """To the rounding of a sum: NumPy sums products of matrices in an order that depends on their sizes."""
    region = region_of(InOnePass(shape, 16, one_chunk), shape, 16, one_chunk)
    for lengths, contexts in (([16], [0]), ([5, 3, 1, 16], [11, 13, 0, 32]), ([16, 2], [16, 14])):
        assert_equals_uncompiled(region, lengths, contexts, steps=8)


@pytest.mark.parametrize("heads", [1, 2])
def test_of_several_heads(shape: LayerShape, heads: int) -> None:
    region = region_of(OfHeads(shape, 16, heads), shape, 16, one_chunk=True)
    for lengths, contexts in (([16], [0]), ([5, 3, 1, 16], [11, 13, 0, 32]), ([16, 2], [16, 14])):
        assert_equals_uncompiled(region, lengths, contexts, steps=8)


def test_a_step_that_is_one_graph(shape: LayerShape) -> None:
    """The same call for steps of other lengths, slots and mixes: for what is padding nothing is read or written."""
    region = region_of(InOnePass(shape, 16, one_chunk=False), shape, 16, one_chunk=False)
    tables = FullTables(16, 5, shape.chunk_size, shape.device, pinned=False)
    captured = Captured(region, tables, 16, 5, lambda run: run)
    rng = random.Random()
    for _ in range(8):
        step = random_step(rng, 16, shape.chunk_size)
        if len(step.lengths) <= captured.sizes.nseqs:
            captured.assert_equals_uncompiled(step, steps=8)
    captured.assert_equals_uncompiled(Step([1, 1], [9, 2], 2), steps=8)
    captured.assert_equals_uncompiled(Step([1, 15], [4, 9], 1), steps=8)


@pytest.mark.fault(13)
@pytest.mark.parametrize("max_tokens", [None, 16])
def test_with_checkpoints(shape: LayerShape, max_tokens: int | None) -> None:
    """The states on the way, as the region keeps them in plain PyTorch, and as prefills that end there leave them."""
    if max_tokens is None:
        direct: DirectRegion = InStages(shape, checkpoints=True)
    else:
        direct = InOnePass(shape, max_tokens, one_chunk=False, checkpoints=True)
    region = region_of(direct, shape, max_tokens, one_chunk=False, checkpoints=True)
    check_against(region, compile_region_with_checkpoints(shape))
    check_against(region, region_of(InStages(shape), shape, None, one_chunk=False))


def test_a_larger_need_gets_memory_of_its_own() -> None:
    kept = workspace.workspace(torch.device("cpu"), 7, 1000)
    assert workspace.workspace(torch.device("cpu"), 7, 1024) is kept
    assert workspace.workspace(torch.device("cpu"), 8, 1024) is not kept
    assert workspace.workspace(torch.device("cpu"), 7, 1025).shape[0] >= 1025
    large = workspace.workspace(torch.device("cpu"), 7, workspace.KEPT + 1)
    assert workspace.workspace(torch.device("cpu"), 7, workspace.KEPT + 1) is not large
