"""`trainer-kit test` says what works under a configuration, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.releases import without_gloo

from trainer_kit.cli.main import main
from trainer_kit.errors import ProcessesLeft, ProcessFailed
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.tools import self_test


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where checkpoints and the like go."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.scenario
def test_two_processes_in_bf16(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = folder / "config.yaml"
    LaunchConfig(num_processes=2, cpu=True, mixed_precision="bf16").save(path)
    assert main(["test", "--config", str(path)]) == 0
    shown = capfd.readouterr()
    assert without_gloo(shown.out).splitlines() == [
        "collectives  ok (2 processes on cpu)",
        "precision    ok (bf16)",
        f"saving       ok (checkpoints in {folder})",
        "resuming     ok (bit for bit)",
        "all is well",
    ]
    if without_gloo(shown.out) == shown.out:  # else gloo's lines of the other rank are kept
        assert list(folder.glob("trainer_kit*")) == []


def test_one_process_passes(capsys: pytest.CaptureFixture[str]) -> None:
    self_test.main()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["ok"] * 4


def break_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.strategies.collectives.Collectives.all_reduce", lambda self, tensor: tensor * 2)


def break_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(self_test._DTYPES, "no", "torch.float64")


def break_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "newest_valid", lambda folder, say: say("checkpoint-4 is skipped"))


def break_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(10))
    monkeypatch.setattr(self_test, "_weights", lambda trainer: {"weight": self_test.torch.tensor(next(numbers))})


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (break_collectives, r"^collectives: RuntimeError: a sum over all processes: 2\.0, expected 1\.0$"),
        (break_precision, r"^precision: RuntimeError: the dtype of a forward pass: \{torch\.float32\}, expected "),
        (break_saving, r"^saving: RuntimeError: the newest valid checkpoint: checkpoint-4 is skipped, expected "),
        (break_resuming, r"^resuming: RuntimeError: weights that differ .*: \['weight'\], expected \[\]$"),
    ],
)
def test_what_does_not_work_is_named(
    break_it: Any, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(RuntimeError, match=sentence):
        self_test.main()
    assert list(folder.iterdir()) == []


def test_a_failure_is_one_line_and_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ProcessFailed(
            "rank 1 on host failed with exit code 1", 1, 1, "Trace\nRuntimeError: saving: OSError: full\n"
        )

    monkeypatch.setattr("trainer_kit.launch.processes.run_processes", fail)
    assert main(["test"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "saving       does not work: OSError: full\n"
    assert shown.err.startswith("trainer-kit test: rank 1 on host failed with exit code 1:\nTrace\n")


def test_a_tpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LaunchConfig] = []
    monkeypatch.setattr("trainer_kit.launch.processes.run_processes", lambda config, *_: asked.append(config))
    assert main(["test", "--tpu"]) == main(["test"]) == 0
    assert [config.tpu for config in asked] == [True, False]


def test_a_signal_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(*_: object) -> None:
        raise ProcessesLeft(143)

    monkeypatch.setattr("trainer_kit.launch.processes.run_processes", leave)
    assert main(["test"]) == 143
    assert tuple(capsys.readouterr()) == ("", "")
