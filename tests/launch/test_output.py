"""Where the ranks write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kit import launched
from kit.launching import run

from trainer_kit.launch.output import OutputFiles
from trainer_kit.launch.processes import PREFIX, Logs


@pytest.mark.distributed
def test_the_first_rank_has_the_terminal_and_others_have_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    code = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    run(sys.executable, "-c", code, logs=Logs(tmp_path), say=said.append, count=3)
    assert tuple(capfd.readouterr()) == ("out 0\n", "err 0\n")
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files == {f"rank-{rank}.{end[:3]}": f"{end} {rank}\n" for rank in (1, 2) for end in ("out", "err")}
    assert said == [f"the output of ranks 1, 2 is in {tmp_path}"]


@pytest.mark.distributed
def test_with_a_prefix_all_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    run(sys.executable, "-c", code, logs=Logs(tmp_path, prefix=PREFIX))
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    run(sys.executable, "-c", code, logs=Logs(prefix="${role_name} ${local_rank}: "))
    assert sorted(capsys.readouterr().out.splitlines()) == ["trainer_kit 0: out 0", "trainer_kit 1: out 1"]
    assert list((tmp_path / "tmp").iterdir()) == []  # all was shown


@pytest.mark.distributed
def test_a_temporary_folder_stays_only_with_something_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(launched.place)
    assert list(tmp_path.iterdir()) == []
    said: list[str] = []
    run(print, "hello", say=said.append)
    (folder,) = tmp_path.iterdir()
    assert said == [f"the output of rank 1 is in {folder}"]
    assert (folder / "rank-1.out").read_text() == "hello\n"


def test_an_error_of_an_earlier_start_of_the_same_number_is_none_of_this_one(tmp_path: Path) -> None:
    """A newcomer's ranks may end before they have a place, and start again with the others."""
    files, variables = OutputFiles(tmp_path, tmp_path, None), {0: {"RANK": "3", "TORCHELASTIC_RESTART_COUNT": "2"}}
    error_file = Path(files.reify(variables).error_files[0])
    error_file.touch()
    assert files.reify(variables).error_files == {0: str(error_file)}
    assert not error_file.exists()


@pytest.mark.distributed
def test_each_start_has_files_of_its_own(tmp_path: Path) -> None:
    run(launched.try_again, str(tmp_path), [1, 2], max_restarts=1, logs=Logs(tmp_path / "logs"))
    assert (tmp_path / "logs" / "rank-1.out").read_text() == "start 0\n"
    assert (tmp_path / "logs" / "restart-1" / "rank-1.out").read_text() == "start 1\n"
