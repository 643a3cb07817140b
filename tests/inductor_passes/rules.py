"""Rules of safety: what must happen to a program, and the check that it does.

Where a snapshot stays the report names the condition, and the program still gives what eager mode gives. Where only the
whole rewrite is forbidden, one masked gather comes instead of gather and mask.
"""

import dataclasses

import torch

from inductor_passes import Condition
from tests.inductor_passes.harness import assert_same_as_eager, compile_with_pass
from tests.inductor_passes.programs import Program, make_inputs


@dataclasses.dataclass
class Rule:
    """What must happen to a program: all goes (no condition), or the named condition keeps the snapshot."""

    program: Program
    condition: Condition | None = None
    masked_gather: bool = False
    chunks: tuple[int, ...] = (2, 1)
    dtype: torch.dtype = torch.bfloat16


def goes(program, **inputs):
    return Rule(program, **inputs)


def stays(condition, program, masked_gather=False, **inputs):
    return Rule(program, condition, masked_gather, **inputs)


def check(rule):
    """Compile the program of a rule, and assert that what must happen to it happens."""
    torch.manual_seed(0)
    inputs = make_inputs(rule.chunks, (True,) * len(rule.chunks), dtype=rule.dtype)
    inputs.cache.nan_to_num_(0.5)
    compiled = assert_same_as_eager(rule.program, inputs, compile_with_pass)
    if rule.condition is None:
        assert compiled.report.eliminated == 1
        assert not compiled.report.declines
        assert not compiled.has("masked_gather")
    else:
        assert compiled.report.count() == {rule.condition: 1}
        assert compiled.report.eliminated == 0
        assert compiled.has("masked_gather") == rule.masked_gather
        if not rule.masked_gather:
            assert compiled.after == compiled.before
