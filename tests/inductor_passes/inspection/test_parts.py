"""The parts behind an inspection: comparing runs, lists side by side, the layout of a drawing, names and sizes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor import metrics

from inductor_passes import Condition, Decline, GraphReport, NodeName
from inductor_passes.inspection.calls import calls_noted
from inductor_passes.inspection.comparison import Outcome, compare, tensors_in
from inductor_passes.inspection.drawing import LIMIT, draw
from inductor_passes.inspection.page import size
from inductor_passes.inspection.recorded import Change, Graph, Node, Recording, Role, merged
from inductor_passes.inspection.recording import recorded
from inductor_passes.inspection.savings import saving
from inductor_passes.inspection.statements import side_by_side, statements
from inductor_passes.observing import suspended
from tests.inductor_passes.absent_gpu import stop_at_code
from tests.inductor_passes.harness import compile_with_pass
from tests.inductor_passes.programs import make_inputs, older_form_with, snapshot, update_with


def outcome(*calls: str, **tensors: torch.Tensor) -> Outcome:
    return Outcome(tensors, list(calls))


def test_equal_runs() -> None:
    a = torch.tensor([1.0, torch.nan, -0.0])
    comparison = compare(outcome("x", "y", a=a), outcome("x", "y", a=a.clone()))
    assert not comparison.differences
    assert str(comparison) == "Equal bit for bit: 1 tensor that it left and 2 calls of compiled functions"


@pytest.mark.parametrize(
    ("without", "with_pass", "message"),
    [
        (outcome(a=torch.tensor(1.0)), outcome(a=torch.tensor(1.5)), "a differs by up to 0.5"),
        (outcome(a=torch.tensor(1.0)), outcome(a=torch.tensor(torch.nan)), "a differs by up to nan"),
        (outcome(a=torch.tensor(0.0)), outcome(a=torch.tensor(-0.0)), "a differs by up to 0"),
        (outcome(a=torch.tensor(True)), outcome(a=torch.tensor(False)), "a differs"),
        (
            outcome(a=torch.ones(2)),
            outcome(a=torch.ones(3)),
            r"a was torch.float32 \(2,\) and became torch.float32 \(3,\)",
        ),
        (outcome(a=torch.ones(2)), outcome(a=torch.ones(2).half()), "became torch.float16"),
        (outcome(a=torch.ones(2)), outcome(), "a is there in one run only"),
        (outcome("x", "y", "z"), outcome("x", "u", "v"), "2 of 3 calls of compiled functions, first number 1"),
        (outcome("x"), outcome("x", "x"), "1 calls of compiled functions became 2"),
    ],
)
def test_runs_that_differ(without: Outcome, with_pass: Outcome, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert not compare(without, with_pass).differences, str(compare(without, with_pass))


def test_runs_that_leave_nothing() -> None:
    assert "Nothing to compare" in str(compare(outcome(), outcome()))


def test_tensors_are_found_in_nested_results_and_buffers_of_modules() -> None:
    norm = torch.nn.BatchNorm1d(2)
    found = tensors_in({"a": [torch.ones(1), 3], "b": (None, norm)}, [])
    assert set(found) == {"['a'][0]"} | {
        f"['b'][1].{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_tensors_without_bytes_are_named_and_the_others_are_compared() -> None:
    problems: list[str] = []
    quantized = torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)
    left = {"sparse": torch.eye(2).to_sparse(), "quantized": quantized, "meta": torch.ones(1, device="meta")}
    left["dense"] = torch.ones(1)
    found = tensors_in(left, problems)
    assert list(found) == ["['dense']"]
    assert [problem.partition(" was not compared: ")[0] for problem in problems] == [
        "['sparse']",
        "['quantized']",
        "['meta']",
    ]


def test_calls_tell_results_and_changed_arguments() -> None:
    digests: list[str] = []
    problems: list[str] = []
    inputs = make_inputs()
    with calls_noted(digests, problems):
        compiled = torch.compile(update_with(snapshot), fullgraph=True)
        compiled(*inputs.clone().args())
        compiled(*inputs.clone().args())
        inputs.states[0, 0, 0, 0] += 1
        compiled(*inputs.clone().args())
    assert not problems
    first, same, other = digests
    assert first == same != other


@pytest.mark.parametrize("form", ["update", "older"])
def test_saved_launches_are_the_kernels_that_inductor_no_longer_generates(form: str) -> None:
    def write(cache, slots, final):
        cache[slots] = final

    program = update_with(snapshot) if form == "update" else older_form_with(write)
    recording, kernels = Recording(), []
    for run in (suspended(), recorded(recording)):
        torch._dynamo.reset()
        metrics.reset()
        with run:
            compile_with_pass(program, make_inputs(), run=stop_at_code)
        kernels.append(metrics.generated_kernel_count)
    (change,) = recording.changes
    assert saving(change).launches == kernels[0] - kernels[1] > 0


@settings(max_examples=100)
@given(st.lists(st.sampled_from("abcdef")), st.lists(st.sampled_from("abcdef")))
def test_side_by_side_shows_every_difference_and_nothing_else(before: list[str], after: list[str]) -> None:
    before, after = ([f"{name} = f({name})" for name in names] for names in (before, after))
    rows = [row for hunk in side_by_side(before, after) for row in hunk]
    left = {row.left_number: row.left for row in rows if row.left_number is not None}
    right = {row.right_number: row.right for row in rows if row.right_number is not None}
    assert all(before[number - 1] == text for number, text in left.items())
    assert all(after[number - 1] == text for number, text in right.items())
    assert all((row.left == row.right) or row.changed for row in rows)
    # Without what is marked as changed or not shown, both sides are the same.
    gone = {row.left_number for row in rows if row.changed}
    came = {row.right_number for row in rows if row.changed}
    rest = [text for number, text in enumerate(before, 1) if number not in gone]
    assert rest == [text for number, text in enumerate(after, 1) if number not in came]


def test_statements_leave_out_annotations_and_comments() -> None:
    text = '# a comment\na: "f32[2]" = torch.ops.aten.neg.default(x);  x = None\nreturn (a,)'
    assert statements(text) == ["a = aten.neg.default(x)", "return (a,)"]


def random_change(number_of_nodes: int) -> Change:
    """A random graph, with a snapshot that is declined somewhere in it."""
    nodes = [
        Node(
            f"n{i}",
            f"aten.op{'x' * random.randint(0, 20)}.default",
            f"f32[{i}]",
            4 * i,
            1,
            False,
            True,
            None,
            "",
            tuple({f"n{random.randrange(i)}" for _ in range(random.randint(0, 3))}) if i else (),
            random.choice([Role.OTHER, Role.OTHER, Role.INPUT]),
        )
        for i in range(number_of_nodes)
    ]
    site = NodeName(random.choice(nodes).name, "site")
    graph = Graph(tuple(nodes), "")
    return Change(graph, graph, GraphReport(declines=(Decline(Condition.CROSSED_SLOTS, site, (site,)),)))


@pytest.mark.parametrize("number_of_nodes", [1, 2, LIMIT, 200])
def test_a_drawing_has_room_for_every_node(number_of_nodes: int) -> None:
    change = random_change(number_of_nodes)
    for drawing in draw(change):
        assert change.report.declines[0].site.name in {box.node.name for box in drawing.boxes}
        if number_of_nodes <= LIMIT:
            assert len(drawing.boxes) == number_of_nodes
        for box in drawing.boxes:
            assert 0 <= box.x - box.width / 2 < box.x + box.width / 2 <= drawing.width
            assert 0 <= box.y - box.height / 2 < box.y + box.height / 2 <= drawing.height
        for a, b in itertools.combinations(drawing.boxes, 2):
            apart_across = abs(a.x - b.x) >= (a.width + b.width) / 2
            assert apart_across or abs(a.y - b.y) >= (a.height + b.height) / 2, f"{a} lies over {b}"


def test_merged_recordings_keep_their_code() -> None:
    empty = Graph((), "")
    one = Recording([Change(empty, empty, GraphReport(), code=0)], ["a"])
    two = Recording([Change(empty, empty, GraphReport(), code=1)], ["b", "c"], ["a problem"])
    whole = merged([one, two])
    assert [whole.codes[change.code or 0] for change in whole.changes] == ["a", "c"]
    assert whole.problems == ["a problem"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (-(1 << 30), "-1 GiB")],
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
