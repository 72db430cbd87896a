"""Saving of single models and objects by an `Accelerator`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from trainer_kit.accelerator.tracking import TrackerHost
from trainer_kit.accelerator.utils.other import save
from trainer_kit.checkpoint.format.export import refuse_pickles, save_model_folder


class ModelSaving(TrackerHost):
    """The part of an `Accelerator` that saves models for inference, and single objects."""

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's tensors, and other values in its `state_dict`, under the user's own names. Collective.

        Args:
            model: Prepared or not.
            unwrap: Without effect: names are always the model's own.

        Returns:
            The tensors; if they are sharded over processes, whole on the host of the main process, and an empty dict
            on the others.
        """
        self.flow.dispatch()
        detached: dict[int, torch.Tensor] = {}  # XLA recognizes tied tensors only by object identity
        state = self.strategy.sharding.collect_on_main(self.strategy.model_state(model))
        if self.strategy.sharding.is_active and not self.is_main_process:
            return {}
        return {
            name: detached.setdefault(id(value), value.detach()) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object with `torch.save` on the main process, atomically and readable without XLA.

        Args:
            obj: Any object, or with `safe_serialization` a dict of tensors.
            f: Path of the file.
            safe_serialization: Whether to write safetensors; the file's name must then end with `.safetensors`.

        Raises:
            ValueError: If the name has another ending.
        """
        save(obj, f, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model for inference: safetensors, and `config.json` where the model has one. Collective.

        Args:
            model: Prepared or not.
            save_directory: Folder, created if missing.
            max_shard_size: Bytes, or text such as "2GB".
            safe_serialization: Must be True: pickles are not written.

        Raises:
            ValueError: If `safe_serialization` is False or the size is invalid.
        """
        refuse_pickles(safe_serialization)
        state, module = self.get_state_dict(model), self.strategy.unwrap(model)
        folder, to_host = Path(save_directory), self.strategy.device_info.to_host
        self.strategy.collectives.on_main(
            lambda: save_model_folder(folder, state, module, None, max_shard_size, to_host)
        )
