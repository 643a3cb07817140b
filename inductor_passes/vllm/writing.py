"""Writing down what was compiled, for a person to look at."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from inductor_passes.vllm.compiled_region import CompiledRegion

logger = logging.getLogger("vllm.mamba_ops")


def write_down(region: CompiledRegion, folder: Path) -> None:
    """Write `graph_before.txt`, `graph_after.txt`, `report.txt` and `code.py` into a folder for this process.

    What goes wrong is logged and changes nothing.
    """
    shape = region.shape
    kind = "checkpoints" if region.checkpoints else "prefill"
    if region.max_tokens is not None:
        kind = f"one_chunk_of_{region.max_tokens}"
    target = folder / f"{kind}_{os.getpid()}_{shape.nheads}x{shape.headdim}x{shape.dstate}_{shape.device.type}"
    texts = {
        "graph_before.txt": region.graph_before,
        "graph_after.txt": region.graph_after,
        "report.txt": str(region.report),
        "code.py": region.code,
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (target / name).write_text(text + "\n")
    except OSError as error:
        logger.warning("mamba_ops: nothing written to %s: %s", target, error)
