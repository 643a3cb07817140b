"""What works here and what does not: `python -m inductor_passes doctor`.

It must say what is wrong with an environment in which nothing else runs. So its own process imports neither PyTorch nor
vLLM, what needs them runs in a process of its own, and a probe that fails is a line of the report.
"""

from inductor_passes.doctor.command import examine, main
from inductor_passes.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "examine", "main"]
