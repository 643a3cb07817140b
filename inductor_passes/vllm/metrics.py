"""The counters of all processes of a server on the `/metrics` page that its API server shows to Prometheus."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from inductor_passes.vllm.decline import COUNTED, Decline, of_all_processes

logger = logging.getLogger("vllm.mamba_ops")

_registries: list[Any] = []


class Collector:
    """Reads the counters whenever Prometheus asks."""

    def collect(self) -> Iterator[Any]:
        """Counters `mamba_ops_<name>_total`, and `mamba_ops_declined_total` by reason."""
        from prometheus_client.core import CounterMetricFamily

        total = of_all_processes()
        for name, meaning in COUNTED.items():
            yield CounterMetricFamily(f"mamba_ops_{name}", f"Mamba2 layers: {meaning}.", value=getattr(total, name))
        declined = CounterMetricFamily(
            "mamba_ops_declined", "Mamba2 layers: prefills left to vLLM's own code, by reason.", labels=["reason"]
        )
        for reason in Decline:
            declined.add_metric([reason.name.lower()], total.declined[reason])
        yield declined


def show_to_prometheus() -> None:
    """Register the collector with the registry that vLLM shows. Safe to call any number of times.

    With several API servers vLLM shows no registry but files that only its own counters can use; then, as without
    Prometheus' client, the counters are in the log alone.
    """
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        logger.info("mamba_ops: several API servers, so the counters are in the log and not in /metrics")
        return
    try:
        from prometheus_client import REGISTRY

        registry: Any = REGISTRY
        if registry not in _registries:
            registry.register(Collector())
            _registries.append(registry)
    except Exception as error:
        logger.warning("mamba_ops: the counters are in the log and not in /metrics: %r", error)
