"""Launchers that meet in order of arrival; machines are threads here, see tests/scenarios/test_elastic.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kit.meetings import Meetings, together
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from trainer_kit.errors import ProcessesLeft, ProcessFailed
from trainer_kit.launch import elastic_rendezvous, link
from trainer_kit.launch.link import IsNewcomerError, RunEndedError
from trainer_kit.launch.membership import Readiness
from trainer_kit.launch.news import BEGINS, CHANGE, FAILED, OPEN, OUTCOME, Change, News
from trainer_kit.launch.published import Facts, Published, machine_key


@pytest.fixture
def elastic() -> Iterator[Meetings]:
    meetings = Meetings()
    yield meetings
    meetings.close()


def test_machines_meet_and_meet_again(elastic: Meetings) -> None:
    machines = [elastic.machine(number) for number in range(3)]
    infos = together(*(machine.next_rendezvous for machine in machines))
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert {info.world_size for info in infos} == {3}
    assert {machine.starts for machine in machines} == {0}
    assert len({machine.membership for machine in machines}) == 1
    for machine in machines:
        machine.confirm()
    infos[0].store.set("key", "first")
    again = together(*(machine.next_rendezvous for machine in machines))
    assert [info.rank for info in again] == [info.rank for info in infos]
    assert {machine.starts for machine in machines} == {1}
    assert not again[1].store.check(["key"]), "each membership has keys of its own"
    run, *facts = machines[0].membership.split("/")
    assert run == machines[2].membership.partition("/")[0]
    assert facts == ["2", "1", "0"], "number, the one before, and that it needs no claim"


def test_the_others_go_on_when_one_has_left(elastic: Meetings) -> None:
    machines = [elastic.machine(number) for number in range(3)]
    infos = together(*(machine.next_rendezvous for machine in machines))
    machines[2].shutdown()
    again = together(*(machine.next_rendezvous for machine in machines[:2]))
    assert {info.world_size for info in again} == {2}
    order = sorted(range(2), key=lambda number: infos[number].rank)
    assert [again[number].rank for number in order] == [0, 1], "those that stay keep their order"
    assert elastic.said == [], "the run may have ended"
    for machine in machines[:2]:
        machine.report()
        machine.report()
    assert sum("is gone: 2 of 3 machines continue" in line for line in elastic.said) == 2


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_machine_that_is_lost_before_it_hears_of_the_membership_holds_no_other_up(
    elastic: Meetings, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or ended by a signal, which it announces."""
    machines = [elastic.machine(number) for number in range(3)]
    late = machines[2]

    def is_lost(_: object) -> None:
        if is_killed:
            assert late._store.link is not None
            late._store.link.stop()  # the system closes its connections
            late._store.link = None
        else:
            late.shutdown()
        raise InterruptedError

    monkeypatch.setattr(late, "_enter", is_lost)
    with ThreadPoolExecutor(3) as pool:
        lost = pool.submit(late.next_rendezvous)
        begin = time.monotonic()
        infos = [future.result(timeout=60) for future in [pool.submit(each.next_rendezvous) for each in machines[:2]]]
        seconds = time.monotonic() - begin
        with pytest.raises(InterruptedError):
            lost.result(timeout=60)
    assert {info.world_size for info in infos} == {2}
    assert {machine.starts for machine in machines[:2]} == {0}, "the first membership has not begun"
    assert seconds < elastic_rendezvous._MEETING_SECONDS / 2
    machines[0].report()
    assert "is gone: 2 of 3 machines continue" in elastic.said[-1]
    together(*(machine.next_rendezvous for machine in machines[:2]))
    assert {machine.starts for machine in machines[:2]} == {2}, "the second one has"


def test_machines_that_have_begun_wait_for_none(elastic: Meetings) -> None:
    machines = [elastic.machine(number) for number in range(3)]
    infos = together(*(machine.next_rendezvous for machine in machines))
    machines[2].shutdown()
    time.sleep(0.5)  # until the keeper knows it
    assert {info.store.get(OUTCOME) for info in infos[:2]} == {BEGINS.encode()}


