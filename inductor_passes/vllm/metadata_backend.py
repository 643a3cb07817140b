"""Which backend a layer names to vLLM: ours, whose builder costs less of the host's time, or vLLM's own."""

from __future__ import annotations

import functools
import logging
from typing import Any

from inductor_passes.vllm.contract import missing_from_metadata

logger = logging.getLogger("vllm.mamba_ops")


@functools.cache
def backend_for(stock: Any) -> Any:
    """Our backend in the place of vLLM's, or vLLM's if it lacks something; the log says so, once."""
    try:
        missing = missing_from_metadata()
        if missing:
            raise RuntimeError(f"this vLLM lacks {', '.join(missing)}")
        from inductor_passes.vllm.metadata_builder import FastMamba2Backend

        if stock not in FastMamba2Backend.__bases__:
            raise RuntimeError(f"its backend is {stock.__qualname__}")
    except Exception as error:
        logger.warning("mamba_ops: vLLM's own code builds the metadata of Mamba2 layers: %s", error)
        return stock
    return FastMamba2Backend
