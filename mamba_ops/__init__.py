"""Mamba2 prefill (SSD) that reads cached states in place: Triton kernels behind torch ops, with a CPU branch."""

from mamba_ops.metadata import ChunkMetadata, build_chunk_metadata
from mamba_ops.ssd import SSDOutput, ssd_chunk_scan

__all__ = ["ChunkMetadata", "SSDOutput", "build_chunk_metadata", "ssd_chunk_scan"]