def test_a_machine_that_does_not_come_is_not_waited_for_forever(
    elastic: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives signs of life, but its launcher stands still."""
    monkeypatch.setattr(elastic_rendezvous, "_MEETING_SECONDS", 1.0)
    machines = [elastic.machine(number) for number in range(3)]
    late, enter = machines[2], machines[2]._enter

    def come_late(published: Published) -> None:
        time.sleep(2.0)
        monkeypatch.undo()
        enter(published)

    monkeypatch.setattr(late, "_enter", come_late)
    infos = together(*(machine.next_rendezvous for machine in machines))
    assert {info.world_size for info in infos} == {3}
    assert {machine.starts for machine in machines} == {0}


def test_too_few_machines_are_counted(elastic: Meetings) -> None:
    machine = elastic.machine(0, start_timeout=0.5)
    with pytest.raises(TimeoutError, match=r"a machine \(1 of at least 2 came\) did not answer within 0.5 s"):
        machine.next_rendezvous()


def test_no_machine_takes_the_end_of_waiting_for_the_end_of_the_run(elastic: Meetings) -> None:
    first, second = (
        elastic.machine(n, num_nodes=4, min_nodes=3, start_timeout=1.0 if n == 0 else 60.0) for n in (0, 1)
    )
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(second.next_rendezvous)
        with pytest.raises(TimeoutError, match="2 of"):
            first.next_rendezvous()
        end = pool.submit(first.shutdown)
        with pytest.raises(OSError, match="the machine with the store has waited for the others in vain"):
            other.result(timeout=30)
        second.shutdown()
        end.result(timeout=30)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_machine_that_waits_hears_of_a_failure_that_ended_the_run(goes_on: bool, elastic: Meetings) -> None:
    """It is on its way to the next membership, while the two others have left."""
    machines = [elastic.machine(number, start_timeout=3.0 if goes_on else 30.0) for number in range(3)]
    infos = together(*(machine.next_rendezvous for machine in machines))
    news = News(ProcessFailed("rank 1 failed", 1, 3), goes_on=goes_on)
    infos[1].store.set(FAILED, news.to_json())
    machines[1].shutdown()
    machines[2].shutdown()
    with pytest.raises(TimeoutError if goes_on else RunEndedError, match=None if goes_on else "rank 1 failed"):
        machines[0].next_rendezvous()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (None, (RendezvousGracefulExitError, "the run has ended")),
        (ProcessesLeft(143), (RunEndedError, "143")),
        (InterruptedError(), (RunEndedError, "143")),
        (OSError("the disk is full"), (OSError, "the run has failed on another machine, whose launcher says why")),
        (ProcessFailed("rank 1 failed", 1, 3), (RunEndedError, "rank 1 failed")),
    ],
    ids=str,
)
def test_a_spare_hears_how_the_run_has_ended(
    how: BaseException | None, expected: tuple[type[BaseException], str], elastic: Meetings
) -> None:
    machines = [elastic.machine(number, num_nodes=2, min_nodes=1) for number in range(3)]
    infos = together(*(machine.next_rendezvous for machine in machines[:2]))
    with ThreadPoolExecutor(3) as pool:
        spare = pool.submit(machines[2].next_rendezvous)
        while machines[2]._store.link is None:
            time.sleep(0.01)
        time.sleep(0.5)  # until the keeper knows it
        if isinstance(how, ProcessFailed):
            infos[1].store.set(FAILED, News(how, goes_on=False).to_json())
        ends = [pool.submit(machine.leave, how) for machine in machines[1::-1]]
        with pytest.raises(expected[0], match=expected[1]):
            spare.result(timeout=30)
        machines[2].shutdown()
        for end in ends:
            end.result(timeout=30)


def test_a_machine_prepares_while_the_others_run(elastic: Meetings) -> None:
    """They hear of it when it is ready; then it waits for its place as any other machine."""
    machines = [elastic.machine(number, last_call=0.5) for number in range(3)]
    *others, late = machines
    assert late.running() is None, "the run has not begun"
    infos = together(*(machine.next_rendezvous for machine in others))
    for machine in others:
        machine.confirm()
    assert [machine.running() for machine in others] == [None, None]
    running = late.running()
    assert running is not None
    assert running.membership.number == 1
    assert late.open_for(running) is None
    late.readiness = Readiness.PREPARING
    late.announce()
    infos[0].store.set(OPEN, "digest")
    assert infos[0].store.get(OPEN) == b"digest"
    assert late.open_for(running) == "digest"
    time.sleep(0.5)  # until the keeper knows it
    assert not infos[0].store.check([CHANGE])
    late.readiness = Readiness.READY
    late.announce()
    assert Change.from_json(infos[0].store.get(CHANGE)).in_process
    assert late.running() == running
    again = [ThreadPoolExecutor(1).submit(machine.next_rendezvous) for machine in others]
    while late.running() is not None:
        time.sleep(0.01)
    info = late.next_rendezvous()
    assert (info.rank, info.world_size) == (2, 3)
    assert {future.result(timeout=60).world_size for future in again} == {3}
    assert late._store.link is not None
    facts = Facts.from_json(late._store.link.store.get(machine_key(late._store.link.number)))
    assert (facts.readiness, facts.past) == (Readiness.TRAINING, ())


@pytest.mark.parametrize("change", ["", "one leaves"])
def test_a_spare_can_prepare_once_the_run_takes_in_newcomers(change: str, elastic: Meetings) -> None:
    """Not while the run changes its machines: the spare may have a place then."""
    machines = [elastic.machine(number, num_nodes=2, min_nodes=1) for number in range(3)]
    *others, spare = machines
    spare.can_prepare = True
    with ThreadPoolExecutor(1) as pool:
        infos = together(*(machine.next_rendezvous for machine in others))
        waits = pool.submit(spare.next_rendezvous)
        if change:
            infos[0].store.set(CHANGE, Change(change, is_joining=False).to_json())
        for text in ("", "digest"):
            time.sleep(0.5)
            assert not waits.done()
            infos[0].store.set(OPEN, text)
        if not change:
            with pytest.raises(IsNewcomerError):
                waits.result(timeout=30)
            return
        time.sleep(0.5)
        assert not waits.done()
        others[1].shutdown()
        again = ThreadPoolExecutor(1).submit(others[0].next_rendezvous)
        assert waits.result(timeout=30).world_size == again.result(timeout=30).world_size == 2


@pytest.mark.parametrize("opens", [True, False])
def test_a_newcomer_waits_for_a_run_that_has_just_changed_its_machines(
    opens: bool, elastic: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the ranks of all would end and start again."""
    monkeypatch.setattr(link, "_EARLY_OPENING_SECONDS", 60.0 if opens else 1.0)
    machines = [elastic.machine(number, last_call=0.5) for number in range(3)]
    *others, late = machines
    infos = together(*(machine.next_rendezvous for machine in others))
    late.can_prepare, late.readiness = True, Readiness.PREPARING
    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(late.next_rendezvous)
        time.sleep(0.5)
        assert not infos[0].store.check([CHANGE])
        if opens:
            infos[0].store.set(OPEN, "digest")
            with pytest.raises(IsNewcomerError):
                waits.result(timeout=30)
            assert not infos[0].store.check([CHANGE])
            return
        assert not Change.from_json(infos[0].store.get(CHANGE)).in_process
        assert {info.world_size for info in together(*(machine.next_rendezvous for machine in others))} == {3}
        assert waits.result(timeout=30).world_size == 3


def test_a_newcomer_waits_while_another_one_joins(elastic: Meetings) -> None:
    """Else the ranks of all would end and start again as soon as the other one has joined."""
    first, ready, late = [elastic.machine(number, min_nodes=1, last_call=0.1) for number in range(3)]
    first.stays = ready.can_prepare = late.can_prepare = True
    info = together(first.next_rendezvous)[0]
    first.confirm()
    ready.readiness, late.readiness = Readiness.READY, Readiness.PREPARING
    ready.announce()
    change = Change("a machine joins", is_joining=True, in_process=True)
    with ThreadPoolExecutor(3) as pool:
        waits = pool.submit(late.next_rendezvous)
        time.sleep(0.5)
        info.store.set(CHANGE, change.to_json())  # before the opening is visible
        info.store.set(OPEN, "digest")
        again, joins = pool.submit(first.next_rendezvous), pool.submit(ready.next_rendezvous)
        assert {each.result(timeout=30).world_size for each in (again, joins)} == {2}
        assert not waits.done()
        store = again.result().store
        store.set(OPEN, "digest")
        with pytest.raises(IsNewcomerError):
            waits.result(timeout=30)
        assert late.readiness is Readiness.PREPARING
        time.sleep(0.5)  # until the keeper would have changed the machines
        assert not store.check([CHANGE])


def test_a_newcomer_that_ends_while_it_waits_changes_nothing(elastic: Meetings) -> None:
    *others, late = [elastic.machine(number, last_call=0.5) for number in range(3)]
    infos = together(*(machine.next_rendezvous for machine in others))
    late.can_prepare, late.readiness = True, Readiness.PREPARING
    announced: list[Readiness] = []
    announce = late.announce
    late.announce = lambda: announced.append(late.readiness) or announce()  # type: ignore[method-assign,func-returns-value]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(late.next_rendezvous)
        time.sleep(0.5)
        elastic.stopped.set()
        with pytest.raises(InterruptedError):
            waits.result(timeout=30)
    assert Readiness.NOT_STARTED not in announced
    assert not infos[0].store.check([CHANGE])


@pytest.mark.parametrize("can_prepare", [True, False])
def test_a_machine_that_the_others_have_left_behind_comes_as_a_newcomer(can_prepare: bool, elastic: Meetings) -> None:
    """Its ranks hold old state. Until it has come to a meeting, the others train on; those that cannot prepare wait."""
    machines = [elastic.machine(number) for number in range(3)]
    *others, late = machines
    together(*(machine.next_rendezvous for machine in machines))
    for machine in machines:
        machine.confirm()
    late.can_prepare, late.stays = can_prepare, True
    beats, late._store.link = late._store.link, None
    assert beats is not None
    beats.stop()
    infos = together(*(machine.next_rendezvous for machine in others))
    assert {info.world_size for info in infos} == {2}
    beats._done.clear()
    signs = threading.Thread(target=beats._beat)
    signs.start()  # it can be heard again
    try:
        time.sleep(0.5)
        assert not infos[0].store.check([CHANGE])
        infos[0].store.set(OPEN, "digest")
        late._store.link = beats
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(late.next_rendezvous)
            if can_prepare:
                with pytest.raises(IsNewcomerError):
                    waits.result(timeout=30)
                assert not infos[0].store.check([CHANGE])
            else:
                assert not Change.from_json(infos[0].store.get(CHANGE)).in_process
                again = together(*(machine.next_rendezvous for machine in others))
                assert {info.world_size for info in (*again, waits.result(timeout=30))} == {3}
    finally:
        beats.stop()
        signs.join(timeout=30)


def test_a_machine_that_prepares_hears_of_the_end(elastic: Meetings) -> None:
    machines = [elastic.machine(number, last_call=0.5) for number in range(3)]
    *others, late = machines
    together(*(machine.next_rendezvous for machine in others))
    late.readiness = Readiness.PREPARING
    late.announce()
    time.sleep(0.5)  # until the keeper knows it
    machines[1].shutdown()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(machines[0].shutdown)
        time.sleep(0.5)
        with pytest.raises(RendezvousGracefulExitError):
            late.running()
        late.shutdown()
        end.result(timeout=30)


def test_a_signal_ends_the_wait(elastic: Meetings) -> None:
    machine = elastic.machine(0)
    threading.Timer(0.3, elastic.stopped.set).start()
    with pytest.raises(InterruptedError):
        machine.next_rendezvous()
