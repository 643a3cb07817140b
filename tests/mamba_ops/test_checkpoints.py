"""States kept in the middle of sequences, by state passing and by the scan in one pass, on a CPU."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.mamba_ops.checkpoints import KeptScan, KeptStates, kept_scans, kept_states


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@pytest.mark.fault(16)
@settings(max_examples=200)
@given(kept_states())
def test_state_passing_keeps_what_goes_on(case: KeptStates) -> None:
    case.check()


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@settings(max_examples=100)
@given(kept_scans())
def test_one_pass_keeps_the_state_of_the_recurrence(case: KeptScan) -> None:
    case.check()
