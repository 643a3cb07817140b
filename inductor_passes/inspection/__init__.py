"""Looking at what the pass did: `inspect` in a program, `python -m inductor_passes inspect` around one.

`recording` looks on while graphs are compiled and keeps plain data (`recorded`); `folder` writes that down, with the
help of `table` and `page`. `command` runs a target twice, in processes of their own (`running`), and compares.
"""

from inductor_passes.inspection.inspecting import inspect

__all__ = ["inspect"]
