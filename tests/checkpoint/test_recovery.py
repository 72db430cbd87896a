"""Copies in memory become a checkpoint on the disk."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.copied_training import train
from kit.generations import write_part
from kit.ranks import on_ranks, try_on_ranks

from trainer_kit.checkpoint import Manifest, find_checkpoints, recovery, verify
from trainer_kit.checkpoint.format import disk
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME
from trainer_kit.checkpoint.generations import folder_name
from trainer_kit.errors import SaveError
from trainer_kit.strategies import multinode_session
from trainer_kit.strategies.single import SingleDevice

Damage = Callable[[pytest.MonkeyPatch, int], None]


def run(*args: Any, **options: Any) -> list[tuple[str | None, int, list[str]]]:
    """Train with FSDP on two processes that stand for machines."""
    return on_ranks(2, train, *args, **options)  # type: ignore[no-any-return]


def see_nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the second machine not see the folder of the first."""
    patch.setattr(multinode_session, "_appears", lambda marker: False)


@pytest.mark.distributed
@pytest.mark.parametrize("lost", [0, 1])
def test_machines_that_see_no_output_folder_send_their_files(tmp_path: Path, lost: int) -> None:
    """What is left after the first machine lost its memory is all on the second."""
    straight = run(tmp_path / "straight", tmp_path / "m", damage=see_nothing)
    run(tmp_path / "run", tmp_path / "m", until=5, damage=see_nothing)
    shutil.rmtree(tmp_path / "m" / f"machine-{lost}")
    resumed = run(tmp_path / "run", tmp_path / "m", damage=see_nothing)
    assert [each[:2] for each in resumed] == [(state, 4) for state, _, _ in straight]
    verify(tmp_path / "run" / "checkpoint-4")


@pytest.mark.parametrize(
    ("newest", "damaged", "chosen", "refused", "read"),
    [
        (None, (), 6, [], {6}),
        (None, (6,), 4, [6], {4, 6}),
        (2, (4, 6), None, [6, 4], {4, 6}),
        (6, (), None, [], set()),
    ],
)
def test_no_more_generations_are_read_than_needed(
    tmp_path: Path, newest: int | None, damaged: tuple[int, ...], chosen: int | None, refused: list[int], read: set[int]
) -> None:
    for step in (2, 4, 6):
        contents = {"model": b"weightS" if step in damaged else b"weights", "state/optimizer": b"moments"}
        write_part(tmp_path, f"{step:08}-0000000a", 0, 0, contents)
    known: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        check = Manifest.check
        patch.setattr(Manifest, "check", lambda own, *args: (known.add(own.step), check(own, *args))[1])
        search = recovery._search(SingleDevice("cpu"), tmp_path, newest)
    found = search.choice.generation
    assert (found and found.step) == chosen
    assert [int(each.removeprefix("the copies of step ").split()[0]) for each in search.refused] == refused
    assert known == read
    assert not search.finds_nothing


@pytest.mark.parametrize("manifest", [None, "{"])
def test_nothing_is_left_where_no_copy_was_written_to_its_end(tmp_path: Path, manifest: str | None) -> None:
    folder = tmp_path / folder_name("00000004-0000000a", 0, 0)
    folder.mkdir()
    if manifest is not None:
        (folder / MANIFEST_NAME).write_text(manifest)
    search = recovery._search(SingleDevice("cpu"), tmp_path, None)
    assert (search.choice.generation, search.refused, search.finds_nothing) == (None, [], True)


def fill_disk(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the disk be full for the second process."""

    def fails(path: Path, pieces: Any) -> Any:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return disk.write_file(path, pieces)

    patch.setattr(recovery, "write_file", fails)


def flip_late(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Flip a bit in the memory of the second machine after its copies were compared with their checksums."""
    read = recovery.read_generation

    def flips(folder: Path, generation: str) -> Any:
        found = read(folder, generation)
        assert found is not None
        for name, path in found.places.items():
            if rank == 1 and name.endswith(".safetensors"):
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
        return found

    patch.setattr(recovery, "read_generation", flips)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("damage", "reason"), [(fill_disk, "No space left on device"), (flip_late, "is damaged: its checksum is")]
)
def test_copies_that_cannot_be_written_stay(tmp_path: Path, damage: Damage, reason: str) -> None:
    run(tmp_path / "run", tmp_path / "m", until=5)
    refused = try_on_ranks(2, train, tmp_path / "run", tmp_path / "m", damage=damage)
    for each in refused:
        assert isinstance(each.error, SaveError)
        assert "the copies of step 4 in memory cannot be written to" in str(each.error)
        assert reason in str(each.error)
    assert "rank 1" in str(refused[0].error)
    assert not find_checkpoints(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".staging-*"))
    resumed = run(tmp_path / "run", tmp_path / "m")
    assert {begin for _, begin, _ in resumed} == {4}, "also where one of two copies is damaged"
