"""Reading of tensors from safetensors files and from sharded files with an index.

All offsets are checked against the file's size before use. Tensors are read, not memory-mapped: a failing disk or a
file truncated meanwhile raises an error instead of ending the process.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.checkpoint.format.json_files import JSON_BYTES, inside, parse_json, read_json
from trainer_kit.checkpoint.format.safetensors_writer import AS_REAL, COMPLEX, DTYPE_NAMES, RESERVED
from trainer_kit.errors import CheckpointError, UnreadableError
from trainer_kit.utils.box import Box, Part
from trainer_kit.utils.units import join_names
from trainer_kit.utils.vectors import as_bytes

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_AS_COMPLEX = {real: dtype for dtype, real in AS_REAL.items()}
_MOST_DIMENSIONS = 64
_PIECE_BYTES = 2**25

Tensors = Mapping[str, torch.Tensor]
Listed = Collection[str]
"""Names of the files that a manifest lists, relative to the checkpoint's folder; no other file is read."""


def load_tensors(directory: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """Load tensors that `save_tensors` or the Hub's tools saved; tied names share one tensor.

    Args:
        directory: Folder of the files.
        stem: Prefix of the files' names.

    Returns:
        The tensors by name, on the CPU.

    Raises:
        CheckpointError: If files are missing or damaged, or an index names files outside `directory`.
    """
    loaded: dict[str, torch.Tensor] = {}
    for source in sources(directory, stem):
        loaded.update(load_source(source))
    return loaded


class TensorEntry(NamedTuple):
    """Dtype, shape and position of a tensor in its file; `start` and `nbytes` are in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Source(NamedTuple):
    """One safetensors file: its tensors in the file's order, and its aliases as {name: stored name}."""

    path: Path
    entries: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by stored name and alias."""
        shapes = {name: entry.shape for name, entry in self.entries.items()}
        return shapes | {alias: shapes[target] for alias, target in self.aliases.items()}


def sources(directory: Path, stem: str, listed: Listed | None = None) -> list[Source]:
    """Read the headers of the files under `stem` in `directory`, and compare them with the index.

    Args:
        directory: The folder.
        stem: Prefix of the files' names, possibly with a subfolder: "state/optimizer".
        listed: Names of the files that may be read; None: all.

    Raises:
        CheckpointError: If there are no files, or one is missing or damaged.
    """
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if _is_there(directory, single, listed):
        return [read_header(inside(directory, single, listed is None))]
    if not _is_there(directory, index, listed):
        there = sorted(path.name for path in directory.glob("*") if path.suffix in (".safetensors", ".bin", ".pt"))
        hint = f"; it holds {join_names(there)}" if there else ""
        raise CheckpointError(f"{directory} has neither {single} nor {index}{hint}")
    return _sharded(directory, index, listed)


def _is_there(directory: Path, name: str, listed: Listed | None) -> bool:
    path = inside(directory, name, listed is None)
    return path.exists() if listed is None else name in listed


def _sharded(directory: Path, index_name: str, listed: Listed | None) -> list[Source]:
    index = inside(directory, index_name, listed is None)
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} is damaged: it has no weight_map of files' names")
    folder = index_name.rpartition("/")[0]
    holder: dict[str, str] = {}
    found = []
    for name in dict.fromkeys(weight_map.values()):
        path = inside(index.parent, name, listed is None)
        if listed is not None and (f"{folder}/{name}" if folder else name) not in listed:
            raise CheckpointError(f"{index} names {name}, which the manifest does not list; do not trust it")
        source = read_header(path)
        for tensor in (*source.entries, *source.aliases):
            if holder.setdefault(tensor, name) != name:
                raise CheckpointError(f"{index} is damaged: {tensor!r:.80} is in {holder[tensor]} and in {name}")
        found.append(source)
    for tensor, name in weight_map.items():
        if holder.get(tensor) != name:
            raise CheckpointError(f"{index} says that {tensor!r:.80} is in {name}, which does not hold it")
    return found


def read_header(path: Path) -> Source:
    """Read the header of a safetensors file, without the tensors.

    Raises:
        CheckpointError: If the file is missing or damaged, or its header does not match its size.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no plain file")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{path} is damaged or no safetensors file: it has only {size} bytes")
            content = file.read(min(length, JSON_BYTES + 1))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    header = parse_json(content, path)
    try:
        return _source(path, header, 8 + length, size)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error


