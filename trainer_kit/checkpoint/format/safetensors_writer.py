"""Writing of tensors to safetensors files, sharded and indexed like those of the Hub's tools."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.checkpoint.format.disk import fsync_directory, make_folders, write_file, write_json
from trainer_kit.checkpoint.format.manifest import FileEntry
from trainer_kit.utils.units import parse_size
from trainer_kit.utils.vectors import as_bytes

ToHost = Callable[[torch.Tensor], torch.Tensor]

# Names of the dtypes in the format (https://github.com/huggingface/safetensors).
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
# The format lacks these dtypes: stored as real numbers with a last dimension of 2; COMPLEX lists the names.
AS_REAL = {torch.complex32: torch.float16, torch.complex128: torch.float64}
COMPLEX = "trainer_kit.complex"
RESERVED = frozenset({"format", "__metadata__", COMPLEX})


class Shard(NamedTuple):
    """One file of tensors.

    Attributes:
        file: Name of the file.
        aliases: Other names of each tensor in the file, by the name under which it is stored, in the file's order.
        writer: Number of the process that writes the file, among those that write together.
    """

    file: str
    aliases: Mapping[str, list[str]]
    writer: int = 0


def save_tensors(
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    stem: str = "model",
    max_shard_size: int | str = "5GB",
    to_host: ToHost = torch.Tensor.cpu,
) -> dict[str, FileEntry]:
    """Save tensors as `STEM.safetensors`, or as shards with an index if they exceed `max_shard_size`.

    Tied tensors are stored once; the file's metadata hold their other names as {name: stored name}. Different views
    of one memory are each stored in full. Files of an earlier call under the same stem are replaced. All files are
    flushed to the disk when the call returns.

    Args:
        tensors: Tensors by name, of any shape, on any device; copied to the host one at a time.
        directory: Folder of the files; created if missing.
        stem: Prefix of the files' names.
        max_shard_size: Largest size of a file's tensors, in bytes or as "300MB", "2GiB"; a larger tensor gets its own
            file.
        to_host: Returns a full copy of a tensor on the host.

    Returns:
        Size and checksum of each file by its name.

    Raises:
        ValueError: If `max_shard_size` is invalid, or a tensor has no content (device "meta") or a reserved name.
        TypeError: If a tensor is sparse, quantized or of a dtype that the format lacks.
        OSError: If the disk is full or cannot be written.
    """
    for name, tensor in tensors.items():
        refuse_unstorable(name, tensor)
    shards = plan_shards(tensors, untie(tensors), stem, max_shard_size)
    make_folders(directory)
    previous = _files_of(directory, stem)
    if len(shards) > 1:  # an old index must not refer to new shards
        (directory / index_name(stem)).unlink(missing_ok=True)
    written = write_shards(shards, tensors, directory, stem, to_host)
    for path in (path for path in previous if path.name not in written):
        path.unlink(missing_ok=True)
    fsync_directory(directory)
    return written


def plan_shards(
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, list[str]],
    stem: str,
    max_shard_size: int | str,
    writers: Mapping[str, int] | None = None,
) -> list[Shard]:
    """Divide tensors into files, in order of the writers and then of the tensors.

    Args:
        tensors: Tensors by name.
        aliases: From `untie`.
        stem: Prefix of the files' names.
        max_shard_size: See `save_tensors`.
        writers: Number of the writer of each stored tensor; None: one process writes all.

    Raises:
        ValueError: If `max_shard_size` is invalid.
    """
    limit, writers = parse_size(max_shard_size), writers or {}
    groups: list[tuple[int, list[str]]] = []
    size = 0
    for name in sorted(aliases, key=lambda name: writers.get(name, 0)):
        writer, nbytes = writers.get(name, 0), tensors[name].nbytes
        if not groups or groups[-1][0] != writer or size + nbytes > limit:
            groups.append((writer, []))
            size = 0
        groups[-1][1].append(name)
        size += nbytes
    groups = groups or [(0, [])]
    files = [f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return [
        Shard(file, {name: aliases[name] for name in _in_order(names, tensors)}, writer)
        for file, (writer, names) in zip(files if len(groups) > 1 else [f"{stem}.safetensors"], groups, strict=True)
    ]


def _in_order(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names in a file's order: largest elements first, so that each tensor is aligned to its element size."""
    return sorted(names, key=lambda name: (-tensors[name].element_size(), name))


