"""What a log and a model card say of a run's model and data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.checkpoint.format.adapters import adapter_folders, base_name
from trainer_kit.utils.lengths import known_length
from trainer_kit.utils.transformers_models import is_transformers_model, loaded_from
from trainer_kit.utils.wrappers import without_wrappers

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LIBRARIES = {"diffusers": "diffusers", "sentence_transformers": "sentence-transformers"}


def hub_metadata(model: torch.nn.Module) -> dict[str, str]:
    """Return `library_name` and `base_model` as far as they are known; a base that is a folder is left out."""
    model = without_wrappers(model)
    has_adapters = bool(adapter_folders(model))
    library = "peft" if has_adapters else _library(model)
    base = (base_name(model) if has_adapters else loaded_from(model)) or ""
    is_on_hub = library is not None and _HUB_NAME.fullmatch(base) is not None and not Path(base).exists()
    return ({"library_name": library} if library else {}) | ({"base_model": base} if is_on_hub else {})


def _library(model: torch.nn.Module) -> str | None:
    """Return the package whose `from_pretrained` reads what is saved of a model."""
    if is_transformers_model(model):
        return "transformers"
    roots = (kind.__module__.partition(".")[0] for kind in type(model).__mro__)
    return next((_LIBRARIES[root] for root in roots if root in _LIBRARIES), None)


def describe_data(training: Any, evaluation: Any) -> dict[str, dict[str, Any]]:
    """Return the facts of each dataset: "training", "evaluation", or "evaluation: NAME" for each of several.

    The facts are `samples` or, of ready batches, `batches`, where they are known; and `name` and `split` of a dataset
    of the package datasets.

    Args:
        training: The `train_dataset` of a run; None without one.
        evaluation: The `eval_dataset` of a run, or a dict of several; None without one.
    """
    several = isinstance(evaluation, Mapping)
    each = (
        {f"evaluation: {name}": value for name, value in evaluation.items()} if several else {"evaluation": evaluation}
    )
    given = {"training": training, **each}
    return {name: _facts(dataset) for name, dataset in given.items() if dataset is not None}


def _facts(dataset: Any) -> dict[str, Any]:
    dataset = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    unit = "batches" if hasattr(dataset, "batches") else "samples"  # of ReadyBatches
    size = None if isinstance(dataset, IterableDataset) else known_length(dataset)
    facts = {} if size is None else {unit: size}
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return facts
    names = {"name": getattr(dataset.info, "dataset_name", None), "split": dataset.split}
    return facts | {name: str(value) for name, value in names.items() if value is not None}
