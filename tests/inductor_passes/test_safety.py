"""Each rule of safety as a pair: a program where the snapshot goes, and its neighbour where it must stay.

Where it stays the report names the condition, and the program still gives what eager mode gives. Where only the whole
rewrite is forbidden, one masked gather comes instead of gather and mask.
"""

import dataclasses

import pytest
import torch

from inductor_passes import Condition
from mamba_ops.ops import state_passing, state_passing_update
from tests.inductor_passes.harness import assert_same_as_eager, compile_with_pass
from tests.inductor_passes.programs import NHEADS, Program, make_inputs, snapshot, update_with


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


def change_before_gather(states, dA, last, cache, slots, has):
    cache.mul_(2)
    return state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots)


def change_after_gather(states, dA, last, cache, slots, has):
    initial = snapshot(cache, slots, has)
    cache.mul_(2)
    return state_passing_update(states, dA, last, initial, cache, slots)


def other_slot_changes_after_gather(states, dA, last, cache, slots, has):
    initial = snapshot(cache, slots, has)
    cache[-1] = states[0]
    return state_passing_update(states, dA, last, initial, cache, slots)


def other_tensor_changes_after_gather(states, dA, last, cache, slots, has):
    initial = snapshot(cache, slots, has)
    states.mul_(2)
    return state_passing_update(states, dA, last, initial, cache, slots)


def change_after_update(states, dA, last, cache, slots, has):
    entering = state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots)
    cache.mul_(2)
    return entering


def cache_returned(states, dA, last, cache, slots, has):
    return state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots), cache


def cache_read_before(states, dA, last, cache, slots, has):
    first = cache[0] + 1
    return state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots), first


def snapshot_returned(states, dA, last, cache, slots, has):
    initial = snapshot(cache, slots, has)
    return state_passing_update(states, dA, last, initial, cache, slots), initial


def cast_snapshot_returned(states, dA, last, cache, slots, has):
    initial = snapshot(cache, slots, has).float()
    return state_passing_update(states, dA, last, initial, cache, slots), initial


def snapshot_summed(states, dA, last, cache, slots, has):
    initial = snapshot(cache, slots, has)
    return state_passing_update(states, dA, last, initial, cache, slots), initial.float().sum()


def snapshot_shared(states, dA, last, cache, slots, has):
    initial = snapshot(cache, slots, has)
    first = state_passing_update(states, dA, last, initial, cache, slots)
    return first, state_passing_update(states, dA, last, initial, cache, slots)


def rows_returned(states, dA, last, cache, slots, has):
    rows = cache[slots]
    initial = torch.where(has[:, None, None, None], rows, 0)
    return state_passing_update(states, dA, last, initial, cache, slots), rows


def unmasked_returned(states, dA, last, cache, slots, has):
    rows = cache[slots]
    return state_passing_update(states, dA, last, rows, cache, slots), rows


def reads_next_slot(states, dA, last, cache, slots, has):
    return state_passing_update(states, dA, last, snapshot(cache, slots.flip(0) - 1, has), cache, slots)


def reads_own_slot_cast(states, dA, last, cache, slots, has):
    return state_passing_update(states, dA, last, snapshot(cache, slots.long(), has), cache, slots.view(-1).clone())


def writes_int64_of_read_slot(states, dA, last, cache, slots, has):
    return state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots.long())


def reads_and_writes_a_table_column(states, dA, last, cache, slots, has):
    table = torch.stack((slots, slots - 1), 1)
    return state_passing_update(states, dA, last, snapshot(cache, table[:, 0], has), cache, table[:, 0])


def reads_one_column_and_writes_another(states, dA, last, cache, slots, has):
    table = torch.stack((slots, slots.flip(0)), 1)
    return state_passing_update(states, dA, last, snapshot(cache, table[:, 0], has), cache, table[:, 1])


def mask_of_zeros_and_ones(cache, slots, has):
    return cache[slots] * has[:, None, None, None]


def mask_as_floats(cache, slots, has):
    return cache[slots] * has.to(cache.dtype)[:, None, None, None]


def heads_masked(cache, slots, has):
    return torch.where(torch.stack([has] * NHEADS, 1)[:, :, None, None], cache[slots], 0)


def mask_along_the_heads(cache, slots, has):
    assert has.shape[0] == NHEADS
    return torch.where(has[None, :, None, None], cache[slots], 0)


def one_mask_for_all(cache, slots, has):
    return torch.where(has.all(), cache[slots], 0)


def twice_masked(cache, slots, has):
    return torch.where(has.flip(0)[:, None, None, None], snapshot(cache, slots, has), 0)


