"""Bitwise comparison with vLLM's own SSD on a GPU: outputs and caches, every family, shard, dtype and length.

    python -m benchmarks.equality [--processes 12]

vLLM tunes its block sizes; ours are fixed. Both run at ours here, and `choices/*` shows which of vLLM's own choices
give the same bits and which do not.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import pathlib
import random
from dataclasses import dataclass

import torch
import tqdm
import triton
from torch import Tensor

from benchmarks import paths
from benchmarks.inputs import FAMILIES, Inputs, Shape, make_inputs
from benchmarks.results import FOLDER, Results, Row

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHARDS = (1, 2, 4, 8)
LONGEST = 8192


@dataclass
class Tally:
    """How many comparisons were made, how many differed, and the first that did."""

    compared: int = 0
    differed: int = 0
    first: str = ""

    def add(self, equal: bool, what: str) -> None:
        self.compared += 1
        if not equal:
            self.differed += 1
            self.first = self.first or what


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN or not."""
    as_int = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(as_int), b.view(as_int))


def whole_pool(cache: Tensor) -> Tensor:
    """The memory of a cache with the padding between its slots."""
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))


def equal_paths(inputs: Inputs) -> bool:
    """Run both paths from the same cache; compare the outputs and every byte of the two pools."""
    pools = [whole_pool(inputs.state_cache).clone() for _ in range(2)]
    outs = [torch.full_like(inputs.x, float("nan"), memory_format=torch.contiguous_format) for _ in range(2)]
    for path, pool, out in zip((paths.stock, paths.ours), pools, outs, strict=True):
        path(inputs, out, pool.as_strided(inputs.state_cache.shape, inputs.state_cache.stride()))
    return same_bits(outs[0], outs[1]) and same_bits(pools[0], pools[1])


def batches(shape: Shape, rng: random.Random, every_edge: bool) -> list[list[int]]:
    """Lengths of single sequences around chunk edges, and batches of up to 32 with lengths around them as well."""
    edges = range(shape.chunk_size, LONGEST + 1, shape.chunk_size)
    chosen = list(edges) if every_edge else [shape.chunk_size, LONGEST, *rng.sample(list(edges), 2)]
    around = sorted({min(LONGEST, edge + step) for edge in chosen for step in (-1, 0, 1)})
    single = [[n] for n in (1, 2, 17, 32, *around)]
    short = [n for n in around if n <= 4 * shape.chunk_size + 1] + [1, 2, 31, 32, 33]
    several = [[rng.choice(short) for _ in range(n)] for n in (2, 3, 8, 32)]
    return single + several


def compare_shape(shape: Shape, name: str, every_edge: bool) -> Tally:
    """All dtypes and batches of one shape, both sides at our block sizes."""
    tally, rng = Tally(), random.Random(name)
    with paths.stock_blocks(paths.our_blocks(shape.headdim, shape.dstate, shape.chunk_size)):
        for dtype, state_dtype in itertools.product(DTYPES, DTYPES):
            usual = dtype == state_dtype == torch.bfloat16
            for lengths in batches(shape, rng, every_edge and usual):
                inputs = make_inputs(
                    shape,
                    lengths,
                    dtype,
                    state_dtype,
                    context_lens=[rng.choice([0, 0, rng.randrange(10000)]) for _ in lengths],
                    has_initial_state=[rng.random() < 0.8 for _ in lengths],
                    slot_padding=rng.choice([0, 1024, 8]),
                    seed=rng.randrange(2**31),
                )
                tally.add(equal_paths(inputs), f"{name} {dtype} {state_dtype} {lengths}")
    return tally


def compare_choices(shape: Shape) -> list[Row]:
    """vLLM at each of its own configurations against ours at its fixed one, stage by stage."""
    rows = []
    fixed = paths.our_blocks(shape.headdim, shape.dstate, shape.chunk_size)
    cases = [make_inputs(shape, lengths, seed=i) for i, lengths in enumerate([[4224], [32] * 8, [300, 1, 256, 77]])]
    for stage, kernel in paths.stock_kernels().items():
        for config in kernel.configs:
            tally = Tally()
            with paths.stock_blocks({**fixed, stage: config}):
                for inputs in cases:
                    try:
                        tally.add(equal_paths(inputs), "")
                    except triton.runtime.errors.OutOfResources:
                        break
            if tally.compared:
                label = ",".join(str(v) for v in config.kwargs.values())
                case = f"choices/{stage}/{label} warps={config.num_warps} stages={config.num_stages}"
                rows.append(mismatches(case, tally))
    return rows


def mismatches(case: str, tally: Tally) -> Row:
    return Row(case, "mismatches", "1", None, tally.differed, None, None, None, tally.compared, tally.first)


def _one(job: tuple[str, int]) -> list[Row]:
    family, tensor_parallel = job
    if tensor_parallel == 0:
        return compare_choices(FAMILIES[family])
    name = f"{family}/tp{tensor_parallel}"
    every_edge = family.startswith("granite") and tensor_parallel == 1
    return [mismatches(name, compare_shape(FAMILIES[family].shard(tensor_parallel), name, every_edge))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=12, help="shapes compared at once; most time is compilation")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER, help="folder for equality.json")
    arguments = parser.parse_args()
    jobs = [("granite-4.0-h-micro", 0), *itertools.product(FAMILIES, SHARDS)]
    results = Results("equality")
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
        for rows in tqdm.tqdm(pool.imap_unordered(_one, jobs), total=len(jobs), unit="shape"):
            results.rows.extend(rows)
    compared = [row for row in results.rows if not row.case.startswith("choices/")]
    differed = sum(int(row.ours or 0) for row in compared)
    total = Row("all", "mismatches", "1", None, differed, None, None, None, sum(row.n for row in compared))
    results.rows = [total, *sorted(results.rows, key=lambda row: row.case)]
    results.show()
    print(results.write(arguments.out))
    if differed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
