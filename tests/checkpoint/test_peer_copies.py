"""Trainings whose state is copied to memory, and that resume from there."""

from __future__ import annotations

import os
import re
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kit.copied_training import copied_steps as steps
from kit.copied_training import run_copied as run

from trainer_kit import Callback, Run
from trainer_kit.checkpoint import find_checkpoints, peer_copies
from trainer_kit.checkpoint.copying import Copying
from trainer_kit.checkpoint.format.disk import write_file
from trainer_kit.checkpoint.generations import MARKER, folder_name, read_marker
from trainer_kit.checkpoint.peer_copies import PeerCopier
from trainer_kit.state import Requests

STEPS = 8


@pytest.mark.distributed
@pytest.mark.parametrize(("size", "kind"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_run_that_lost_a_machine_goes_on_from_the_last_copy(tmp_path: Path, size: int, kind: str) -> None:
    """With the bits of one that nothing happened to; what is in memory leaves with the end."""
    options: dict[str, Any] = {} if size == 1 else {"kind": kind}
    straight = run(size, tmp_path / "straight", tmp_path / "m", **options)
    assert steps(tmp_path / "m") == set()
    assert not (tmp_path / "straight" / MARKER).exists()
    other = tmp_path / "m" / "machine-0" / "trainer_kit-of-another-run"
    other.mkdir()
    first = run(size, tmp_path / "run", tmp_path / "m", until=5, **options)
    assert steps(tmp_path / "m") >= {4}
    assert any("copies of the state up to step 4 stay in memory" in line for line in first[0][2])
    if size > 1:
        shutil.rmtree(tmp_path / "m" / "machine-1")
    second = run(size, tmp_path / "run", tmp_path / "m", **options)
    assert [(state, begin) for state, begin, _ in second] == [(state, 4) for state, _, _ in straight]
    assert any(f"wrote {tmp_path / 'run' / 'checkpoint-4'}" in line for line in second[0][2])
    assert steps(tmp_path / "m") == set()
    assert other.is_dir()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_copies_beside_training_and_saves_change_no_bit(tmp_path: Path, kind: str) -> None:
    straight = run(2, tmp_path / "straight", tmp_path / "m", kind=kind, every=100)
    busy = run(2, tmp_path / "busy", tmp_path / "m", kind=kind, every=1, waits=False, save_steps=3, async_save=True)
    assert [each[:2] for each in busy] == [each[:2] for each in straight]
    assert not [line for _, _, lines in busy for line in lines if "copied" in line]


@pytest.mark.distributed
def test_another_layout_takes_it_too(tmp_path: Path) -> None:
    run(2, tmp_path / "run", tmp_path / "m", kind="fsdp", until=5)
    for path in (tmp_path / "m" / "machine-1").iterdir():
        shutil.rmtree(path)  # the one machine that is left has the parts of both
    alone = run(1, tmp_path / "run", tmp_path / "m")
    assert alone[0][1] == 4
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == ["checkpoint-4", "checkpoint-8"]


def flip_bits(memory: Path, step: int, pattern: str) -> None:
    """Flip a bit of all copies of some files of a step."""
    found = [*memory.glob(f"*/*/{step:08}-*/{pattern}")]
    assert found
    for path in found:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("damaged", "begin", "instead"),
    [
        ([4], 2, "resumes from the copies of step 2"),
        ([2, 4], 1, "resumes from the checkpoint of step 1"),
    ],
)
def test_a_flipped_bit_sends_the_run_further_back(tmp_path: Path, damaged: list[int], begin: int, instead: str) -> None:
    straight = run(2, tmp_path / "straight", tmp_path / "m", kind="ddp", callbacks=(SavesFirst(),))
    run(2, tmp_path / "run", tmp_path / "m", kind="ddp", callbacks=(SavesFirst(),), until=5)
    assert steps(tmp_path / "m") == {2, 4}
    for step in damaged:
        flip_bits(tmp_path / "m", step, "model-00002-of-00002.safetensors")
    second = run(2, tmp_path / "run", tmp_path / "m", kind="ddp", callbacks=(SavesFirst(),))
    assert [each[:2] for each in second] == [(straight[0][0], begin)] * 2
    (line,) = [line for line in second[0][2] if "the copies of step 4 cannot be used" in line]
    assert "is damaged: its checksum is" in line
    assert instead in line


class SavesFirst(Callback):
    """Asks for a checkpoint after the first step."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 1:
            run.requests.save = True


@pytest.mark.distributed
def test_both_machines_of_a_pair_are_lost(tmp_path: Path) -> None:
    """Machines 0 and 2 hold the parts of both: what they held is nowhere else."""
    run(4, tmp_path / "run", tmp_path / "m", kind="fsdp", until=5, callbacks=(SavesFirst(),))
    for machine in (0, 2):
        shutil.rmtree(tmp_path / "m" / f"machine-{machine}")
    second = run(4, tmp_path / "run", tmp_path / "m", kind="fsdp")
    assert [begin for _, begin, _ in second] == [1] * 4
    assert any(
        "the copies of step 4 cannot be used: no machine that is here has" in line
        and line.endswith("the run resumes from the checkpoint of step 1")
        for line in second[0][2]
    )


@pytest.mark.distributed
def test_no_copy_is_left(tmp_path: Path) -> None:
    run(1, tmp_path / "run", tmp_path / "m", until=5)
    shutil.rmtree(tmp_path / "m")
    ((_, begin, lines),) = run(1, tmp_path / "run", tmp_path / "m")
    assert begin == 0
    assert "no copy of the state is left in memory; the run resumes from the start" in lines


def lack_room(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        patch.setattr(os, "stat", _on_a_device_of_its_own(os.stat))
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))


def _on_a_device_of_its_own(stat: Any) -> Any:
    return lambda path, **given: (
        SimpleNamespace(st_dev=-1) if "trainer_kit-" in Path(path).name else stat(path, **given)
    )


@pytest.mark.distributed
def test_a_machine_without_room_is_named_once(tmp_path: Path) -> None:
    straight = run(2, tmp_path / "straight", tmp_path / "m", kind="fsdp")
    tight = run(2, tmp_path / "run", tmp_path / "m", kind="fsdp", damage=lack_room)
    assert [each[:2] for each in tight] == [each[:2] for each in straight]
    (line,) = [line for line in tight[0][2] if "was not copied" in line]
    assert re.search(r"machine-1 on .* has 1,000 B left, a copy needs .* KiB; make it larger", line), line
    assert "docker run --shm-size" in line


@pytest.mark.distributed
def test_the_newest_checkpoint_wins_over_older_copies(tmp_path: Path) -> None:
    run(1, tmp_path / "run", tmp_path / "m", until=7, every=4, save_steps=5)
    assert steps(tmp_path / "m") == set(), "a newer checkpoint is on the disk"
    ((_, begin, _),) = run(1, tmp_path / "run", tmp_path / "m", every=4)
    assert begin == 5


@pytest.mark.distributed
def test_copies_of_a_branch_that_was_left_do_not_come_back(tmp_path: Path) -> None:
    """A machine has the copies of all still, though the run went on from an earlier checkpoint without it."""
    options: dict[str, Any] = {"kind": "ddp", "callbacks": (SavesFirst(),)}
    run(2, tmp_path / "run", tmp_path / "m", until=5, **options)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "m" / "machine-1", kept)
    earlier = str(tmp_path / "run" / "checkpoint-1")
    again = run(2, tmp_path / "run", tmp_path / "m", until=3, resume=earlier, **options)
    assert [begin for _, begin, _ in again] == [1, 1]
    shutil.copytree(kept, tmp_path / "m" / "machine-1", dirs_exist_ok=True)
    last = run(2, tmp_path / "run", tmp_path / "m", **options)
    assert [begin for _, begin, _ in last] == [2, 2]
    assert not [*(tmp_path / "m").glob("*/trainer_kit-*")], "those of the earlier starts are removed too"


@pytest.mark.distributed
def test_a_start_without_copies_gives_those_up(tmp_path: Path) -> None:
    run(1, tmp_path / "run", tmp_path / "m", until=5)
    assert (tmp_path / "run" / MARKER).exists()
    run(1, tmp_path / "run", tmp_path / "m", every=None, resume=False)
    assert len([*(tmp_path / "m").glob("*/trainer_kit-*")]) == 1
    run(1, tmp_path / "run", tmp_path / "m", until=1)
    assert not [*(tmp_path / "m").glob("*/trainer_kit-*/*")], "the next start that makes copies removes them"


@pytest.mark.distributed
def test_copies_stand_in_for_a_damaged_checkpoint(tmp_path: Path) -> None:
    """It is the newest one, but the checkpoint before it is older than the copies."""
    run(1, tmp_path / "run", tmp_path / "m", until=5, callbacks=(SavesFirst(),))
    damaged = tmp_path / "run" / "checkpoint-5"
    shutil.copytree(tmp_path / "run" / "checkpoint-1", damaged)
    (damaged / "model.safetensors").write_bytes(b"cut short")
    ((_, begin, lines),) = run(1, tmp_path / "run", tmp_path / "m", callbacks=(SavesFirst(),))
    assert begin == 4
    assert any(line.startswith("checkpoint-5 is skipped") for line in lines)


class Leaves(Callback):
    """Leaves the run, as after a signal, while a copy is under way."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            run.requests.exit_code = 143


@pytest.mark.distributed
def test_who_leaves_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = list[bool]()

    def exchange(copying: Copying, entries: Any) -> None:
        cancelled.append(copying._is_cancelled.wait(60))

    monkeypatch.setattr(Copying, "_exchange", exchange)
    with pytest.raises(SystemExit):
        run(1, tmp_path / "run", tmp_path / "m", callbacks=(Leaves(),), waits=False)
    assert cancelled == [True]
    assert [path.name for path in find_checkpoints(tmp_path / "run")] == ["checkpoint-3"]


class FakeCollectives:
    is_main = is_local_main = True
    local_rank = 0

    def broadcast(self, value: Any) -> Any:
        return value

    def gather_object(self, value: Any) -> list[Any]:
        return [value]

    def describe_rank(self, rank: int) -> str:
        return f"rank {rank}"


@pytest.fixture
def copier(tmp_path: Path) -> PeerCopier:
    session = SimpleNamespace(open_peer_channel=lambda: None)
    strategy = SimpleNamespace(collectives=FakeCollectives(), session=session, world_size=1, is_main=True)
    run = SimpleNamespace(args=SimpleNamespace(max_shard_size=1), strategy=strategy, requests=Requests())
    saver: Any = SimpleNamespace(run=run, folder=tmp_path, committed=[], is_busy=False, is_copying=False, copies=Mock())
    return PeerCopier(saver, tmp_path)


def test_each_opening_removes_the_copies_before(copier: PeerCopier) -> None:
    copier.open()
    before = copier._folder
    (before / "00000004-0000000a-0-0").mkdir()
    copier.open()
    assert copier._folder != before
    assert [*copier.root.glob("trainer_kit-*")] == [copier._folder]
    assert read_marker(copier.root) == copier._marker


def test_a_copier_that_was_never_opened_removes_nothing(copier: PeerCopier) -> None:
    copier.close(is_complete=True)
    assert copier.root.is_dir()


def test_a_new_main_process_says_where_the_copies_are(copier: PeerCopier, caplog: pytest.LogCaptureFixture) -> None:
    copier.open()
    (copier.root / MARKER).unlink()  # the disk of another machine
    copier.mark()
    assert read_marker(copier.root) == copier._marker
    copier._saver.folder = copier.root / "missing"
    copier.mark()
    assert "a restart will not find the copies" in caplog.text


def test_a_loss_while_a_copy_begins_ends_its_host_copies(copier: PeerCopier) -> None:
    """Else the optimizer of the next membership would wait for them."""
    abandoned = list[int]()
    copier._saver.copies = SimpleNamespace(abandon=lambda: abandoned.append(1))  # type: ignore[assignment]
    copier.open()
    copier.drain()
    copier._saver.is_busy = True  # a save uses them
    copier.drain()
    assert abandoned == [1]


def test_each_process_removes_what_it_holds(copier: PeerCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    copier.open()
    collectives: Any = copier.run.strategy.collectives
    for owner, holder in ((0, 2), (3, 3), (1, 3), (0, 0)):
        (copier._folder / folder_name("00000004-0000000a", owner, holder)).mkdir()
    found = {}
    for rank in (2, 3):
        copier.run.strategy.rank, collectives.local_rank = rank, rank - 2  # type: ignore[misc]
        collectives.is_local_main = rank == 2
        found[rank] = {path.name.partition("a-")[2] for path in copier._stale()}
    assert found == {2: {"0-2", "0-0"}, 3: {"3-3", "1-3"}}, "process 0 is no more"
    copier._complete = ["00000004-0000000a"]
    assert not copier._stale()


def test_a_copy_that_is_given_up_completes_nothing(
    copier: PeerCopier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs while it writes, and goes on when the run has begun another one."""
    monkeypatch.setattr(peer_copies, "LOSS_SECONDS", 0.1)
    goes_on, ended, released = threading.Event(), threading.Event(), list[int]()

    def write(folder: Path, size: Any) -> dict[str, Any]:
        goes_on.wait(10)
        return {"model": write_file(folder / "model", [b"weights"])}

    given: Any = Future[Any]()
    given.set_result(SimpleNamespace(write=write))
    copier.open()
    name = "00000004-0000000a"
    copying = Copying(
        name, copier._folder, 0, ["rank 0"], None, 1, given, [], lambda: released.append(1), copier._ask_to_finish
    )
    copier._copying, copier._saver.copies = copying, "staging"  # type: ignore[assignment]
    copying.start()
    copier.drain()
    assert copier._saver.copies != "staging", "the thread has that memory"
    goes_on.set()
    copying.result.add_done_callback(lambda done: ended.set())
    assert ended.wait(10)
    assert "given up" in str(copying.result.result())
    assert released == [1]
    assert not copier._requests.written
    assert [each.name for each in (copier._folder / f"{name}-0-0").iterdir() if each.is_file()] == ["model"]
