from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_kit import TrainingArguments
from trainer_kit.config.checkpointing_options import CheckpointingOptions


@pytest.mark.parametrize(
    ("setting", "expected"), [(False, None), (True, CheckpointingOptions()), ({}, CheckpointingOptions())]
)
def test_without_a_key_all_repeated_blocks_recompute_all(setting: Any, expected: Any) -> None:
    found = TrainingArguments(gradient_checkpointing=setting).checkpointing_options
    assert found == expected
    assert found is None or (found.modules, found.every, found.policy, found.are_default) == (None, 1, "all", True)


@pytest.mark.parametrize("setting", [{"modules": ["a"]}, {"every": 2}, {"policy": "save_matmuls"}], ids=str)
def test_an_option_is_no_default(setting: dict[str, Any]) -> None:
    found = TrainingArguments(gradient_checkpointing=setting).checkpointing_options
    assert found is not None
    assert not found.are_default


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_options_are_kept_in_files(tmp_path: Path, suffix: str) -> None:
    setting = {"modules": ["encoder.*", "Decoder"], "every": 3, "policy": "save_matmuls"}
    TrainingArguments(gradient_checkpointing=setting).save(tmp_path / f"args.{suffix}")
    assert TrainingArguments.load(tmp_path / f"args.{suffix}").gradient_checkpointing == setting


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"use_reentrant": False}, TypeError, "has the unknown key 'use_reentrant'; use modules, every, policy"),
        ({"every": 0}, ValueError, ": every=0 is not allowed; it must be a whole number of at least 1"),
        ({"every": True}, TypeError, ": every=True is not allowed; it must be a whole number of at least 1"),
        ({"policy": "dots"}, ValueError, ": policy='dots' is not allowed; it must be one of 'all', 'save_matmuls'"),
        ({"policy": None}, TypeError, ": policy=None is not allowed; it must be one of 'all', 'save_matmuls'"),
        ({"modules": "h.*"}, TypeError, ": modules='h.*' is not allowed; it must be a list of patterns of module"),
        ({"modules": []}, ValueError, ": modules=[] is not allowed; it must be a list of patterns of module names"),
        ({"modules": [""]}, ValueError, ": modules=[''] is not allowed; it must be a list of patterns of module names"),
    ],
    ids=str,
)
def test_what_is_no_option_is_refused(setting: dict[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        TrainingArguments(gradient_checkpointing=setting)
    assert str(raised.value).startswith(f"gradient_checkpointing={setting!r}")
    assert message in str(raised.value)
