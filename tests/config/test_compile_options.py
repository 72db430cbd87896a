from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_kit import TrainingArguments
from trainer_kit.config.compile_options import CompileOptions


@pytest.mark.parametrize("setting", [True, {}])
def test_without_a_key_torchs_defaults_hold(setting: Any) -> None:
    options = CompileOptions.read(setting)
    assert options == CompileOptions()
    assert options.for_torch() == {"mode": None, "backend": "inductor", "dynamic": None, "fullgraph": False}


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_options_are_kept_in_files(tmp_path: Path, suffix: str) -> None:
    setting = {"mode": "max-autotune-no-cudagraphs", "dynamic": False, "fullgraph": True, "regional": True}
    TrainingArguments(torch_compile=setting).save(tmp_path / f"args.{suffix}")
    assert TrainingArguments.load(tmp_path / f"args.{suffix}").torch_compile == setting


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"mod": "x"}, TypeError, "has the unknown key 'mod'; use mode, backend, dynamic, fullgraph, regional"),
        ({1: True}, TypeError, "has the unknown key 1; use mode, backend, dynamic, fullgraph, regional"),
        ({"mode": 3}, TypeError, ": mode=3 is not allowed; it must be one of 'default', 'reduce-overhead', "),
        ({"mode": "fast"}, ValueError, ": mode='fast' is not allowed; it must be one of 'default', "),
        ({"backend": ""}, ValueError, ": backend='' is not allowed; it must be a name that is not empty"),
        ({"backend": None}, TypeError, ": backend=None is not allowed; it must be a name that is not empty"),
        ({"dynamic": "auto"}, TypeError, ": dynamic='auto' is not allowed; it must be True or False, or None"),
        ({"fullgraph": 1}, TypeError, ": fullgraph=1 is not allowed; it must be True or False"),
        ({"regional": None}, TypeError, ": regional=None is not allowed; it must be True or False"),
        ({"regional": True, "mode": "reduce-overhead"}, ValueError, ": regional=True is not possible with mode="),
    ],
    ids=str,
)
def test_what_is_no_option_is_refused(setting: dict[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        TrainingArguments(torch_compile=setting)
    assert str(raised.value).startswith(f"torch_compile={setting!r}")
    assert message in str(raised.value)
