"""Every kernel compiles for every GPU we name, with the very arguments that the ops launch it with. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from triton.backends.compiler import GPUTarget

from mamba_ops import ops
from mamba_ops.kernels.one_pass import most_tokens
from mamba_ops.ops import one_pass
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.conv_cumsum import conv_cumsum
from mamba_ops.ops.one_pass_heads import has_form_of_heads
from tests.compile_only_driver import SM90, compile_only

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# nheads, headdim, dstate, ngroups, chunk_size
SHAPES = {
    "granite": (64, 64, 128, 1, 256),
    "falcon-h1": (24, 128, 256, 1, 256),
    "zamba2": (112, 64, 64, 2, 256),
    "odd": (6, 80, 96, 2, 128),
    "small": (2, 16, 16, 1, 16),
}
# Each kernel and the arguments that it writes.
KERNELS = {
    "chunk_cumsum_kernel": {"dt_out_ptr", "dA_cumsum_ptr"},
    "chunk_state_kernel": {"states_ptr"},
    "state_passing_kernel": {"entering_ptr", "final_ptr"},
    "bmm_chunk_kernel": {"cb_ptr"},
    "chunk_scan_kernel": {"out_ptr"},
    "masked_gather_kernel": {"rows_ptr"},
    "causal_conv_tiled_kernel": {"state_ptr", "out_ptr"},
    "conv_cumsum_kernel": {"state_ptr", "out_ptr", "dt_out_ptr", "dA_cumsum_ptr"},
    "conv_checkpoint_kernel": {"state_ptr"},
    "one_pass_kernel": {"state_ptr", "out_ptr"},
    "one_pass_heads_kernel": {"state_ptr", "out_ptr"},
}
# Of layers of any other shape or dtype, no program of that kernel goes through several heads.
HAVE_HEADS = ("granite", "zamba2", "small")
# Longest sequences that the kernel in one pass is compiled for.
MAX_TOKENS = (32, 64)
OF_HEADS = 31  # and its form of several heads


class _CapturedError(Exception):
    """Raised in place of running the graph, which nothing here could."""


def _launch_nodes(
    shape: tuple[int, ...], dtype: torch.dtype, state_dtype: torch.dtype, target: GPUTarget = SM90
) -> list[torch.fx.Node]:
    """The launches of all ops in the graph that torch.compile makes of them for a target."""
    nheads, headdim, dstate, ngroups, chunk_size = shape
    conv_dim = nheads * headdim + 2 * ngroups * dstate

    def all_ops(
        x: Tensor,
        dt: Tensor,
        B: Tensor,
        head: Tensor,
        ints: Tensor,
        has: Tensor,
        cache: Tensor,
        wide: Tensor,
        taps: Tensor,
        conv_cache: Tensor,
    ) -> list[Tensor]:
        dA_cumsum, dt_out = ops.chunk_cumsum(dt, head, ints, chunk_size, head, True, 0.0)
        states = ops.chunk_state(B, x, dt_out, dA_cumsum, ints)
        snapshot = ops.masked_gather(cache, ints, has)
        entering, final = ops.state_passing(states, dA_cumsum, ints, snapshot, state_dtype)
        ops.state_passing_update(states, dA_cumsum, ints, snapshot, cache, ints)
        entering = ops.state_passing_indexed(states, dA_cumsum, ints, cache, ints, has, ints)
        checkpoints = (ints, ints, ints)
        ops.state_passing_indexed(states, dA_cumsum, ints, cache, ints, has, ints, False, *checkpoints)
        cb = ops.bmm_chunk(B, B, ints, chunk_size)
        out = torch.empty_like(x)
        ops.chunk_scan(cb, x, dt_out, dA_cumsum, B, entering, ints, out, head, x)
        convolution = (wide, taps, wide[0], ints, conv_cache, ints[1:], has[1:], ints, ints)
        convolved = causal_conv_tiled(*convolution)
        ops.conv_checkpoint(wide, ints, conv_cache, ints[1:], has[1:], ints[1:], ints[1:], taps.shape[1])
        more, dA_cumsum, dt_out = conv_cumsum(*convolution, dt, head, chunk_size, head, True, ints)
        for max_tokens in sorted({min(most, chunk_size) for most in MAX_TOKENS}):
            for last in (None, ints[1:]):
                if max_tokens > most_tokens(dstate * dtype.itemsize, last is None):
                    continue
                sequences = (ints, cache, ints[1:], has[1:])
                # With checkpoints a sequence of several chunks runs all the code that it does without.
                kept = () if last is None else (ints[1:], ints[1:], ints[1:])
                ops.one_pass_scan(x, B, B, dt_out, dA_cumsum, *sequences, out, max_tokens, head, last, *kept)
        most = min(OF_HEADS, chunk_size - 1)
        ops.one_pass_scan(x, B, B, dt_out, dA_cumsum, ints, cache, ints[1:], has[1:], out, most, head)
        return [out, final, convolved, more]

    def tensor(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        raise _CapturedError

    def heads_of_a_program(x: Tensor, B: Tensor, slots: Tensor, max_tokens: int) -> int:
        has_form = max_tokens == min(OF_HEADS, chunk_size - 1) and has_form_of_heads(x, B, max_tokens)
        return nheads // ngroups if has_form else 1

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, compile_only(target), torch.no_grad():
        patch.setattr(one_pass, "heads_of_a_program", heads_of_a_program)  # it asks how large the GPU is
        compiled = torch.compile(
            all_ops, backend=aot_autograd(fw_compiler=capture, inference_compiler=capture), fullgraph=True
        )
        with pytest.raises(Exception, match="_CapturedError"):
            compiled(
                tensor(512, nheads, headdim),
                tensor(512, nheads),
                tensor(512, ngroups, dstate),
                tensor(nheads, dtype=torch.float32),
                tensor(3, dtype=torch.int32),
                tensor(3, dtype=torch.bool),
                tensor(7, nheads, headdim, dstate, dtype=state_dtype),
                tensor(512, conv_dim),
                tensor(conv_dim, 4),
                tensor(7, 3, conv_dim).transpose(1, 2),
            )
    return graphs[0].graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)


def _kernel(node: torch.fx.Node) -> Any:
    return kernel_side_table.get_kernel(node.kwargs["kernel_idx"])


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Arguments of a launch by name, with the dtype of each tensor in its place."""
    arguments = {
        name: triton.runtime.jit.MockTensor(value.meta["val"].dtype) if isinstance(value, torch.fx.Node) else value
        for name, value in node.kwargs["kwargs"].items()
    }
    return arguments | kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])


