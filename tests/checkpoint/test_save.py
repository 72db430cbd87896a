"""One checkpoint on its way to the disk, in two parts, with the other process told by the tests."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainer_kit.checkpoint import Snapshot, contribution, load_tensors, read_state, save, take_snapshot, verify
from trainer_kit.checkpoint.format import ownership
from trainer_kit.checkpoint.format.commit import open_staging
from trainer_kit.checkpoint.save import Save
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.sharding import Sharding

WEIGHTS = {"a": torch.arange(6.0), "b": torch.arange(4.0)}
OPTIMIZER = {"exp_avg": torch.ones(5)}


class Session:
    """Keeps what is sent; a process that sent nothing has ended."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}
        self.awaited: list[int] = []

    def send_to_main(self, key: str, text: str) -> None:
        assert key not in self.sent
        self.sent[key] = text

    def receive(self, key: str, rank: int) -> str | None:
        self.awaited.append(rank)
        return self.sent.pop(key, None)


def strategy(rank: int, session: Session) -> Strategy:
    return cast(
        Strategy,
        SimpleNamespace(
            rank=rank,
            session=session,
            device_info=SimpleNamespace(to_host=torch.Tensor.cpu),
            collectives=SimpleNamespace(describe_rank=lambda rank: f"rank {rank} (south)"),
        ),
    )


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    monkeypatch.setattr(ownership, "PART_BYTES", 1)
    whole = take_snapshot(3, WEIGHTS, {"optimizer": OPTIMIZER, "mine": {"x": torch.ones(2)}}, arguments={})
    division = whole.divide(["optimizer"], 2, "5GB")
    assert division.writers == 2
    other = take_snapshot(3, WEIGHTS, {"optimizer": OPTIMIZER}, arguments={})
    return [each._replace(division=division, writer=number) for number, each in enumerate((whole, other))]


@pytest.fixture
def begun(tmp_path: Path) -> Save:
    return Save(3, open_staging(tmp_path, "checkpoint-3"), "unique")


def given(
    snapshot: Snapshot | Exception, complete: Callable[[], None] = lambda: None
) -> Future[contribution.Contribution]:
    future: Future[contribution.Contribution] = Future()
    if isinstance(snapshot, Exception):
        future.set_exception(snapshot)
    else:
        taken = contribution.Contribution(snapshot, Sharding(), [], [], [], complete)
        future.set_result(taken.prepared(torch.Tensor.cpu))
    return future


def commit(begun: Save, snapshot: Snapshot, session: Session) -> Path:
    return begun.commit(given(snapshot), strategy(0, session), [1], "5GB", lambda: None)


def test_two_parts_are_one_checkpoint(begun: Save, parts: list[Snapshot]) -> None:
    session = Session()
    begun.send_part(given(parts[1]), strategy(1, session), "5GB")
    path = commit(begun, parts[0], session)
    assert path == begun.staging.with_name("checkpoint-3")
    verify(path)
    assert {name: tensor.tolist() for name, tensor in load_tensors(path).items()} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }
    optimizer = read_state(path, "optimizer")
    assert optimizer is not None
    assert torch.equal(optimizer["exp_avg"], OPTIMIZER["exp_avg"])
    assert not begun.staging.exists()
    assert session.sent == {}


def test_a_process_without_a_report_fails_the_save(begun: Save, parts: list[Snapshot]) -> None:
    with pytest.raises(OSError, match=r"^rank 1 \(south\) ended before it had written its part$"):
        commit(begun, parts[0], Session())
    assert not begun.staging.exists()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "model"), r"\[Errno 28\] No space left on device: 'model'"),
        (MemoryError(), "no memory"),
        (ZeroDivisionError("what"), "ZeroDivisionError: what"),
    ],
)
def test_each_failure_of_a_part_is_reported(
    begun: Save, parts: list[Snapshot], error: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session()
    begun.send_part(given(error), strategy(1, session), "5GB")
    is_bug = isinstance(error, ArithmeticError)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_bug
    with pytest.raises(OSError, match=rf"^rank 1 \(south\): {text}$"):
        commit(begun, parts[0], session)
    assert not begun.staging.exists()


def test_a_part_that_is_interrupted_is_reported(begun: Save, parts: list[Snapshot]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    session = Session()
    with pytest.raises(KeyboardInterrupt):
        begun.send_part(given(parts[1], interrupted), strategy(1, session), "5GB")
    assert [json.loads(text) for text in session.sent.values()] == [{"error": "it was interrupted"}]


def test_the_folder_is_removed_once_no_process_writes_there(
    begun: Save, parts: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    remove = save.remove_folder

    def removed(folder: Path) -> None:
        assert session.awaited == [1]
        remove(folder)

    begun.send_part(given(parts[1]), strategy(1, session), "5GB")
    monkeypatch.setattr(contribution, "write_part", full)
    monkeypatch.setattr(save, "remove_folder", removed)
    with pytest.raises(OSError, match="No space"):
        commit(begun, parts[0], session)
    assert not begun.staging.exists()


def test_a_part_that_comes_too_late_leaves_no_folder(begun: Save, parts: list[Snapshot]) -> None:
    session = Session()
    with pytest.raises(OSError, match="ended before"):
        commit(begun, parts[0], session)
    begun.send_part(given(parts[1]), strategy(1, session), "5GB")
    assert "No such file" in next(iter(session.sent.values()))
    assert not list(begun.staging.parent.iterdir())
