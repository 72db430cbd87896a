from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.data.source import ReadyBatches
from trainer_kit.report.provenance import describe_data, hub_metadata


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


def bert(name: str) -> Any:
    config = transformers.BertConfig(
        vocab_size=5, hidden_size=2, num_hidden_layers=1, num_attention_heads=1, intermediate_size=2
    )
    config._name_or_path = name
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("name", ["google/bert", "gpt2"])
def test_a_base_of_the_hub_is_named(name: str) -> None:
    assert hub_metadata(bert(name)) == {"library_name": "transformers", "base_model": name}


def test_a_base_that_is_a_folder_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("", "mine", str(tmp_path), "./mine", "a/b/c"):
        assert hub_metadata(bert(name)) == {"library_name": "transformers"}


def test_a_plain_module_says_nothing() -> None:
    assert hub_metadata(torch.nn.Linear(1, 1)) == {}


def test_sizes_of_all_forms_of_data() -> None:
    rows = list(range(7))
    given = {"list": rows, "loader": DataLoader(rows, batch_size=2), "ready": ReadyBatches(rows), "stream": Stream()}  # type: ignore[arg-type]
    assert describe_data(Stream(), given) == {
        "training": {},
        "evaluation: list": {"samples": 7},
        "evaluation: loader": {"samples": 7},
        "evaluation: ready": {"batches": 7},
        "evaluation: stream": {},
    }
    assert describe_data(rows, rows[:2]) == {"training": {"samples": 7}, "evaluation": {"samples": 2}}
    assert describe_data(ReadyBatches(iter(rows)), None) == {"training": {}}
