"""Preemption and aborts of several processes, over their heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from trainer_kit.strategies.process_collectives import ProcessCollectives
from trainer_kit.strategies.process_session import ProcessSession


class Beat:
    """Stands for the heartbeat of a process."""

    leaving = False
    last_duty: Any = None

    def announce_leaving(self) -> None:
        self.leaving = True


def make(heartbeat: Beat | None) -> tuple[ProcessSession, list[Any]]:
    ended: list[Any] = []
    group = SimpleNamespace(heartbeat=heartbeat, end_training=ended.append)
    return ProcessSession(cast(ProcessCollectives, SimpleNamespace(group=group))), ended


def test_a_preemption_is_announced_to_the_others_and_heard_from_them() -> None:
    beat = Beat()
    session, _ = make(beat)
    assert not session.is_preempted
    session.announce_preemption()
    assert beat.leaving
    other = Beat()
    session, _ = make(other)
    other.leaving = True  # as another process said
    assert session.is_preempted


def test_without_a_heartbeat_it_is_this_process_alone() -> None:
    session, ended = make(None)
    session.set_abort_handler(lambda: None)
    session.announce_preemption()
    assert session.is_preempted
    error = ValueError("boom")
    session.end_training(error)
    assert not session.is_preempted
    assert ended == [error]


def test_the_abort_handler_is_the_heartbeats_last_duty() -> None:
    beat = Beat()
    session, _ = make(beat)

    def handler() -> None:
        pass

    session.set_abort_handler(handler)
    assert beat.last_duty is handler
    session.set_abort_handler(None)
    assert beat.last_duty is None
