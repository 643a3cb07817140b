"""What the pages of the documentation take from the code and from the results of record, so that it cannot drift.

MkDocs calls the functions that begin with `on_`. In a page,

    <!-- generate: NAME ARGUMENT ... -->

on a line of its own becomes what the function of that name below returns, and under a heading that is the name of a
reason why a snapshot stays comes the sentence that the code has for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docs_plots
import docs_tables

from inductor_passes.report import Condition
from inductor_passes.vllm.decline import Decline

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- generate: (.+?) -->$", re.MULTILINE)
HEADING = re.compile(r"^### `([A-Z_]+)`$", re.MULTILINE)
SENTENCES = {reason.name: reason.value for reason in (*Condition, *Decline)}

GENERATORS: dict[str, Callable[..., str]] = {
    "headline": docs_tables.headline,
    "options": docs_tables.options,
    "plugin-state": docs_tables.plugin_state,
    "versions": docs_tables.versions,
    "environment": docs_tables.environment,
    "continuations": docs_tables.continuations,
    "stages": docs_tables.stages,
    "memory": docs_tables.memory,
    "equality": docs_tables.equality,
    "results": docs_tables.results,
    "times-plot": docs_plots.times,
    "ratios-plot": docs_plots.ratios,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in a page."""
    markdown = HEADING.sub(_with_sentence, markdown)
    return MARK.sub(_generated, markdown)


def on_config(config: Any) -> Any:
    """Look at the code and the results too when `mkdocs serve` watches for changes."""
    config.watch += [str(ROOT / name) for name in ("benchmarks/results", "examples", "inductor_passes", "mamba_ops")]
    return config


def _generated(found: re.Match[str]) -> str:
    name, *arguments = found[1].split()
    return GENERATORS[name](*arguments)


def _with_sentence(heading: re.Match[str]) -> str:
    sentence = SENTENCES[heading[1]]
    return f"{heading[0]}\n\n*{sentence[0].upper()}{sentence[1:]}.*"
