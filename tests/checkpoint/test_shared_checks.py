"""Files of checkpoints that several processes check: each file once, and what any of them finds counts for all."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks

from trainer_kit.checkpoint import take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format.discovery import first_valid
from trainer_kit.checkpoint.format.manifest import Manifest
from trainer_kit.checkpoint.shared_checks import find_on_main
from trainer_kit.errors import CheckpointError
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.process_session import ProcessSession


def saved(folder: Path, step: int) -> Path:
    model = {f"weight{number}": torch.full((200 + number,), float(step)) for number in range(5)}
    snapshot = take_snapshot(step, model, {"other": {"a": 1}}, arguments={})
    return write_checkpoint(folder, snapshot, max_shard_size=900)


def find(folders: list[Path], blind: bool = False) -> dict[str, Any]:
    """The first valid folder, the warnings, and the files that this process checked."""
    strategy, checked, said = DDP(device="cpu"), list[str](), list[str]()
    strategy.setup()
    check = Manifest.check

    def record(self: Manifest, directory: Path, names: Any = None) -> None:
        checked.extend(f"{directory.name}/{name}" for name in names)
        check(self, directory, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "check", record)
        if blind:
            patch.setattr(ProcessSession, "find_readers", lambda self, directory: [0, 2])
        found = find_on_main(strategy, lambda check_files: first_valid(folders, said.append, check_files))
    strategy.collectives.barrier()
    return {"found": found, "checked": checked, "said": said}


@pytest.mark.distributed
def test_processes_check_a_share_each_until_a_checkpoint_is_valid(tmp_path: Path) -> None:
    folders = [saved(tmp_path, step) for step in (3, 2, 1)]
    for number in (1, 4):
        path = folders[0] / f"model-0000{number}-of-00005.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    (folders[1] / "manifest.json").unlink()
    several = on_ranks(3, find, folders)
    assert [each["found"] for each in several] == [folders[2]] * 3
    assert [len(each["said"]) for each in several] == [2, 0, 0]
    assert "model-0000" in several[0]["said"][0]
    of_valid = [[name for name in each["checked"] if name.startswith("checkpoint-1/")] for each in several]
    files = [f"checkpoint-1/{name}" for name in Manifest.read(folders[2]).files]
    assert sorted(itertools.chain.from_iterable(of_valid)) == sorted(files)
    assert all(of_valid)
    assert on_ranks(3, find, folders[2:], blind=True)[1]["checked"] == []


def fail(folder: Path) -> str:
    strategy = DDP(device="cpu")
    strategy.setup()
    with pytest.raises(CheckpointError) as damaged:
        find_on_main(strategy, lambda check_files: check_files(folder))
    with pytest.raises(KeyError):
        find_on_main(strategy, lambda check_files: {}[0])  # type: ignore[index]
    return str(damaged.value)


@pytest.mark.distributed
def test_an_error_is_raised_on_all_processes(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    path = folder / "model-00001-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    for text in on_ranks(2, fail, folder):
        assert f"{path} is damaged" in text
