"""A machine comes to a run under way: its ranks prepare, then join the others, which stay in their processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.joining import Joining, Note

pytestmark = [pytest.mark.distributed]


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[Joining]:
    run = Joining(tmp_path)
    yield run
    run.close()


def begin(run: Joining, machines: int = 2) -> list[Note]:
    """Start a run, and return the places of its ranks."""
    for machine in range(machines):
        run.start(machine)
    return run.wait_for_places(machines * run.fields["num_processes"] // run.fields["num_nodes"])


def test_a_newcomer_joins_ranks_that_stay_in_their_processes(tmp_path: Path) -> None:
    run = Joining(tmp_path, num_processes=6)
    try:
        before = begin(run)
        run.start(2)
        after = run.wait_for_places(6)
        assert [note.pid for note in after[:4]] == [note.pid for note in before]
        assert [(note.rank, note.membership) for note in after] == [(rank, 2) for rank in range(6)]
        for note in after[4:]:
            first, second = run.notes()[note.pid]
            assert first == Note(note.pid, 2, note.rank, 6, 0, is_newcomer=True), "the place that it could expect"
            assert second == note
        assert "joins: the run goes on with it" in run.said(0)
        assert "have joined" not in run.said(1)
        assert run.said(1).count("has joined: 3 of 3 machines go on") == 1
        assert run.end() == {0: 0, 1: 0, 2: 0}
        assert len(run.notes()) == 6, "no process was started again"
    finally:
        run.close()
