"""Where the Triton kernels run: on a GPU, and in Triton's interpreter on all tensors."""

import triton
from torch import Tensor

_INTERPRETED = bool(triton.knobs.runtime.interpret)


def runs_kernels(tensor: Tensor) -> bool:
    """Whether an op on this tensor launches its kernel; if not, its plain PyTorch branch runs."""
    return tensor.device.type != "cpu" or _INTERPRETED


def compiles_for_nvidia() -> bool:
    """Whether Triton compiles for an NVIDIA GPU: its compilers for others raise on options that only this one knows."""
    if _INTERPRETED:
        return False
    try:
        backend: str = triton.runtime.driver.active.get_current_target().backend
    except RuntimeError:  # there is no GPU, and an op is traced on tensors that claim one
        return False
    return backend == "cuda"
