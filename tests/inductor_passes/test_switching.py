"""Switching the pass on and off, beside whatever else the user has in its place."""

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

from inductor_passes import SnapshotElimination, eliminate_snapshots, inductor_options, install, uninstall
from tests.inductor_passes.harness import KeepGraph
from tests.inductor_passes.programs import make_inputs, snapshot, update_with

PROGRAM = update_with(snapshot)


class Named(CustomGraphPass):
    """A pass of the user's that may be cached."""

    def __call__(self, graph):
        self.saw_snapshot = any("aten.where" in str(node.target) for node in graph.nodes)

    def uuid(self):
        return "named"


@pytest.fixture(params=[None, "function", "pass", "list"])
def present(request):
    """What the user has in the pass's place already."""
    pass_of = {None: None, "function": KeepGraph().__call__, "pass": Named(), "list": [Named(), KeepGraph()]}
    present = pass_of[request.param]
    with inductor_config.patch(post_grad_custom_post_pass=present):
        yield present


def compile_and_run(options=None):
    torch._dynamo.reset()
    torch.compile(PROGRAM, fullgraph=True, options=options)(*make_inputs().args())


def test_context_manager(present):
    with eliminate_snapshots() as elimination:
        compile_and_run()
    assert elimination.report().eliminated == 1
    assert inductor_config.post_grad_custom_post_pass is present
    compile_and_run()
    assert len(elimination.report().graphs) == 1


def test_context_manager_restores_after_an_error(present):
    with pytest.raises(KeyError), eliminate_snapshots():
        raise KeyError
    assert inductor_config.post_grad_custom_post_pass is present


def test_options(present):
    elimination = SnapshotElimination()
    compile_and_run(inductor_options(elimination))
    assert elimination.report().eliminated == 1
    assert inductor_config.post_grad_custom_post_pass is present


def test_options_of_a_mode():
    options = inductor_options(mode="max-autotune")
    assert options["max_autotune"] is True
    with pytest.raises(RuntimeError, match="no-such-mode"):
        inductor_options(mode="no-such-mode")


def test_install_is_idempotent_and_undone(present):
    try:
        first, second = install(), install()
        compile_and_run()
        assert len(first.report().graphs) == 0
        assert second.report().eliminated == 1
        installed = inductor_config.post_grad_custom_post_pass
        passes = installed if isinstance(installed, list) else [installed]
        assert sum(isinstance(one, SnapshotElimination) for one in passes) == 1
    finally:
        uninstall()
    assert inductor_config.post_grad_custom_post_pass == present
    uninstall()
    assert inductor_config.post_grad_custom_post_pass == present


def test_contexts_nest():
    with eliminate_snapshots() as outer, eliminate_snapshots(masked_gather=False) as inner:
        compile_and_run()
    assert inner.report().eliminated == 1
    assert not outer.report().graphs


def test_the_pass_of_the_user_runs_after_ours():
    user = Named()
    with inductor_config.patch(post_grad_custom_post_pass=user), eliminate_snapshots():
        compile_and_run()
    assert not user.saw_snapshot


def test_a_function_in_the_place_bypasses_the_cache_as_before():
    """PyTorch cannot tell what a function would do, so it must not serve a graph that was compiled with it."""
    with inductor_config.patch(fx_graph_cache=True, post_grad_custom_post_pass=lambda graph: None):
        for options in (None, inductor_options()):
            counters["inductor"].clear()
            compile_and_run(options)
            assert counters["inductor"]["fxgraph_cache_bypass"] == 1
            assert counters["inductor"]["fxgraph_cache_miss"] == 0


def test_uuid_tells_options_apart():
    assert SnapshotElimination().uuid() == SnapshotElimination().uuid()
    assert SnapshotElimination().uuid() != SnapshotElimination(masked_gather=False).uuid()


def test_masked_gather_can_be_left_out():
    def program(*args):
        initial = snapshot(*args[3:])
        return torch.ops.mamba_ops.state_passing_update(*args[:3], initial, *args[3:5]), initial

    with eliminate_snapshots(masked_gather=False) as elimination:
        torch.compile(program, fullgraph=True)(*make_inputs().args())
    assert len(elimination.report().declines) == 1
    assert not elimination.report().rewrites
