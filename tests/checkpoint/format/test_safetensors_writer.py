from __future__ import annotations

import errno
import json
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from trainer_kit.checkpoint import CheckpointError, load_tensors, save_tensors
from trainer_kit.checkpoint.format.json_files import checksum
from trainer_kit.checkpoint.format.safetensors_reader import sources

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
]


def raw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    parsed: dict[str, Any] = json.loads(content[8 : 8 + length])
    return parsed


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"matrix": raw(dtype, 3, 5), "scalar": raw(dtype), "empty": raw(dtype, 0, 4), "cube": raw(dtype, 2, 1, 3)}
    save_tensors(tensors, tmp_path)
    loaded = load_tensors(tmp_path)
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {name: bits(tensors[name]) for name in tensors}
    if dtype not in (torch.complex32, torch.complex128):
        theirs = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert {name: bits(tensor) for name, tensor in theirs.items()} == {
            name: bits(tensors[name]) for name in tensors
        }


def test_a_file_of_mixed_dtypes_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {str(dtype): raw(dtype, 3) for dtype in DTYPES if dtype not in (torch.complex32, torch.complex128)}
    save_tensors(tensors, tmp_path)
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {name: bits(tensors[name]) for name in tensors}


def test_a_file_of_safetensors_own_is_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"author": "someone", "a": "b"})
    loaded = load_tensors(tmp_path)
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {name: bits(tensors[name]) for name in tensors}


