"""Loading the plugin: what it needs of vLLM, and what it does when that is missing."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Call

STATE = """
from vllm.model_executor.custom_op import op_registry_oot
print("registered:", [layer.__name__ for layer in op_registry_oot.values()])
"""

# Takes away, in turn, every name that a part of the contract lists, and gives each callable other parameters, in the
# real modules.
TAKING = """
import contextlib, importlib, inspect, logging, sys
from inductor_passes.vllm import contract, register

said = []
class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("vllm.mamba_ops").addHandler(Listener(logging.WARNING))

@contextlib.contextmanager
def without(owner, name):
    kept = inspect.getattr_static(owner, name)
    delattr(owner, name)
    yield
    setattr(owner, name, kept)

@contextlib.contextmanager
def with_other_parameters(owner, name):
    kept = inspect.getattr_static(owner, name)
    setattr(owner, name, lambda other, than, what, is_, expected: None)
    yield
    setattr(owner, name, kept)

@contextlib.contextmanager
def without_module(name):
    kept, sys.modules[name] = sys.modules[name], None
    yield
    sys.modules[name] = kept

@contextlib.contextmanager
def without_field(fields, name):
    kept = fields.pop(name)
    yield
    fields[name] = kept

def cases(module_attributes, signatures):
    for name, attributes in module_attributes.items():
        module = importlib.import_module(name)
        yield name, without_module(name)
        for attribute in attributes:
            yield f"{name}.{attribute}", without(module, attribute)
    for name, path, parameters in signatures:
        *parents, attribute = path.split(".")
        owner = importlib.import_module(name)
        for parent in parents:
            owner = getattr(owner, parent)
        shown = f"{name}.{path}({', '.join(parameters)})"
        yield shown, with_other_parameters(owner, attribute)
        if not any(hasattr(base, attribute) for base in getattr(owner, "__bases__", ())):
            yield f"{name}.{path}", without(owner, attribute)
"""

# Prints a line for each: what was taken, whether vLLM's layers stayed, and what the log said.
TAKEN_IN_TURN = (
    TAKING
    + """
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

def all_cases():
    yield from cases(contract.MODULE_ATTRIBUTES, contract.SIGNATURES)
    fields = importlib.import_module(contract._METADATA).Mamba2AttentionMetadata.__dataclass_fields__
    for name in contract.METADATA_FIELDS:
        yield f"Mamba2AttentionMetadata.{name}", without_field(fields, name)

for name, taken in all_cases():
    said.clear()
    with taken:
        register()
    print(f"CASE {name} | {list(op_registry_oot)} | {' '.join(said)}")
register()
print("and with all of them:", [layer.__name__ for layer in op_registry_oot.values()])
"""
)

# Makes metadata of a step with two prefills on a device.
METADATA = """
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
"""

MIXED_DEVICES = (
    METADATA
    + """
def decline(data):
    found = StepPlan(data, torch.device("cpu")).decline
    return found and found.name
print("same:", decline(metadata("cpu")))
print("other:", decline(metadata("meta")))
print("mixed:", decline(metadata("cpu", seq_idx_p=torch.zeros(2, dtype=torch.int32, device="meta"))))
print("dtype:", decline(metadata("cpu", last_chunk_indices_p=torch.tensor([0, 1]))))
print("shared:", decline(metadata("cpu", state_indices_tensor_p=torch.tensor([0, 0], dtype=torch.int32))))
"""
)

# Prefix caching is turned on when the regions have been made without it.
LATE_CHECKPOINTS = (
    METADATA
    + """
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata
from inductor_passes.vllm.layer import SnapshotFreeMixer2
from inductor_passes.vllm.options import Options
from inductor_passes.vllm.region_inputs import LayerShape
from inductor_passes.vllm.regions import region_for
f32 = torch.float32
shape = LayerShape(2, 16, 1, 16, 64, 4, f32, f32, (f32, f32, f32), True, (1, 64), torch.device("cpu"))
ints = torch.tensor([2, 0], dtype=torch.int32)
kept = MambaPrefillCheckpointMetadata(offsets=[2, 0], checkpoint_offsets=ints, state_indices=ints + 3)
data = metadata("cpu", checkpoint_chunk_idx=torch.tensor([0, -1]), checkpoint_meta=kept)
layer = SnapshotFreeMixer2.__new__(SnapshotFreeMixer2)
torch.nn.Module.__init__(layer)
layer._region = region_for(shape, False, Options())
print("late:", layer._decline(StepPlan(data, torch.device("cpu")), torch.zeros(5, 8), torch.zeros(5, 8)).name)
"""
)


def test_this_vllm_has_everything(call: Call) -> None:
    script = "from inductor_passes.vllm.contract import missing_from_vllm as m; print('missing:', m())"
    assert "missing: []" in call("-c", script)


def test_vllm_finds_the_entry_point_and_twice_is_once(call: Call) -> None:
    script = (
        "from vllm.plugins import load_general_plugins as load; load(); import inductor_passes.vllm as p; p.register()"
    )
    assert "registered: ['SnapshotFreeMixer2']" in call("-c", script + STATE)


def test_whatever_is_missing_is_named_and_vllms_layers_stay(call: Call) -> None:
    output = call("-c", TAKEN_IN_TURN)
    cases = [line[len("CASE ") :].split(" | ") for line in output.splitlines() if line.startswith("CASE ")]
    assert len(cases) > 25
    for name, registered, said in cases:
        assert registered == "[]", name
        assert said.startswith("mamba_ops: vLLM's own Mamba2 layers run; this vLLM lacks "), name
        assert name in said
    assert "and with all of them: ['SnapshotFreeMixer2']" in output


def test_turned_off(call: Call) -> None:
    script = "from inductor_passes.vllm import register\nregister()" + STATE
    output = call("-c", script, environment={"MAMBA_OPS_VLLM": "0"})
    assert "registered: []" in output


def test_a_misspelt_option_is_an_error(call: Call) -> None:
    script = (
        "from inductor_passes.vllm import register\ntry:\n  register()\nexcept ValueError as e:\n  print('ERROR', e)"
    )
    assert "known: enabled, eliminate" in call("-c", script, environment={"MAMBA_OPS_VLLM_ELIMINATES": "1"})


@pytest.mark.fault(20)
def test_metadata_of_another_device_is_declined(call: Call) -> None:
    output = call("-c", MIXED_DEVICES)
    for line in ("same: None", "other: DEVICE", "mixed: DEVICE", "dtype: METADATA", "shared: SHARED_SLOT"):
        assert line in output


def test_checkpoints_that_no_region_keeps_are_declined(call: Call) -> None:
    assert "late: CHECKPOINTS" in call("-c", LATE_CHECKPOINTS)
