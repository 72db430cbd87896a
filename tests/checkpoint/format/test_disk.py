from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_kit.checkpoint import take_snapshot, verify, write_checkpoint
from trainer_kit.checkpoint.format.disk import fsync_directory, rename_folder, write_file, write_json
from trainer_kit.checkpoint.format.json_files import checksum, read_json

SNAPSHOT = take_snapshot(1, {"weight": torch.ones(3)}, {"mine": {"a": 1}}, arguments={})


def failing(number: int, only: Any = lambda *_: True) -> Any:
    """A system call that fails for some of its arguments."""

    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if only(*args):
                raise OSError(number, os.strerror(number))
            return function(*args, **kwargs)

        return call

    return wrap


def is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


@settings(max_examples=60)
@given(sizes=st.lists(st.sampled_from([0, 1, 7, 2**16 - 1, 2**16, 2**16 + 1, 2**22, 2**22 + 5, 2**23 + 1]), max_size=6))
def test_the_content_and_its_entry(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    pieces = [os.urandom(min(size, 7)).ljust(size, bytes([number])) for number, size in enumerate(sizes)]
    path = tmp_path_factory.mktemp("files") / "file.bin"
    entry = write_file(path, [memoryview(piece) if len(piece) % 2 else piece for piece in pieces])
    content = b"".join(pieces)
    assert path.read_bytes() == content
    assert entry.size == len(content)
    assert entry.checksum == xxhash.xxh3_64_hexdigest(content) == checksum(path)
    assert os.listdir(path.parent) == ["file.bin"]


def test_many_small_pieces_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, sizes = os.write, []

    def counted(descriptor: int, content: Any) -> int:
        sizes.append(len(content))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", counted)
    write_file(tmp_path / "file.bin", (b"x" * 1000 for _ in range(10_000)))
    assert len(sizes) == 3
    assert sum(sizes) == 10_000_000


def test_large_pieces_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = []

    def write(descriptor: int, content: memoryview) -> int:
        owners.append(content.obj)
        return len(content)

    monkeypatch.setattr(os, "write", write)
    piece = memoryview(bytearray(10 * 2**20))
    write_file(tmp_path / "file.bin", [piece])
    assert len(owners) == 3
    assert all(owner is piece.obj for owner in owners)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(
        os, "write", lambda descriptor, content: write(descriptor, content[: max(1, len(content) // 3)])
    )
    content = os.urandom(100_000)
    entry = write_file(tmp_path / "file.bin", [content])
    assert (tmp_path / "file.bin").read_bytes() == content
    assert entry.size == len(content)


def test_a_write_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(OSError, match=r"Nothing is written.*file\.bin"):
        write_file(tmp_path / "file.bin", [b"content"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_an_error_names_the_file_keeps_its_number_and_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number)(getattr(os, call)))
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            write_file(path, [b"new"])
    assert caught.value.errno == number
    assert "file.bin" in str(caught.value)
    assert type(caught.value) is type(OSError(number, ""))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_an_error_of_who_gives_the_content_leaves_the_old_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("device lost")

    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="device lost"):
        write_file(path, pieces())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_json_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.checkpoint.format.json_files.JSON_VALUES", 100)
    write_json(tmp_path / "a.json", [1] * 90)
    assert read_json(tmp_path / "a.json") == [1] * 90
    with pytest.raises(ValueError, match=r"b\.json would hold more than .* values; keep long lists as tensors"):
        write_json(tmp_path / "b.json", [1] * 110)
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not flushed there")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
@pytest.mark.parametrize("only", [is_folder, lambda descriptor: not is_folder(descriptor)], ids=["folders", "files"])
def test_a_file_system_that_knows_no_fsync_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, only: Any
) -> None:
    monkeypatch.setattr(os, "fsync", failing(number, only)(os.fsync))
    paths = [write_checkpoint(tmp_path / "run", SNAPSHOT, name=name) for name in ("checkpoint-1", "checkpoint-2")]
    assert [verify(path).step for path in paths] == [1, 1]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{tmp_path / 'run'}: its file system does not flush to the disk when asked (fsync: {os.strerror(number)}), so "
        "a power cut could lose the newest checkpoint, and training would resume from the one before"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not flushed there")
def test_an_fsync_that_fails_is_an_error_that_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO)(os.fsync))
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        fsync_directory(tmp_path)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_folders_that_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    write_checkpoint(tmp_path, SNAPSHOT, name="checkpoint-1")
    monkeypatch.setattr(os, "rename", failing(number)(os.rename))
    with pytest.raises(OSError, match="does not rename folders in one step; use another output_dir") as caught:
        write_checkpoint(tmp_path, SNAPSHOT, name="checkpoint-2")
    assert caught.value.errno == number
    assert os.strerror(number) in str(caught.value)
    assert str(caught.value.filename2) == str(tmp_path / "checkpoint-2")
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def leaves_the_source(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def loses_a_file(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    shutil.rmtree(source)
    next(target.glob("manifest.json")).unlink()


@pytest.mark.parametrize("rename", [leaves_the_source, loses_a_file])
@pytest.mark.parametrize("name", ["checkpoint-1", "checkpoint-2"])
def test_a_rename_that_is_none_is_noticed_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rename: Any
) -> None:
    original: Any = os.rename
    path = write_checkpoint(tmp_path, SNAPSHOT, name="checkpoint-1")

    def of_staging(source: Path, target: Path) -> None:
        (rename if source.name.startswith(".staging-") else original)(source, target)

    monkeypatch.setattr(os, "rename", of_staging)
    with pytest.raises(OSError, match=r"Not renamed as a whole .* use another output_dir"):
        write_checkpoint(tmp_path, SNAPSHOT, name=name)
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert verify(path).step == 1


def test_a_rename_that_copies_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def copy(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        shutil.rmtree(source)

    monkeypatch.setattr(os, "rename", copy)
    for name in ("checkpoint-1", "checkpoint-2"):
        assert verify(write_checkpoint(tmp_path, SNAPSHOT, name=name)).step == 1
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{tmp_path}: a folder that was renamed became another one")


def test_a_rename_that_works_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    rename_folder(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.rglob("*")] == ["b", "file"]
    assert not caplog.records
