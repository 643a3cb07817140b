"""A real server, stock and with the plugin: time to first token, throughput, engine step, start and memory.

    python -m benchmarks.serve MODEL [--servers 4] [--together] [--spread 60] [--bursts 10] [--waves 3] [--decodes 0] \
        [--tensor-parallel 1] -- --max-model-len 16384 --kv-cache-memory-bytes 8G ...

What follows `--` goes to `vllm serve`. Servers run one after the other in the order stock, plugin, plugin, stock, ...;
with `--together` a stock server and one with the plugin stay up side by side on the same GPU and are measured turn by
turn, the other one idle, which is steadier on a host whose speed drifts and needs fewer starts. Requests are token ids
over HTTP, so no tokenizer is needed. Needs an installed plugin (an entry point that vLLM sees).

`step/1x32` is the engine's own time from scheduling one continuation to its token, without HTTP. Results, with a plot
and the servers' logs beside them, are written again after every server and block, so that a run cut short leaves both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from benchmarks.plots import plot_ratios
from benchmarks.results import FOLDER, Results, Row
from benchmarks.serving.gpu_memory import settled_gpu_bytes
from benchmarks.serving.ratios import Block, paired_row
from benchmarks.serving.server import Server, Setup, serving
from benchmarks.serving.workloads import DECODE_UNIT, IN_FLIGHT, UNITS, Sizes, amount, measure, warm_up

STOCK, PLUGIN = False, True


class Record:
    """All samples so far, a block for each time that a server was measured, and what they come to."""

    def __init__(self, options: argparse.Namespace) -> None:
        parallel = options.tensor_parallel
        self._name = options.name or ("serve" if parallel == 1 else f"serve_tp{parallel}")
        self._title = f"{Path(options.model).name}, ratio of the plugin to stock"
        self._folder: Path = options.out
        self._samples: Path = options.logs / f"{self._name}_samples.json"
        self._blocks: dict[tuple[str, str], tuple[list[Block], list[Block]]] = {}
        self._notes: dict[str, list[str]] = {}

    def add(self, plugin: bool, case: str, metric: str, block: Block) -> None:
        self._blocks.setdefault((case, metric), ([], []))[plugin].append(block)

    def note(self, case: str, text: str) -> None:
        if text not in self._notes.setdefault(case, []):
            self._notes[case].append(text)

    def results(self) -> Results:
        rows: list[Row] = []
        for (case, metric), (stock, ours) in self._blocks.items():
            unit = DECODE_UNIT if case == "decode" else UNITS[metric]
            note = "; ".join(self._notes.get(case, []))
            if stock and ours:
                rows.append(paired_row(case, metric, unit, stock, ours, note))
        return Results(self._name, rows)

    def write(self) -> Results:
        """Write all samples beside the logs, and the results once both sides have been measured."""
        named = {" ".join(figure): {"stock": stock, "ours": ours} for figure, (stock, ours) in self._blocks.items()}
        self._samples.write_text(json.dumps(named))
        results = self.results()
        if results.rows:
            results.write(self._folder)
            try:
                plot_ratios(results.rows, self._folder / f"{self._name}.svg", self._title)
            except ImportError as error:
                print(f"no plot: {error}", file=sys.stderr)
        return results


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    setup = Setup(
        options.model, options.serve, options.tensor_parallel, options.start_timeout, not options.warm, options.logs
    )
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})
    record = Record(options)
    pool = ThreadPoolExecutor(IN_FLIGHT)
    for plugins in turns(options.servers, options.together):
        with contextlib.ExitStack() as stack:
            servers = [start(stack, setup, sizes, plugin, record, pool) for plugin in plugins]
            order = [servers[0]] if len(servers) == 1 else [servers[i] for i in (0, 1, 1, 0)]
            done = dict.fromkeys(plugins, 0)
            for server in order * options.blocks:
                done[server.plugin] += 1
                title = f"{'plugin' if server.plugin else 'stock'}, block {done[server.plugin]}"
                with tqdm(total=amount(sizes), desc=title, file=sys.stderr) as bar:
                    samples = measure(server.client, sizes, done[server.plugin], pool, bar.update)
                for (case, metric), block in samples.items():
                    record.add(server.plugin, case, metric, block)
                print(*server.telling_lines(), sep="\n", file=sys.stderr, flush=True)
                record.write()
        for server in servers:  # what they say at their end
            print(*server.telling_lines(), sep="\n", file=sys.stderr, flush=True)
    record.write().show()


def turns(servers: int, together: bool) -> Iterator[list[bool]]:
    """Which servers are up at a time: stock, plugin, plugin, stock, ... one by one or in pairs."""
    order = [(STOCK, PLUGIN, PLUGIN, STOCK)[i % 4] for i in range(servers)]
    size = 2 if together else 1
    for first in range(0, servers, size):
        yield order[first : first + size]


def start(
    stack: contextlib.ExitStack, setup: Setup, sizes: Sizes, plugin: bool, record: Record, pool: ThreadPoolExecutor
) -> Server:
    """Start a server and warm it up; note how long it took and what memory it holds."""
    name = "plugin" if plugin else "stock"
    before = settled_gpu_bytes(setup.tensor_parallel)
    server = stack.enter_context(serving(setup, plugin))
    hits = warm_up(server.client, sizes, pool)
    server.used = settled_gpu_bytes(setup.tensor_parallel) - before
    print(f"{name}: up after {server.seconds:.1f} s, log {server.log}", file=sys.stderr)
    print(*server.figures(), *server.telling_lines(), sep="\n", file=sys.stderr, flush=True)
    record.add(plugin, "startup", "wall", [[1e3 * server.seconds]])
    record.note("startup", "empty compile caches" if setup.cold else "shared compile caches")
    record.note("step/1x32", f"{name}: {hits} of {sizes.cached + sizes.new} tokens cached")
    if server.used > 0:
        record.add(plugin, "memory", "bytes", [[server.used]])
    for figure in server.figures():
        record.note("memory" if server.used > 0 else "startup", f"{name}: {figure}")
    record.write()
    return server


def parse() -> argparse.Namespace:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--servers", type=int, default=4, help="how many are started: stock, plugin, plugin, stock ...")
    parser.add_argument("--together", action="store_true", help="two at a time, measured turn by turn")
    parser.add_argument("--blocks", type=int, default=1, help="times that the workloads are repeated on each server")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--warm", action="store_true", help="let servers share compile caches, on disk as usual")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds")
    parser.add_argument("--name", default="", help="of the result, serve or serve_tp<N> unless given")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--logs", type=Path, default=Path("build/serve_logs"), help="folder of the servers' logs")
    for field in dataclasses.fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, help="see benchmarks/serving/workloads.py")
    options = parser.parse_args(arguments[:cut])
    options.serve = arguments[cut + 1 :]
    if options.together and not any(a.startswith("--gpu-memory-utilization") for a in options.serve):
        options.serve += ["--gpu-memory-utilization", "0.45"]
    return options


if __name__ == "__main__":
    main()
