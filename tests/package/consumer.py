"""A user's program: `tools/check_package.py` runs `mypy` over it, as strict as here, beside the installed package."""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_passes import (
    Condition,
    Decline,
    GraphReport,
    NodeName,
    Report,
    Rewrite,
    SnapshotElimination,
    eliminate_snapshots,
    inductor_options,
    inspect,
    install,
    uninstall,
)
from mamba_ops import (
    ChunkMetadata,
    LayerState,
    Mamba2Layer,
    SSDOutput,
    build_chunk_metadata,
    layer_from_transformers,
    ssd_chunk_scan,
)


def continue_sequences(layer: Mamba2Layer, hidden: Tensor, state: LayerState, slots: Tensor) -> Tensor:
    metadata: ChunkMetadata = build_chunk_metadata([0, 3, 5], layer.chunk_size, context_lens=[7, 0])
    out: Tensor = layer(hidden, metadata, state.conv_state, state.state_cache, slots, None, slots)
    return out


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    metadata = build_chunk_metadata(torch.tensor([0, 5]), 64)
    result: SSDOutput = ssd_chunk_scan(x, dt, A, B, C, metadata, state_cache=cache, read_slots=slots, write_slots=slots)
    states: Tensor | None = result.final_states
    return result.out if states is None else states


def compile_layer(layer: Mamba2Layer) -> tuple[Report, int]:
    elimination: SnapshotElimination = install(SnapshotElimination(masked_gather=False))
    uninstall()
    torch.compile(layer, options=inductor_options(elimination, mode="reduce-overhead"))
    with eliminate_snapshots() as inside, inspect("folder", title="layer") as shown:
        report: Report = inside.report() if inside is not shown else shown.report()
    graph: GraphReport | None = report.graphs[0] if report.graphs else None
    rewrites: tuple[Rewrite, ...] = graph.rewrites if graph else ()
    declines: tuple[Decline, ...] = report.declines
    names: list[NodeName] = [node for decline in declines for node in decline.nodes]
    return report, len(rewrites) + len(names) + report.count()[Condition.CROSSED_SLOTS]


def from_transformers(mixer: torch.nn.Module, config: object) -> Mamba2Layer:
    return layer_from_transformers(mixer, config)
