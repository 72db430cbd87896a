"""Checkpoints between machines that share no disk."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.ranks import RankFailed, on_ranks, try_on_ranks

from trainer_kit.strategies import multinode_session
from trainer_kit.strategies.multinode import MultiNode

FILES = {"empty": 0, "one": 1, "state/below": 999, "state/exact": 1000, "state/above": 1001, "model": 2500}


HOST = socket.gethostname()


def content(name: str) -> bytes:
    return bytes(torch.randint(0, 256, (FILES[name],), generator=torch.Generator().manual_seed(len(name))).tolist())


def fill(directory: Path) -> Path:
    for name in FILES:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content(name))
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@contextlib.contextmanager
def machines(folder: Path) -> Iterator[tuple[MultiNode, list[str]]]:
    """Rank 0 on machine 0, 1 and 2 on 1, 3 on 2, each machine in a working folder of its own; and the log."""
    rank = int(os.environ["RANK"])
    node, local_rank, size = [(0, 0, 1), (1, 0, 2), (1, 1, 2), (2, 0, 1)][rank]
    os.environ |= {"GROUP_RANK": str(node), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size)}
    home, temporary = os.getcwd(), tempfile.tempdir
    disk = folder / f"machine-{node}"
    (disk / "tmp").mkdir(parents=True, exist_ok=True)
    os.chdir(disk)
    tempfile.tempdir = str(disk / "tmp")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainer_kit")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        strategy = MultiNode(device="cpu")
        strategy.setup()
        yield strategy, records
    finally:
        logger.removeHandler(handler)
        os.chdir(home)
        tempfile.tempdir = temporary
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def copied(folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, machines(folder) as (strategy, records):
        patch.setattr(multinode_session, "_PIECE_BYTES", 1000)
        path = strategy.session.fetch_checkpoint(Path("checkpoint-3"))
        found = contents(path)
        strategy.session.release_checkpoint_copies()
        strategy.barrier()
        return {"path": str(path), "found": found, "is there": path.exists(), "log": records}


@pytest.mark.distributed
def test_a_checkpoint_is_sent_to_a_machine_that_does_not_see_it(tmp_path: Path) -> None:
    fill(tmp_path / "machine-0" / "checkpoint-3")
    other = tmp_path / "machine-1" / "checkpoint-3"
    other.mkdir(parents=True)
    (other / "model").write_text("of another run")
    main, first, second = on_ranks(3, copied, tmp_path)
    assert main["path"] == "checkpoint-3"
    assert first["path"] == second["path"]
    assert Path(first["path"]).parent == tmp_path / "machine-1" / "tmp"
    for each in (main, first, second):
        assert each["found"] == {name: content(name) for name in FILES}
    assert (main["is there"], first["is there"], second["is there"]) == (True, False, False)
    assert contents(other) == {"model": b"of another run"}
    assert list((tmp_path / "machine-1" / "tmp").iterdir()) == []
    assert f"sending checkpoint-3 (5.372 KiB) to {HOST}, where it is not seen" in main["log"]
    assert first["log"] == []


def copied_with_gpus(folder: Path) -> dict[str, Any]:
    """With NCCL bound to a device, making a group is a step of all processes, of which only its members know."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"):
            if hasattr(torch.distributed, name):
                patch.setattr(torch.distributed, name, None)
        return copied(folder)


@pytest.mark.distributed
def test_a_checkpoint_goes_from_machine_to_machine_without_a_group_of_some(tmp_path: Path) -> None:
    fill(tmp_path / "machine-0" / "checkpoint-3")
    results = on_ranks(4, copied_with_gpus, tmp_path)
    for each in results:
        assert each["found"] == {name: content(name) for name in FILES}
    assert Path(results[3]["path"]).parent == tmp_path / "machine-2" / "tmp"
    assert [each["is there"] for each in results] == [True, False, False, False]


def seen_by_all(folder: Path, can_mark: bool) -> tuple[str, bool, list[str], list[int]]:
    with pytest.MonkeyPatch.context() as patch, machines(folder) as (strategy, records):
        if not can_mark:
            patch.setattr(multinode_session, "_mark", lambda directory: None)
        path = strategy.session.fetch_checkpoint(folder / "shared")
        whole = contents(path) == {name: content(name) for name in FILES}
        strategy.session.release_checkpoint_copies()
        strategy.barrier()  # `find_writers` marks the folder for a moment
        writers = strategy.session.find_writers(folder / "shared")
        strategy.barrier()
        assert strategy.session.find_readers(folder / "shared") == writers
        return str(path), whole, records, writers


@pytest.mark.distributed
def test_a_shared_folder_is_read_where_it_is(tmp_path: Path) -> None:
    shared = fill(tmp_path / "shared")
    results = on_ranks(3, seen_by_all, tmp_path, True)
    assert {path for path, *_ in results} == {str(shared)}
    assert [writers for *_, writers in results] == [[0, 1, 2]] * 3
    assert set(contents(shared)) == set(FILES)  # and nothing else
    assert f"{shared} is shared by all machines" in results[0][2]


