"""What a kernel launch consists of, so that an op and whoever launches its kernel without PyTorch agree on it."""

from typing import Any, NamedTuple

from torch.library import wrap_triton


class Launch(NamedTuple):
    """A launch of a Triton kernel.

    Attributes:
        kernel: the kernel. grid: its programs.
        arguments: by position. constants: by name, with the options of the compiler.
    """

    kernel: Any
    grid: tuple[Any, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def run(self) -> None:
        """Launch it, or record the launch if PyTorch is tracing."""
        wrap_triton(self.kernel)[self.grid](*self.arguments, **self.constants)
