from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from kit.boxes import Reads, rows_of

from trainer_kit.checkpoint import (
    CheckpointError,
    Manifest,
    find_checkpoints,
    load_checkpoint_in_model,
    load_tensors,
    newest_valid,
    read_arguments,
    read_state,
    remove_stale_staging,
    save_tensors,
    take_snapshot,
    verify,
    write_checkpoint,
)
from trainer_kit.checkpoint.format.discovery import read_state_into


def save(output_dir: Path, step: int) -> Path:
    weights = {"a": torch.randn(20), "b": torch.randn(3)}
    states = {"optimizer": {"exp_avg": torch.randn(5), "step": step}, "trainer": {"step": step}}
    snapshot = take_snapshot(step, weights, states, arguments={"seed": 1})
    return write_checkpoint(output_dir, snapshot, max_shard_size=80)


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def dead_pid() -> int:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join(60)
    assert process.pid is not None
    return process.pid


def test_checkpoints_are_found_in_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("checkpoint-1000", "checkpoint-20", "checkpoint-3", "checkpoint-0"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-", "checkpoint-x", "checkpoint-5b", "checkpoint--1", "checkpoint-007", "checkpoint-²"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9").touch()
    (tmp_path / ".staging-checkpoint-8-1").mkdir()
    found = [path.name for path in find_checkpoints(tmp_path)]
    assert found == ["checkpoint-0", "checkpoint-3", "checkpoint-20", "checkpoint-1000"]
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_every_file_truncated_flipped_or_deleted_is_found_and_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    assert len(files(checkpoint)) == 8
    for path in files(checkpoint):
        content = path.read_bytes()
        for position in (0, len(content) // 2, len(content) - 2):
            flipped = bytearray(content)
            flipped[position] ^= 4
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
                verify(checkpoint)
        for length in (0, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=f"{path.name} is (damaged|truncated: {length} bytes instead)"):
                verify(checkpoint)
        path.write_bytes(content + b"more")
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
            verify(checkpoint)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} is missing|has no manifest.json"):
            verify(checkpoint)
        path.mkdir()
        with pytest.raises(CheckpointError, match=path.name):
            verify(checkpoint)
        path.rmdir()
        path.write_bytes(content)
    assert verify(checkpoint).step == 3


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a file that cannot be read")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    (checkpoint / "arguments.json").chmod(0)
    with pytest.raises(CheckpointError, match=r"arguments\.json cannot be read"):
        verify(checkpoint)


def test_an_input_output_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save(tmp_path, 3)

    def checksum(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("trainer_kit.checkpoint.format.manifest.checksum", checksum)
    with pytest.raises(CheckpointError, match=r"arguments\.json cannot be read: Input/output error"):
        verify(checkpoint)


def test_the_newest_that_is_whole_is_taken_and_the_others_are_told_of(tmp_path: Path) -> None:
    for step in (1, 2, 10, 30):
        save(tmp_path, step)
    (tmp_path / "checkpoint-30" / "manifest.json").unlink()
    path = tmp_path / "checkpoint-10" / "state" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    said: list[str] = []
    assert newest_valid(tmp_path, said.append) == tmp_path / "checkpoint-2"
    assert len(said) == 2
    assert said[0].startswith("checkpoint-30 is skipped: ")
    assert "has no manifest.json" in said[0]
    assert said[1].startswith("checkpoint-10 is skipped: ")
    assert "optimizer.safetensors is truncated: " in said[1]


def test_older_checkpoints_are_not_read_where_the_newest_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    read: list[str] = []

    def spy(directory: Path) -> None:
        read.append(directory.name)

    assert newest_valid(tmp_path, pytest.fail, check=spy) == tmp_path / "checkpoint-2"
    assert read == ["checkpoint-2"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path, pytest.fail) is None
    assert newest_valid(tmp_path / "nowhere", pytest.fail) is None
    (tmp_path / "checkpoint-4").mkdir()
    said: list[str] = []
    assert newest_valid(tmp_path, said.append) is None
    assert len(said) == 1


def test_a_checkpoint_moved_aside_is_put_back_only_if_its_place_is_empty(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "checkpoint-3").rename(tmp_path / ".replaced-checkpoint-3")
    assert newest_valid(tmp_path, pytest.fail) == tmp_path / "checkpoint-3"
    weights = load_tensors(tmp_path / "checkpoint-3")
    shutil.copytree(save(tmp_path / "other", 3), tmp_path / ".replaced-checkpoint-3")
    newest_valid(tmp_path, pytest.fail)
    assert torch.equal(load_tensors(tmp_path / "checkpoint-3")["a"], weights["a"])
    assert (tmp_path / ".replaced-checkpoint-3").exists()
    remove_stale_staging(tmp_path)
    assert os.listdir(tmp_path / "checkpoint-3")
    assert not (tmp_path / ".replaced-checkpoint-3").exists()


def test_only_staging_of_dead_processes_is_removed(tmp_path: Path) -> None:
    dead = dead_pid()
    parent = psutil.Process().ppid()
    stale = [f".staging-checkpoint-7-{dead}", f".staging-delete-checkpoint-3-{dead}"]
    stale.append(f".staging-checkpoint-7-{os.getpid()}")  # this process writes nothing: an earlier container's
    kept = [f".staging-checkpoint-8-{parent}", ".staging-mine", "checkpoint-7"]
    for name in (*stale, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / f".staging-file-{dead}").touch()
    remove_stale_staging(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, f".staging-file-{dead}"])
    remove_stale_staging(tmp_path / "nowhere")