def rounded(cache, slots, has):
    return snapshot(cache, slots, has).bfloat16()


def rounded_to_fp16(cache, slots, has):
    return torch.where(has[:, None, None, None], cache[slots].half(), 0)


def scaled(cache, slots, has):
    return snapshot(cache, slots, has) * 2


def from_a_copy(cache, slots, has):
    return snapshot(cache + 0.5, slots, has)


def from_another_window(states, dA, last, cache, slots, has):
    initial = snapshot(cache[:-1], slots.clamp(0, cache.shape[0] - 2), has)
    return state_passing_update(states, dA, last, initial, cache, slots)


def from_strided_rows(states, dA, last, cache, slots, has):
    wide = torch.cat((cache, cache), -1)
    initial = snapshot(wide[..., : cache.shape[-1]], slots, has)
    return state_passing_update(states, dA, last, initial, cache, slots)


def older_form(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots] = final
    return entering


def final_returned(states, dA, last, cache, slots, has):
    return state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)


def final_written_and_returned(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots] = final
    return entering, final


def final_scaled(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots] = final * 0.5
    return entering


def final_added(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache.index_put_((slots,), final, accumulate=True)
    return entering


def final_to_other_slots(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots.flip(0)] = final
    return entering


def final_in_fp32(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), torch.float32)
    cache[slots] = final.to(cache.dtype)
    return entering


def final_in_bf16(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), torch.bfloat16)
    cache[slots] = final.to(cache.dtype)
    return entering