@pytest.mark.distributed
def test_a_folder_that_cannot_be_written_to_is_sent(tmp_path: Path) -> None:
    """A disk that is read-only for the main process: who sees it cannot be found out."""
    shared = fill(tmp_path / "shared")
    main, first, second = on_ranks(3, seen_by_all, tmp_path, False)
    assert main[:2] == (str(shared), True)
    assert first[:2] == second[:2]
    assert main[3] == first[3] == second[3] == [0]  # alone on its machine
    assert Path(first[0]).parent == tmp_path / "machine-1" / "tmp"
    assert first[1]


def report(folder: Path) -> tuple[list[str], str]:
    with pytest.MonkeyPatch.context() as patch, machines(folder) as (strategy, records):
        strategy.session.find_writers(Path("checkpoint-3"))
        patch.setenv("TRAINER_KIT_PROGRESS_FILE", f"progress-{strategy.rank}")
        strategy.session.report_saved_step(7)
        try:
            strategy.collectives.check_same_on_all_ranks({"seed": strategy.rank})
        except ValueError as error:
            return records, str(error)
    return records, ""


@pytest.mark.distributed
def test_who_runs_where_and_what_is_shared(tmp_path: Path) -> None:
    (tmp_path / "machine-0" / "checkpoint-3").mkdir(parents=True)
    main, *others = on_ranks(3, report, tmp_path)
    title, first, second = main[0][0].splitlines()
    assert title.startswith("3 processes on 2 machines, which meet at 127.0.0.1:")
    assert first == f"  machine 0, {HOST}: rank 0 on cpu"
    assert second == f"  machine 1, {HOST}: ranks 1-2 on 2 x cpu"
    assert main[0][1] == (
        f"checkpoint-3 is not shared with {HOST}: checkpoints and logs are on {HOST} alone, where rank 0 must run "
        "again to resume"
    )
    assert [records for records, _ in others] == [[], []]
    for _, error in (main, *others):
        assert f"seed differs: 1 on rank 1 ({HOST}), 0 on rank 0 ({HOST})" in error
    progress = sorted(path.name for path in tmp_path.rglob("progress-*"))
    assert progress == ["progress-0", "progress-1"]  # the first process of each machine, for its launcher


@contextlib.contextmanager
def broken(what: str) -> Iterator[None]:
    """Something goes wrong on rank 1; what concerns reading, on rank 0."""
    rank = int(os.environ["RANK"])

    def raise_error(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        if what == "reading" and rank == 0:
            patch.setattr(multinode_session, "_read_piece", raise_error)
        elif what == "room" and rank == 1:
            patch.setattr(multinode_session.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
        elif what == "folder" and rank == 1:
            patch.setattr(multinode_session.tempfile, "mkdtemp", raise_error)
        elif what == "writing" and rank == 1:
            import resource

            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        elif what == "size" and rank == 0:
            patch.setattr(multinode_session, "_sizes", lambda directory: {"model": 3 * 2**20 + 1})
        patch.setattr(multinode_session, "_PIECE_BYTES", 2**20)
        try:
            yield
        finally:
            if what == "writing" and rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def copy_and_fail(folder: Path, what: str) -> None:
    with machines(folder) as (strategy, _), broken(what):
        try:
            strategy.session.fetch_checkpoint(Path("checkpoint-3"))
        finally:
            strategy.teardown()


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("reading", f"rank 0 ({HOST}): the disk is gone"),
        ("room", f"rank 1 ({HOST}): {{tmp}} has 1 MiB left of the 3 MiB needed"),
        ("folder", f"rank 1 ({HOST}): the disk is gone"),
        ("writing", f"rank 1 ({HOST}): [Errno 27] File too large"),
        ("size", f"rank 0 ({HOST}): checkpoint-3/model has become shorter"),
    ],
)
def test_a_copy_that_fails_is_an_error_on_all(tmp_path: Path, what: str, sentence: str) -> None:
    directory = tmp_path / "machine-0" / "checkpoint-3"
    directory.mkdir(parents=True)
    (directory / "model").write_bytes(bytes(3 * 2**20))
    for result in try_on_ranks(3, copy_and_fail, tmp_path, what):
        assert isinstance(result, RankFailed)
        assert isinstance(result.error, OSError), result
        assert "checkpoint-3 cannot be sent to the machines that do not see it" in str(result.error)
        assert sentence.format(tmp=tmp_path / "machine-1" / "tmp") in str(result.error)
    assert list((tmp_path / "machine-1" / "tmp").iterdir()) == []


def late(look: int) -> Callable[[Path], list[str]]:
    left = [look]

    def listdir(folder: Path) -> list[str]:
        left[0] -= 1
        if left[0] == 1:
            raise OSError("stale file handle")
        return ["marker"] if left[0] <= 0 else []

    return listdir


@pytest.mark.parametrize(("look", "found"), [(1, True), (3, True), (9, False)])
def test_a_network_disk_may_show_a_file_late(
    look: int, found: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(multinode_session, "_LOOKS", (0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(multinode_session.os, "listdir", late(look))
    assert multinode_session._appears(tmp_path / "marker") is found
