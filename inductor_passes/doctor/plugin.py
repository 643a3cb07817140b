"""The vLLM plugin: whether vLLM sees it, whether it would take over the layers, and the options that hold."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator

from inductor_passes.doctor.finding import Finding, Status
from inductor_passes.vllm.contract import missing_from_vllm
from inductor_passes.vllm.options import PREFIX, Options, given_options, read_options

SECTION, OPTIONS = "vLLM plugin", "Options"
# All others with this start are options of the plugin.
SWITCHES = ("MAMBA_OPS_CHECKS", "MAMBA_OPS_TORCH", "MAMBA_OPS_VENV")
GROUP, NAME = "vllm.general_plugins", "mamba_ops"


def has_vllm() -> bool:
    """Whether vLLM can be imported; it is not imported for that."""
    return importlib.util.find_spec("vllm") is not None


def find_entry_point() -> Iterator[Finding]:
    """Whether vLLM, in this environment, would load the plugin."""
    if not has_vllm():
        yield Finding(SECTION, "entry point", "not looked for", Status.NOTE, "vLLM is not installed here")
        return
    found = [point for point in importlib.metadata.entry_points(group=GROUP) if point.name == NAME]
    if not found:
        reason = "install mamba-ops into vLLM's environment; a source folder on PYTHONPATH is not enough"
        yield Finding(SECTION, "entry point", f"no {NAME} in {GROUP}", Status.PROBLEM, reason)
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        reason = f"add {NAME} to VLLM_PLUGINS, or unset it"
        yield Finding(SECTION, "entry point", f"shut out by VLLM_PLUGINS={allowed}", Status.PROBLEM, reason)
        return
    yield Finding(SECTION, "entry point", f"{GROUP}: {NAME} = {found[0].value}")


def find_options() -> Iterator[Finding]:
    """Every option with its value and where that comes from."""
    try:
        options, given = read_options(), given_options()
    except ValueError as error:
        yield Finding(OPTIONS, "environment", "wrong", Status.PROBLEM, str(error))
        return
    for field in dataclasses.fields(Options):
        value = getattr(options, field.name)
        text = str(int(value)) if isinstance(value, bool) else str(value) or "none"
        origin = given[field.name][0] if field.name in given else "default"
        yield Finding(OPTIONS, field.name, text, reason=origin)
    for variable in sorted(os.environ):
        if variable.startswith("MAMBA_OPS_") and variable not in SWITCHES and not _is_of_plugin(variable):
            reason = f"{variable}: nothing reads it; options of the plugin begin with {PREFIX}_"
            yield Finding(OPTIONS, "environment", "unknown", Status.PROBLEM, reason)
    checks = os.environ.get("MAMBA_OPS_CHECKS")
    if checks not in (None, "0", "1"):
        yield Finding(OPTIONS, "environment", "wrong", Status.PROBLEM, f"MAMBA_OPS_CHECKS: {checks!r}; allowed: 0 or 1")
        return
    origin = "default" if checks is None else "MAMBA_OPS_CHECKS"
    yield Finding(OPTIONS, "value checks on a GPU", str(int(checks == "1")), reason=origin)


def _is_of_plugin(variable: str) -> bool:
    return variable == PREFIX or variable.startswith(PREFIX + "_")


def check_contract() -> Iterator[Finding]:
    """Whether this vLLM has what the plugin touches, and the plugin registers its layer. Imports vLLM."""
    missing = missing_from_vllm()
    if missing:
        reason = f"this vLLM lacks {', '.join(missing)}; its own layers would run"
        yield Finding(SECTION, "contract", "not met", Status.PROBLEM, reason)
        return
    yield Finding(SECTION, "contract", "this vLLM has all that the plugin touches")
    from vllm.model_executor.custom_op import op_registry_oot

    from inductor_passes.vllm.plugin import LAYER, register

    is_enabled = read_options().enabled
    os.environ[PREFIX] = "1"  # in this process only: whether it would register if it were on
    register()
    layer = op_registry_oot.get(LAYER)
    if layer is None or not layer.__module__.startswith("inductor_passes."):
        yield Finding(SECTION, "layer", f"{LAYER} is {layer}", Status.PROBLEM, "the plugin could not register its own")
        return
    yield Finding(SECTION, "layer", f"{layer.__name__} registers as {LAYER}")
    off = (Status.NOTE, f"vLLM's own layers run; {PREFIX}=1 turns the plugin on")
    yield Finding(SECTION, "state", "on" if is_enabled else "off", *(() if is_enabled else off))