def _source(path: Path, header: Any, start: int, size: int) -> Source:
    """Parse a header; raise ValueError if it does not fit the file."""
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are no strings")
    entries = {name: _entry(name, fields, start) for name, fields in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    end = start
    for name, entry in entries.items():
        if entry.start != end:
            raise ValueError(f"the tensor {name!r:.80} overlaps another, or nothing lies before it")
        end += entry.nbytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, it ends at byte {size}")
    for name in _complex_names(metadata, path):
        if name in entries:
            entries[name] = _as_complex(name, entries[name])
    aliases = {
        alias: target
        for alias, target in metadata.items()
        if target in entries and alias not in entries and alias not in RESERVED
    }
    return Source(path, entries, aliases)


def _entry(name: str, fields: Any, start: int) -> TensorEntry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the tensor {name!r:.80} has no dtype, shape and data_offsets")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not (_are_sizes(shape) and len(shape) <= _MOST_DIMENSIONS and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"the tensor {name!r:.80} has a shape or data_offsets that make no sense")
    dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"the tensor {name!r:.80} is of dtype {fields['dtype']!r:.50}, which is not known here")
    nbytes = math.prod(shape) * dtype.itemsize
    # torch computes strides with a size of 0 as 1.
    if nbytes != offsets[1] - offsets[0] or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"the tensor {name!r:.80} has a shape that does not fit its data_offsets")
    return TensorEntry(dtype, tuple(shape), start + offsets[0], nbytes)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _complex_names(metadata: Mapping[str, str], path: Path) -> list[str]:
    names = parse_json(metadata.get(COMPLEX, "[]").encode(errors="replace"), path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"its metadata {COMPLEX!r} are no names")
    return names


def _as_complex(name: str, entry: TensorEntry) -> TensorEntry:
    if entry.dtype not in _AS_COMPLEX or entry.shape[-1:] != (2,):
        raise ValueError(f"the tensor {name!r:.80} holds no complex numbers, as its metadata say")
    return entry._replace(dtype=_AS_COMPLEX[entry.dtype], shape=entry.shape[:-1])


