"""The session of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.config import environment
from trainer_kit.errors import CutOffError, LostProcessError
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.session import Session
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.utils.membership_claim import read_claim


@pytest.fixture
def session() -> Session:
    strategy = SingleDevice("cpu")
    strategy.setup()
    return strategy.session


def test_a_preemption_holds_until_the_training_ends(session: Session) -> None:
    assert not session.is_preempted
    session.announce_preemption()
    assert session.is_preempted
    session.end_training(None)
    assert not session.is_preempted


def test_the_launcher_reads_the_step_that_was_saved_last(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.report_saved_step(1)  # without a launcher
    monkeypatch.setenv("TRAINER_KIT_PROGRESS_FILE", str(tmp_path / "progress"))
    for step in (5, 10):
        session.report_saved_step(step)
        assert (tmp_path / "progress").read_text() == f"{step}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]


def test_a_launcher_that_cannot_be_reached_is_a_warning(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINER_KIT_PROGRESS_FILE", str(tmp_path / "gone" / "progress"))
    session.report_saved_step(5)
    assert "could not report the checkpoint of step 5 to the launcher" in caplog.text


def test_only_the_first_process_of_a_machine_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(Collectives):
        is_local_main = False  # type: ignore[assignment]

    monkeypatch.setenv("TRAINER_KIT_PROGRESS_FILE", str(tmp_path / "progress"))
    Session(Second.__new__(Second)).report_saved_step(5)
    assert not any(tmp_path.iterdir())


def test_restarts_are_the_launchers(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.restarts == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert session.restarts == 2


def test_checkpoints_are_read_where_they_are(session: Session, tmp_path: Path) -> None:
    assert session.fetch_checkpoint(tmp_path) == tmp_path
    session.release_checkpoint_copies()
    assert tmp_path.is_dir()


def test_a_single_process_writes_alone(session: Session, tmp_path: Path) -> None:
    assert session.find_writers(tmp_path) == [0]
    for call in (lambda: session.send_to_main("key", "text"), lambda: session.receive("key", 1)):
        with pytest.raises(NotImplementedError, match="single process"):
            call()


def test_a_claim_is_reported_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, progress = Session(Collectives()), tmp_path / "progress"
    with session.reporting_claim():
        pass  # no launcher
    monkeypatch.setenv(environment.PROGRESS_FILE, str(progress))
    monkeypatch.setenv(environment.MEMBERSHIP, "run/3/2/0")
    with session.reporting_claim():
        assert read_claim(progress) == (0, False)
    assert read_claim(progress) == (3, True)
    with pytest.raises(LostProcessError), session.reporting_claim():
        raise LostProcessError("the main process may hold it")
    assert read_claim(progress) == (3, True)
    with pytest.raises(CutOffError), session.reporting_claim():
        raise CutOffError("others hold it")
    assert read_claim(progress) == (3, False)
