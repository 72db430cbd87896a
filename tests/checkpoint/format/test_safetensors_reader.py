from __future__ import annotations

import io
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.boxes import Reads, boxes, cut, rows

from trainer_kit.checkpoint import CheckpointError, load_tensors, save_tensors
from trainer_kit.checkpoint.format import safetensors_reader
from trainer_kit.checkpoint.format.json_files import JSON_BYTES
from trainer_kit.checkpoint.format.safetensors_reader import load_parts, load_source, load_tensor, read_header, sources
from trainer_kit.checkpoint.format.safetensors_writer import AS_REAL, DTYPE_NAMES
from trainer_kit.utils.box import Box


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_every_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.randint(0, 2, (3, dtype.itemsize), dtype=torch.uint8).view(dtype) for dtype in DTYPE_NAMES
    }
    tensors["complex32"] = torch.view_as_complex(torch.tensor([[1, 2]], dtype=torch.float16))
    tensors |= {"complex128": torch.randn(2, 2, dtype=torch.complex128), "scalar": torch.tensor(3.5)}
    tensors |= {"empty": torch.empty(0, 3), "half empty": torch.empty(2, 0, dtype=torch.int8)}
    save_tensors(tensors, tmp_path)
    loaded = load_tensors(tmp_path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_each_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    loaded = load_tensors(tmp_path)
    assert all(tensor.untyped_storage().nbytes() == 12 for tensor in loaded.values())
    loaded["a"].zero_()
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert loaded["b"].tolist() == [1, 1, 1]


def test_tensors_of_any_size_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{size}": torch.randn(size) for size in (0, 1, 2, 3, 15, 16, 17, 33, 1000)}
    save_tensors(tensors, tmp_path)
    for piece in (1, 7, 64, 5000):
        monkeypatch.setattr(safetensors_reader, "_PIECE_BYTES", piece)
        loaded = load_tensors(tmp_path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_read_that_gives_less_than_was_asked_for_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(50)
    save_tensors({"a": tensor}, tmp_path)

    class Slow(io.FileIO):
        def readinto(self, view: Any) -> int:
            return super().readinto(view[:7]) or 0

    source = read_header(tmp_path / "model.safetensors")
    monkeypatch.setattr(safetensors_reader, "open", lambda path, mode, buffering: Slow(path, mode), raising=False)
    assert torch.equal(load_source(source)["a"], tensor)


def test_bools_that_are_none_become_some(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", {"a": entry("BOOL", [3], [0, 3])}, b"\x00\x01\xfe")
    assert load_source(read_header(path))["a"].view(torch.uint8).tolist() == [0, 1, 1]


def test_one_tensor_of_a_file_is_read_alone(tmp_path: Path) -> None:
    tied = torch.randn(3)
    save_tensors({"a": tied, "b": torch.ones(2), "c": tied}, tmp_path)
    (source,) = sources(tmp_path, "model")
    assert source.shapes == {"a": (3,), "b": (2,), "c": (3,)}
    assert torch.equal(load_tensor(source, "c"), tied)
    assert load_tensor(source, "b").tolist() == [1, 1]


def test_a_file_that_is_cut_short_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(3)}, tmp_path)
    (source,) = sources(tmp_path, "model")
    os.truncate(source.path, source.path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut short"):
        load_source(source)
    source.path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        load_source(source)


HUGE = 2**62
BAD_HEADERS = {
    "no object": b"[]",
    "not JSON": b"{",
    "not UTF-8": b'{"\xff": 1}',
    "a number that is none": b'{"__metadata__": NaN}',
    "nested": b'{"a":' + b"[" * 100_000,
    "a huge number": b'{"a":' + b"1" * 100_000 + b"}",
    "metadata that are numbers": {"__metadata__": {"a": 3}},
    "metadata that are a list": {"__metadata__": []},
    "an entry that is none": {"a": 3},
    "an entry without a shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
    "an entry with more": {"a": entry(more=1)},
    "an unknown dtype": {"a": entry("F33")},
    "a dtype that is a list": {"a": entry(["F32"])},
    "a shape that is too small": {"a": entry(shape=[1])},
    "a shape that is too large": {"a": entry(shape=[3])},
    "a negative size": {"a": entry(shape=[-2])},
    "two negative sizes": {"a": entry(shape=[-2, -1])},
    "a size that is a float": {"a": entry(shape=[2.0])},
    "a size that is true": {"a": entry(shape=[2, True])},
    "a shape that is a number": {"a": entry(shape=2)},
    "a product that overflows": {"a": entry(shape=[HUGE, HUGE, 4])},
    "a product that overflows to what it should be": {"a": entry(shape=[2**63 + 2])},
    "strides that overflow": {"a": entry(shape=[0, HUGE, HUGE], offsets=[0, 0]), "b": entry()},
    "more dimensions than there are": {"a": entry(shape=[1] * 1000 + [2])},
    "an end before the start": {"a": entry(offsets=[8, 0])},
    "negative offsets": {"a": entry(offsets=[-8, 0])},
    "three offsets": {"a": entry(offsets=[0, 8, 8])},
    "an end beyond the file": {"a": entry(shape=[2**31], offsets=[0, 2**33])},
    "a start beyond the file": {"a": entry(offsets=[8, 16])},
    "less than the file": {"a": entry(shape=[1], offsets=[0, 4])},
    "nothing": {},
    "an overlap": {"a": entry(), "b": entry(shape=[1], offsets=[4, 8])},
    "twice the same": {"a": entry(), "b": entry()},
    "a hole": {"a": entry("U8", [1], [0, 1]), "b": entry("U8", [1], [7, 8])},
    "complex names that are none": {"__metadata__": {"trainer_kit.complex": "3"}, "a": entry()},
    "complex names that are no JSON": {"__metadata__": {"trainer_kit.complex": "["}, "a": entry()},
    "complex numbers of that dtype": {"__metadata__": {"trainer_kit.complex": '["a"]'}, "a": entry()},
    "complex numbers of that shape": {"__metadata__": {"trainer_kit.complex": '["a"]'}, "a": entry("F64", [1])},
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: Any) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (damaged|no)"):
        read_header(path)


def test_a_good_header_is_taken(tmp_path: Path) -> None:  # so that those above are refused for what they say
    path = write(tmp_path / "model.safetensors", {"a": entry()}, struct.pack("<2f", 1, 2))
    assert load_source(read_header(path))["a"].tolist() == [1, 2]
    path = write(tmp_path / "model.safetensors", {"__metadata__": None, "a": entry(shape=[0], offsets=[0, 0])})
    assert load_source(read_header(path))["a"].tolist() == []


@pytest.mark.parametrize("length", [3, 10_000_000_000, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused_at_once(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", b"{}", length=length)
    with pytest.raises(CheckpointError, match="damaged or no safetensors file: it has only 10 bytes"):
        read_header(path)


@pytest.mark.parametrize("size", range(8))
def test_a_file_without_a_header_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"it has only {size} bytes"):
        load_tensors(tmp_path)


def test_a_header_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", b"{}", length=JSON_BYTES + 1)
    os.truncate(path, 2**33)  # takes no room on the disk
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not to be trusted: it holds JSON of more than"):
        read_header(path)


def test_a_folder_or_a_pipe_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is no plain file"):
        load_tensors(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(CheckpointError, match="is no plain file"):
            read_header(tmp_path / "pipe.safetensors")


def test_a_later_of_two_equal_names_counts_as_in_safetensors_own_reader(tmp_path: Path) -> None:
    double = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    path = write(tmp_path / "model.safetensors", double, bytes(8))
    assert read_header(path).shapes == {"a": (2,)}
    assert safetensors.torch.load_file(path)["a"].shape == (2,)


def shards(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    save_tensors({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path, max_shard_size=12)
    index = tmp_path / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


BAD_MAPS = {
    "none": (None, "has no weight_map"),
    "a list": ([], "has no weight_map"),
    "numbers for names": ({"a": 3}, "has no weight_map"),
    "nothing for names": ({"a": None}, "has no weight_map"),
    "lists for names": ({"a": ["model-00001-of-00002.safetensors"]}, "has no weight_map"),
    "a way out": ({"a": "../x.safetensors"}, "does not lie inside"),
    "an absolute name": ({"a": "/etc/passwd"}, "does not lie inside"),
    "another spelling": ({"a": "./model-00001-of-00002.safetensors"}, "does not lie inside"),
    "nothing there": ({"a": "model.bin"}, "model.bin is missing"),
    "the index itself": ({"a": "model.safetensors.index.json"}, "is damaged"),
    "another file": ({"a": "model-00002-of-00002.safetensors"}, "says that 'a' is in model-00002"),
    "no such tensor": ({"z": "model-00002-of-00002.safetensors"}, "says that 'z' is in model-00002"),
    "the same tensor twice": (
        {"a": "model-00001-of-00002.safetensors", "b": "again.safetensors"},
        "'a' is in model-00001-of-00002.safetensors and in again.safetensors",
    ),
}


@pytest.mark.parametrize(("weight_map", "message"), BAD_MAPS.values(), ids=BAD_MAPS)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, weight_map: Any, message: str) -> None:
    index, content = shards(tmp_path)
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "again.safetensors")
    assert load_tensors(tmp_path).keys() == {"a", "b"}
    index.write_text(json.dumps({**content, "weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        load_tensors(tmp_path)


def test_only_listed_files_are_read(tmp_path: Path) -> None:
    shards(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    save_tensors({"a": torch.zeros(1)}, tmp_path / "foreign")
    shutil.copy(tmp_path / "foreign" / "model.safetensors", tmp_path)
    assert len(sources(tmp_path, "model", names)) == 2
    assert len(sources(tmp_path.parent, f"{tmp_path.name}/model", {f"{tmp_path.name}/{name}" for name in names})) == 2
    with pytest.raises(CheckpointError, match="which the manifest does not list"):
        sources(tmp_path, "model", names - {"model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="has neither"):
        sources(tmp_path, "model", [])


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Distinct bits in each byte that may have any; a bool is 0 or 1."""
    count = torch.empty(shape, dtype=torch.int8).numel()
    most = 2 if dtype == torch.bool else 256
    content = torch.randint(0, most, (count * dtype.itemsize,), dtype=torch.uint8)
    if dtype in AS_REAL:
        return torch.view_as_complex(content.view(AS_REAL[dtype]).view(*shape, 2))
    return content.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # once in a process
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(box=boxes(), dtype=st.sampled_from([*DTYPE_NAMES, *AS_REAL]), is_contiguous=st.booleans())
def test_a_part_is_what_slicing_gives_and_nothing_else_is_read(
    tmp_path: Path, box: Box, dtype: torch.dtype, is_contiguous: bool
) -> None:
    whole = filled(box.shape, dtype)
    save_tensors({"before": torch.ones(3), "a": whole, "z": torch.ones(3)}, tmp_path)
    local = filled(box.sizes, dtype) if is_contiguous else cut(filled(box.shape, dtype), box)
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        load_parts(read_header(tmp_path / "model.safetensors"), {"a": (local, box)})
    assert bits(local) == bits(cut(whole, box))
    assert reads.nbytes == cut(whole, box).numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_one_read_and_each_tensor_is_cast_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    tensors = {f"{number}": torch.randn(9, 4) for number in range(4)} | {"few": torch.randn(2, 4)}
    save_tensors(tensors, tmp_path)
    (source,) = sources(tmp_path, "model")
    parts = {name: rows(tuple(tensor.shape), 2, 3) for name, tensor in tensors.items()}
    locals_of = {name: torch.zeros(box.sizes, dtype=dtype) for name, box in parts.items()}
    reads, read = Reads(monkeypatch), safetensors_reader._read
    together: list[int] = []

    def counted(path: Path, entries: Any, into: Any, boxes: Any) -> Any:
        together.append(len(entries.keys() - into.keys()))
        return read(path, entries, into, boxes)

    monkeypatch.setattr(safetensors_reader, "_read", counted)
    load_parts(source, {name: (locals_of[name], box) for name, box in parts.items()})
    assert all(torch.equal(locals_of[name], cut(tensors[name], box).to(dtype)) for name, box in parts.items())
    # Nothing of "few", whose rows are on other ranks.
    assert sorted(reads.found) == [(source.entries[f"{number}"].start + 6 * 16, 3 * 16) for number in range(4)]
    assert max(together) == (0 if dtype == torch.float32 else 1)


def test_parts_of_tied_tensors_are_read_by_any_name(tmp_path: Path) -> None:
    tied = torch.randn(4, 2)
    save_tensors({"a": tied, "b": tied}, tmp_path)
    top, columns = torch.zeros(1, 2), torch.zeros(4, 1)
    parts = {"a": (top, Box((4, 2), (2, 0), (1, 2))), "b": (columns, Box((4, 2), (0, 1), (4, 1)))}
    load_parts(read_header(tmp_path / "model.safetensors"), parts)
    assert torch.equal(top, tied[2:3])
    assert torch.equal(columns, tied[:, 1:])


def test_a_part_of_a_file_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(4, 4)}, tmp_path)
    (source,) = sources(tmp_path, "model")
    os.truncate(source.path, source.path.stat().st_size - 1)
    load_parts(source, {"a": (torch.zeros(2, 4), rows((4, 4), 0, 2))})
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut short"):
        load_parts(source, {"a": (torch.zeros(2, 4), rows((4, 4), 1, 2))})


def test_a_box_of_another_shape_than_the_tensors_is_an_error(tmp_path: Path) -> None:
    save_tensors({"a": torch.ones(4, 4)}, tmp_path)
    (source,) = sources(tmp_path, "model")
    with pytest.raises(AssertionError, match="does not fit"):
        load_parts(source, {"a": (torch.zeros(2, 4), rows((3, 4), 0, 2))})
    with pytest.raises(AssertionError, match="does not fit"):
        load_parts(source, {"a": (torch.zeros(1, 4), rows((4, 4), 0, 2))})
