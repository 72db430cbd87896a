from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import types
from typing import Any

import pytest

from trainer_kit import callbacks
from trainer_kit.callback import Callback
from trainer_kit.config.arguments import TrainingArguments


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def names(**arguments: Any) -> set[str]:
    return {type(callback).__name__ for callback in callbacks.default_callbacks(TrainingArguments(**arguments))}


ALWAYS = {"Checkpointing", "Preemption", "Compilation", "Memory", "Throughput", "SlowProcesses"}
WRITERS = {"TensorBoard", "JsonLines", "Report"}


def test_a_pipe_gets_plain_lines() -> None:
    assert names() == ALWAYS | WRITERS | {"Console"}


def test_a_terminal_gets_a_bar_unless_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((80, 24)))
    assert names() == ALWAYS | WRITERS | {"Progress"}
    assert names(disable_tqdm=True) == ALWAYS | WRITERS | {"Console"}


def test_a_terminal_without_columns_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((0, 0)))
    assert names() == ALWAYS | WRITERS | {"Console"}


def test_a_quiet_run_gets_neither() -> None:
    assert names(disable_tqdm=True, log_level="error") == ALWAYS | WRITERS


@pytest.mark.parametrize("own", [callbacks.Progress, callbacks.Console])
def test_the_users_own_display_takes_the_place_of_the_default_one(own: type[Callback]) -> None:
    defaults = {type(callback).__name__ for callback in callbacks.default_callbacks(TrainingArguments(), [own()])}
    assert defaults == ALWAYS | WRITERS


def test_a_process_without_stderr_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert "Console" in names()


@pytest.mark.parametrize(("config", "expected"), [({"IPKernelApp": {}}, "Progress"), ({}, "Console")])
def test_a_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], expected: str) -> None:
    shell = types.SimpleNamespace(config=config)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert expected in names()


@pytest.mark.parametrize(
    ("report_to", "expected"),
    [
        ("none", set()),
        (["jsonl"], {"JsonLines"}),
        (["tensorboard"], {"TensorBoard"}),
        (["html"], {"Report"}),
        ("all", WRITERS),
    ],
)
def test_report_to_names_the_writers(report_to: Any, expected: set[str]) -> None:
    assert names(report_to=report_to) & WRITERS == expected


def test_steps_to_profile() -> None:
    [profiler] = [
        each
        for each in callbacks.default_callbacks(TrainingArguments(profile="1:3"))
        if type(each) is callbacks.Profiler
    ]
    assert (profiler.start, profiler.stop) == (1, 3)


def test_every_public_name_is_there() -> None:
    assert callbacks.__all__ == sorted(callbacks.__all__, key=lambda name: (not name.isupper(), name.islower(), name))
    for name in callbacks.__all__:
        value = getattr(callbacks, name)
        assert not isinstance(value, types.ModuleType)
        assert not isinstance(value, type) or issubclass(value, Callback)
    assert set(dir(callbacks)) == set(callbacks.__all__)
    with pytest.raises(AttributeError, match="Chekpointing"):
        callbacks.Chekpointing  # noqa: B018


def test_a_function_is_not_hidden_by_its_module() -> None:
    importlib.import_module("trainer_kit.callbacks.from_transformers")
    assert callable(callbacks.from_transformers)


@pytest.mark.slow
def test_the_defaults_import_nothing_heavy() -> None:
    code = (
        "import sys; from trainer_kit.config.arguments import TrainingArguments; from trainer_kit import callbacks;"
        "callbacks.default_callbacks(TrainingArguments());"
        "print({'transformers', 'tensorboard', 'torch_xla', 'torch.utils.tensorboard'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
