"""Which tensors the Triton kernels take: those on a GPU, and all of them in Triton's interpreter."""

import triton
from torch import Tensor

_INTERPRETED = bool(triton.knobs.runtime.interpret)


def runs_kernels(tensor: Tensor) -> bool:
    """Whether an op on this tensor launches its kernel; if not, its plain PyTorch branch runs."""
    return tensor.device.type != "cpu" or _INTERPRETED
