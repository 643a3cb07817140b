"""GPU time of every stage and of whole continuations, ours and vLLM's side by side.

    python -m benchmarks.kernels

Each pair runs from CUDA graphs in the order stock, ours, ours, stock; vLLM tunes each stage at the measured shape,
ours runs at its fixed block sizes. `cold` cases walk through sets of buffers larger than the L2, `warm` ones reuse
one set. Both sides of `one_pass/*` are ours: `--only one_pass` needs no vLLM.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from functools import partial

import torch
import tqdm
from torch import Tensor

from benchmarks import paths
from benchmarks.inputs import FAMILIES, Inputs, make_inputs
from benchmarks.one_pass import make_one_pass, one_pass, staged
from benchmarks.results import FOLDER, Results, Row, compare
from benchmarks.timing import L2_BYTES, Graph, Work, interleave, memory
from mamba_ops import ops

GRANITE = FAMILIES["granite-4.0-h-micro"]
STAGE_LENGTHS = {"1x4224": [4224], "32x32": [32] * 32, "1x32": [32]}
STAGES = ("chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk", "chunk_scan")
ONE_PASS_SIZES = [(nseqs, length) for nseqs in (1, 8, 32) for length in (8, 16, 32, 64)]


class Stages:
    """One set of buffers with each stage's launch, ours and vLLM's, on it."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
        self.cu, self.chunk_size = inputs.metadata.cu_chunk_seqlens, inputs.metadata.chunk_size
        self.dA_cumsum, self.dt_out = self.our_chunk_cumsum()
        self.states = self.our_chunk_state()
        self.entering = self.our_state_passing()
        self.cb = self.our_bmm_chunk()
        # vLLM keeps heads before chunks, reads the state after a chunk, and takes the snapshot besides.
        self.stock_dA, self.stock_dt = (t.transpose(0, 1).contiguous() for t in (self.dA_cumsum, self.dt_out))
        self.snapshot = ops.masked_gather(inputs.state_cache, inputs.slots, inputs.has_initial_state)

    def our_chunk_cumsum(self) -> tuple[Tensor, Tensor]:
        i = self.inputs
        return ops.chunk_cumsum(i.dt, i.A, self.cu, self.chunk_size, i.dt_bias, True, 0.0)

    def our_chunk_state(self) -> Tensor:
        return ops.chunk_state(self.inputs.B, self.inputs.x, self.dt_out, self.dA_cumsum, self.cu)

    def our_state_passing(self) -> Tensor:
        i = self.inputs
        last = i.metadata.last_chunk_indices
        return ops.state_passing_indexed(
            self.states, self.dA_cumsum, last, i.state_cache, i.slots, i.has_initial_state, i.slots
        )

    def our_bmm_chunk(self) -> Tensor:
        return ops.bmm_chunk(self.inputs.C, self.inputs.B, self.cu, self.chunk_size)

    def our_chunk_scan(self) -> None:
        i = self.inputs
        ops.chunk_scan(self.cb, i.x, self.dt_out, self.dA_cumsum, i.C, self.entering, self.cu, self.out, i.D)

    def stock_chunk_cumsum(self) -> object:
        from vllm.model_executor.layers.mamba.ops.ssd_chunk_state import _chunk_cumsum_fwd

        i = self.inputs
        return _chunk_cumsum_fwd(i.dt, i.A, self.chunk_size, self.cu, dt_bias=i.dt_bias, dt_softplus=True)

    def stock_chunk_state(self) -> object:
        from vllm.model_executor.layers.mamba.ops.ssd_chunk_state import _chunk_state_fwd

        return _chunk_state_fwd(self.inputs.B, self.inputs.x, self.stock_dt, self.stock_dA, self.cu)

    def stock_state_passing(self) -> object:
        from vllm.model_executor.layers.mamba.ops.ssd_state_passing import _state_passing_fwd

        i = self.inputs
        return _state_passing_fwd(
            self.states.flatten(-2),
            self.stock_dA,
            i.metadata.last_chunk_indices,
            initial_states=self.snapshot.flatten(-2),
            out_dtype=i.state_cache.dtype,
            final_states=i.state_cache.flatten(-2),
            final_state_indices=i.slots,
        )

    def stock_bmm_chunk(self) -> object:
        from vllm.model_executor.layers.mamba.ops.ssd_bmm import _bmm_chunk_fwd

        return _bmm_chunk_fwd(self.inputs.C, self.inputs.B, self.chunk_size, self.cu, output_dtype=torch.float32)

    def stock_chunk_scan(self) -> object:
        from vllm.model_executor.layers.mamba.ops.ssd_chunk_scan import _chunk_scan_fwd

        i, dt, dA = self.inputs, self.stock_dt, self.stock_dA
        states, seq_idx = self.entering, i.metadata.seq_idx  # any states do for timing
        return _chunk_scan_fwd(
            self.cb, i.x, dt, dA, i.C, states, self.cu, self.out, seq_idx, D=i.D, initial_states=self.snapshot
        )


