"""The table of options."""

from __future__ import annotations

from typing import Any

import pytest

from inductor_passes.vllm.options import Options, read_options


def test_defaults() -> None:
    assert read_options(None, {"PATH": "/bin"}) == Options()


@pytest.mark.parametrize("text", ["0", "false", "OFF"])
def test_the_short_form_turns_it_off(text: str) -> None:
    assert not read_options(None, {"MAMBA_OPS_VLLM": text}).enabled


@pytest.mark.parametrize("text", ["1", "true", "ON", None])
def test_it_is_on_unless_the_user_says_otherwise(text: str | None) -> None:
    assert read_options(None, {} if text is None else {"MAMBA_OPS_VLLM": text}).enabled


def test_additional_config_wins() -> None:
    config = {"mamba_ops": {"dump": "b", "verify": 3}, "other": 1}
    assert read_options(config, {"MAMBA_OPS_VLLM_DUMP": "a"}) == Options(dump="b", verify=3)


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (None, {"MAMBA_OPS_VLLM_DUMB": "x"}, "MAMBA_OPS_VLLM_DUMB: unknown option; known: enabled, eliminate"),
        ({"mamba_ops": {"dumb": 1}}, {}, "unknown option; known: enabled"),
        ({"mamba_ops": 1}, {}, "must be a mapping"),
        (None, {"MAMBA_OPS_VLLM_VERIFY": "-1"}, "MAMBA_OPS_VLLM_VERIFY: '-1'; it must not be negative"),
        (None, {"MAMBA_OPS_VLLM": "maybe"}, "allowed: 0 or 1"),
        (None, {"MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "2"}, "allowed: 0 to 1"),
    ],
)
def test_errors_name_the_option(config: Any, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(config, environment)
