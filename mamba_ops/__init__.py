"""Mamba2 prefill (SSD) that reads cached states in place: Triton kernels behind torch ops, with a CPU branch."""

from mamba_ops.layer import LayerState, Mamba2Layer
from mamba_ops.metadata import ChunkMetadata, build_chunk_metadata
from mamba_ops.ssd import SSDOutput, ssd_chunk_scan
from mamba_ops.weights import layer_from_transformers

__all__ = [
    "ChunkMetadata",
    "LayerState",
    "Mamba2Layer",
    "SSDOutput",
    "build_chunk_metadata",
    "layer_from_transformers",
    "ssd_chunk_scan",
]
