"""`ColumnFilter` and `OwnCollator`: leave out columns of samples that neither the model nor the collator takes."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from trainer_kit.data.collate import OTHER_LABELS, Collator, PadCollator, stack, stack_with_labels
from trainer_kit.data.own_generators import OwnGenerators
from trainer_kit.loss.loss import columns_of
from trainer_kit.utils.rng import KeptGenerators
from trainer_kit.utils.transformers_models import is_transformers_model
from trainer_kit.utils.units import join_names
from trainer_kit.utils.wrappers import without_adapters

logger = logging.getLogger("trainer_kit")

_LABELS = ("labels", *OTHER_LABELS)
"""Names of labels, which collators rename to those of the model."""


class ColumnFilter:
    """A collator that gets samples without unused columns, whose names are logged once.

    Args:
        collate: The collator.
        columns: Names of the columns to keep.

    Attributes:
        collate: The collator.
    """

    def __init__(self, collate: Collator, columns: frozenset[str]) -> None:
        self.collate = collate
        self._columns = columns
        self._has_logged = False

    def __call__(self, samples: list[Any]) -> Any:
        first = samples[0]
        if type(first) is dict and first.keys() <= self._columns:  # the quickest
            return self.collate(samples)
        return self.collate(self.kept(samples))

    def kept(self, mappings: list[Any]) -> list[Any]:
        """Return samples, or batches, without unused columns; anything but dicts as it is."""
        if not (unused := self.unused(mappings[0])):
            return mappings
        self.log("columns that neither the model nor the collator takes are left out", unused)
        return without(mappings, unused)

    def unused(self, mapping: Any) -> list[Any]:
        """Return the names of a sample's unused columns."""
        return [*(mapping.keys() - self._columns)] if isinstance(mapping, (dict, Mapping)) else []

    def log(self, what: str, unused: list[Any]) -> None:
        """Log the names of unused columns, once and in one worker."""
        worker = get_worker_info()
        if not self._has_logged and (worker is None or worker.id == 0):
            names = join_names(sorted(map(str, unused)))
            logger.info("%s: %s (remove_unused_columns=False keeps them)", what, names)
        self._has_logged = True


class OwnCollator:
    """A collator of the user's, which may read any column: it gets whole samples if it takes them.

    If the first batch shows that it fails with them and works without the unused columns, it gets samples without
    them, as under transformers' Trainer.

    Args:
        collate: The collator.
        columns: Names of the columns that the model takes.
        takes_any: Whether the model takes any column; otherwise batches lose the others.

    Attributes:
        collate: The collator.
    """

    def __init__(self, collate: Collator, columns: frozenset[str], takes_any: bool) -> None:
        self.collate = collate
        self._of_samples = ColumnFilter(collate, columns | {*_LABELS})
        self._of_batches = None if takes_any else ColumnFilter(collate, columns)
        self._gets_whole: bool | None = None  # until a sample with unused columns has come

    def __call__(self, samples: list[Any]) -> Any:
        if self._gets_whole is False:
            return self._of_samples(samples)
        if self._gets_whole is None and (unused := self._of_samples.unused(samples[0])):
            return self._try(samples, unused)
        return self._collated(samples)

    def _collated(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        return batch if self._of_batches is None else self._of_batches.kept([batch])[0]

    def _try(self, samples: list[Any], unused: list[Any]) -> Any:
        """Collate a batch with or without the unused columns, and remember which one works."""
        used, generators = None, KeptGenerators()
        with contextlib.suppress(Exception):  # not everything can be copied
            used = copy.deepcopy(without(samples, unused))  # the collator may change what it gets
        self._gets_whole = True
        try:
            return self._collated(samples)
        except Exception as error:
            if not (used and used[0]) or OwnGenerators(self.collate).find():  # which may have drawn already
                raise
            generators.restore()
            with contextlib.suppress(Exception):
                batch = self.collate(used)
                self._gets_whole = False
                what = f"the collator raises {type(error).__name__} if it gets all columns, so these are left out"
                self._of_samples.log(what, unused)
                return batch
            raise


def without(mappings: list[Any], names: Collection[Any]) -> list[dict[Any, Any]]:
    """Return copies of dicts without some of their keys."""
    return [{name: value for name, value in each.items() if name not in names} for each in mappings]


def without_unused_columns(collate: Collator, model: torch.nn.Module) -> Collator:
    """Return a collator that drops the columns that a model's `forward` does not name.

    The collators of trainer_kit, torch and transformers get samples without these columns. Any other collator gets
    whole samples if it takes them, and its batch loses columns that the model would refuse.

    Args:
        collate: The collator.
        model: A model that is called with the batch. One that takes any keyword keeps all columns, except a
            transformers model, whose `forward` names what it reads.
    """
    inner = without_adapters(model)
    named = columns_of(inner, even_with_keywords=is_transformers_model(inner))
    if named is None:
        return collate
    if not _is_known(collate):
        return OwnCollator(collate, frozenset(named), takes_any=columns_of(inner) is None)
    kept = {*named, *_LABELS}
    if getattr(collate, "mlm", False):  # transformers' DataCollatorForLanguageModeling reads them
        kept.add("special_tokens_mask")
    if getattr(collate, "whole_word_mask", False):
        kept.add("offset_mapping")
    return ColumnFilter(collate, frozenset(kept))


def _is_known(collate: Collator) -> bool:
    module = getattr(collate if hasattr(collate, "__name__") else type(collate), "__module__", "")
    is_own = isinstance(collate, PadCollator) or collate in (stack, stack_with_labels, default_collate)
    return is_own or str(module).startswith("transformers.")
