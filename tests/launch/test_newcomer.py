"""A machine comes to a run under way: its ranks prepare, then join the others, which stay in their processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.clock import Clock
from kit.joining import Joining, Note

from trainer_kit.launch import newcomer as newcomers
from trainer_kit.launch.membership import Membership, Readiness
from trainer_kit.launch.newcomer import Newcomer, Outlook
from trainer_kit.launch.published import Published
from trainer_kit.utils.new_place import NEW


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[Joining]:
    run = Joining(tmp_path, last_call=0.5)
    yield run
    run.close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Joining]:
    """A run with room for two machines."""
    run = Joining(tmp_path, num_nodes=2, min_nodes=1, num_processes=2)
    yield run
    run.close()


def begin(run: Joining, machines: int = 2) -> list[Note]:
    """Start a run which newcomers can join, and return the places of its ranks."""
    for machine in range(machines):
        run.start(machine)
    return run.wait_for_places(machines * run.fields["num_processes"] // run.fields["num_nodes"])


def pids(notes: list[Note]) -> list[int]:
    return [note.pid for note in notes]


def newcomer(run: Joining, machine: int) -> int:
    """Wait for a process that prepares on a machine, and return its ID."""

    def found() -> list[int]:
        return [pid for pid, notes in run.notes().items() if notes[0].machine == machine and notes[0].is_newcomer]

    run.wait(found, f"newcomer on machine {machine}")
    return found()[-1]


def check_undisturbed(run: Joining, before: list[Note]) -> None:
    """The ranks of the run have the places that they had."""
    time.sleep(1.5)  # a change would be announced, and read by the first launcher
    assert run.wait_for_places(len(before)) == before
    assert "joins" not in run.said(0)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2], ids=["one process", "two processes"])
def test_a_newcomer_joins_ranks_that_stay_in_their_processes(processes: int, tmp_path: Path) -> None:
    run = Joining(tmp_path, num_processes=3 * processes, last_call=0.5)
    try:
        before = begin(run)
        run.start(2)
        after = run.wait_for_places(3 * processes)
        assert pids(after[: 2 * processes]) == pids(before)
        assert [(note.rank, note.membership) for note in after] == [(rank, 2) for rank in range(3 * processes)]
        for note in after[2 * processes :]:
            expected = Note(note.pid, 2, note.rank, 3 * processes, 0, is_newcomer=True)
            assert run.notes()[note.pid] == [expected, note]
        assert "joins: the run continues with it" in run.said(0)
        for machine in range(3):
            assert run.said(machine).count("has joined: 3 of 3 machines continue") == 1
        assert run.end() == {0: 0, 1: 0, 2: 0}
        assert len(run.notes()) == 3 * processes, "no process was started again"
    finally:
        run.close()


@pytest.mark.distributed
def test_two_newcomers_come_one_after_the_other(tmp_path: Path) -> None:
    """The main process opens the training again in each membership."""
    run = Joining(tmp_path, min_nodes=1, last_call=0.5)
    try:
        run.start(0)
        before = run.wait_for_places(1)
        for machine in (1, 2):
            run.start(machine)
            after = run.wait_for_places(machine + 1)
            assert pids(after)[:machine] == pids(before)
            before = after
        assert [note.membership for note in after] == [3] * 3
        assert run.end() == {0: 0, 1: 0, 2: 0}
    finally:
        run.close()


@pytest.mark.distributed
def test_another_training_takes_the_old_way(joining: Joining) -> None:
    """The ranks of all machines end and start again; those that run save first."""
    before = begin(joining)
    joining.start(2, digest="other")
    prepared = newcomer(joining, 2)
    after = joining.wait_for_places(3)
    assert not {*pids(before), prepared} & set(pids(after))
    assert "the run cannot take in these processes" in joining.said(2)
    assert "joins: the run saves and continues with it" in joining.said(0)
    assert joining.end() == {0: 0, 1: 0, 2: 0}
    assert len([note for notes in joining.notes().values() for note in notes if note.is_newcomer]) == 1


@pytest.mark.distributed
def test_a_run_that_is_not_open_takes_the_old_way(joining: Joining) -> None:
    (joining.folder / "closed").touch()
    before = begin(joining)
    joining.start(2)
    after = joining.wait_for_places(3)
    assert not set(pids(before)) & set(pids(after))
    assert not any(note.is_newcomer for notes in joining.notes().values() for note in notes)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "exit_code", "text"), [("fails", 1, "left with exit code 3"), ("ends", 0, "")], ids=["fails", "ends"]
)
def test_a_newcomer_that_ends_leaves_the_run_alone(how: str, exit_code: int, text: str, joining: Joining) -> None:
    before = begin(joining)
    joining.start(2, how=how)
    assert joining.exit_code(2) == exit_code
    assert text in joining.said(2)
    check_undisturbed(joining, before)
    joining.start(2)
    assert pids(joining.wait_for_places(3))[:2] == pids(before), "the next one can join"


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_newcomer_alone(number: int, exit_code: int, joining: Joining) -> None:
    before = begin(joining)
    joining.start(2, how="never ends")
    newcomer(joining, 2)
    joining.launchers[2].send_signal(number)
    assert joining.exit_code(2) == exit_code
    check_undisturbed(joining, before)


@pytest.mark.distributed
def test_a_newcomer_that_prepares_ends_with_the_run(joining: Joining) -> None:
    begin(joining)
    joining.start(2, how="never ends")
    pid = newcomer(joining, 2)
    assert joining.end() == {0: 0, 1: 0, 2: 0}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def begin_with_spare(full: Joining) -> tuple[list[Note], int]:
    """The ranks of a run that has its machines, and the process of a further machine, which has prepared."""
    before = begin(full)
    full.start(2)
    full.wait_for_text("waiting for a place in the run", 2)
    return before, newcomer(full, 2)


@pytest.mark.distributed
def test_a_machine_too_many_joins_when_another_is_lost(full: Joining) -> None:
    before, prepared = begin_with_spare(full)
    check_undisturbed(full, before)
    full.launchers[1].kill()
    os.kill(before[1].pid, signal.SIGKILL)
    (full.folder / "meeting-1").touch()  # rank 0 has noticed the loss
    after = full.wait_for_places(2, after=1)
    assert pids(after) == [before[0].pid, prepared]
    assert full.end() == {0: 0, 1: -signal.SIGKILL, 2: 0}


@pytest.mark.distributed
def test_a_machine_too_many_is_stopped_while_it_waits(full: Joining) -> None:
    before, prepared = begin_with_spare(full)
    full.launchers[2].send_signal(signal.SIGTERM)
    assert full.exit_code(2) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(prepared, 0)
    check_undisturbed(full, before)


@pytest.mark.distributed
def test_a_newcomer_that_prepares_is_taken_where_the_others_are_too_few(joining: Joining) -> None:
    before = begin(joining)
    joining.start(2, how="never ends")
    prepared = newcomer(joining, 2)
    joining.launchers[1].kill()
    os.kill(before[1].pid, signal.SIGKILL)
    (joining.folder / "meeting-1").touch()
    after = joining.wait_for_places(2, after=1)
    assert [note.machine for note in after] == [0, 2]
    assert not {before[0].pid, prepared} & set(pids(after)), "they start together"


@pytest.mark.distributed
def test_a_spare_from_the_beginning_prepares_and_takes_the_place_of_a_lost_machine(full: Joining) -> None:
    for machine in range(3):
        full.start(machine)
    before = full.wait_for_places(2)
    spare = ({0, 1, 2} - {note.machine for note in before}).pop()
    prepared = newcomer(full, spare)
    full.wait_for_text("waiting for a place in the run", spare)
    check_undisturbed(full, before)
    lost = before[1]
    full.launchers[lost.machine].kill()
    os.kill(lost.pid, signal.SIGKILL)
    (full.folder / "meeting-1").touch()  # rank 0 has noticed the loss
    assert pids(full.wait_for_places(2, after=1)) == [before[0].pid, prepared]
    assert full.end() == {before[0].machine: 0, lost.machine: -signal.SIGKILL, spare: 0}


@pytest.mark.distributed
def test_a_machine_with_another_training_leaves_those_that_stay_after_a_loss_in_their_processes(tmp_path: Path) -> None:
    """It joins in the membership that follows, whose ranks save first."""
    run = Joining(tmp_path, min_nodes=1)
    try:
        before = begin(run, machines=3)
        run.start(3, digest="other")
        run.wait_for_text("the run cannot take in these processes, whose training differs", 3)
        lost = before[2]
        run.launchers[lost.machine].kill()
        os.kill(lost.pid, signal.SIGKILL)
        (run.folder / "meeting-1").touch()  # rank 0 has noticed the loss
        after = run.wait_for_places(3, after=2)
        assert not set(pids(before)) & set(pids(after))
        assert after[2].machine == 3
        for note in before[:2]:
            assert [each.membership for each in run.notes()[note.pid]] == [1, 2]
        assert "joins: the run saves and continues with it" in run.said(before[0].machine)
        assert run.end() == {lost.machine: -signal.SIGKILL} | {note.machine: 0 for note in after}
    finally:
        run.close()


@pytest.mark.distributed
@pytest.mark.parametrize("is_open", [True, False])
def test_a_spare_from_the_beginning_ends_with_the_run_or_by_a_signal(is_open: bool, full: Joining) -> None:
    if not is_open:
        (full.folder / "closed").touch()
    for machine in range(3):
        full.start(machine)
    before = full.wait_for_places(2)
    spare = ({0, 1, 2} - {note.machine for note in before}).pop()
    full.wait_for_text("waiting for a place in the run", spare)
    begin = time.monotonic()
    full.launchers[spare].send_signal(signal.SIGTERM)
    assert full.exit_code(spare) == 143
    assert time.monotonic() - begin < 5
    check_undisturbed(full, before)
    full.start(spare)
    full.wait_for_text("waiting for a place in the run", spare)
    assert full.end() == {0: 0, 1: 0, 2: 0}


class Meeting:
    """What a newcomer sees of a run."""

    def __init__(self) -> None:
        self.readiness, self.announced = Readiness.NOT_STARTED, list[Readiness]()
        self.said = list[str]()
        self.published: Published | None = Published(Membership(3, ("a", "b")))
        self.digest: str | None = "digest"
        self.is_lost = self.has_left_store = False

    def is_outvoted(self) -> bool:
        return False

    def running(self) -> Published | None:
        if self.is_lost:
            raise RuntimeError
        return self.published

    def open_for(self, running: Published) -> str | None:
        return self.digest

    def announce(self) -> None:
        self.announced.append(self.readiness)

    def leave_store(self) -> None:
        self.has_left_store = True


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> tuple[Newcomer, Meeting, Clock]:
    made, clock = Meeting(), Clock()
    rendezvous: Any = made
    monkeypatch.setattr(newcomers.time, "monotonic", clock.monotonic)
    return Newcomer(rendezvous, made.said.append), made, clock


@pytest.mark.parametrize("way", ["none runs", "closed", "unknown", "lost"])
def test_ranks_start_with_the_others_where_they_cannot_join(way: str, meeting: tuple[Newcomer, Meeting, Clock]) -> None:
    own, run, _ = meeting
    run.published = None if way == "none runs" else run.published
    run.digest = {"closed": "", "unknown": None}.get(way, "digest")
    run.is_lost = way == "lost"
    assert own.begin() is None
    assert run.announced == []
    assert run.has_left_store == (way == "lost"), "the meeting finds another one"
    expected = Readiness.PREPARING if way == "unknown" else Readiness.NOT_STARTED
    assert run.readiness is expected, "the run may take in newcomers in a moment"


def test_ranks_prepare_and_are_ready_and_join(meeting: tuple[Newcomer, Meeting, Clock]) -> None:
    own, run, clock = meeting
    assert own.begin() == run.published
    run.digest = None  # the run has changed its machines
    clock.now += 300
    assert own.outlook(None) is Outlook.STAY, "preparing takes as long as it takes"
    clock.now += 50
    assert own.outlook("new/digest") is Outlook.STAY
    assert run.announced == [Readiness.PREPARING]
    run.digest = "digest"
    assert own.outlook("new/digest") is own.outlook("new/digest") is Outlook.STAY
    assert run.announced == [Readiness.PREPARING, Readiness.READY]
    run.published = None
    assert own.outlook("new/digest") is Outlook.JOIN


@pytest.mark.parametrize("way", ["other", "closed", "not opened", "taken too early", "lost"])
@pytest.mark.parametrize("was_ready", [True, False])
def test_ranks_that_cannot_join_start_again_with_the_others(
    way: str, was_ready: bool, meeting: tuple[Newcomer, Meeting, Clock]
) -> None:
    own, run, clock = meeting
    own.begin()
    assert own.outlook("new/digest" if was_ready else None) is Outlook.STAY
    run.digest = {"other": "2", "closed": "", "not opened": None}.get(way, "digest")
    run.is_lost = way == "lost"
    if way == "not opened":
        clock.now += 59
        assert own.outlook("new/digest") is Outlook.STAY
        clock.now += 2
    if way == "taken too early":
        run.published = None
        run.readiness = Readiness.PREPARING
    assert own.outlook("new/digest") is Outlook.START_AGAIN
    assert run.readiness is (Readiness.PREPARING if way == "lost" else Readiness.NOT_STARTED)
    is_told = run.announced[-1] is Readiness.NOT_STARTED  # before the ranks have ended
    assert is_told == (way != "lost")
    assert run.has_left_store == (way == "lost")
    reason = {
        "other": ", whose training differs from that of the run or is at another place of the script",
        "closed": " now", "not opened": " now",
    }.get(way)  # fmt: skip
    again = "they start again with those of the other machines"
    expected = [] if reason is None else [f"the run cannot take in these processes{reason}: {again}"]
    assert run.said[1:] == expected


@pytest.mark.parametrize("digest", ["", "digest"])
def test_ranks_that_refuse_to_join_start_again_with_the_others(
    digest: str, meeting: tuple[Newcomer, Meeting, Clock]
) -> None:
    """Also while the run takes in none."""
    own, run, _ = meeting
    own.begin()
    run.digest = digest
    assert own.outlook(NEW) is Outlook.START_AGAIN
    assert Readiness.READY not in run.announced


def test_ranks_that_end_take_no_place(meeting: tuple[Newcomer, Meeting, Clock]) -> None:
    own, run, _ = meeting
    own.begin()
    own.withdraw()
    assert run.announced == [Readiness.PREPARING]
    own.outlook("new/digest")
    own.withdraw()
    assert run.announced == [Readiness.PREPARING, Readiness.READY, Readiness.PREPARING]
