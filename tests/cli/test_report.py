from __future__ import annotations

import json
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
from kit.run_logs import finished

from trainer_kit.cli.main import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        finished(folder / name)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What `trainer-kit report` says where it refuses; one sentence, and nothing else."""
    assert main(["report", *map(str, words)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trainer-kit report: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", ["a", "a/log.jsonl"])
def test_a_page_in_the_runs_folder(runs: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = runs / "a" / "report.html"
    path.unlink(missing_ok=True)
    assert main(["report", str(runs / name)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("words", "name", "begins"),
    [
        (["--format", "md"], "a/report.md", b"## Training report: a\n"),
        (["--output", "x.md"], "x.md", b"## Training report: a\n"),
        (["--output", "deep/x.PNG"], "deep/x.PNG", b"\x89PNG"),
        (["--output", "x.txt", "--format", "md"], "x.txt", b"## Training report: a\n"),
        (["--output", "y.md", "--compare", "b"], "y.md", b"## Training report: a and b\n"),
    ],
)
def test_other_formats_and_places(
    runs: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str, begins: bytes
) -> None:
    monkeypatch.chdir(runs)
    assert main(["report", "a", *words]) == 0
    assert (runs / name).read_bytes().startswith(begins)


def test_it_opens(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.chdir(runs)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["report", "a", "--format", "md", "--open"]) == 0
    assert opened == [(runs / "a" / "report.md").as_uri()]


def test_bad_input_is_one_sentence(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no log.jsonl; give the output_dir of a run" in refused(capsys, tmp_path)
    assert "nowhere does not exist" in refused(capsys, runs / "a", "--compare", tmp_path / "nowhere")
    assert "'pdf' is no format of a report; use one of: html, png, md" in refused(capsys, runs / "a", "--format", "pdf")
    assert "x.pdf ends with no format of a report" in refused(capsys, runs / "a", "--output", tmp_path / "x.pdf")
    many = [runs / "b"] * 6
    assert "7 runs cannot be distinguished in one plot; compare at most 6" in refused(
        capsys, runs / "a", "--compare", *many
    )
    log = tmp_path / "log.jsonl"
    log.touch()
    assert "holds no records" in refused(capsys, tmp_path)
    start = {"event": "start", "time": 1.7e9, "step": 0}
    log.write_text(json.dumps(start | {"format": 99, "trainer_kit": "9.0"}) + "\n")
    assert "format 99, written by trainer_kit 9.0" in refused(capsys, tmp_path)
    log.write_text(f"{json.dumps(start)}\nno record\n{json.dumps(start | {'event': 'log'})}\n")
    assert "line 2 is no record of a run; repair or remove that line" in refused(capsys, tmp_path)
    assert list(tmp_path.iterdir()) == [log]


def test_a_report_needs_no_torch(runs: Path) -> None:
    script = (
        "import sys\nfrom trainer_kit.cli.main import main\n"
        "assert main(['report', sys.argv[1], '--format', 'md']) == 0\n"
        "assert not {'torch', 'matplotlib'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script, str(runs / "b")], check=True, timeout=60)