def cache_changes_before_write(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache.mul_(2)
    cache[slots] = final
    return entering


def cache_read_before_write(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    old = cache[0] * entering.sum()
    cache[slots] = final
    return entering, old


def checkpoint_after_write(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots] = final
    cache[-1] = entering[1]
    return entering


def checkpoint_before_write(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[-1] = entering[1]
    cache[slots] = final
    return entering


def write_slots_from_result(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots + (entering.float().sum() > 1e30).int()] = final
    return entering


def zeros_in_fp32(cache, slots, has):
    rows = cache[slots]
    return torch.where(has[:, None, None, None], rows, torch.zeros_like(rows, dtype=torch.float32))


def promoted_and_returned(states, dA, last, cache, slots, has):
    initial = zeros_in_fp32(cache, slots, has)
    return state_passing_update(states, dA, last, initial, cache, slots), initial


def states_from_the_cache(states, dA, last, cache, slots, has):
    entering, final = state_passing(cache[: states.shape[0]], dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots] = final
    return entering


def rows_written_by_mask(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache[:2], slots % 2, has), cache.dtype)
    cache[:2][has] = final
    return entering


def initial_states_given(states, dA, last, cache, slots, has):
    return state_passing_update(states, dA, last, states[: slots.shape[0]], cache, slots)


RULES = {
    # One version of the cache
    "cache changes before the gather": goes(change_before_gather),
    "cache changes after the gather": stays(Condition.CACHE_CHANGED, change_after_gather),
    "one slot changes after the gather": stays(Condition.CACHE_CHANGED, other_slot_changes_after_gather),
    "another tensor changes after the gather": goes(other_tensor_changes_after_gather),
    "cache changes after the update": goes(change_after_update),
    "cache is returned": goes(cache_returned),
    "cache is read before": goes(cache_read_before),
    "rows of a copy": stays(Condition.OTHER_CACHE, update_with(from_a_copy)),
    "rows of another window": stays(Condition.OTHER_CACHE, from_another_window),
    "rows that are not dense": stays(Condition.ROWS_NOT_DENSE, from_strided_rows),
    # No other user
    "snapshot returned": stays(Condition.SNAPSHOT_RETURNED, snapshot_returned, masked_gather=True),
    "snapshot returned after a cast": stays(Condition.SNAPSHOT_RETURNED, cast_snapshot_returned, masked_gather=True),
    "snapshot summed": stays(Condition.SNAPSHOT_USED_ELSEWHERE, snapshot_summed, masked_gather=True),
    "bare rows returned": stays(Condition.ROWS_USED_ELSEWHERE, rows_returned),
    "bare rows returned, no mask": stays(Condition.SNAPSHOT_RETURNED, unmasked_returned),
    # One slot a sequence
    "reads what another writes": stays(Condition.CROSSED_SLOTS, reads_next_slot, masked_gather=True),
    "one sequence reads one slot and writes another": goes(reads_next_slot, chunks=(2,)),
    "own slot, copied and cast": goes(reads_own_slot_cast),
    "own slot, written as int64": goes(writes_int64_of_read_slot),
    "one column of a table": goes(reads_and_writes_a_table_column),
    "two columns of a table": stays(Condition.CROSSED_SLOTS, reads_one_column_and_writes_another, masked_gather=True),
    # The mask and what it fills in
    "rows times a mask": stays(Condition.MASK_PRODUCT, update_with(mask_of_zeros_and_ones)),
    "rows times a mask of floats": stays(Condition.MASK_PRODUCT, update_with(mask_as_floats)),
    "mask of heads": stays(Condition.MASK_NOT_PER_SEQUENCE, update_with(heads_masked)),
    "mask along the heads": stays(Condition.MASK_NOT_PER_SEQUENCE, update_with(mask_along_the_heads), chunks=(2, 1, 1)),
    "one mask for all": goes(update_with(one_mask_for_all)),
    "two masks": stays(Condition.NOT_A_SNAPSHOT, update_with(twice_masked)),
    "filled with one": stays(
        Condition.FILL_NOT_ZERO,
        update_with(lambda c, s, h: torch.where(h[:, None, None, None], c[s], 1)),
    ),
    "filled with minus zero": stays(
        Condition.FILL_NOT_ZERO,
        update_with(lambda c, s, h: torch.where(h[:, None, None, None], c[s], -0.0)),
    ),
    "filled with other rows": stays(
        Condition.FILL_NOT_ZERO,
        update_with(lambda c, s, h: torch.where(h[:, None, None, None], c[s], c[s + 1])),
    ),
    # Values
    "rounded": stays(Condition.INEXACT_CAST, update_with(rounded), dtype=torch.float32),
    "rounded in name only": goes(update_with(rounded), dtype=torch.bfloat16),
    "bf16 to fp16": stays(Condition.INEXACT_CAST, update_with(rounded_to_fp16), dtype=torch.bfloat16),
    "promoted by the zeros": goes(update_with(zeros_in_fp32)),
    "promoted by the zeros, and returned": stays(
        Condition.SNAPSHOT_RETURNED, promoted_and_returned, masked_gather=True
    ),
    "scaled": stays(Condition.NOT_A_SNAPSHOT, update_with(scaled)),
    "initial states given": stays(Condition.NOT_A_SNAPSHOT, initial_states_given, dtype=torch.float32),
    # The older form
    "final states written later": goes(older_form),
    "final states returned": stays(Condition.NOT_WRITTEN_BACK, final_returned, masked_gather=True),
    "final states written and returned": stays(
        Condition.FINAL_STATES_USED_ELSEWHERE, final_written_and_returned, masked_gather=True
    ),
    "final states scaled": stays(Condition.NOT_WRITTEN_BACK, final_scaled, masked_gather=True),
    "final states added": stays(Condition.WRITEBACK_ACCUMULATES, final_added),
    "final states to other slots": stays(Condition.CROSSED_SLOTS, final_to_other_slots, masked_gather=True),
    "final state to another slot, one sequence": goes(final_to_other_slots, chunks=(2,)),
    "final states in fp32, bf16 cache": stays(Condition.INEXACT_CAST, final_in_fp32),
    "final states in fp32, fp32 cache": goes(final_in_fp32, dtype=torch.float32),
    "final states in bf16, fp32 cache": stays(Condition.STATE_DTYPE, final_in_bf16, dtype=torch.float32),
    "cache changes before the write": stays(Condition.CACHE_CHANGED, cache_changes_before_write),
    "cache is read before the write": stays(Condition.CACHE_READ_LATER, cache_read_before_write, masked_gather=True),
    "states from the cache": stays(Condition.ARGUMENT_OF_CACHE, states_from_the_cache, dtype=torch.float32),
    "rows written by a mask": stays(Condition.NOT_WRITTEN_BACK, rows_written_by_mask, masked_gather=True),
    "checkpoint after the write": goes(checkpoint_after_write),
    "checkpoint before the write": stays(
        Condition.CACHE_WRITTEN_AFTER_SCAN, checkpoint_before_write, masked_gather=True
    ),
    "write slots from the result": stays(Condition.WRITE_SLOTS_TOO_LATE, write_slots_from_result, chunks=(2,)),
}


@pytest.mark.fault(3)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rule(rule):
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


@pytest.mark.fault(3)
def test_two_scans_of_one_snapshot_keep_it():
    compiled = assert_same_as_eager(snapshot_shared, make_inputs((2, 1)), compile_with_pass)
    assert compiled.report.eliminated == 0
    assert compiled.report.count()[Condition.SNAPSHOT_USED_ELSEWHERE] == 1


def test_every_condition_is_explained():
    assert all(condition.value and condition.value[0].islower() for condition in Condition)
    assert len({condition.value for condition in Condition}) == len(Condition)
