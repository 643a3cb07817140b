"""The compiled region against the same function run op by op, with its snapshot. Needs no vLLM."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from inductor_passes.inspection.recorded import Recording
from inductor_passes.vllm import regions
from inductor_passes.vllm.compiled_region import (
    CompiledRegion,
    compile_region,
    compile_region_in_one_pass,
    compile_region_with_checkpoints,
    present,
)
from inductor_passes.vllm.direct_region import (
    DirectCall,
    direct_region,
    direct_region_in_one_pass,
    direct_region_of_heads,
)
from inductor_passes.vllm.example_inputs import SLOT_MULTIPLE
from inductor_passes.vllm.options import Options
from inductor_passes.vllm.region import keep_inputs, prefill, prefill_with_checkpoints
from inductor_passes.vllm.region_inputs import CheckpointTensors, LayerShape, LayerTensors, StepTensors
from inductor_passes.vllm.self_check import check_against, self_check
from inductor_passes.vllm.writing import write_down
from mamba_ops import build_chunk_metadata

NUM_SLOTS = 24

Keep = Scan = Callable[[CheckpointTensors], None]
Wrong = Callable[[Keep, Scan, CheckpointTensors, int], None]


def shape_on(device: str, dtype: torch.dtype = torch.float32) -> LayerShape:
    channels = 8 * 32 + 2 * 2 * 16
    return LayerShape(
        nheads=8,
        headdim=32,
        ngroups=2,
        dstate=16,
        chunk_size=64,
        width=4,
        dtype=dtype,
        state_dtype=torch.float32,
        parameter_dtypes=(dtype, dtype, dtype),
        has_conv_bias=True,
        conv_strides=(1, channels),
        device=torch.device(device),
    )


def make_layer(shape: LayerShape) -> LayerTensors:
    """Caches as two views of one buffer of bytes, one page a slot, what nobody owns NaN."""
    conv = shape.conv_dim * (shape.width - 1) * shape.dtype.itemsize
    ssm = shape.nheads * shape.headdim * shape.dstate * shape.state_dtype.itemsize
    step = 16 * SLOT_MULTIPLE
    page = -(-(conv + ssm) // step) * step + step
    pages = torch.empty(NUM_SLOTS, page, dtype=torch.int8, device=shape.device)
    first = (
        pages[:, :conv]
        .view(shape.dtype)
        .as_strided((NUM_SLOTS, shape.conv_dim, shape.width - 1), (page // shape.dtype.itemsize, *shape.conv_strides))
    )
    second = pages[:, conv : conv + ssm].view(shape.state_dtype)
    second = second.unflatten(1, (shape.nheads, shape.headdim, shape.dstate))
    for cache in (first, second):
        cache.copy_(torch.randn(cache.shape))
    make = {"dtype": shape.dtype, "device": shape.device}
    return LayerTensors(
        torch.randn(shape.conv_dim, shape.width, **make),
        torch.randn(shape.conv_dim, **make) if shape.has_conv_bias else None,
        -torch.rand(shape.nheads, device=shape.device),
        torch.randn(shape.nheads, **make),
        torch.randn(shape.nheads, **make),
        first,
        second,
    )


def make_step(lengths: list[int], contexts: list[int], shape: LayerShape) -> StepTensors:
    offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
    metadata = build_chunk_metadata(offsets, shape.chunk_size, contexts)
    table = torch.zeros(len(lengths), 5, dtype=torch.int32)
    table[:, 0] = torch.randperm(NUM_SLOTS)[: len(lengths)]
    tiles = [(row, tile) for row, length in enumerate(lengths) for tile in range(-(-length // 8))]
    tensors = (
        metadata.cu_seqlens,
        metadata.cu_chunk_seqlens,
        metadata.last_chunk_indices,
        metadata.seq_idx,
        table,
        torch.tensor(contexts) > 0,
        torch.tensor(tiles, dtype=torch.int32).T.contiguous()[0],
        torch.tensor(tiles, dtype=torch.int32).T.contiguous()[1],
    )
    step = StepTensors(*(tensor.to(shape.device) for tensor in tensors))
    return step._replace(slots=step.slots[:, 0])


def sizes_of(projected: Tensor, layer: LayerTensors, step: StepTensors) -> tuple[int, ...]:
    steps = (cache.stride(0) // SLOT_MULTIPLE for cache in (layer.conv_state, layer.ssm_state))
    counts = (step.slots.shape[0], step.seq_idx.shape[0], step.tile_sequence.shape[0])
    return projected.shape[0], *counts, step.slots.stride(0), NUM_SLOTS, *steps


def assert_equals_uncompiled(
    region: CompiledRegion, lengths: list[int], contexts: list[int], *, steps: int = 0
) -> None:
    """Bit for bit, or to so many steps between two neighbouring numbers of the outputs' dtype."""
    shape = region.shape
    step = make_step(lengths, contexts, shape)
    layer = make_layer(shape)
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in step.slots.tolist()]
    layer.ssm_state[untouched] = torch.nan
    layer.ssm_state[step.slots.long()[~step.has_initial_state]] = torch.nan  # stale
    other = make_layer(shape)
    other = layer._replace(
        conv_state=other.conv_state.copy_(layer.conv_state), ssm_state=other.ssm_state.copy_(layer.ssm_state)
    )
    padding = 3
    projected = torch.randn(sum(lengths) + padding, shape.projected, dtype=shape.dtype, device=shape.device)
    out, expected = (
        torch.full((projected.shape[0], shape.nheads, shape.headdim), torch.nan, dtype=shape.dtype, device=shape.device)
        for _ in range(2)
    )
    prefill(projected, expected, other, step, shape)
    region(sizes_of(projected, layer, step), projected, out, present(layer), step)
    for got, want in (
        (out[:-padding], expected[:-padding]),
        (layer.conv_state, other.conv_state),
        (layer.ssm_state, other.ssm_state),
    ):
        tolerance = steps * torch.finfo(shape.dtype).eps
        torch.testing.assert_close(got, want, rtol=tolerance, atol=16 * tolerance, equal_nan=True)
    assert not out[:-padding].isnan().any()
    assert out[-padding:].isnan().all()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def region(request: pytest.FixtureRequest) -> CompiledRegion:
    return compile_region(shape_on(request.param))


