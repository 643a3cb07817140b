"""What the user reads: the report object, its text, and one log record a graph."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inductor_passes import Condition, SnapshotElimination, inductor_options
from mamba_ops import build_chunk_metadata, ssd_chunk_scan
from mamba_ops.ops import state_passing_update
from tests.inductor_passes.programs import make_inputs, snapshot, update_with

HERE = Path(__file__).name


def mixed(states, dA, last, cache, slots, has):
    """One snapshot that goes and one that is returned."""
    first = state_passing_update(states, dA, last, snapshot(cache, slots, has), cache, slots)
    kept = snapshot(cache, slots, has)
    return first, state_passing_update(states, dA, last, kept, cache, slots), kept


@pytest.fixture
def elimination():
    elimination = SnapshotElimination()
    torch.compile(mixed, fullgraph=True, options=inductor_options(elimination))(*make_inputs().args())
    return elimination


def test_report_tells_what_went_and_what_stayed(elimination):
    report = elimination.report()
    assert len(report.graphs) == 1
    assert report.eliminated == 1
    whole, partial = report.rewrites
    assert whole.into == "state_passing_indexed"
    assert {"aten.index.Tensor", "aten.where.self"} <= {node.op for node in whole.removed}
    assert "mamba_ops.state_passing_indexed_cpu.default" in {node.op for node in whole.added}
    assert partial.into == "masked_gather"
    assert {node.op for node in partial.added} == {"mamba_ops.masked_gather_cpu.default"}
    (decline,) = report.declines
    assert decline.condition is Condition.SNAPSHOT_RETURNED
    assert decline.nodes


def test_report_names_the_source_line(elimination):
    sources = [rewrite.site.source for rewrite in elimination.report().rewrites]
    assert all(HERE in source for source in sources)
    assert len(set(sources)) == 2


def test_report_gives_the_size_of_the_snapshot(elimination):
    cache = make_inputs().cache
    sizes = {rewrite.snapshot_bytes for rewrite in elimination.report().rewrites}
    assert sizes == {3 * cache[0].numel() * cache.element_size()}


def test_report_reads_as_text(elimination):
    text = str(elimination.report())
    assert "snapshots eliminated: 1, kept: 1" in text
    assert f"SNAPSHOT_RETURNED: {Condition.SNAPSHOT_RETURNED.value}" in text
    assert "aten.index.Tensor" in text


def test_report_survives_the_next_graph(elimination):
    before = elimination.report()
    torch._dynamo.reset()
    torch.compile(update_with(snapshot), options=inductor_options(elimination))(*make_inputs().args())
    assert len(before.graphs) == 1
    assert elimination.report().graphs[:1] == before.graphs
    assert len(elimination.report().graphs) == 2


def test_a_graph_without_snapshot_is_left_alone():
    elimination = SnapshotElimination()
    program = update_with(lambda cache, slots, has: None)
    torch.compile(program, fullgraph=True, options=inductor_options(elimination))(*make_inputs().args())
    assert str(elimination.report().graphs[0]) == "no snapshot"


def test_one_log_record_a_graph(caplog):
    with caplog.at_level(logging.INFO, "inductor_passes"):
        torch.compile(mixed, options=inductor_options())(*make_inputs().args())
    (record,) = [record for record in caplog.records if record.name == "inductor_passes"]
    assert record.levelno == logging.INFO
    assert "state_passing_indexed" in record.getMessage()
    assert "SNAPSHOT_RETURNED" in record.getMessage()


def test_torch_logs_names_the_logger():
    script = (
        "import torch, inductor_passes as passes; from tests.inductor_passes.programs import *\n"
        "torch.compile(update_with(snapshot), options=passes.inductor_options())(*make_inputs().args())"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"TORCH_LOGS": "inductor_passes", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root, env=environment
    )
    assert "now state_passing_indexed" in run.stderr


def test_a_graph_that_the_pass_fails_on_compiles_as_without_it(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no proof today")

    monkeypatch.setattr("inductor_passes.snapshot_elimination.prove", fail)
    elimination = SnapshotElimination()
    expected_inputs = make_inputs()
    inputs = expected_inputs.clone()
    program = update_with(snapshot)
    expected = program(*expected_inputs.args())
    actual = torch.compile(program, fullgraph=True, options=inductor_options(elimination))(*inputs.args())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    for changed, wanted in zip(inputs.args(), expected_inputs.args(), strict=True):
        torch.testing.assert_close(changed, wanted, rtol=0, atol=0, equal_nan=True)
    (decline,) = elimination.report().declines
    assert decline.condition is Condition.PASS_FAILED
    assert "no proof today" in caplog.text


def test_a_scan_is_named_by_the_line_that_calls_it():
    """The line inside the scan is the same for all layers of a model."""
    metadata = build_chunk_metadata([0, 16, 24], 64, context_lens=[100, 0])
    x, dt, A = torch.randn(24, 4, 32), torch.rand(24, 4), -torch.rand(4)
    B, C = torch.randn(2, 24, 1, 32)
    has = torch.tensor([True, False])

    def scan(cache, slots, initial):
        states = {"initial_states": initial, "state_cache": cache, "write_slots": slots}
        return ssd_chunk_scan(x, dt, A, B, C, metadata, **states).out

    def model(first, second, slots):
        one = scan(first, slots, torch.where(has[:, None, None, None], first[slots], 0))
        return one + scan(second, slots, second[slots] * 2)

    first, second = torch.randn(2, 6, 4, 32, 32)
    elimination = SnapshotElimination()
    torch.compile(model, fullgraph=True, options=inductor_options(elimination))(first, second, torch.tensor([4, 1]))
    report = elimination.report()
    (rewrite,), (decline,) = report.rewrites, report.declines
    assert HERE in rewrite.site.source
    assert HERE in decline.site.source
