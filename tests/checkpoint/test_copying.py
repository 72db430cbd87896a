"""Copies that are killed or fail on their way to memory."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from kit.copied_training import copied_steps as steps
from kit.copied_training import run_copied as run
from kit.copied_training import train
from kit.ranks import try_on_ranks

from trainer_kit.checkpoint import copying, transfer
from trainer_kit.checkpoint.copying import Copying
from trainer_kit.strategies.peer_channel import PeerChannel


def die_at(patch: pytest.MonkeyPatch, owner: Any, name: str, calls: int) -> None:
    """End this process in a call of a function or method."""
    called = getattr(owner, name)
    count = iter(range(1, 1000))

    def dies(*args: Any, **given: Any) -> Any:
        if next(count) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return called(*args, **given)

    patch.setattr(owner, name, dies)


def die_writing(patch: pytest.MonkeyPatch, rank: int) -> None:
    die_at(patch, Copying, "_write", 2)


def die_before_the_exchange(patch: pytest.MonkeyPatch, rank: int) -> None:
    die_at(patch, Copying, "_exchange", 2)


def die_in_the_exchange(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(transfer, "_PIECE_BYTES", 1000)
    arrive = transfer.Arrival.write

    def dies(self: transfer.Arrival, content: Any) -> None:
        arrive(self, content)
        if "00000004-" in str(self.folder):
            os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(transfer.Arrival, "write", dies)


@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("damage", [die_writing, die_before_the_exchange, die_in_the_exchange])
def test_a_copy_that_is_killed_leaves_the_one_before(tmp_path: Path, damage: Any) -> None:
    """Whatever the phase; the memory of the first machine is lost too."""
    options: dict[str, Any] = {"kind": "fsdp"}
    straight = run(2, tmp_path / "straight", tmp_path / "m", **options)
    killed = try_on_ranks(2, train, tmp_path / "run", tmp_path / "m", damage=damage, **options)
    assert all("exit code -9" in str(each) for each in killed)
    assert steps(tmp_path / "m") >= {2}
    shutil.rmtree(tmp_path / "m" / "machine-0")
    second = run(2, tmp_path / "run", tmp_path / "m", **options)
    assert [each[:2] for each in second] == [(straight[0][0], 2)] * 2


def fail_once(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 1 find its connection broken in the first exchange."""
    exchange, failed = PeerChannel.exchange, list[int]()

    def fails(self: PeerChannel, *args: Any) -> None:
        if rank == 1 and not failed:
            failed.append(1)
            raise OSError("no route to host")
        exchange(self, *args)

    patch.setattr(PeerChannel, "exchange", fails)


def write_badly(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the memory of rank 1 be full at the first copy."""
    if rank == 1:
        write, failed = copying.Contribution.write, list[int]()

        def fails(self: Any, folder: Path, size: Any) -> Any:
            if not failed:
                failed.append(1)
                shutil.rmtree(folder)
            return write(self, folder, size)

        patch.setattr(copying.Contribution, "write", fails)


def arrive_damaged(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let a bit flip on the way to rank 1 in the first copy."""
    write, failed = transfer.Arrival.write, list[int]()

    def flips(self: Any, content: Any) -> None:
        if rank == 1 and not failed:
            failed.append(1)
            content[0] ^= 1
        write(self, content)

    patch.setattr(transfer.Arrival, "write", flips)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("damage", "reason"),
    [(fail_once, "no route to host"), (write_badly, "No such file"), (arrive_damaged, "arrived with the checksum")],
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_copy_that_fails_is_given_up_and_tried_again(tmp_path: Path, kind: str, damage: Any, reason: str) -> None:
    options: dict[str, Any] = {"kind": kind}
    straight = run(2, tmp_path / "straight", tmp_path / "m", **options)
    first = run(2, tmp_path / "run", tmp_path / "m", damage=damage, until=5, **options)
    (line,) = [line for line in first[0][2] if "was not copied to memory" in line]
    assert line.startswith("the state of step 2 was not copied to memory: rank 1 (")
    assert reason in line
    assert steps(tmp_path / "m") == {4}
    second = run(2, tmp_path / "run", tmp_path / "m", **options)
    assert [each[:2] for each in second] == [(state, 4) for state, _, _ in straight]