def test_staging_older_than_the_process_of_its_number_is_removed(tmp_path: Path) -> None:
    staging = tmp_path / f".staging-checkpoint-7-{os.getpid()}"
    staging.mkdir()
    before = psutil.Process().create_time() - 1000
    os.utime(staging, (before, before))
    remove_stale_staging(tmp_path)
    assert not staging.exists()


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs waitid")
def test_staging_of_a_dead_process_that_nobody_has_waited_for_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    staging = tmp_path / f".staging-checkpoint-7-{process.pid}"
    staging.mkdir()
    try:
        remove_stale_staging(tmp_path)
    finally:
        process.wait()
    assert not staging.exists()


def test_damaged_states_and_arguments_are_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="does not lie inside"):
        read_state(checkpoint, "../../secret")
    (checkpoint / "state" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        read_state(checkpoint, "optimizer")
    (checkpoint / "state" / "trainer.json").write_text('{"a": {"__kind__": "tensor", "value": "a"}}')
    with pytest.raises(CheckpointError, match=r"trainer\.json does not fit its tensors"):
        read_state(checkpoint, "trainer")
    (checkpoint / "state" / "trainer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer\.json is damaged"):
        read_state(checkpoint, "trainer")
    for content in ("[]", '{"__kind__": "?"}', "3"):
        (checkpoint / "arguments.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"arguments\.json is damaged"):
            read_arguments(checkpoint)
    (checkpoint / "arguments.json").unlink()
    with pytest.raises(CheckpointError, match=r"arguments\.json is missing"):
        read_arguments(checkpoint)


def test_a_folder_of_states_that_is_a_link_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    (checkpoint / "state").rename(tmp_path / "elsewhere")
    (checkpoint / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="state is a link"):
        read_state(checkpoint, "trainer")
    with pytest.raises(CheckpointError, match="state is a link"):
        verify(checkpoint)


def test_files_that_the_manifest_does_not_list_are_let_be_and_never_read(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    expected, arguments = load_tensors(checkpoint), read_arguments(checkpoint)
    assert (checkpoint / "model-00001-of-00002.safetensors").exists()
    save_tensors({"a": torch.zeros(20), "b": torch.zeros(3)}, tmp_path / "foreign")
    for name in ("model.safetensors", "state/trainer.safetensors", "state/more.safetensors"):
        shutil.copy(tmp_path / "foreign" / "model.safetensors", checkpoint / name)
    for name in ("state/more.json", "state/junk.txt", "README.md"):
        (checkpoint / name).write_text("{")
    assert newest_valid(tmp_path, pytest.fail) == checkpoint
    assert read_state(checkpoint, "more") is None
    assert read_state(checkpoint, "trainer") == {"step": 3}
    assert read_arguments(checkpoint) == arguments
    model = torch.nn.ParameterDict({"a": torch.ones(20), "b": torch.ones(3)})
    load_checkpoint_in_model(model, checkpoint)
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())


def test_arguments_that_the_manifest_does_not_list_are_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    content = Manifest.read(checkpoint)
    files = {name: entry for name, entry in content.files.items() if name != "arguments.json"}
    manifest = dataclasses.replace(content, files=files)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest.to_json()))
    with pytest.raises(CheckpointError, match=r"does not list arguments\.json"):
        read_arguments(checkpoint)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("name", ["manifest.json", "arguments.json", "model-00001-of-00002.safetensors", "state"])
def test_what_would_be_waited_for_is_refused(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path, 3)
    (checkpoint / name).rename(tmp_path / "moved")
    os.mkfifo(checkpoint / name)
    said: list[str] = []
    assert newest_valid(tmp_path, said.append) is None
    assert f"{name} is neither a plain file nor a folder" in said[0]


def test_of_given_tensors_of_a_state_only_the_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    column_major = torch.randn(3, 4).t()  # its strides are in the JSON tree
    state = {"state": {0: {"step": torch.tensor(3.0), "a": column_major}, 1: {"a": torch.randn(2, 4), "n": 5}}}
    directory = write_checkpoint(tmp_path, take_snapshot(1, {}, {"optimizer": state}, arguments={}))
    targets = {("state", 0, "a"): torch.zeros(4, 3), ("state", 1, "a"): torch.zeros(2, 4)}
    reads = Reads(monkeypatch)
    found = read_state_into(directory, "optimizer", targets, rows_of(1, 3))  # rows 2 and 3; row 1
    assert found["state"][0]["a"] is targets["state", 0, "a"]
    assert found["state"][1]["a"] is targets["state", 1, "a"]
    assert torch.equal(found["state"][0]["a"], torch.cat([torch.zeros(2, 3), column_major[2:]]))
    assert torch.equal(found["state"][1]["a"], torch.cat([torch.zeros(1, 4), state["state"][1]["a"][1:]]))
    assert (found["state"][0]["step"], found["state"][1]["n"]) == (torch.tensor(3.0), 5)
    assert reads.nbytes == 4 * (6 + 4 + 1)
    assert torch.equal(read_state_into(directory, "optimizer", {}, rows_of(1, 3))["state"][0]["a"], column_major)
    assert read_state_into(directory, "nothing", {}, rows_of(0, 1)) is None
