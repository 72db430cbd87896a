"""Preemption and aborts of several processes, over their heartbeat."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit.ranks import on_ranks

from trainer_kit.strategies.ddp import DDP
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


def find_writers(folder: str) -> list[int]:
    strategy = DDP(device="cpu")
    strategy.setup()
    with pytest.MonkeyPatch.context() as patch:
        access = os.access
        patch.setattr(os, "access", lambda path, mode: strategy.rank != 1 and access(path, mode))
        patch.chdir(folder if strategy.rank == 0 else "/")
        writers = strategy.session.find_writers(Path("run"))
        assert strategy.session.find_readers(Path("run")) == writers
        return writers


@pytest.mark.distributed
def test_the_processes_that_can_use_the_main_ones_folder_are_writers_and_readers(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert on_ranks(3, find_writers, str(tmp_path)) == [[0, 2]] * 3


def test_messages_go_through_the_heartbeat() -> None:
    sent: dict[str, str] = {}

    class Post(Beat):
        def send(self, key: str, text: str) -> bool:
            sent[key] = text
            return False  # which is no error: the main process is lost

        def receive(self, key: str, rank: int) -> str | None:
            return sent.get(f"{key}/{rank}")

    session, _ = make(Post())
    session.send_to_main("part/1", "text")
    assert [session.receive("part", rank) for rank in (1, 2)] == ["text", None]
