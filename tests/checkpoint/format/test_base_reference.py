"""`BaseReference`: frozen weights outside of a checkpoint, kept once in the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_kit.checkpoint import CheckpointError, save_tensors, take_snapshot, verify, write_checkpoint
from trainer_kit.checkpoint.format.base_reference import BaseReference, digest, write_kept
from trainer_kit.checkpoint.format.safetensors_reader import load_source
from trainer_kit.checkpoint.stateful_entries import OWN_STATES
from trainer_kit.errors import UnreadableError

TIED = torch.arange(4.0)
WEIGHTS = {"a": TIED, "b": torch.ones(2, 2), "c": TIED}
DTYPES = dict.fromkeys(WEIGHTS, "torch.float32")


def reference() -> BaseReference:
    return BaseReference.of(
        "someone/base", {name: digest(each) for name, each in WEIGHTS.items()}, ["a", "b", "c"], None, DTYPES
    )


def checkpoint(run: Path, given: BaseReference) -> Path:
    return write_checkpoint(run, take_snapshot(1, {}, {"frozen-base": given.to_state()}, arguments={}))


def test_a_digest_tells_values_dtypes_and_shapes_apart() -> None:
    tensors = [TIED, -TIED, TIED.double(), TIED.view(2, 2), TIED.to(torch.bfloat16), torch.zeros(0)]
    assert len({digest(each) for each in tensors}) == len(tensors)
    assert digest(TIED) == digest(torch.arange(8.0)[:4]) == digest(TIED.view(2, 2).t().t().reshape(4))
    assert digest(torch.nn.Parameter(TIED)) == digest(TIED)


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert BaseReference.read(checkpoint(tmp_path, reference())) == reference()
    plain = write_checkpoint(tmp_path, take_snapshot(2, {"w": TIED}, {}, arguments={}))
    assert BaseReference.read(plain) is None
    save_tensors(WEIGHTS, tmp_path / "model")
    assert BaseReference.read(tmp_path / "model") is None


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"name": None, "digests": {}, "kept": ["x"], "folder": "base-1"},
        {"name": None, "digests": {}, "kept": [], "folder": "../elsewhere"},
        {"name": None, "digests": 3, "kept": [], "folder": None},
    ],
)
def test_a_reference_that_makes_no_sense_is_damage(state: dict[str, object], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, take_snapshot(1, {}, {"frozen-base": state}, arguments={}))
    with pytest.raises(CheckpointError):
        verify(directory)


def test_kept_weights_are_written_once_and_read_by_name(tmp_path: Path) -> None:
    given = reference()
    assert given.folder == reference().folder
    assert given.folder != BaseReference.of(None, {**given.digests, "b": "0" * 16}, given.kept, None, DTYPES).folder
    write_kept(tmp_path, given, WEIGHTS, "5GB", torch.Tensor.cpu)
    assert given.folder is not None
    before = (tmp_path / given.folder / "model.safetensors").stat().st_mtime_ns
    write_kept(tmp_path, given, {}, "5GB", torch.Tensor.cpu)
    assert (tmp_path / given.folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == [given.folder]
    directory = checkpoint(tmp_path, given)
    verify(directory)
    (source,) = given.kept_sources(directory, {"c"})
    assert {name: each.tolist() for name, each in load_source(source).items()} == {"c": TIED.tolist()}
    assert given.kept_sources(directory, ()) == []


def test_a_checkpoint_that_was_set_aside_finds_its_base(tmp_path: Path) -> None:
    write_kept(tmp_path, reference(), WEIGHTS, "5GB", torch.Tensor.cpu)
    directory = checkpoint(tmp_path, reference())
    (tmp_path / "earlier-1").mkdir()
    moved = directory.rename(tmp_path / "earlier-1" / directory.name)
    verify(moved)


def test_a_missing_or_damaged_base_is_no_damage_of_the_checkpoint(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, reference())
    with pytest.raises(UnreadableError, match=r"checkpoint-1 lacks the frozen weights of its model, the folder base-"):
        verify(directory)
    write_kept(tmp_path, reference(), WEIGHTS, "5GB", torch.Tensor.cpu)
    path = tmp_path / str(reference().folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UnreadableError, match=r"the frozen weights of checkpoint-1 cannot be read: .* is truncated"):
        verify(directory)
    with pytest.raises(UnreadableError, match="is truncated"):
        reference().verify(directory, quick=True)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def failing(tensor: torch.Tensor) -> torch.Tensor:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_kept(tmp_path, reference(), WEIGHTS, "5GB", failing)
    assert [*tmp_path.iterdir()] == []
    write_kept(tmp_path, BaseReference.of("x", {}, (), None, {}), {}, "5GB", failing)
    assert [*tmp_path.iterdir()] == []


def test_a_damaged_folder_is_moved_aside_and_written_again(tmp_path: Path) -> None:
    folder = tmp_path / str(reference().folder)
    for number in (1, 2):
        write_kept(tmp_path, reference(), WEIGHTS, "5GB", torch.Tensor.cpu)
        path = folder / ("model.safetensors" if number == 1 else "manifest.json")
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        write_kept(tmp_path, reference(), WEIGHTS, "5GB", torch.Tensor.cpu)
        assert (tmp_path / f"damaged-{number}-{folder.name}").is_dir()
        verify(checkpoint(tmp_path, reference()))


def test_a_part_of_a_reference_names_its_tensors_alone() -> None:
    part = reference().only({"b"})
    assert (part.digests.keys(), part.dtypes.keys(), part.kept) == ({"b"}, {"b"}, ["b"])
    assert part.folder == reference().folder
    assert reference().only(()).folder is None


def test_a_state_of_the_user_may_be_named_base(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, take_snapshot(1, {"w": TIED}, {"base": {"count": 3}}, arguments={}))
    verify(directory)
    assert BaseReference.read(directory) is None
    assert "base" not in OWN_STATES
