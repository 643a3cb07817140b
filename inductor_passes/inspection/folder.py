"""One folder with everything that was seen: the page, the table, graphs, code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from inductor_passes.inspection.comparison import Comparison
from inductor_passes.inspection.noting import noting
from inductor_passes.inspection.recorded import Recording

WITH_PASS, WITHOUT_PASS, DEPYF = "with_pass", "without_pass", "depyf"
NO_GRAPH = (
    "Nothing was compiled while the pass was on. torch.compile compiles when a function is first called, and not again "
    "what it has compiled before: make the first call meanwhile, or call torch.compiler.reset()."
)
PAGE, TABLE = "report.html", "table.txt"

# All names of files that an inspection writes; those of an earlier one must not stay between the new ones.
_OURS = (
    PAGE,
    TABLE,
    "graph_*_before.py",
    "graph_*_after.py",
    *(f"{run}/{name}" for run in (WITH_PASS, WITHOUT_PASS) for name in ("code_*.py", f"{DEPYF}/*.py")),
)


@dataclasses.dataclass
class Inspected:
    """Everything that one inspection has to show.

    Attributes:
        title: what was inspected.
        recording: with the pass.
        codes_without_pass: what Inductor generated in a run without it, if there was one.
        comparison: of the two runs, if there were two; or what else is known, in words.
        kernels: how many kernels Inductor generated without and with the pass, if known.
        no_graph: what to say if the pass has seen no graph.
    """

    title: str
    recording: Recording
    codes_without_pass: list[str] = dataclasses.field(default_factory=list)
    comparison: Comparison | str | None = None
    kernels: tuple[int, int] | None = None
    no_graph: str = NO_GRAPH

    @property
    def files(self) -> list[str]:
        """Names of the graph and code files, by the folder's layout."""
        return list(_texts(self))


def clear(folder: Path) -> None:
    """Remove what an earlier inspection left in a folder, and nothing else."""
    for pattern in _OURS:
        for file in folder.glob(pattern):
            file.unlink()


def write(folder: Path, inspected: Inspected) -> list[str]:
    """Write everything; what cannot be written is left out.

    Returns:
        What went wrong, in words; added to the recording's problems too.
    """
    problems: list[str] = []
    for name, text in _texts(inspected).items():
        with noting(problems, f"{name} was not written"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    with noting(problems, f"{TABLE} was not written"):
        from inductor_passes.inspection.table import as_text

        (folder / TABLE).write_text(as_text(inspected), encoding="utf-8")
    with noting(problems, f"{PAGE} was not written"):
        from inductor_passes.inspection.page import render

        (folder / PAGE).write_text(render(inspected, folder), encoding="utf-8")
    inspected.recording.problems += problems
    return problems


def _texts(inspected: Inspected) -> dict[str, str]:
    texts: dict[str, str] = {}
    for number, change in enumerate(inspected.recording.changes):
        texts[f"graph_{number}_before.py"] = change.before.text
        texts[f"graph_{number}_after.py"] = change.after.text
    for run, codes in ((WITH_PASS, inspected.recording.codes), (WITHOUT_PASS, inspected.codes_without_pass)):
        texts |= {f"{run}/code_{number}.py": code for number, code in enumerate(codes)}
    return texts
