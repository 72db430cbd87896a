"""Checkpoints: folders that the Hub's tools can load, verified by a manifest, without a pickle."""

from trainer_kit.checkpoint.export import pretrained_files
from trainer_kit.checkpoint.files import CheckpointError
from trainer_kit.checkpoint.format import CHECKPOINT_PREFIX, STAGING_PREFIX, FileEntry, Manifest
from trainer_kit.checkpoint.loading import load_checkpoint_in_model
from trainer_kit.checkpoint.reader import (
    find_checkpoints,
    newest_valid,
    read_arguments,
    read_state,
    remove_stale_staging,
    verify,
)
from trainer_kit.checkpoint.retention import Committed, Retention, delete_checkpoint, prune
from trainer_kit.checkpoint.shards import save_tensors
from trainer_kit.checkpoint.snapshot import Snapshot, take_snapshot
from trainer_kit.checkpoint.sources import load_tensors
from trainer_kit.checkpoint.writer import write_checkpoint

__all__ = [
    "CHECKPOINT_PREFIX",
    "STAGING_PREFIX",
    "CheckpointError",
    "Committed",
    "FileEntry",
    "Manifest",
    "Retention",
    "Snapshot",
    "delete_checkpoint",
    "find_checkpoints",
    "load_checkpoint_in_model",
    "load_tensors",
    "newest_valid",
    "pretrained_files",
    "prune",
    "read_arguments",
    "read_state",
    "remove_stale_staging",
    "save_tensors",
    "take_snapshot",
    "verify",
    "write_checkpoint",
]
