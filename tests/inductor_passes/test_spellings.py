"""Every spelling of the snapshot goes, whatever the dtypes, and not one bit changes."""

import pytest
import torch

from tests.inductor_passes.harness import Compiled, assert_same_as_eager, compile_with_pass
from tests.inductor_passes.programs import (
    SPELLINGS,
    UNMASKED_SPELLINGS,
    make_inputs,
    older_form_with,
    snapshot,
    update_with,
)

SNAPSHOT_OPS = ("aten.index.", "aten.where", "masked_fill", "index_put", "embedding", "masked_gather", "index_select")


def assert_eliminated(compiled: Compiled) -> None:
    assert compiled.report.eliminated == 1
    assert not compiled.report.declines
    assert compiled.has("state_passing_indexed")
    assert not [op for op in compiled.after if any(name in op for name in SNAPSHOT_OPS)]


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("form", ["update", "older"])
def test_spelling_goes(spelling, form):
    program = update_with(spelling) if form == "update" else older_form_with(_index_put, spelling)
    assert_eliminated(assert_same_as_eager(program, make_inputs(), compile_with_pass))


@pytest.mark.parametrize("spelling", UNMASKED_SPELLINGS.values(), ids=UNMASKED_SPELLINGS.keys())
def test_unmasked_spelling_goes(spelling):
    inputs = make_inputs(has=(True, True, True))
    assert_eliminated(assert_same_as_eager(update_with(spelling), inputs, compile_with_pass))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("chunks", [(1,), (3,), (2, 1), (1, 0, 2, 0)])
def test_dtypes_and_batches(dtype, slot_dtype, chunks):
    inputs = make_inputs(chunks, dtype=dtype, slot_dtype=slot_dtype)
    assert_eliminated(assert_same_as_eager(update_with(snapshot), inputs, compile_with_pass))


def _index_put(cache, slots, final):
    cache[slots] = final
