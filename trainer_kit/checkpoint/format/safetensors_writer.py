"""Writing of tensors to safetensors files, sharded and indexed like those of the Hub's tools."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.disk import fsync_directory, make_folders, write_file, write_json
from trainer_kit.checkpoint.format.manifest import FileEntry
from trainer_kit.utils.units import parse_size

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
    limit = parse_size(max_shard_size)
    for name, tensor in tensors.items():
        refuse_unstorable(name, tensor)
    kept, aliases = _untie(tensors)
    shards = _partition(kept, limit)
    make_folders(directory)
    previous = _files_of(directory, stem)
    index = directory / f"{stem}.safetensors.index.json"
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        index.unlink(missing_ok=True)  # an old index must not refer to new shards
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    written = {
        name: write_file(directory / name, _content(shard, {name: aliases[name] for name in shard}, to_host))
        for name, shard in zip(names, shards, strict=True)
    }
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for tensor in kept.values())
        written[index.name] = write_json(
            index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        )
    for path in previous:
        if path.name not in written:
            path.unlink(missing_ok=True)
    fsync_directory(directory)
    return written


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


def _untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Return the tensors to store, and the other names of each by its stored name."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(storage_key(tensor), []).append(name)
    # A reserved name cannot be an alias, since the metadata hold another value under it.
    stored = [next((name for name in names if name in RESERVED), names[0]) for names in groups.values()]
    aliases = {
        keep: [name for name in names if name != keep] for keep, names in zip(stored, groups.values(), strict=True)
    }
    return {name: tensors[name] for name in stored}, aliases


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


def _partition(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    """Split tensors into shards, in order."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _content(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, list[str]], to_host: ToHost
) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file: length of the header (8 bytes), header, the tensors' bytes.

    safetensors' own writer needs the whole shard on the host, makes files readable only by their owner, and drops the
    errno of a full disk.
    """
    # Largest elements first, so that each tensor is aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header(names, tensors, aliases)
    yield struct.pack("<Q", len(header)) + header
    for name in names:
        yield _bytes_of(tensors[name], to_host)


def _header(names: Iterable[str], tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, list[str]]) -> bytes:
    metadata = {"format": "pt", **{alias: name for name, others in aliases.items() for alias in others}}
    as_real = [name for name in names if tensors[name].dtype in AS_REAL]
    if as_real:
        metadata[COMPLEX] = json.dumps(as_real)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        real = AS_REAL.get(tensor.dtype)
        shape = [*tensor.shape, 2] if real else list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[real or tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


def _bytes_of(tensor: torch.Tensor, to_host: ToHost) -> memoryview:
    """Return a tensor's bytes on the host, without a copy if it is contiguous there."""
    host = to_host(tensor.detach().resolve_conj().resolve_neg()).contiguous()
    content: memoryview = host.reshape(-1).view(torch.uint8).numpy().data
    return content


def is_file_of(name: str, stem: str) -> bool:
    """Return whether `save_tensors` writes files of this name under `stem`."""
    return bool(re.fullmatch(re.escape(stem) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", name))


def _files_of(directory: Path, stem: str) -> list[Path]:
    return [path for path in directory.iterdir() if is_file_of(path.name, stem)]
