"""Final states that come back from the scan and are written later: by slots, by a slice, or over the whole cache."""

import pytest
import torch

from inductor_passes import Condition
from mamba_ops.ops import state_passing, state_passing_update
from tests.inductor_passes.harness import assert_same_as_eager, compile_with_pass
from tests.inductor_passes.programs import make_inputs, older_form_with, snapshot


def written(write, read=None):
    """State passing from some of the cache's slots, chosen in the program, and a write of its own."""

    def program(states, dA, last, cache, slots, has):
        rows = cache[slots] if read is None else read(cache)
        initial = torch.where(has[:, None, None, None], rows, 0)
        entering, final = state_passing(states, dA, last, initial, cache.dtype)
        write(cache, slots, final)
        return entering

    return program


def index_copy(cache, slots, final):
    cache.index_copy_(0, slots.long(), final)


def index_put_cast(cache, slots, final):
    cache[slots.long()] = final.float().to(cache.dtype)


def index_put_of_layer(cache, slots, final):
    cache[:4][slots] = final


def second_to_fourth(cache, slots, final):
    cache[1:4].copy_(final)


def third_to_fifth(cache, slots, final):
    cache[2:5] = final


def fifth(cache, slots, final):
    cache[4].copy_(final[0])


def all_of_it(cache, slots, final):
    cache.copy_(final)


def twice(cache, slots, final):
    cache[slots] = final
    cache[slots + 1] = final


THREE, ONE = (2, 0, 1), (2,)
GOES = {
    "index_copy_": (written(index_copy), THREE),
    "index_put of a cast": (written(index_put_cast), THREE),
    "slice": (written(second_to_fourth, lambda c: c[1:4]), THREE),
    "slice, one sequence": (written(lambda c, s, f: c[1:2].copy_(f), lambda c: c[1:2]), ONE),
    "one slot by number": (written(fifth, lambda c: c[4:5]), ONE),
    "one slot by number, unsqueezed": (written(fifth, lambda c: c[4].unsqueeze(0)), ONE),
    "one slot by number, unbound": (written(fifth, lambda c: c.unbind()[4].unsqueeze(0)), ONE),
    "another slot than is read, one sequence": (written(lambda c, s, f: c.index_put_((s,), f), lambda c: c[2:3]), ONE),
}


@pytest.mark.parametrize(("program", "chunks"), GOES.values(), ids=GOES.keys())
def test_goes(program, chunks):
    inputs = make_inputs(chunks, (True,) * len(chunks))
    inputs.cache.nan_to_num_(0.5)
    compiled = assert_same_as_eager(program, inputs, compile_with_pass)
    assert compiled.report.eliminated == 1
    assert not compiled.has("scatter")
    assert not compiled.has("index_put")


STAYS = {
    "slice, and the one beside it": (written(third_to_fifth, lambda c: c[1:4]), Condition.OTHER_CACHE),
    "slots, and a slice": (written(second_to_fourth), Condition.OTHER_CACHE),
    "slice, and slots": (written(lambda c, s, f: c.index_put_((s,), f), lambda c: c[1:4]), Condition.CROSSED_SLOTS),
    "written twice": (written(twice), Condition.FINAL_STATES_USED_ELSEWHERE),
    "every other slot": (written(lambda c, s, f: c[0:6:2].copy_(f), lambda c: c[0:3]), Condition.OTHER_CACHE),
    "one row for all": (written(lambda c, s, f: c.index_put_((s,), f[:1])), Condition.NOT_WRITTEN_BACK),
}


@pytest.mark.parametrize(("program", "condition"), STAYS.values(), ids=STAYS.keys())
def test_stays(program, condition):
    inputs = make_inputs(THREE, (True,) * 3)
    inputs.cache.nan_to_num_(0.5)
    inputs.slots.copy_(torch.tensor([5, 1, 3]))
    compiled = assert_same_as_eager(program, inputs, compile_with_pass)
    assert compiled.report.count() == {condition: 1}


def test_strided_slice_that_is_read_and_written():
    program = written(lambda c, s, f: c[0:6:2].copy_(f), lambda c: c[0:6:2])
    inputs = make_inputs(THREE, (False, True, True))
    inputs.cache.nan_to_num_(0.5)
    assert assert_same_as_eager(program, inputs, compile_with_pass).report.eliminated == 1


def test_cache_with_one_row_a_sequence():
    """A cache without slots, as transformers keeps it: the whole of it is read and overwritten."""
    inputs = make_inputs(THREE)
    inputs.cache = inputs.cache[:3].clone()
    inputs.cache[~inputs.has] = float("nan")
    compiled = assert_same_as_eager(written(all_of_it, lambda c: c), inputs, compile_with_pass)
    assert compiled.report.eliminated == 1
    assert not compiled.has("aten.where")


def test_update_form_with_a_slot_by_number():
    def program(states, dA, last, cache, slots, has):
        initial = torch.where(has[0], cache[3], 0).unsqueeze(0)
        return state_passing_update(states, dA, last, initial, cache, slots)

    inputs = make_inputs(ONE, (True,))
    inputs.cache.nan_to_num_(0.5)
    assert assert_same_as_eager(program, inputs, compile_with_pass).report.eliminated == 1


def test_empty_sequence_writes_its_initial_state():
    """`cache[slots] = final` also writes where there is nothing to scan: zeros for a sequence without a state."""
    inputs = make_inputs((0, 1, 0), (False, True, True))
    before = inputs.clone()
    compiled = compile_with_pass(older_form_with(lambda c, s, f: c.index_put_((s,), f)), inputs)
    assert compiled.report.eliminated == 1
    first, _, last = inputs.slots.tolist()
    assert (inputs.cache[first] == 0).all()
    torch.testing.assert_close(inputs.cache[last], before.cache[last], rtol=0, atol=0)


def test_snapshot_read_before_another_scan_of_the_same_cache():
    """Two scans, one after the other: each reads what the one before has written."""

    def program(states, dA, last, cache, slots, has):
        first = state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots)
        entering, final = state_passing(states, dA, last, snapshot(cache, slots, has), cache.dtype)
        cache[slots] = final
        return first, entering

    compiled = assert_same_as_eager(program, make_inputs(), compile_with_pass)
    assert compiled.report.eliminated == 2


def test_two_snapshots_taken_before_both_scans():
    """The second scan overwrites what the first one wrote, and must start from before both."""

    def program(states, dA, last, cache, slots, has):
        first, second = snapshot(cache, slots, has), snapshot(cache, slots, ~has)
        entering = state_passing_update(states, dA, last, first, cache, slots)
        return entering, state_passing_update(states, dA, last, second, cache, slots)

    inputs = make_inputs()
    inputs.cache.nan_to_num_(0.5)
    compiled = assert_same_as_eager(program, inputs, compile_with_pass)
    assert compiled.report.count() == {Condition.CACHE_CHANGED: 1}
