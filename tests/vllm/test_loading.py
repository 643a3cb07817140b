"""Loading the plugin: what it needs of vLLM, and what it does when that is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Call = Callable[..., str]

STATE = """
from vllm.model_executor.custom_op import op_registry_oot
print("registered:", [layer.__name__ for layer in op_registry_oot.values()])
"""

OTHER_SIGNATURE = """
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
MambaMixer2.conv_ssm_forward = lambda self: None
"""

MIXED_DEVICES = """
import torch
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
from inductor_passes.vllm.step import StepPlan
def metadata(device, **changes):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)
    tensors = dict(query_start_loc_p=ints(0, 3, 5), cu_chunk_seqlen_p=ints(0, 3, 5), last_chunk_indices_p=ints(0, 1),
        seq_idx_p=ints(0, 1), state_indices_tensor_p=ints(1, 2), has_initial_states_p=ints(0, 1) > 0)
    rest = dict(state_indices_tensor_d=None, query_start_loc_d=None, num_accepted_tokens=None, seq_lens=ints(3, 2))
    return Mamba2AttentionMetadata(num_prefills=2, num_prefill_tokens=5, num_decodes=0, num_decode_tokens=0, num_reqs=2,
        chunk_size=64, **{**tensors, **rest, **changes})
def decline(data):
    found = StepPlan(data, torch.device("cpu")).decline
    return found and found.name
print("same:", decline(metadata("cpu")))
print("other:", decline(metadata("meta")))
print("mixed:", decline(metadata("cpu", seq_idx_p=torch.zeros(2, dtype=torch.int32, device="meta"))))
print("dtype:", decline(metadata("cpu", last_chunk_indices_p=torch.tensor([0, 1]))))
print("shared:", decline(metadata("cpu", state_indices_tensor_p=torch.tensor([0, 0], dtype=torch.int32))))
"""


def test_this_vllm_has_everything(call: Call) -> None:
    script = "from inductor_passes.vllm.contract import missing_from_vllm as m; print('missing:', m())"
    assert "missing: []" in call("-c", script)


def test_vllm_finds_the_entry_point_and_twice_is_once(call: Call) -> None:
    script = (
        "from vllm.plugins import load_general_plugins as load; load(); import inductor_passes.vllm as p; p.register()"
    )
    assert "registered: ['SnapshotFreeMixer2']" in call("-c", script + STATE)


@pytest.mark.parametrize(
    ("remove", "name"),
    [
        ("import vllm.forward_context as m; del m.get_forward_context", "vllm.forward_context.get_forward_context"),
        (OTHER_SIGNATURE, "MambaMixer2.conv_ssm_forward(self, projected_states, output)"),
    ],
)
def test_what_is_missing_is_named_and_vllms_layers_stay(call: Call, remove: str, name: str) -> None:
    output = call("-c", f"{remove}\nfrom inductor_passes.vllm import register\nregister()" + STATE)
    assert name in output
    assert "vLLM's own Mamba2 layers run" in output
    assert "registered: []" in output


def test_turned_off(call: Call) -> None:
    output = call(
        "-c", "from inductor_passes.vllm import register\nregister()" + STATE, environment={"MAMBA_OPS_VLLM": "0"}
    )
    assert "registered: []" in output


@pytest.mark.fault(20)
def test_metadata_of_another_device_is_declined(call: Call) -> None:
    output = call("-c", MIXED_DEVICES)
    for line in ("same: None", "other: DEVICE", "mixed: DEVICE", "dtype: METADATA", "shared: SHARED_SLOT"):
        assert line in output
