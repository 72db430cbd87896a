"""Batch samplers of sentence_transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.data_training import check_resume, rows

pytest.importorskip("datasets")
pytest.importorskip("sentence_transformers")

import datasets
from sentence_transformers.base.sampler import GroupByLabelBatchSampler

pytestmark = [pytest.mark.ecosystem]


def test_a_group_by_label_sampler_gives_the_batches(tmp_path: Path) -> None:
    labels = datasets.Dataset.from_dict({"labels": [int(row["labels"]) for row in rows()]})

    def make() -> object:
        sampler = GroupByLabelBatchSampler(labels, 4, drop_last=False, valid_label_columns=["labels"], seed=3)
        return {"train_sampler": sampler}

    steps = check_resume(tmp_path, rows, make_given=make)
    for batch in steps.samples:
        found = sorted(index % 3 for index in batch)
        assert all(found.count(label) >= 2 for label in set(found))
