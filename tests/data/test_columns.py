from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.data.collate import stack
from trainer_kit.data.columns import ColumnFilter, without_unused_columns


class Named(nn.Module):
    def forward(self, x: Any, labels: Any = None) -> Any:
        return x


class Anything(nn.Module):
    def forward(self, **columns: Any) -> Any:
        return columns


class Wrapped(nn.Module):
    """As peft's models, which take any keyword and have the user's model inside."""

    def forward(self, **columns: Any) -> Any:
        return columns

    def get_base_model(self) -> nn.Module:
        return Named()


SAMPLES = [{"x": torch.ones(2), "labels": label, "text": "a", "id": 3} for label in (1, 0)]


@pytest.mark.parametrize("model", [Named(), Wrapped()])
def test_our_collators_get_no_unused_column(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    collate = without_unused_columns(stack, model)
    with caplog.at_level(logging.INFO, "trainer_kit"):
        assert collate(SAMPLES).keys() == {"x", "labels"}
        collate(SAMPLES)
    assert [record.message for record in caplog.records] == [
        "columns that neither the model nor the collator takes are left out: id and text "
        "(remove_unused_columns=False keeps them)"
    ]


def test_a_user_s_collator_gets_every_column() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"x": torch.tensor([len(each["text"]) for each in samples]), "text": [each["text"] for each in samples]}

    batch = without_unused_columns(collate, Named())(SAMPLES)
    assert batch.keys() == {"x"}
    assert batch["x"].tolist() == [1, 1]


def test_batches_that_are_no_dicts_stay_as_they_are() -> None:
    pairs = [(torch.ones(2), 1), (torch.zeros(2), 0)]
    assert len(without_unused_columns(stack, Named())(pairs)) == 2


def test_a_model_that_takes_any_keyword_keeps_all_columns() -> None:
    assert without_unused_columns(stack, Anything()) is stack
    assert isinstance(without_unused_columns(stack, Named()), ColumnFilter)
