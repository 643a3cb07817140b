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


def test_decodes_can_be_left_to_vllm() -> None:
    assert read_options(None, {}).decode
    assert read_options(None, {"MAMBA_OPS_VLLM_DECODE": "0"}) == Options(decode=False)


def test_additional_config_wins() -> None:
    config = {"mamba_ops": {"dump": "b", "verify": 3}, "other": 1}
    assert read_options(config, {"MAMBA_OPS_VLLM_DUMP": "a"}) == Options(dump="b", verify=3)


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (None, {"MAMBA_OPS_VLLM_DUMB": "x"}, "MAMBA_OPS_VLLM_DUMB: unknown option; known: enabled, eliminate"),
        ({"mamba_ops": {"dumb": 1}}, {}, "unknown option; known: enabled"),
        ({"mamba_ops": 1}, {}, "must be a mapping"),
        (None, {"MAMBA_OPS_VLLM_VERIFY": "-1"}, "MAMBA_OPS_VLLM_VERIFY: '-1'; allowed: a whole number from 0 on"),
        (None, {"MAMBA_OPS_VLLM_VERIFY": "yes"}, "MAMBA_OPS_VLLM_VERIFY: 'yes'; allowed: a whole number from 0 on"),
        ({"mamba_ops": {"verify": 2.5}}, {}, "2.5; allowed: a whole number from 0 on"),
        ({"mamba_ops": {"verify": None}}, {}, "None; allowed: a whole number from 0 on"),
        (None, {"MAMBA_OPS_VLLM": "maybe"}, "allowed: 0 or 1"),
        (None, {"MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "2"}, "'2'; allowed: a number from 0 to below 1"),
        (None, {"MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "nan"}, "'nan'; allowed: a number from 0 to below 1"),
        (None, {"MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "low"}, "'low'; allowed: a number from 0 to below 1"),
        ({"mamba_ops": {"verify_tolerance": [0.1]}}, {}, "allowed: a number from 0 to below 1"),
    ],
)
def test_errors_name_the_option(config: Any, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(config, environment)
