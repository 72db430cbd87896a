"""`ColumnFilter`: leaves out columns of samples that neither the model nor the collator takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from trainer_kit.data.collate import OTHER_LABELS, Collator, PadCollator, stack, stack_with_labels
from trainer_kit.loss.loss import columns_of
from trainer_kit.utils.transformers_models import is_transformers_model
from trainer_kit.utils.units import join_names
from trainer_kit.utils.wrappers import without_adapters

logger = logging.getLogger("trainer_kit")

_LABELS = ("labels", *OTHER_LABELS)
"""Names of labels, which collators rename to those of the model."""


class ColumnFilter:
    """A collator that drops unused columns, and logs their names once.

    Args:
        collate: The collator.
        columns: Names of the columns to keep.
        takes_all: Whether the collator may read any column, so that columns are dropped from its batch instead.

    Attributes:
        collate: The collator.
    """

    def __init__(self, collate: Collator, columns: frozenset[str], takes_all: bool) -> None:
        self.collate = collate
        self._columns = columns
        self._takes_all = takes_all
        self._has_logged = False

    def __call__(self, samples: list[Any]) -> Any:
        if self._takes_all:
            return self._kept([self.collate(samples)])[0]
        first = samples[0]
        if type(first) is dict and first.keys() <= self._columns:
            return self.collate(samples)
        return self.collate(self._kept(samples))

    def _kept(self, mappings: list[Any]) -> list[Any]:
        first, columns = mappings[0], self._columns
        if not isinstance(first, (dict, Mapping)) or not (unused := [*(first.keys() - columns)]):
            return mappings
        self._log(unused)
        return [{name: value for name, value in each.items() if name in columns} for each in mappings]

    def _log(self, unused: list[Any]) -> None:
        worker = get_worker_info()
        if not self._has_logged and (worker is None or worker.id == 0):
            logger.info(
                "columns that neither the model nor the collator takes are left out: %s (remove_unused_columns=False "
                "keeps them)", join_names(sorted(map(str, unused))),
            )  # fmt: skip
        self._has_logged = True


def without_unused_columns(collate: Collator, model: torch.nn.Module) -> Collator:
    """Return a collator that drops the columns that a model's `forward` does not name.

    The collators of trainer_kit, torch and transformers get samples without these columns. Any other collator gets
    whole samples, and its batch loses columns that the model would refuse.

    Args:
        collate: The collator.
        model: A model that is called with the batch. One that takes any keyword keeps all columns, except a
            transformers model, whose `forward` names what it reads.
    """
    inner = without_adapters(model)
    takes_all = not _is_known(collate)
    named = columns_of(inner, even_with_keywords=is_transformers_model(inner) and not takes_all)
    if named is None:
        return collate
    kept = {*named} if takes_all else {*named, *_LABELS}
    if getattr(collate, "mlm", False):  # transformers' DataCollatorForLanguageModeling reads them
        kept.add("special_tokens_mask")
    if getattr(collate, "whole_word_mask", False):
        kept.add("offset_mapping")
    return ColumnFilter(collate, frozenset(kept), takes_all)


def _is_known(collate: Collator) -> bool:
    module = getattr(collate if hasattr(collate, "__name__") else type(collate), "__module__", "")
    is_own = isinstance(collate, PadCollator) or collate in (stack, stack_with_labels, default_collate)
    return is_own or str(module).startswith("transformers.")
