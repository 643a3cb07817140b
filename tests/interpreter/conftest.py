"""These tests run the kernels themselves on the CPU, in Triton's interpreter, which must be chosen before Triton loads.

They are collected only in a process of their own: TRITON_INTERPRET=1 pytest tests/interpreter
"""

import triton

collect_ignore_glob = [] if triton.knobs.runtime.interpret else ["test_*.py"]
