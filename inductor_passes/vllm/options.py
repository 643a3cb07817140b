"""The plugin's options: one table, read from the environment and from vLLM's `additional_config`.

An option `name` is `MAMBA_OPS_VLLM_NAME` in the environment and `{"mamba_ops": {"name": ...}}` in `additional_config`,
which wins. `MAMBA_OPS_VLLM=0` is short for `enabled=0`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from inductor_passes.vllm import counts_file

PREFIX = "MAMBA_OPS_VLLM"
KEY = "mamba_ops"


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes:
        enabled: whether the plugin does anything.
        eliminate: whether the pass runs; without it the region is compiled with its snapshot, for comparisons.
        one_pass: whether short prefills run in one pass over the state, with the same bits.
        direct: whether kernels are launched by address on a GPU, without the code that Inductor generated.
        decode: whether vLLM's kernels for decodes beside prefills are launched by address too; not without `direct`.
        metadata: whether the plugin builds what vLLM's layers need in each step, with the same values in less time.
        full_steps: whether whole short steps with a prefill are captured as one graph each; with `metadata`.
        self_check: whether a compiled region is tried on made-up sequences before it is used.
        dump: folder for both graphs, what the pass did, and the generated code; empty for none.
        verify: number of layer calls that are also run by vLLM's own code and compared; for tests, it is slow.
        verify_tolerance: largest difference that `verify` accepts, relative to the largest value; 0 is bit for bit.
    """

    enabled: bool = True
    eliminate: bool = True
    one_pass: bool = True
    direct: bool = True
    decode: bool = True
    metadata: bool = True
    full_steps: bool = False
    self_check: bool = True
    dump: str = ""
    verify: int = 0
    verify_tolerance: float = 0.0

    @property
    def builds_metadata(self) -> bool:
        """Whether the plugin builds the metadata of a step."""
        return self.metadata or self.full_steps


def read_options(additional_config: Any = None, environment: Mapping[str, str] | None = None) -> Options:
    """The options that hold.

    Args:
        additional_config: vLLM's; anything but a mapping has no options of ours.
        environment: variables, by default those of the process.

    Raises:
        ValueError: an unknown option, or a value that does not fit; the message lists what is known.
    """
    values = {}
    for name, (origin, value) in given_options(additional_config, environment).items():
        if name not in _READERS:
            raise ValueError(f"{origin}: unknown option; known: {_known()}")
        try:
            values[name] = _READERS[name](value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{origin}: {value!r}; {error}") from None
    return Options(**values)


def given_options(
    additional_config: Any = None, environment: Mapping[str, str] | None = None
) -> dict[str, tuple[str, Any]]:
    """Where each option was given, and its value as it stands there; arguments as for `read_options`.

    Raises:
        ValueError: what `additional_config` has under our key is no mapping.
    """
    environment = os.environ if environment is None else environment
    given: dict[str, tuple[str, Any]] = {}
    for variable, text in environment.items():
        if variable == PREFIX:
            given["enabled"] = (variable, text)
        elif variable.startswith(PREFIX + "_") and variable not in OTHER_VARIABLES:
            given[variable[len(PREFIX) + 1 :].lower()] = (variable, text)
    section = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(section, Mapping):
        raise ValueError(f"additional_config[{KEY!r}]: {section!r}; it must be a mapping of options: {_known()}")
    return given | {str(name): (f"additional_config[{KEY!r}][{name!r}]", value) for name, value in section.items()}


def _read_bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("allowed: 0 or 1")


def _read_count(value: Any) -> int:
    if not re.fullmatch(r"\s*\+?\d+\s*", str(value)):
        raise ValueError("allowed: a whole number from 0 on")
    return int(value)


def _read_tolerance(value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        tolerance = float(value)
        if 0.0 <= tolerance < 1.0:
            return tolerance
    raise ValueError("allowed: a number from 0 to below 1")


_READERS: dict[str, Callable[[Any], Any]] = {
    "enabled": _read_bool,
    "eliminate": _read_bool,
    "one_pass": _read_bool,
    "direct": _read_bool,
    "decode": _read_bool,
    "metadata": _read_bool,
    "full_steps": _read_bool,
    "self_check": _read_bool,
    "dump": str,
    "verify": _read_count,
    "verify_tolerance": _read_tolerance,
}

# Names with our prefix that other parts of the project use.
OTHER_VARIABLES = frozenset({counts_file.VARIABLE, "MAMBA_OPS_VLLM_CPU_PYTHON", "MAMBA_OPS_VLLM_ENGINE_PYTHON"})


def _known() -> str:
    return ", ".join(_READERS)