def test_the_pass_removed_the_snapshot(region: CompiledRegion) -> None:
    assert [rewrite.into for rewrite in region.report.rewrites] == ["state_passing_indexed"]
    (change,) = region.recording.changes
    assert "aten.index.Tensor" in change.before.text
    assert "aten.index.Tensor" not in change.after.text


@pytest.mark.fault(7)
@pytest.mark.parametrize("nseqs", [1, 2, 3, 17])
def test_states_are_continued(region: CompiledRegion, nseqs: int) -> None:
    assert_equals_uncompiled(region, [5 + 61 * (i % 3) for i in range(nseqs)], [64 + i for i in range(nseqs)])
    assert_equals_uncompiled(region, [1] * nseqs, [i % 2 for i in range(nseqs)])


@pytest.mark.fault(12)
@pytest.mark.fault(15)
def test_one_compile_for_all_sizes(region: CompiledRegion) -> None:
    rng = random.Random()
    modules = len(PyCodeCache.modules)
    for _ in range(40):
        nseqs = rng.randint(1, 9)
        contexts = [rng.choice((0, 1, 63, 64, 100)) for _ in range(nseqs)]
        assert_equals_uncompiled(region, [rng.randint(1, 150) for _ in range(nseqs)], contexts)
    assert len(PyCodeCache.modules) == modules


