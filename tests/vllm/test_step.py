"""Plans of the groups of layers in a step: what they share, and what they must not."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Call
from tests.vllm.test_loading import MIXED_DEVICES

# Two groups of a step with and without checkpoints, and one of another step; each plan against one made alone.
GROUPS = (
    MIXED_DEVICES
    + """
import copy
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata
from mamba_ops.kernels.causal_conv_tiled import BLOCK_TOKENS
from inductor_passes.vllm.step import PLAN
cpu = torch.device("cpu")

def ints(*values):
    return torch.tensor(values, dtype=torch.int32)

def group(slots, kept, of=None):
    tiles = {"batch_ptr": ints(0, 1), "token_chunk_offset_ptr": ints(0, 0), "tot": 2}
    made = of and copy.copy(of) or metadata("cpu", nums_dict={BLOCK_TOKENS: tiles})
    made.state_indices_tensor_p = slots
    if kept is not None:
        made.checkpoint_chunk_idx = of.checkpoint_chunk_idx if of else torch.tensor([0, -1])
        offsets = of.checkpoint_meta.checkpoint_offsets if of else ints(2, 0)
        made.checkpoint_meta = MambaPrefillCheckpointMetadata(
            offsets=[2, 0], checkpoint_offsets=offsets, state_indices=kept
        )
    return made

def alone(data):
    data = copy.copy(data)
    data.nums_dict = {BLOCK_TOKENS: data.nums_dict[BLOCK_TOKENS]}
    return StepPlan(data, cpu)

def same(data):
    before = data.nums_dict.get(PLAN)
    plan = StepPlan(data, cpu)
    made = int(data.nums_dict[PLAN] is not before)
    other = alone(data)
    for name in ("addresses", "checkpoint_addresses", "sizes", "max_tokens", "one_chunk", "decline"):
        assert getattr(plan, name) == getattr(other, name), name
    for a, b in zip((*plan.tensors, *(plan.checkpoints or ())), (*other.tensors, *(other.checkpoints or ()))):
        assert a.data_ptr() == b.data_ptr() and torch.equal(a, b)
    return made

wide = torch.arange(8, dtype=torch.int32).view(2, 4)
for kept in (None, ints(5, 0)):
    first = group(wide[:, 1], kept)
    other = None if kept is None else ints(6, 0)
    print("worked out:", kept is not None, [
        same(first),
        same(group(wide[:, 2], other, first)),
        same(group(ints(1, 2), other, first)),  # slots at another distance
        same(group(wide[:, 1], other)),  # another step
    ])
first = group(wide[:, 1], None)
print("then with checkpoints:", [same(first), same(group(wide[:, 1], ints(5, 0), None))])
marked = group(wide[:, 1], ints(5, 0))
again = group(wide[:, 2], ints(6, 0), marked)
again.checkpoint_meta.checkpoint_offsets = ints(1, 0)
print("other checkpoints:", [same(marked), same(again)])
"""
)


@pytest.mark.fault(13)
def test_groups_share_all_but_slots(call: Call) -> None:
    output = call("-c", GROUPS)
    assert "worked out: False [1, 0, 1, 1]" in output
    assert "worked out: True [1, 0, 1, 1]" in output
    assert "then with checkpoints: [1, 1]" in output
    assert "other checkpoints: [1, 1]" in output