def test_views_conjugates_and_strides_are_stored_as_they_look(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    numbers = torch.randn(3, dtype=torch.complex64)
    tensors = {
        "whole": base,
        "flat": base.view(-1),
        "rows": base[1:3],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[:1, :1].expand(3, 3),
        "as_int": base.view(torch.int32),
        "conjugate": numbers.conj(),
        "numbers": numbers,
        "negative": numbers.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    save_tensors(tensors, tmp_path)
    loaded = load_tensors(tmp_path)
    assert set(header(tmp_path / "model.safetensors")) == {*tensors, "__metadata__"}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    save_tensors({"z": weight, "a": weight.detach(), "m": weight.view(4, 4), "other": weight.clone()}, tmp_path)
    parsed = header(tmp_path / "model.safetensors")
    assert set(parsed) == {"z", "other", "__metadata__"}
    assert parsed["__metadata__"] == {"format": "pt", "a": "z", "m": "z"}
    loaded = load_tensors(tmp_path)
    assert loaded["a"] is loaded["z"] is loaded["m"]
    assert torch.equal(loaded["a"], weight)
    assert loaded["other"].data_ptr() != loaded["z"].data_ptr()


def test_a_tied_tensor_with_a_name_of_the_metadata_is_kept_under_it(tmp_path: Path) -> None:
    weight = torch.randn(2)
    save_tensors({"a": weight, "format": weight}, tmp_path)
    assert header(tmp_path / "model.safetensors")["__metadata__"] == {"format": "pt", "a": "format"}
    assert torch.equal(load_tensors(tmp_path)["a"], weight)


def test_empty_tensors_are_not_taken_for_tied(tmp_path: Path) -> None:
    save_tensors({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(2, 0)}, tmp_path)
    assert {name: list(tensor.shape) for name, tensor in load_tensors(tmp_path).items()} == {
        "a": [0],
        "b": [0],
        "c": [2, 0],
    }


def test_nothing_to_store_is_a_file_too(tmp_path: Path) -> None:
    save_tensors({}, tmp_path)
    assert names(tmp_path) == ["model.safetensors"]
    assert load_tensors(tmp_path) == {}


def test_each_file_is_returned_with_its_size_and_checksum(tmp_path: Path) -> None:
    for size in ("5GB", 8):
        entries = save_tensors({"a": torch.randn(2), "b": torch.randn(2)}, tmp_path, max_shard_size=size)
        assert sorted(entries) == names(tmp_path)
        for name, entry in entries.items():
            assert entry.size == (tmp_path / name).stat().st_size
            assert entry.checksum == checksum(tmp_path / name)


def test_large_tensors_are_sharded_with_the_hubs_index(tmp_path: Path) -> None:
    tensors = {f"layer.{index}": torch.randn(25) for index in range(5)}  # 100 bytes each
    tensors["big"] = torch.randn(100)
    tensors["tied"] = tensors["layer.3"]
    save_tensors(tensors, tmp_path, max_shard_size=200)
    shards = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert names(tmp_path) == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 900}
    assert index["weight_map"] == {
        "layer.0": shards[0],
        "layer.1": shards[0],
        "layer.2": shards[1],
        "layer.3": shards[1],
        "layer.4": shards[2],
        "big": shards[3],
    }
    assert header(tmp_path / shards[1])["__metadata__"] == {"format": "pt", "tied": "layer.3"}
    assert header(tmp_path / shards[0])["__metadata__"] == {"format": "pt"}
    loaded = load_tensors(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert loaded["tied"] is loaded["layer.3"]


@pytest.mark.parametrize(("first", "second"), [(8, "5GB"), ("5GB", 8), (8, 16), (8, 8)])
def test_another_layout_replaces_the_first_one_and_leaves_other_files(
    tmp_path: Path, first: int | str, second: int | str
) -> None:
    (tmp_path / "model.safetensors.backup").write_text("mine")
    (tmp_path / "model_b.safetensors").write_text("mine")
    save_tensors({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, tmp_path, max_shard_size=first)
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    save_tensors(tensors, tmp_path / "fresh", max_shard_size=second)
    save_tensors(tensors, tmp_path, max_shard_size=second)
    expected = [*names(tmp_path / "fresh"), "fresh", "model.safetensors.backup", "model_b.safetensors"]
    assert names(tmp_path) == sorted(expected)
    assert all(tensor.tolist() == [1, 1] for tensor in load_tensors(tmp_path).values())


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("")
    save_tensors({"a": torch.zeros(1)}, tmp_path)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == (tmp_path / "probe").stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (torch.empty(2, device="meta"), ValueError, "'layer.w' is on the device 'meta'"),
        (torch.eye(2).to_sparse(), TypeError, "'layer.w' is sparse"),
        (torch.empty(2, dtype=torch.bits8), TypeError, "'layer.w' is of dtype torch.bits8"),
        ([1.0], TypeError, "'layer.w' is of type list"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, tensor: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        save_tensors({"fine": torch.zeros(1), "layer.w": tensor}, tmp_path)
    assert names(tmp_path) == []


def test_the_formats_reserved_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'__metadata__'"):
        save_tensors({"__metadata__": torch.zeros(1)}, tmp_path)


@pytest.mark.parametrize("size", ["", "GB", "5 apples", "-1GB", "0", "7", 0, -5, True, 1.5, None, "nan", "1e3MB"])
def test_a_bad_size_is_named(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match="max_shard_size="):
        save_tensors({"a": torch.zeros(1)}, tmp_path, max_shard_size=size)


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit of file sizes")
def test_a_write_that_fails_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    save_tensors({"a": torch.zeros(10)}, tmp_path)
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_tensors({"a": torch.ones(10_000)}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == ["model.safetensors"]
    assert load_tensors(tmp_path)["a"].tolist() == [0] * 10


def test_a_save_that_fails_between_two_shards_never_leaves_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tensors({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path, max_shard_size=8)
    replace = os.replace

    def fail_at_the_second(source: Path, target: Path) -> None:
        if "00002" in target.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_the_second)
    with pytest.raises(OSError, match="No space left"):
        save_tensors({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, max_shard_size=8)
    with pytest.raises(CheckpointError, match="neither"):
        load_tensors(tmp_path)


def test_loaded_tensors_lie_in_memory_of_their_own(tmp_path: Path) -> None:
    save_tensors({"a": torch.zeros(3), "b": torch.zeros(100)}, tmp_path)
    loaded = load_tensors(tmp_path)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())
    (tmp_path / "model.safetensors").write_bytes(b"")
    loaded["b"].add_(1)
    assert loaded["b"].sum().item() == 100


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"neither model.safetensors nor .*index.json; it holds pytorch_model.bin"
    ):
        load_tensors(tmp_path)
    save_tensors({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path, max_shard_size=8)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is missing"):
        load_tensors(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_tensors({"a": torch.randn(50)}, tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is damaged or no safetensors file"):
            load_tensors(tmp_path)


def test_links_lead_elsewhere_where_no_manifest_says_what_there_is(tmp_path: Path) -> None:
    """As in the Hub's cache, in which all files are links."""
    save_tensors({"a": torch.ones(2)}, tmp_path, "secret")
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "linked.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "linked.safetensors"}}))
    assert load_tensors(directory)["a"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="is a link"):
        sources(directory, "model", ["model.safetensors.index.json", "linked.safetensors"])
    (directory / "linked.safetensors").unlink()
    os.mkfifo(directory / "linked.safetensors")
    with pytest.raises(CheckpointError, match="neither a plain file nor a folder"):
        load_tensors(directory)


def test_the_metadata_is_what_transformers_asks_for(tmp_path: Path) -> None:
    save_tensors({"a": torch.zeros(2)}, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