def write_shards(
    shards: Sequence[Shard],
    tensors: Mapping[str, torch.Tensor],
    directory: Path,
    stem: str,
    to_host: ToHost = torch.Tensor.cpu,
    writer: int = 0,
) -> dict[str, FileEntry]:
    """Write the files of one writer, and flush them but not the folder; writer 0 also writes the index.

    Args:
        shards: From `plan_shards`, the same for all writers.
        tensors: Tensors by name; this writer reads the content of its own alone.
        directory: Folder of the files, which exists.
        stem: Prefix of the files' names.
        to_host: See `save_tensors`.
        writer: Number of this process among the writers.

    Returns:
        Size and checksum of each file that this call wrote, by its name.

    Raises:
        OSError: If the disk is full or cannot be written.
    """
    written = {
        shard.file: write_file(directory / shard.file, _content(tensors, shard.aliases, to_host))
        for shard in shards
        if shard.writer == writer
    }
    if len(shards) > 1 and writer == 0:
        files = {name: shard.file for shard in shards for name in shard.aliases}
        total = sum(tensors[name].nbytes for name in files)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        written[index_name(stem)] = write_json(directory / index_name(stem), content)
    return written


def index_name(stem: str) -> str:
    """Return the name of the index of several files."""
    return f"{stem}.safetensors.index.json"


def storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tied tensors, which are the same view of one memory, and differs for others."""
    memory = address(tensor)
    if memory == 0 or tensor.numel() == 0:
        return (id(tensor),)
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, memory, *view)


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 without memory, and on devices without addresses (XLA)."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
    except RuntimeError:
        return 0


def untie(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the other names of each tensor to store, by the name under which it is stored."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(storage_key(tensor), []).append(name)
    # A reserved name cannot be an alias, since the metadata hold another value under it.
    stored = [next((name for name in names if name in RESERVED), names[0]) for names in groups.values()]
    return {keep: [name for name in names if name != keep] for keep, names in zip(stored, groups.values(), strict=True)}


def refuse_unstorable(name: str, tensor: torch.Tensor) -> None:
    """Check that a safetensors file can hold a tensor.

    Args:
        name: Name of the tensor.
        tensor: The tensor.

    Raises:
        TypeError: If it is no tensor, sparse, quantized or of a dtype that the format lacks.
        ValueError: If it has no content (device "meta") or the reserved name "__metadata__".
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} is of type {type(tensor).__name__}; only tensors can be stored")
    if name == "__metadata__":
        raise ValueError("a tensor is named '__metadata__', which the safetensors format keeps for itself; rename it")
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor {name!r} is sparse ({tensor.layout}), which cannot be stored; use to_dense() first")
    if tensor.dtype not in DTYPE_NAMES and tensor.dtype not in AS_REAL:
        raise TypeError(f"tensor {name!r} is of dtype {tensor.dtype}, which cannot be stored; convert it first")
    if tensor.is_meta:
        raise ValueError(f"tensor {name!r} is on the device 'meta' and has no content to store; load the weights first")


def _content(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, list[str]], to_host: ToHost
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file of the tensors in `aliases`: length of the header (8 bytes), header, their bytes.

    safetensors' own writer needs the whole shard on the host, makes files readable only by their owner, and drops the
    errno of a full disk.
    """
    header = _header(tensors, aliases)
    yield struct.pack("<Q", len(header)) + header
    for name in aliases:
        yield bytes_of(tensors[name], to_host)


def _header(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, list[str]]) -> bytes:
    metadata = {"format": "pt", **{alias: name for name, others in aliases.items() for alias in others}}
    as_real = [name for name in aliases if tensors[name].dtype in AS_REAL]
    if as_real:
        metadata[COMPLEX] = json.dumps(as_real)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in aliases:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        real = AS_REAL.get(tensor.dtype)
        shape = [*tensor.shape, 2] if real else list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[real or tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


def bytes_of(tensor: torch.Tensor, to_host: ToHost) -> memoryview:
    """Return a tensor's bytes on the host, without a copy if it is contiguous there."""
    host = to_host(tensor).detach().resolve_conj().resolve_neg()
    content: memoryview = as_bytes(host).numpy().data
    return content


def is_file_of(name: str, stem: str) -> bool:
    """Return whether `save_tensors` writes files of this name under `stem`."""
    return bool(re.fullmatch(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", name))


def _files_of(directory: Path, stem: str) -> list[Path]:
    return [path for path in directory.iterdir() if is_file_of(path.name, stem)]
