from __future__ import annotations

import contextlib
import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
import xxhash

from trainer_kit.checkpoint import CheckpointError, Manifest
from trainer_kit.checkpoint.format.disk import write_file, write_json
from trainer_kit.checkpoint.format.json_files import inside
from trainer_kit.checkpoint.format.manifest import _content_checksum, list_files


def make(directory: Path) -> Manifest:
    (directory / "state").mkdir()
    files = {
        "state/a.json": write_file(directory / "state" / "a.json", [b"{}"]),
        "model.bin": write_file(directory / "model.bin", [b"x" * 5_000_000]),
    }
    manifest = Manifest.of(files, step=3, world_size=2)
    write_json(directory / "manifest.json", manifest.to_json())
    return manifest


def rewrite(directory: Path, **changes: object) -> None:
    """Changes a manifest the way somebody would who knows how to make its checksum fit."""
    content = json.loads((directory / "manifest.json").read_text())
    del content["checksum"]
    content.update(changes)
    (directory / "manifest.json").write_text(json.dumps({**content, "checksum": _content_checksum(content)}))


def test_a_manifest_comes_back_and_describes_every_file(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert (manifest.step, manifest.world_size, manifest.torch_version) == (3, 2, torch.__version__)
    assert datetime.fromisoformat(manifest.time).utcoffset() == timedelta(0)
    assert [(name, entry.size) for name, entry in manifest.files.items()] == [
        ("model.bin", 5_000_000), ("state/a.json", 2)
    ]  # fmt: skip
    assert manifest.files["model.bin"].checksum == xxhash.xxh3_64_hexdigest(b"x" * 5_000_000)
    manifest.check(tmp_path)


@pytest.mark.slow
def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    make(tmp_path)
    content = (tmp_path / "manifest.json").read_bytes()
    survived = []
    for position in range(len(content) - 1):  # all but the newline at the end
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            (tmp_path / "manifest.json").write_bytes(damaged)
            with contextlib.suppress(CheckpointError):
                survived.append((position, bit, Manifest.read(tmp_path)))
    assert survived == []


def test_a_missing_manifest_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no manifest\.json: it is no checkpoint"):
        Manifest.read(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        Manifest.read(tmp_path / "nowhere")


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    rewrite(tmp_path, format_version=1, trainer_kit_version="0.1")
    with pytest.raises(CheckpointError, match=r"format version 1, .* reads version 2; use .* that wrote it \('0\.1'\)"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        *({"files": files} for files in ([], {"a": {"size": 1}}, {"a": 3}, {"a": {"size": "1", "checksum": "x"}})),
        *({"files": {"a": {"size": size, "checksum": check}}} for size, check in ((-1, "x"), (1.0, "x"), (1, 2))),
        *(
            {"more": 1},
            {"a\nb": 1},
            {"step": "3"},
            {"step": -1},
            {"world_size": None},
            {"time": 3},
            {"torch_version": []},
        ),
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    make(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="is no manifest") as caught:
        Manifest.read(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "state/../../outside", "..", "C:/x", "a\\b", "."])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("secret")
    directory = tmp_path / "checkpoint-1"
    directory.mkdir()
    make(directory)
    rewrite(directory, files={name: {"size": 6, "checksum": "0" * 16}})
    with pytest.raises(CheckpointError, match="does not lie inside"):
        Manifest.read(directory).check(directory)


@pytest.mark.parametrize("link", ["model.bin", "state", "manifest.json"])
def test_links_are_refused(tmp_path: Path, link: str) -> None:
    directory = tmp_path / "checkpoint-1"
    directory.mkdir()
    make(directory)
    (directory / link).rename(tmp_path / "moved")
    (directory / link).symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=f"{link} is a link"):
        Manifest.read(directory).check(directory)
    with pytest.raises(CheckpointError, match="neither a plain file nor a folder"):
        list_files(directory)


def test_only_the_files_asked_for_are_compared(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    (tmp_path / "model.bin").unlink()
    manifest.check(tmp_path, ["state/a.json"])
    with pytest.raises(CheckpointError, match=r"model\.bin is missing"):
        manifest.check(tmp_path)


def test_names_inside_a_folder(tmp_path: Path) -> None:
    assert inside(tmp_path, "state/a..b.json") == tmp_path / "state" / "a..b.json"
