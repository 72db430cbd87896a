"""Checkpoints: folders without pickles that a manifest verifies and the Hub's tools can load."""

from trainer_kit.checkpoint.format.commit import write_checkpoint
from trainer_kit.checkpoint.format.discovery import (
    find_checkpoints,
    newest_valid,
    read_arguments,
    read_state,
    remove_stale_staging,
    verify,
)
from trainer_kit.checkpoint.format.export import pretrained_files
from trainer_kit.checkpoint.format.loading import load_checkpoint_in_model
from trainer_kit.checkpoint.format.manifest import CHECKPOINT_PREFIX, STAGING_PREFIX, FileEntry, Manifest
from trainer_kit.checkpoint.format.retention import Committed, Retention, delete_checkpoint, prune
from trainer_kit.checkpoint.format.safetensors_reader import load_tensors
from trainer_kit.checkpoint.format.safetensors_writer import save_tensors
from trainer_kit.checkpoint.format.snapshot import Snapshot, take_snapshot
from trainer_kit.errors import CheckpointError

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
