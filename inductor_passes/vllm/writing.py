"""Writing down what was compiled, for a person to look at."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from inductor_passes.inspection.folder import Inspected, write
from inductor_passes.vllm.compiled_region import CompiledRegion

logger = logging.getLogger("vllm.mamba_ops")

NO_GRAPH = "The pass was not run on this: it reads cached states in place by itself, or the pass is off."


def debug_dump_folder(vllm_config: Any) -> str:
    """Where regions go if vLLM dumps its own graphs: a folder beside those of this rank. Empty if it does not."""
    find = getattr(vllm_config, "compile_debug_dump_path", None)
    found = find() if find is not None else None
    return str(Path(found) / "mamba_ops") if found else ""


def write_down(region: CompiledRegion, folder: Path) -> None:
    """Write a region's graphs, report and code into a folder of its own; see `inductor_passes.inspection.folder`.

    What goes wrong is logged and changes nothing.
    """
    shape = region.shape
    kind = "prefill" if region.direct is None else "by_address"
    if region.max_tokens is not None:
        kind = f"one_pass_of_{region.max_tokens}" + ("_in_one_chunk" if region.one_chunk else "")
    if region.checkpoints:
        kind = f"checkpoints_{kind}"
    size = f"{shape.nheads}x{shape.headdim}x{shape.dstate}"
    target = folder / f"{kind}_{os.getpid()}_{size}_{shape.device.type}"
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("mamba_ops: nothing written to %s: %s", target, error)
        return
    inspected = Inspected(f"{kind} of {size} on {shape.device.type}", region.recording, no_graph=NO_GRAPH)
    for problem in write(target, inspected):
        logger.warning("mamba_ops: %s: %s", target, problem)
