"""`trainer-kit config` asks, checks the answers and writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.cli import config
from trainer_kit.cli.main import main
from trainer_kit.launch.config import LaunchConfig


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "trainer_kit" / "default_config.yaml"


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str, gpus: int = 0) -> list[str]:
    """Gives these answers; returns the list of questions, which fills as they are asked."""
    questions: list[str] = []
    waiting = iter(answers)

    def ask(question: str) -> str:
        questions.append(question)
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    for module in ("trainer_kit.cli.config", "trainer_kit.launch.config"):
        monkeypatch.setattr(f"{module}.count_gpus", lambda: gpus)
    return questions


@pytest.mark.parametrize(
    ("answers", "gpus", "expected"),
    [
        (["", "", "", ""], 0, {}),
        (["1", "2", "bf16", "3"], 0, {"num_processes": 2, "mixed_precision": "bf16", "max_restarts": 3}),
        (["", "yes", "8", "", ""], 4, {"cpu": True, "num_processes": 8}),
        (["", " N ", "4", "fp16", ""], 4, {"num_processes": 4, "mixed_precision": "fp16"}),
        (
            ["2", "1", "node0", "1234", "4", "", ""], 0,
            {"num_nodes": 2, "node_rank": 1, "master_addr": "node0", "master_port": 1234, "num_processes": 4},
        ),
        (["2", "", "node0", "", "", "", ""], 0, {"num_nodes": 2, "master_addr": "node0", "master_port": 29500}),
    ],
)  # fmt: skip
def test_the_answers_are_written(
    answers: list[str], gpus: int, expected: dict[str, Any], settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = answer(monkeypatch, *answers, gpus=gpus)
    assert main(["config"]) == 0
    assert LaunchConfig.load(settings) == LaunchConfig(**expected)
    assert len(questions) == len(answers)


@pytest.mark.parametrize(
    ("answers", "gpus", "sentence"),
    [
        (["two", "1", "", "", ""], 0, "'two' is no whole number"),
        (["0", "1", "", "", ""], 0, "num_nodes=0 is not allowed; it must be a whole number of at least 1"),
        (["2", "2", "1", "", "", "", "", ""], 0, "node_rank=2 is not allowed"),
        (["2", "0", "", "", "3", "4", "", ""], 0, "num_processes=3 is not allowed with num_nodes=2"),
        (["", "maybe", "no", "", "", ""], 2, "'maybe' is no answer; say yes or no"),
        (["", "", "3", "2", "", ""], 2, "num_processes=3, but this machine has 2 GPUs"),
        (
            ["", "", "int8", "bf16", ""],
            0,
            "mixed_precision='int8' is not allowed; it must be one of",
        ),
    ],
)
def test_a_wrong_answer_is_asked_again(
    answers: list[str],
    gpus: int,
    sentence: str,
    settings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    questions = answer(monkeypatch, *answers, gpus=gpus)
    assert main(["config"]) == 0
    assert sentence in capsys.readouterr().out
    assert len(set(questions)) == len(questions) - 1
    LaunchConfig.load(settings)


def test_a_question_shows_what_an_empty_answer_means(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = answer(monkeypatch, "", "", "", "", "", gpus=2)
    config.ask()
    assert questions == [
        "How many machines [1]: ",
        "Train on the CPU though there are GPUs (yes or no) [no]: ",
        "How many processes, on all machines together [as many as GPUs]: ",
        "Mixed precision (no, fp16, bf16 or fp8) [no]: ",
        "How often to restart after a failure [0]: ",
    ]


@pytest.mark.parametrize(("say", "expected"), [("", {"tpu": True}), ("yes", {"num_processes": 2, "cpu": True})])
def test_on_a_tpu(say: str, expected: dict[str, Any], settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.config.environment.xla_device_type", lambda: "TPU")
    monkeypatch.setattr("trainer_kit.config.environment.has_torch_xla", lambda: True)
    questions = answer(monkeypatch, "", say, *(["2"] if say else []), "", "")
    assert main(["config"]) == 0
    assert questions[1] == "Train on the CPU though there is a TPU (yes or no) [no]: "
    assert LaunchConfig.load(settings) == LaunchConfig(**expected)


def test_answers_that_end_early(
    settings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "1")
    assert main(["config"]) == 1
    assert "the answers ended before the questions; use --default" in capsys.readouterr().err
    assert not settings.exists()


def test_default_does_not_ask(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--default"]) == 0
    assert LaunchConfig.load(settings) == LaunchConfig()
    assert capsys.readouterr().out == f"Written to {settings}. Start with: trainer-kit launch script.py\n"


def test_default_leaves_a_saved_file(
    settings: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    LaunchConfig(num_processes=3).save(settings)
    assert main(["config", "--default"]) == 0
    assert LaunchConfig.load(settings) == LaunchConfig(num_processes=3)
    assert capsys.readouterr().out == ""
    assert f"a configuration is saved at {settings} and stays as it is" in caplog.text


def test_another_file(settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert main(["config", "--default", "--config", str(path)]) == 0
    assert LaunchConfig.load(path) == LaunchConfig()
    assert f"trainer-kit launch --config {path} script.py" in capsys.readouterr().out
    assert not settings.exists()


@pytest.mark.slow
def test_it_reads_from_a_pipe(settings: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer_kit", "config"],
        input="1\n3\nbf16\n0\n", capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert LaunchConfig.load(settings) == LaunchConfig(num_processes=3, mixed_precision="bf16", max_restarts=0)
    assert done.stderr == ""
