"""Files that rot: whatever happens to one, its checkpoint is passed over with a sentence that names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainer_kit.checkpoint import load_tensors, newest_valid, read_state, take_snapshot, verify, write_checkpoint
from trainer_kit.checkpoint.format.loading import load_weights
from trainer_kit.checkpoint.format.safetensors_reader import read_header

_ALL_BYTES_UP_TO = 256
_FLIPS = 48


def save(output_dir: Path, step: int) -> Path:
    weights = {name: torch.full((8,), float(step)) for name in ("a", "b", "c", "d")}
    optimizer = {"state": {0: {"exp_avg": torch.full((8,), step / 2), "step": torch.tensor(step)}}, "lr": 0.1}
    snapshot = take_snapshot(
        step,
        weights,
        {"optimizer": optimizer, "trainer": {"step": step, "name": "x" * 20}},
        arguments={"learning_rate": step / 10},
        files={"config.json": b'{"model_type": "%d"}' % step, "tokenizer/vocabulary.txt": b"a b c"},
    )
    return write_checkpoint(output_dir, snapshot, max_shard_size=64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, which no test changes for longer than it lasts."""
    run = tmp_path_factory.mktemp("run")
    save(run, 1)
    save(run, 2)
    return run


def names() -> list[str]:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    states = [f"state/{name}" for name in ("optimizer.json", "optimizer.safetensors", "trainer.json")]
    plain = ["arguments.json", "config.json", "manifest.json", "model.safetensors.index.json"]
    return sorted([*plain, *shards, *states, "tokenizer/vocabulary.txt"])


def passed_over(run: Path) -> str:
    """The sentence about checkpoint-2; checkpoint-1 is found, and loads."""
    said: list[str] = []
    found = newest_valid(run, said.append)
    assert found == run / "checkpoint-1", said
    assert len(said) == 1
    assert "\n" not in said[0]
    return said[0].removeprefix("checkpoint-2 is skipped: ")


def damaged(run: Path, name: str, contents: Iterator[bytes] | list[bytes]) -> Iterator[str]:
    """What is said of each content that is put in the place of a file, which is then put back."""
    path = run / "checkpoint-2" / name
    whole = path.read_bytes()
    try:
        for content in contents:
            path.write_bytes(content)
            yield passed_over(run)
    finally:
        path.write_bytes(whole)


def test_the_checkpoint_holds_what_the_tests_are_about(whole: Path) -> None:
    newest = whole / "checkpoint-2"
    assert sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()) == names()
    assert newest_valid(whole, pytest.fail) == newest


def boundaries(path: Path) -> set[int]:
    size = path.stat().st_size
    found = {0, 1, size // 2, size - 1}
    if path.suffix == ".safetensors":
        entries = read_header(path).entries.values()
        found |= {7, 8, *(entry.start for entry in entries), *(entry.start + entry.nbytes for entry in entries)}
    if path.name == "manifest.json":
        found.discard(size - 1)  # ends with a newline, without which it says the same
    return {length for length in found if length < size}


@pytest.mark.parametrize("name", names())
def test_a_file_that_is_cut_short_anywhere_is_found(whole: Path, name: str) -> None:
    path = whole / "checkpoint-2" / name
    content, lengths = path.read_bytes(), sorted(boundaries(path))
    for length, said in zip(lengths, damaged(whole, name, (content[:length] for length in lengths)), strict=True):
        assert f"{name} is " in said, length
        assert name == "manifest.json" or f"truncated: {length} bytes instead of {len(content)}" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_flipped_bit_is_found(whole: Path, name: str) -> None:
    content = (whole / "checkpoint-2" / name).read_bytes()
    last = len(content) - (name == "manifest.json")  # ends with a newline, for which any space may stand
    step = 1 if last <= _ALL_BYTES_UP_TO else last / _FLIPS
    positions = sorted({int(index * step) for index in range(int(last / step))} | {last - 1})

    def flipped() -> Iterator[bytes]:
        for position in positions:
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            yield bytes(changed)

    for position, said in zip(positions, damaged(whole, name, flipped()), strict=True):
        assert f"{name} is damaged" in said, position


@pytest.mark.parametrize("name", names())
def test_a_byte_too_many_is_found(whole: Path, name: str) -> None:
    content = (whole / "checkpoint-2" / name).read_bytes()
    for said in damaged(whole, name, [content + b"x", b"x" + content]):
        assert f"{name} is damaged" in said


def moved(run: Path, name: str, put: Callable[[Path, Path], object]) -> str:
    """What is said after a file was moved away and something else put in its place."""
    path, aside = run / "checkpoint-2" / name, run / "aside"
    path.rename(aside)
    try:
        put(path, aside)
        return passed_over(run)
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        aside.rename(path)


@pytest.mark.parametrize("name", names())
def test_a_file_that_is_gone_or_none_is_found(whole: Path, name: str) -> None:
    missing = "has no manifest.json" if name == "manifest.json" else f"{name} is missing"
    assert missing in moved(whole, name, lambda path, aside: None)
    assert f"{name} is " in moved(whole, name, lambda path, aside: path.mkdir())
    assert f"{name} is a link" in moved(whole, name, lambda path, aside: path.symlink_to(aside))
    if hasattr(os, "mkfifo"):
        assert f"{name} is neither" in moved(whole, name, lambda path, aside: os.mkfifo(path))


def test_files_of_the_same_size_that_change_places_are_found(whole: Path) -> None:
    first, second = (whole / "checkpoint-2" / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert first.stat().st_size == second.stat().st_size
    content = second.read_bytes()
    for said in damaged(whole, first.name, [content]):
        assert f"{first.name} is damaged" in said
    for said in damaged(whole, first.name, [(whole / "checkpoint-1" / first.name).read_bytes()]):
        assert f"{first.name} is damaged" in said


def test_a_folder_that_is_gone_is_found(whole: Path) -> None:
    state, aside = whole / "checkpoint-2" / "state", whole / "aside"
    state.rename(aside)
    try:
        assert "state/optimizer.json is missing" in passed_over(whole)
        state.write_bytes(b"")  # a file in its place
        assert "state/optimizer.json is missing" in passed_over(whole)
        state.unlink()
        state.symlink_to(aside)
        assert "state is a link" in passed_over(whole)
        state.unlink()
    finally:
        aside.rename(state)


def test_what_is_passed_over_is_not_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "state" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    found = newest_valid(tmp_path, lambda sentence: None)
    assert found is not None
    model = torch.nn.ParameterDict({name: torch.zeros(8) for name in "abcd"})
    load_weights(model, found, is_verified=True)
    assert all((parameter == 1).all() for parameter in model.values())
    optimizer = read_state(found, "optimizer")
    assert optimizer is not None
    assert (optimizer["state"][0]["exp_avg"] == 0.5).all()


def test_a_copy_of_any_kind_is_as_good(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole / "checkpoint-2", tmp_path / "copy", copy_function=os.link)  # hard links
    assert verify(tmp_path / "copy").step == 2
    assert (load_tensors(tmp_path / "copy")["a"] == 2).all()
    (tmp_path / "checkpoint-7").symlink_to(tmp_path / "copy")  # that of its folder is its user's own choice
    assert newest_valid(tmp_path, pytest.fail) == tmp_path / "checkpoint-7"