def _name(node: torch.fx.Node) -> str:
    kernel = _kernel(node)  # PyTorch may wrap the jit function in one fixed configuration
    return str((kernel if isinstance(kernel, triton.runtime.jit.JITFunction) else kernel.fn).fn.__name__)


def _compiled(node: torch.fx.Node) -> Any:
    compiled = _kernel(node).warmup(grid=(1,), **_arguments(node))
    return compiled[0] if isinstance(compiled, list) else compiled


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FULLY = [("granite", BF16, BF16), ("falcon-h1", FP32, FP32)]  # the second needs the most shared memory
# sm_100 has the shared memory of sm_90 and takes the same choices; the code for it takes as long to make.
FEWER = [("granite", FP16, FP32), ("granite", FP32, FP16)] + [
    (name, BF16, FP32) for name in SHAPES if name != "granite"
]
CASES = [(*case, list(TARGETS)) for case in FULLY] + [(*case, ["sm_80", "sm_90", "gfx942"]) for case in FEWER]


@pytest.mark.fault(21)
@pytest.mark.parametrize(("name", "dtype", "state_dtype", "targets"), CASES, ids=str)
def test_compiles_for_every_target(name: str, dtype: torch.dtype, state_dtype: torch.dtype, targets: list[str]) -> None:
    for target_name in targets:
        target = TARGETS[target_name]
        launches = _launch_nodes(SHAPES[name], dtype, state_dtype, target)
        has_heads = name in HAVE_HEADS and dtype != FP32 and target.backend == "cuda"
        assert {_name(node) for node in launches} == set(KERNELS) - (set() if has_heads else {"one_pass_heads_kernel"})
        with compile_only(target):
            for node in launches:
                compiled = _compiled(node)
                binary = "hsaco" if target.backend == "hip" else "cubin"
                assert len(compiled.asm[binary]) > 0
                assert compiled.metadata.shared <= SHARED_MEMORY[target_name]


@pytest.mark.fault(1)
@pytest.mark.fault(12)
def test_no_kernel_is_autotuned() -> None:
    """Fault rows 1 and 12: a kernel with several configurations would run trials, and those would advance the cache."""
    for node in _launch_nodes(SHAPES["granite"], BF16, BF16):
        assert len(getattr(_kernel(node), "configs", [None])) == 1


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [("granite", BF16, "sm_90"), ("granite", FP32, "sm_90"), ("falcon-h1", BF16, "sm_90"), ("granite", BF16, "gfx942")],
    ids=str,
)
def test_registers_are_limited_where_few_are_missing(name: str, dtype: torch.dtype, target: str) -> None:
    """Only for an NVIDIA GPU, only up to 32 tokens of one chunk, and only for the tile for which it was measured."""
    limited = set()
    for node in _launch_nodes(SHAPES[name], dtype, dtype, TARGETS[target]):
        if _name(node) == "one_pass_kernel":
            with compile_only(TARGETS[target]):
                compiled = _compiled(node)
            if ".maxnreg 168" in compiled.asm.get("ptx", ""):
                limited.add((_arguments(node)["BLOCK_TOKENS"], _arguments(node)["ONE_CHUNK"]))
    assert limited == ({(32, True)} if (name, dtype, target) == ("granite", BF16, "sm_90") else set())


@pytest.mark.fault(17)
@pytest.mark.fault(18)
def test_exactly_what_a_kernel_writes_counts_as_mutated() -> None:
    """Fault rows 17 and 18: PyTorch clones what it takes for mutated, and gives up CUDA graphs where it is an input."""
    for node in _launch_nodes(SHAPES["granite"], BF16, BF16):
        assert set(node.kwargs["tensors_to_clone"]) == KERNELS[_name(node)], node.format_node()


_SCAN = re.compile(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\) -> tensor")
_LAYOUT = r"^{} = .*sizePerThread = \[\d+, (\d+)\], threadsPerWarp = \[\d+, (\d+)\], warpsPerCTA = \[\d+, (\d+)\]"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128, 256])
def test_running_sums_are_taken_in_the_same_order_in_both_kernels(chunk_size: int, target: str) -> None:
    """Which tokens of a chunk a thread and a warp hold decides the order of sums, and so the bits.

    On an NVIDIA GPU four of them, as in all of vLLM's choices but those of the fewest heads.
    """
    layouts = set()
    for node in _launch_nodes((64, 64, 128, 1, chunk_size), BF16, BF16):
        if _name(node) in ("chunk_cumsum_kernel", "conv_cumsum_kernel"):
            with compile_only(TARGETS[target]):
                text = _compiled(node).asm["ttgir"]
            (name,) = set(_SCAN.findall(text))
            layouts.update(re.findall(_LAYOUT.format(name), text, re.MULTILINE))
    assert len(layouts) == 1, layouts
    if target == "sm_90":
        ((tokens_per_thread, _, _),) = layouts
        assert tokens_per_thread == "4"
