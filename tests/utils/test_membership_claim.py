"""Which membership of an elastic run owns an output folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.errors import CutOffError, FolderInUseError
from trainer_kit.utils.membership_claim import MembershipClaim, MembershipPlace, read_claim, report_claim
from trainer_kit.utils.run_lock import NAME, RunLock


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the claims that earlier tests of this process keep."""
    monkeypatch.setattr("trainer_kit.utils.membership_claim._kept", set())


def claim(folder: Path, number: int, after: int, needs_claim: bool = False, run: str = "run") -> MembershipClaim:
    return MembershipClaim(folder, "output_dir", MembershipPlace(run, number, after, needs_claim))


def test_one_of_two_halves_claims_a_folder(tmp_path: Path) -> None:
    claim(tmp_path, 1, 0).take()
    claim(tmp_path, 2, 1, needs_claim=True).take()
    for number in (2, 3):
        with pytest.raises(CutOffError, match="belongs to membership 2 of this run: other machines continue"):
            claim(tmp_path, number, 1).take()
    claim(tmp_path, 3, 2).take()


def test_half_without_the_last_main_process_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CutOffError, match="is not the folder of the last main process"):
        claim(tmp_path, 2, 1, needs_claim=True).take()
    claim(tmp_path, 2, 1).take()


def test_other_runs_are_removed(tmp_path: Path) -> None:
    claim(tmp_path, 9, 8, run="earlier").take()
    for number in range(1, 4):
        claim(tmp_path, number, number - 1).take()
    claim(tmp_path, 3, 2).remove_earlier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".membership-2-run", ".membership-3-run"]
    assert claim(tmp_path, 2, 1).newer() == 3
    assert claim(tmp_path, 3, 2).newer() is None
    assert claim(tmp_path / "missing", 3, 2).newer() is None


def test_an_older_membership_commits_nothing(tmp_path: Path) -> None:
    """Neither after the newer one took the lock, nor in the moment before, in which the lock may be missing."""
    old = RunLock(tmp_path, membership=MembershipPlace("run", 1))
    old.acquire()
    old.confirm()
    claim(tmp_path, 2, 1).take()
    (tmp_path / NAME).unlink()
    with pytest.raises(FolderInUseError, match="membership 2 of this run, since the other machines continue without"):
        old.confirm()
    assert not (tmp_path / NAME).exists()


def test_a_process_may_train_again_in_its_membership(tmp_path: Path) -> None:
    """In the same folder, after a refusal too, and in another one; the other half of a cut network may not."""
    place = MembershipPlace("run", 2, 1, needs_claim=True)
    claim(tmp_path, 1, 0).take()
    in_use = RunLock(tmp_path)
    in_use.acquire()
    with pytest.raises(FolderInUseError):
        RunLock(tmp_path, membership=place).acquire()
    in_use.release()
    for _ in range(2):
        lock = RunLock(tmp_path, membership=place)
        lock.acquire()
        with pytest.raises(CutOffError):
            claim(tmp_path, 3, 1).take()
        lock.release()
    (tmp_path / "other").mkdir()
    claim(tmp_path / "other", 2, 1, needs_claim=True).take()
    claim(tmp_path, 3, 2).take()
    with pytest.raises(CutOffError, match="belongs to membership 3"):
        RunLock(tmp_path, membership=place).acquire()


def test_a_newer_membership_takes_the_lock_over(tmp_path: Path) -> None:
    old, new = (RunLock(tmp_path, membership=MembershipPlace("run", number, number - 1)) for number in (1, 2))
    old.acquire()
    new.acquire()
    new.confirm()
    with pytest.raises(FolderInUseError, match="was taken over by"):
        old.confirm()
    with pytest.raises(CutOffError):
        RunLock(tmp_path, membership=MembershipPlace("run", 2, 1)).acquire()
    new.release()


def test_a_process_reports_to_its_launcher(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    assert read_claim(progress) == (0, False)
    for number, is_held in ((3, True), (4, False)):
        report_claim(progress, number, is_held)
        assert read_claim(progress) == (number, is_held)
    (tmp_path / "claim").write_text("")  # it is just being written
    assert read_claim(progress) == (0, False)
