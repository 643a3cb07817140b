"""What a layer keeps of the caches that vLLM gives it, and for how long."""

from __future__ import annotations

from tests.vllm.conftest import Call

LET_GO = """
import gc, weakref, torch
from inductor_passes.vllm.layer import SnapshotFreeMixer2
from inductor_passes.vllm.layer_tensors import BoundLayer

layer = SnapshotFreeMixer2.__new__(SnapshotFreeMixer2)
torch.nn.Module.__init__(layer)
assert not hasattr(layer, "kv_cache")
for empty in ([], (), torch.tensor([])):
    caches = (torch.zeros(3), torch.zeros(4))
    layer.kv_cache = caches
    assert layer.kv_cache is caches
    layer._bound, layer._binding_tried = BoundLayer([*caches], (0, 0), (1, 1, 1)), True
    known = weakref.ref(caches[1])
    del caches
    layer.kv_cache = empty
    gc.collect()
    assert known() is None
    assert not layer._binding_tried
    assert layer.kv_cache is empty
del layer.kv_cache
assert not hasattr(layer, "kv_cache")
print("let go")
"""


def test_caches_that_vllm_takes_back_are_let_go(call: Call) -> None:
    """vLLM allocates a small cache first, to see what graphs need, and takes it back; so it does when it ends."""
    assert "let go" in call("-c", LET_GO)
