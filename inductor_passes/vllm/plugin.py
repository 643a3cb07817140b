"""What vLLM calls: decide once a process whether its Mamba2 layers are replaced."""

from __future__ import annotations

import logging

from inductor_passes.vllm.contract import TESTED_VERSIONS, missing_from_vllm
from inductor_passes.vllm.counts_file import open_folder
from inductor_passes.vllm.decline import log_at_end
from inductor_passes.vllm.metrics import show_to_prometheus
from inductor_passes.vllm.options import Options, read_options

# A child of vLLM's logger, so that its handlers, level and format apply.
logger = logging.getLogger("vllm.mamba_ops")

LAYER = "MambaMixer2"


def register() -> None:
    """Have vLLM build our layer wherever a model asks for `MambaMixer2`. Safe to call any number of times.

    Whatever is wrong with this vLLM or with us, the server starts and runs vLLM's own layers.

    Raises:
        ValueError: an unknown option or a wrong value in the environment; the message lists the options.
    """
    options = read_options()
    try:
        _register(options)
    except Exception as error:
        logger.warning("mamba_ops: vLLM's own Mamba2 layers run; the plugin could not be loaded: %r", error)


def _register(options: Options) -> None:
    if not options.enabled:
        logger.info("mamba_ops: turned off")
        return
    missing = missing_from_vllm()
    if missing:
        logger.warning("mamba_ops: vLLM's own Mamba2 layers run; this vLLM lacks %s", ", ".join(missing))
        return
    import vllm
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from inductor_passes.vllm.layer import SnapshotFreeMixer2

    present = op_registry_oot.get(LAYER)
    if present is SnapshotFreeMixer2:
        return
    if present is not None:
        logger.warning("mamba_ops: vLLM's Mamba2 layers have been replaced by %r already; left alone", present)
        return
    if vllm.__version__ not in TESTED_VERSIONS:
        logger.info("mamba_ops: not tested with vLLM %s, but it has all that is needed", vllm.__version__)
    PluggableLayer.register_oot(SnapshotFreeMixer2, name=LAYER)
    try:
        open_folder(log_at_end)
    except OSError as error:
        logger.warning("mamba_ops: counters are only in the log, of processes that vLLM lets end: %s", error)
    else:
        show_to_prometheus()