@pytest.mark.parametrize("compiler", [compile_region, compile_region_with_checkpoints])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_self_check_passes(compiler: object, device: str, dtype: torch.dtype) -> None:
    assert callable(compiler)
    self_check(compiler(shape_on(device, dtype)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_self_check_passes_where_long_sums_cancel(device: str) -> None:
    """A state of 128 and chunks of 256, as in Granite-4.0-h: what a CPU adds up in another order differs by more."""
    shape = shape_on(device)._replace(headdim=64, dstate=128, ngroups=1, chunk_size=256)
    self_check(compile_region(shape._replace(conv_strides=(1, shape.conv_dim))))


@pytest.mark.gpu
@pytest.mark.fault(20)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiler", [compile_region, compile_region_with_checkpoints])
def test_tensors_that_are_not_on_the_current_device(compiler: Callable[[LayerShape], CompiledRegion]) -> None:
    with torch.cuda.device(0):
        self_check(compiler(shape_on("cuda:1")))


@pytest.mark.fault(6)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_two_dtypes_in_one_buffer(device: str) -> None:
    """BF16 inputs and FP32 states lie in the same pages, and both are written."""
    region = compile_region(shape_on(device, torch.bfloat16))
    assert_equals_uncompiled(region, [5, 70, 1, 130], [0, 64, 3, 1])


@pytest.mark.parametrize("max_tokens", [32, 64])
@pytest.mark.parametrize("one_chunk", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_sequences_in_one_pass(
    region: CompiledRegion, max_tokens: int, one_chunk: bool, dtype: torch.dtype
) -> None:
    """The same bits as in stages, whatever the number of sequences, their lengths and where their chunks begin."""
    shape = region.shape._replace(dtype=dtype, parameter_dtypes=(dtype, dtype, dtype))
    one_pass = compile_region_in_one_pass(shape, max_tokens, one_chunk)
    check_against(one_pass, compile_region(shape))
    assert_equals_uncompiled_whatever_the_sequences(one_pass)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stages_launched_by_address(dtype: torch.dtype) -> None:
    """The same bits as launched by what Inductor generated, for sequences of any length."""
    region = direct_region(shape_on("cuda:0", dtype))
    check_against(region, compile_region(region.shape))
    rng = random.Random()
    for _ in range(20):
        lengths = [rng.choice((1, 2, 31, 63, 64, 65, 200, rng.randint(1, 300))) for _ in range(rng.randint(1, 17))]
        assert_equals_uncompiled(region, lengths, [rng.randint(0, 200) for _ in lengths])


@pytest.mark.gpu
@pytest.mark.fault(13)
@pytest.mark.parametrize("max_tokens", [None, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checkpoints_launched_by_address(max_tokens: int | None, dtype: torch.dtype) -> None:
    """The same bits as kept by compiled code, and as left by prefills that end where the checkpoints are."""
    shape = shape_on("cuda:0", dtype)
    if max_tokens is None:
        region = direct_region(shape, checkpoints=True)
    else:
        region = direct_region_in_one_pass(shape, max_tokens, one_chunk=False, checkpoints=True)
    check_against(region, compile_region_with_checkpoints(shape))
    check_against(region, compile_region(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("max_tokens", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_conv_bias", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("one_chunk", [True, False])
def test_launched_by_address(
    max_tokens: int, dtype: torch.dtype, has_conv_bias: bool, channels_last: bool, one_chunk: bool
) -> None:
    """The same bits without PyTorch's and Triton's own code between the layer and the launches."""
    shape = shape_on("cuda:0", dtype)._replace(has_conv_bias=has_conv_bias)
    if not channels_last:
        shape = shape._replace(conv_strides=(shape.width - 1, 1))
    assert_equals_uncompiled_whatever_the_sequences(direct_region_in_one_pass(shape, max_tokens, one_chunk))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [None, 3, 12])
def test_several_heads_in_a_program(state_dtype: torch.dtype, heads: int | None) -> None:
    """As many as is fastest, and up to all of a group, of which a program asks for the states of three at once."""
    few = shape_on("cuda:0", torch.bfloat16)
    shape = few._replace(state_dtype=state_dtype, nheads=24, conv_strides=(few.width - 1, 1))
    region = direct_region_of_heads(shape, 32, heads)
    check_against(region, compile_region(shape))
    assert_equals_uncompiled_whatever_the_sequences(region)


def assert_equals_uncompiled_whatever_the_sequences(one_pass: CompiledRegion) -> None:
    rng = random.Random()
    max_tokens = one_pass.max_tokens or 0
    for _ in range(20):
        lengths = [rng.randint(1, max_tokens) for _ in range(rng.randint(1, 17))]
        begin = [rng.randint(0, 64 - length if one_pass.one_chunk else 63) for length in lengths]
        contexts = [64 * rng.randint(0, 2) + first for first in begin]
        assert_equals_uncompiled(one_pass, lengths, contexts)


def test_self_check_finds_a_region_that_mixes_sequences(region: CompiledRegion) -> None:
    def run(arguments: list[object]) -> None:
        region.run(arguments.copy())
        out = arguments[9]
        assert isinstance(out, Tensor)
        out[0] += out[-1]

    broken = dataclasses.replace(region, run=run)
    with pytest.raises(RuntimeError, match="self check: the output of sequence 0 differs"):
        self_check(broken)


@pytest.mark.fault(22)
def test_each_region_of_a_layer_is_written_to_a_folder_of_its_own(region: CompiledRegion, tmp_path: Path) -> None:
    def launch(_: DirectCall) -> None:
        raise AssertionError("nothing is run")

    by_address = [dataclasses.replace(region, direct=launch, max_tokens=most) for most in (None, 32, 64)]
    one_chunk = dataclasses.replace(by_address[1], one_chunk=True)
    regions = [region, one_chunk, *by_address]
    regions += [dataclasses.replace(each, checkpoints=True) for each in (region, *by_address)]
    for each in regions:
        write_down(each, tmp_path)
    assert len(list(tmp_path.iterdir())) == len(regions)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_finds_a_token_whose_outputs_are_small(device: str, dtype: torch.dtype) -> None:
    """The first of a sequence, beside tokens behind long sums, whose outputs are a hundred times as large."""
    region = compile_region(shape_on(device, dtype))

    def run(arguments: list[object]) -> None:
        region.run(arguments.copy())
        out = arguments[9]
        assert isinstance(out, Tensor)
        out[0] *= 1.1

    with pytest.raises(RuntimeError, match="self check: the output differs"):
        check_against(dataclasses.replace(region, run=run), region)


def kept_too_early(keep: Keep, scan: Scan, kept: CheckpointTensors, chunks: int) -> None:
    keep(kept._replace(offsets=(kept.offsets - 1).clamp(min=0)))
    scan(kept)


def kept_of_another_chunk(keep: Keep, scan: Scan, kept: CheckpointTensors, chunks: int) -> None:
    keep(kept)
    scan(kept._replace(chunks=(kept.chunks + 1).clamp(max=chunks - 1)))


def kept_after_the_convolution(keep: Keep, scan: Scan, kept: CheckpointTensors, chunks: int) -> None:
    scan(kept)
    keep(kept)


@pytest.mark.fault(13)
@pytest.mark.parametrize("wrong", [kept_too_early, kept_of_another_chunk, kept_after_the_convolution])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_no_region_keeps_wrong_checkpoints(wrong: Wrong, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong alike for each sequence by itself and for several: only a prefill that ends at the checkpoint tells."""
    shape = shape_on(device)

    def compile_wrong(shape: LayerShape, *, eliminate: bool) -> CompiledRegion:
        def run(arguments: list[Any]) -> None:
            projected, out, *rest = arguments[8:]
            layer, step, kept = LayerTensors(*rest[:7]), StepTensors(*rest[7:-3]), CheckpointTensors(*rest[-3:])

            def keep(kept: CheckpointTensors) -> None:
                keep_inputs(projected, layer, step, kept, shape)

            def scan(kept: CheckpointTensors) -> None:
                prefill_with_checkpoints(projected, out, layer, step, kept, shape)

            wrong(keep, scan, kept, step.seq_idx.shape[0])

        return CompiledRegion(shape, True, None, False, run, Recording())

    monkeypatch.setattr(regions, "compile_region_with_checkpoints", compile_wrong)
    monkeypatch.setattr(regions, "_regions", {})
    options = Options(direct=False)
    with pytest.raises(RuntimeError, match=r"self check: the (convolution's )?states differs"):
        regions.region_for(shape, True, options)


def assert_rows_alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums where chunks end elsewhere; a GPU also cuts FP32 factors to TF32, and where large
    terms cancel little of one element is left, so the error is held against its whole row."""
    limit = 1e-4 if expected.device.type == "cpu" else 3e-2
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < limit, f"a row is off by {error.max():.2e} of its length"


@pytest.mark.fault(13)
@pytest.mark.parametrize("offset", [2, 40, 64, 100])
def test_checkpoint_is_the_state_of_a_shorter_prefill(region: CompiledRegion, offset: int) -> None:
    """The slot of a checkpoint holds what a prefill up to there leaves; the rest is as without a checkpoint."""
    shape = region.shape
    layer, shorter, plain = make_layer(shape), make_layer(shape), make_layer(shape)
    plain = layer._replace(conv_state=plain.conv_state, ssm_state=plain.ssm_state)
    shorter = layer._replace(conv_state=shorter.conv_state, ssm_state=shorter.ssm_state)
    for copy in (plain, shorter):
        copy.conv_state.copy_(layer.conv_state)
        copy.ssm_state.copy_(layer.ssm_state)
    lengths, contexts = [120, 30], [50, 0]
    projected = torch.randn(150, shape.projected, device=shape.device)
    out, plain_out = (torch.empty(150, shape.nheads, shape.headdim, device=shape.device) for _ in range(2))
    step = make_step(lengths, contexts, shape)
    metadata = build_chunk_metadata([0, 120, 150], 64, contexts, [offset, 0], shape.device)
    split = step._replace(
        cu_chunk_seqlens=metadata.cu_chunk_seqlens,
        last_chunk_indices=metadata.last_chunk_indices,
        seq_idx=metadata.seq_idx,
    )
    free = next(slot for slot in range(NUM_SLOTS) if slot not in step.slots.tolist())
    chunk = metadata.cu_chunk_seqlens.tolist().index(offset) - 1
    make = {"dtype": torch.int32, "device": shape.device}
    kept = CheckpointTensors(
        torch.tensor([chunk, 0], device=shape.device),
        torch.tensor([offset, 0], **make),
        torch.tensor([free, 0], **make),
    )
    with_checkpoints = compile_region_with_checkpoints(shape)
    with_checkpoints(sizes_of(projected, layer, split), projected, out, present(layer), (*split, *kept))

    prefill(projected, plain_out, plain, step, shape)
    assert_rows_alike(out, plain_out)
    slots = step.slots.long()
    assert_rows_alike(layer.ssm_state[slots], plain.ssm_state[slots])
    torch.testing.assert_close(layer.conv_state[slots], plain.conv_state[slots])
    first = make_step([offset], [50], shape)._replace(
        slots=step.slots[:1], has_initial_state=step.has_initial_state[:1]
    )
    prefill(projected[:offset], torch.empty(offset, 8, 32, device=shape.device), shorter, first, shape)
    assert_rows_alike(layer.ssm_state[free], shorter.ssm_state[slots[0]])
    torch.testing.assert_close(layer.conv_state[free], shorter.conv_state[slots[0]])
