"""Datasets of Hugging Face: map-style with a format, and streams with a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.data_training import check_resume, rows
from torch.utils.data import DataLoader

pytest.importorskip("datasets")

import datasets

pytestmark = [pytest.mark.ecosystem]


def table() -> Any:
    columns = {"x": [row["x"].tolist() for row in rows()], "labels": [int(row["labels"]) for row in rows()]}
    features = datasets.Features({"x": datasets.Sequence(datasets.Value("float64")), "labels": datasets.Value("int64")})
    return datasets.Dataset.from_dict(columns, features)


MAKE: dict[str, Any] = {
    "formatted": lambda: table().with_format("torch", dtype=None),
    "in a loader": lambda: DataLoader(table().with_format("numpy"), batch_size=4, shuffle=True),
    "stream": lambda: table().to_iterable_dataset().with_format("numpy"),
    "stream in a loader": lambda: DataLoader(table().to_iterable_dataset().with_format("torch"), batch_size=4),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_resume_is_exact(tmp_path: Path, kind: str) -> None:
    options = {} if kind in ("formatted", "in a loader") else {"max_steps": 9}
    check_resume(tmp_path, MAKE[kind], reads_again=kind == "stream in a loader", **options)
