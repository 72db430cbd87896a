"""`BaseReference`: the frozen weights below the adapters of a checkpoint, which lie outside of it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from trainer_kit.checkpoint.format.disk import fsync_directory, remove_folder, rename_folder, write_json
from trainer_kit.checkpoint.format.json_files import inside, read_json
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME, STAGING_PREFIX, STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.safetensors_reader import Source, sources
from trainer_kit.checkpoint.format.safetensors_writer import ToHost, bytes_of, save_tensors
from trainer_kit.errors import CheckpointError, UnreadableError
from trainer_kit.utils.pytree import unflatten_state
from trainer_kit.utils.quantized_tensors import parts_of

logger = logging.getLogger("trainer_kit")

STATE_NAME = "frozen-base"
FOLDER_PREFIX = "base-"


class BaseReference(NamedTuple):
    """Frozen weights that the checkpoints of a run share.

    Attributes:
        name: Name or folder that the model was loaded from; None if it is not known.
        digests: Digest of each tensor by its name in the model, from `digest`.
        kept: Names of the tensors in `folder`; `name` holds the others.
        folder: Name of a folder in the run's folder; None if nothing is kept.
        commit: Commit of the repository `name` on the Hub; None if it is not known.
        dtypes: Dtype of each tensor by its name in the model.
    """

    name: str | None
    digests: Mapping[str, str]
    kept: Collection[str]
    folder: str | None
    commit: str | None
    dtypes: Mapping[str, str]

    @classmethod
    def of(
        cls, name: str | None, digests: Mapping[str, str], kept: Collection[str], commit: str | None,
        dtypes: Mapping[str, str],
    ) -> BaseReference:  # fmt: skip
        """Return the reference to weights of which some are kept, in a folder that is named by their digests."""
        lines = [f"{each} {digests[each]}" for each in sorted(kept)]
        folder = f"{FOLDER_PREFIX}{xxhash.xxh3_64_hexdigest(chr(10).join(lines).encode())}" if kept else None
        return cls(name, dict(digests), sorted(kept), folder, commit, dict(dtypes))

    def only(self, names: Collection[str]) -> BaseReference:
        """Return the reference to those tensors alone that have these names."""
        kept = [each for each in self.kept if each in names]
        digests, dtypes = (
            {each: value for each, value in values.items() if each in names} for values in (self.digests, self.dtypes)
        )
        return self._replace(digests=digests, dtypes=dtypes, kept=kept, folder=self.folder if kept else None)

    @classmethod
    def read(cls, directory: Path) -> BaseReference | None:
        """Return the reference in a checkpoint; None if the checkpoint holds all weights itself.

        Raises:
            CheckpointError: If the manifest or the reference is damaged.
        """
        file = f"{STATE_FOLDER}/{STATE_NAME}.json"
        if not (directory / MANIFEST_NAME).exists() or file not in Manifest.read(directory).files:
            return None
        path = inside(directory, file)
        try:
            content = unflatten_state(read_json(path), {})
            found = cls(**content)
            inside(directory, found.folder or FOLDER_PREFIX)
            if not found.digests.keys() >= set(found.kept) or found.digests.keys() != found.dtypes.keys():
                raise ValueError("a tensor has no digest or no dtype")
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        return found

    def to_state(self) -> dict[str, Any]:
        """Return the content of the state of a checkpoint."""
        return {**self._asdict(), "kept": [*self.kept]}

    def find_folder(self, directory: Path) -> Path | None:
        """Return the folder of the kept weights of a checkpoint; None if nothing is kept.

        The folder lies in the run's folder, also for a checkpoint that was moved to `earlier-N/` there.

        Raises:
            CheckpointError: If the folder is not there.
        """
        if self.folder is None:
            return None
        parent = directory.absolute().parent
        for place in (parent / self.folder, parent.parent / self.folder):
            if (place / MANIFEST_NAME).is_file():
                return place
        raise UnreadableError(
            f"{directory} lacks the frozen weights of its model, the folder {self.folder} of its run; put that folder "
            f"into {parent}"
        )

    def verify(self, directory: Path, quick: bool = False) -> None:
        """Verify the kept weights of a checkpoint: all checksums, or only the sizes with `quick`.

        Raises:
            CheckpointError: If a file is missing or damaged.
        """
        folder = self.find_folder(directory)
        if folder is None:
            return
        try:
            manifest = Manifest.read(folder)
            if quick:
                manifest.check_sizes(folder)
            else:
                manifest.check(folder)
        except CheckpointError as error:  # the checkpoint itself may be valid
            raise UnreadableError(f"the frozen weights of {directory.name} cannot be read: {error}") from error

    def kept_sources(self, directory: Path, names: Collection[str]) -> list[Source]:
        """Return the files of kept weights with these names alone, after a comparison with their checksums.

        Raises:
            CheckpointError: If the folder is not there, or damaged.
        """
        folder = self.find_folder(directory) if names else None
        if folder is None:
            return []
        self.verify(directory)
        return [_only(each, names) for each in sources(folder, "model")]


def _only(source: Source, names: Collection[str]) -> Source:
    """Return those tensors of a file that have one of these names, stored or alias."""
    entries, aliases = {}, dict[str, str]()
    for stored, entry in source.entries.items():
        if own := [
            each for each in (stored, *source.aliases) if source.aliases.get(each, each) == stored and each in names
        ]:
            entries[own[0]] = entry
            aliases |= dict.fromkeys(own[1:], own[0])
    return Source(source.path, entries, aliases)


def write_kept(
    run_folder: Path, reference: BaseReference, tensors: Mapping[str, torch.Tensor], max_shard_size: int | str,
    to_host: ToHost,
) -> None:  # fmt: skip
    """Write the kept weights into a run's folder, unless they are there: staged, and committed by one rename.

    A damaged folder is moved aside, to `damaged-1-base-…`.

    Raises:
        OSError: If the disk is full or cannot be written.
    """
    if reference.folder is None or _is_whole(run_folder / reference.folder):
        return
    staging = run_folder / f"{STAGING_PREFIX}{reference.folder}-{os.getpid()}"
    remove_folder(staging)
    try:
        written = save_tensors(tensors, staging, max_shard_size=max_shard_size, to_host=to_host)
        write_json(staging / MANIFEST_NAME, Manifest.of(written, 0, 1).to_json())
        fsync_directory(staging)
        _move_aside(run_folder / reference.folder)
        rename_folder(staging, run_folder / reference.folder)
        fsync_directory(run_folder)
    except BaseException:
        remove_folder(staging)
        raise


def _is_whole(folder: Path) -> bool:
    """Return whether a folder of kept weights is there and holds what its manifest says; log what is damaged."""
    if not os.path.lexists(folder):
        return False
    try:
        Manifest.read(folder).check(folder)
    except CheckpointError as error:
        logger.warning("the frozen weights are written again: %s", error)
        return False
    return True


def _move_aside(folder: Path) -> None:
    if os.path.lexists(folder):
        places = (folder.with_name(f"damaged-{number}-{folder.name}") for number in itertools.count(1))
        os.rename(folder, next(place for place in places if not os.path.lexists(place)))


def digest(tensor: torch.Tensor, to_host: ToHost = torch.Tensor.cpu) -> str:
    """Return the XXH3 64-bit hash of a tensor's dtype, shape and bytes as 16 hexadecimal digits."""
    hashed = xxhash.xxh3_64()
    for part in parts_of(tensor.detach()):
        hashed.update(f"{part.dtype} {[*part.shape]}".encode())
        hashed.update(bytes_of(part, to_host))
    return hashed.hexdigest()
