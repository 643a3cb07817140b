"""The rules of safety of the older form, each as a pair: the final states come back, and a later node writes them."""

import pytest
import torch

from inductor_passes import Condition
from mamba_ops.ops import state_passing
from tests.inductor_passes.programs import snapshot
from tests.inductor_passes.rules import check, goes, stays


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


def states_from_the_cache(states, dA, last, cache, slots, has):
    entering, final = state_passing(cache[: states.shape[0]], dA, last, snapshot(cache, slots, has), cache.dtype)
    cache[slots] = final
    return entering


def rows_written_by_mask(states, dA, last, cache, slots, has):
    entering, final = state_passing(states, dA, last, snapshot(cache[:2], slots % 2, has), cache.dtype)
    cache[:2][has] = final
    return entering


RULES = {
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
    check(rule)