def measure(case: str, stock: list[Work], ours: list[Work], *, warm: bool, note: str = "") -> Row:
    """Interleaved GPU times of two lists of pieces, one a buffer set."""
    if warm:
        stock, ours = stock[:1], ours[:1]
    repeats = max(1, 40 // len(stock))
    times = interleave(Graph(stock, repeats), Graph(ours, repeats))
    return compare(case, "gpu_time", "us", *times, note=f"{'warm' if warm else 'cold'} L2 {note}".strip())


def buffer_sets(lengths: list[int]) -> list[Stages]:
    """Enough sets of buffers that walking through them leaves nothing in the L2."""
    first = Stages(make_inputs(GRANITE, lengths))
    one = sum(t.numel() * t.element_size() for t in (first.states, first.entering, first.cb, first.inputs.x))
    count = min(40, max(3, 3 * L2_BYTES // one))
    return [first, *(Stages(make_inputs(GRANITE, lengths, seed=i)) for i in range(1, count))]


def stage_rows(size: str) -> list[Row]:
    sets = buffer_sets(STAGE_LENGTHS[size])
    rows = []
    for stage in STAGES:
        stock = [getattr(s, f"stock_{stage}") for s in sets]
        ours = [getattr(s, f"our_{stage}") for s in sets]
        with paths.stock_blocks({stage: None}):
            for warm in (False, True):
                suffix = "" if not warm else "/warm"
                rows.append(measure(f"stage/{stage}/{size}{suffix}", stock, ours, warm=warm))
    return rows


def continuation_rows(size: str) -> list[Row]:
    sets = [s.inputs for s in buffer_sets(STAGE_LENGTHS[size])]
    outs = [torch.empty_like(i.x, memory_format=torch.contiguous_format) for i in sets]

    def pieces(path: Callable[[Inputs, Tensor], None]) -> list[Work]:
        return [partial(path, i, out) for i, out in zip(sets, outs, strict=True)]

    rows = []
    with paths.stock_blocks(dict.fromkeys(STAGES)):
        for warm in (False, True):
            case = f"continue/{size}{'/warm' if warm else ''}"
            rows.append(measure(case, pieces(paths.stock), pieces(paths.ours), warm=warm))
        used = [memory(pieces(path)[0]) for path in (paths.stock, paths.ours)]
    note = f"one dense copy of the states: {sets[0].state_cache[0].nbytes * len(sets[0].slots)} bytes"
    for metric, stock, ours in zip(("peak_extra", "allocated"), *used, strict=True):
        rows.append(Row(f"memory/{size}", metric, "bytes", stock, ours, ours / stock, None, None, 1, note))
    return rows


def one_pass_rows(nseqs: int, length: int) -> list[Row]:
    """Sequences of one chunk in one pass, against the same in stages; the convolution is part of both."""
    lengths = [length] * nseqs
    sets = [make_one_pass(GRANITE, lengths)]
    count = min(200, max(3, 3 * L2_BYTES // (nseqs * sets[0].state_cache[0].nbytes)))
    sets += [make_one_pass(GRANITE, lengths, seed=i) for i in range(1, count)]
    outs = [batch.poisoned() for batch in sets]
    stock = [partial(staged, batch, out) for batch, out in zip(sets, outs, strict=True)]
    ours = [partial(one_pass, batch, out, length) for batch, out in zip(sets, outs, strict=True)]
    note = "stock = our own staged ops, convolution included; ours = conv_cumsum + one_pass_scan"
    return [measure(f"one_pass/{nseqs}x{length}", stock, ours, warm=False, note=note)]


def bandwidth_row() -> Row:
    """Indexed state passing over 64 sequences of 2,048 tokens against a device copy of as many bytes."""
    s = Stages(make_inputs(GRANITE, [2048] * 64))
    moved = s.states.nbytes + s.entering.nbytes + 2 * len(s.inputs.slots) * s.inputs.state_cache[0].nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = interleave(Graph([lambda: target.copy_(source)], 5), Graph([s.our_state_passing], 5))
    rates = [[moved / t * 1e-6 for t in side] for side in times]
    note = "stock = device-to-device copy, read + written bytes; ratio = share of its bandwidth"
    return compare("state_passing_indexed/64x2048", "bandwidth", "TB/s", *rates, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER, help="folder for kernels.json")
    parser.add_argument("--only", choices=("bandwidth", "continue", "stage", "one_pass"), help="one group of rows")
    arguments = parser.parse_args()
    results = Results("kernels")
    groups: dict[str, list[Callable[[], list[Row]]]] = {
        "bandwidth": [lambda: [bandwidth_row()]],
        "continue": [partial(continuation_rows, size) for size in STAGE_LENGTHS],
        "stage": [partial(stage_rows, size) for size in STAGE_LENGTHS],
        "one_pass": [partial(one_pass_rows, *size) for size in ONE_PASS_SIZES],
    }
    steps = groups[arguments.only] if arguments.only else [step for group in groups.values() for step in group]
    for step in tqdm.tqdm(steps, unit="group"):
        results.rows.extend(step())
        torch.cuda.empty_cache()
    results.show()
    print(results.write(arguments.out))


if __name__ == "__main__":
    main()
