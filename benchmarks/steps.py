"""Steps of one engine that continue 1 to 32 cached sequences, with the plugin's layers and with vLLM's own in turn.

    python -m benchmarks.steps MODEL [--rounds 3] [--repeats 4] [--new 32]

The same engine runs both, layer by layer the same weights and caches, so that what differs is the layers alone; turns
go stock, plugin, plugin, stock. Writes results/steps.json: `step/<n>x<new>` the wall time of the step, `gpu/<n>x<new>`
the sum of its GPU kernels, `layer/<n>x<new>` the kernels of one Mamba2 layer without its projections, the last two from
PyTorch's profiler. `whole/<n>x<new>` and `whole_gpu/<n>x<new>` are `step` and `gpu` where the plugin replays the whole
step as one graph, option `full_steps`. The plugin builds the metadata for all alike. Needs a GPU.

`--host FILE` writes where Python spends its time in steps that continue 1 sequence and 32 (cProfile, the plugin's
layers), `--kernels FILE` which kernels the GPU's time goes to, in the first profile of each kind of step.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import time
from pathlib import Path

os.environ["MAMBA_OPS_VLLM"] = os.environ["MAMBA_OPS_VLLM_FULL_STEPS"] = "1"

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.engine import in_worker
from benchmarks.engine.side import Engine
from benchmarks.results import FOLDER, Results
from benchmarks.serving.ratios import Block, paired_row
from inductor_passes.vllm import register

SETTINGS = {
    "dtype": "bfloat16",
    "max_model_len": 16384,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 8 << 30,
    "enable_prefix_caching": True,
    # Up to 512 tokens, as in a server that is not told how many sequences to run at most; fewer sizes, to start sooner.
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]},
}
COUNTS = (1, 2, 4, 8, 16, 32)
MOST_WHOLE = 64  # tokens of a step that is one graph
STOCK, PLUGIN, WHOLE = range(3)


class Steps:
    """An engine with a cached prefix, one step of which continues it so many times."""

    def __init__(self, model: str, cached: int, new: int) -> None:
        self._engine = Engine({"model": model, "engine": SETTINGS}).llm
        self._layers = self._engine.apply_model(in_worker.layers)[0]
        self._regions = [layer._region for layer in self._layers]
        self._rng, self._new, self._requests = random.Random(0), new, 0
        self._vocabulary = self._engine.llm_engine.vllm_config.model_config.get_vocab_size()
        self._prefix = self._tokens(cached)

    def use(self, way: int) -> bool:
        """Have the layers run the plugin's region, or vLLM's own code; or replay whole steps if they are short.

        Whether steps may now run that way: whole ones can be captured with some backends of attention only.
        """
        for layer, region in zip(self._layers, self._regions, strict=True):
            layer._region = None if way == STOCK else region
        captured = self._engine.collective_rpc(in_worker.offer_whole_steps, args=(way == WHOLE,))
        return way != WHOLE or all(captured)

    def run(self, count: int) -> float:
        """Milliseconds of a step that continues the prefix `count` times."""
        from vllm import SamplingParams

        engine = self._engine.llm_engine
        for _ in range(count):
            self._requests += 1
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
            engine.add_request(
                str(self._requests), {"prompt_token_ids": self._prefix + self._tokens(self._new)}, params
            )
        torch.accelerator.synchronize()
        start = time.perf_counter()
        engine.step()
        torch.accelerator.synchronize()
        wall = time.perf_counter() - start
        while engine.has_unfinished_requests():
            engine.step()
        return 1e3 * wall

    def kernels(self, count: int) -> tuple[float, float, str]:
        """Microseconds of all GPU kernels of such a step, and of those of one layer; and a table of them all."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self.run(count)
        on_gpu = torch.autograd.DeviceType.CUDA
        averages = profiled.key_averages()
        whole = sum(row.self_device_time_total for row in averages if row.device_type == on_gpu)
        inside = (event for event in profiled.events() if in_worker.inside_layer(event))
        of_layers = sum(kernel.duration for event in inside for kernel in event.kernels)
        table = averages.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
        return whole, of_layers / len(self._layers), table

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(1, self._vocabulary), k=count)


def main() -> None:
    options = parse()
    register()  # also where the package is not installed
    steps = Steps(options.model, options.cached, options.new)
    ways = [way for way in (STOCK, PLUGIN, WHOLE) if steps.use(way)]
    for way in reversed(ways):
        steps.use(way)
        for count in counts(way, options.new):
            steps.run(count), steps.run(count)
    walls: dict[tuple[int, int], list[Block]] = {}
    for _ in tqdm(range(options.rounds), desc="rounds"):
        for way in (*ways, *reversed(ways)):
            steps.use(way)
            for count in counts(way, options.new):
                block = [[steps.run(count)] for _ in range(options.repeats)]
                walls.setdefault((way, count), []).append(block)
    kernels: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for way in ways:
        steps.use(way)
        for count in tqdm(counts(way, options.new), desc="profiles"):
            steps.run(count)
            kernels[way, count] = [steps.kernels(count) for _ in range(options.profiles)]
    results = Results("steps")
    for way in ways[1:]:
        cases = ("whole", "whole_gpu") if way == WHOLE else ("step", "gpu", "layer")
        for count in counts(way, options.new):
            name = f"{count}x{options.new}"
            results.rows.append(paired_row(f"{cases[0]}/{name}", "wall", "ms", walls[STOCK, count], walls[way, count]))
            for place, case in enumerate(cases[1:]):
                stock, ours = ([[[times[place]] for times in kernels[w, count]]] for w in (STOCK, way))
                results.rows.append(paired_row(f"{case}/{name}", "wall", "us", stock, ours))
    results.show()
    print(results.write(options.out))
    if options.kernels:
        tables = (
            f"{('stock', 'plugin', 'whole')[way]}, {count} sequences\n{profiles[0][-1]}"
            for (way, count), profiles in kernels.items()
        )
        options.kernels.write_text("\n".join(tables))
    if options.host:
        steps.use(PLUGIN)
        profile_host(steps, options.host)


def counts(way: int, new: int) -> tuple[int, ...]:
    """Of sequences that a step continues."""
    return tuple(count for count in COUNTS if way != WHOLE or count * new <= MOST_WHOLE)


def profile_host(steps: Steps, path: Path) -> None:
    """Write what Python does in ten steps that continue the fewest sequences, and in ten with the most."""
    with path.open("w") as file:
        for count in (COUNTS[0], COUNTS[-1]):
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(10):
                steps.run(count)
            profiler.disable()
            print(f"ten steps that continue {count}", file=file)
            for order in ("tottime", "cumtime"):
                pstats.Stats(profiler, stream=file).sort_stats(order).print_stats(70)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--cached", type=int, default=4224, help="tokens of the prefix")
    parser.add_argument("--new", type=int, default=32, help="new tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=3, help="of stock, plugin, plugin, stock")
    parser.add_argument("--repeats", type=int, default=4, help="steps of each kind in a turn")
    parser.add_argument("--profiles", type=int, default=3, help="profiled steps of each kind")
    parser.add_argument("--host", type=Path, help="file for a profile of the host")
    parser.add_argument("--kernels", type=Path, help="file for the kernels of each kind of step")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