def load_source(
    source: Source, into: Tensors | None = None, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Load the tensors of one file, by stored name and alias.

    Args:
        source: The file.
        into: Target tensors by stored name, contiguous, on the CPU, of the stored shape and dtype; they are returned in
            place of new tensors. None: all tensors are new.
        names: Stored names and aliases to load; None: all.

    Raises:
        CheckpointError: If the file cannot be read, or is shorter than when its header was read.
    """
    names = source.shapes if names is None else names
    stored = {source.aliases.get(name, name) for name in names}
    loaded = _read(source.path, {name: entry for name, entry in source.entries.items() if name in stored}, into or {})
    return {name: loaded[source.aliases.get(name, name)] for name in names}


@torch.no_grad()
def load_parts(source: Source, parts: Mapping[str, Part]) -> None:
    """Load parts of a file's tensors into the tensors that hold them, reading no other bytes of the file.

    Args:
        source: The file.
        parts: For each stored name or alias the local tensor, of any device and dtype, and its box in the stored one.

    Raises:
        CheckpointError: If the file cannot be read, or is shorter than when its header was read.
    """
    entries = {name: source.entries[source.aliases.get(name, name)] for name in parts}
    locals_of = {name: local.detach() for name, (local, _) in parts.items()}
    boxes = {name: box for name, (_, box) in parts.items()}
    direct = readable_into(locals_of, entries)
    _read(source.path, {name: entries[name] for name in direct}, direct, boxes)
    for name in parts.keys() - direct.keys():  # one at a time, so that the host holds one
        locals_of[name].copy_(_read(source.path, {name: entries[name]}, {}, boxes)[name])


def readable_into(tensors: Tensors, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Return those tensors, by name of their entry, into which a file's bytes can be read directly."""
    found = {
        name: tensor for name, tensor in tensors.items() if tensor.dtype == entries[name].dtype and _is_plain(tensor)
    }
    # Threads would read tensors that the model ties into one memory at the same time.
    users = Counter(tensor.data_ptr() for tensor in found.values())
    return {name: tensor for name, tensor in found.items() if users[tensor.data_ptr()] == 1}


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own_type = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return (
        is_own_type
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def outline(source: Source) -> dict[str, torch.Tensor]:
    """Return the tensors of one file without their values, on the device "meta"."""
    empty = {name: _empty(entry, entry.shape, "meta") for name, entry in source.entries.items()}
    return empty | {alias: empty[target] for alias, target in source.aliases.items()}


def load_tensor(source: Source, name: str) -> torch.Tensor:
    """Load one tensor of a file, by its stored name or an alias.

    Raises:
        CheckpointError: If the file cannot be read, or is shorter than when its header was read.
    """
    return load_source(source, names=[name])[name]


def _read(
    path: Path, entries: Mapping[str, TensorEntry], into: Tensors, boxes: Mapping[str, Box] | None = None
) -> dict[str, torch.Tensor]:
    """Read tensors, or their parts in `boxes`, in parallel pieces: reading releases the GIL."""
    boxes = boxes or {name: Box.whole(entry.shape) for name, entry in entries.items()}
    loaded = {name: into[name] if name in into else _empty(entry, boxes[name].sizes) for name, entry in entries.items()}
    targets = (target for name, tensor in loaded.items() for target in _targets(tensor, entries[name], boxes[name]))
    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(lambda job: _read_into(path, job), _jobs(targets)):
                pass
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    for tensor in loaded.values():
        if tensor.dtype == torch.bool:
            tensor.view(torch.uint8).clamp_(max=1)  # torch's kernels rely on bools that are 0 or 1
    return loaded


def _empty(entry: TensorEntry, shape: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    if entry.dtype in AS_REAL:  # torch.empty warns of complex32
        return torch.view_as_complex(torch.empty((*shape, 2), dtype=AS_REAL[entry.dtype], device=device))
    return torch.empty(shape, dtype=entry.dtype, device=device)


def _targets(tensor: torch.Tensor, entry: TensorEntry, box: Box) -> Iterator[tuple[int, memoryview]]:
    """Yield the memory to read into, run by run, with its position in the file."""
    assert (box.shape, box.sizes) == (entry.shape, tensor.shape), f"{box} of {entry} does not fit {tensor.shape}"
    content, size, begin = memoryview(_bytes_of(tensor)), entry.dtype.itemsize, 0
    for start, length in box.runs():
        end = begin + length * size
        yield entry.start + start * size, content[begin:end]
        begin = end


def _bytes_of(tensor: torch.Tensor) -> Any:
    assert tensor.is_contiguous(), "what is read would end up in a copy"
    return as_bytes(tensor).numpy()


def _jobs(targets: Iterable[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """Split targets into jobs of about `_PIECE_BYTES`, independent of the size of each target."""
    job, size = [], 0
    for start, view in targets:
        for begin in range(0, len(view), _PIECE_BYTES):
            part = view[begin : begin + _PIECE_BYTES]
            job.append((start + begin, part))
            size += len(part)
            if size >= _PIECE_BYTES:
                yield job
                job, size = [], 0
    if job:
        yield job


def _read_into(path: Path, job: Iterable[tuple[int, memoryview]]) -> None:
    with open(path, "rb", buffering=0) as file:
        for start, view in job:
            file.seek(start)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{path} was cut short while it was read")
                view = view[count:]
