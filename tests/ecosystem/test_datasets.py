"""Datasets of Hugging Face: map-style with a format, and streams with a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.data_training import check_resume, rows
from torch.utils.data import DataLoader

pytest.importorskip("datasets")

import datasets

pytestmark = [pytest.mark.ecosystem]


def table() -> Any:
    columns = {"x": [row["x"].tolist() for row in rows()], "labels": [int(row["labels"]) for row in rows()]}
    features = datasets.Features({"x": datasets.Sequence(datasets.Value("float64")), "labels": datasets.Value("int64")})
    return datasets.Dataset.from_dict(columns, features)


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    x = torch.stack([torch.as_tensor(each["x"], dtype=torch.float64) for each in samples])
    return {"x": x, "labels": torch.tensor([int(each["labels"]) for each in samples])}


MAKE: dict[str, Any] = {
    "map": table,
    "formatted": lambda: table().with_format("torch"),
    "in a loader": lambda: DataLoader(table().with_format("numpy"), batch_size=4, shuffle=True, collate_fn=collate),
    "stream": lambda: table().to_iterable_dataset().with_format("torch"),
    "stream in a loader": lambda: DataLoader(table().to_iterable_dataset(), batch_size=4, collate_fn=collate),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_resume_is_exact(tmp_path: Path, kind: str) -> None:
    options = {"max_steps": 9} if "stream" in kind else {}
    check_resume(tmp_path, MAKE[kind], kind == "stream in a loader", lambda: {"data_collator": collate}, **options)
