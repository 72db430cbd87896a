from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from trainer_kit.data.collate import stack
from trainer_kit.data.columns import ColumnFilter, OwnCollator, without_unused_columns
from trainer_kit.utils.rng import seed_generators


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
    assert isinstance(without_unused_columns(Choices(), Named()), OwnCollator)


class Choices:
    """A collator that turns every column into a tensor, as that of transformers' example for multiple choice."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __call__(self, samples: list[Any]) -> Any:
        labels = [each.pop("labels") for each in samples]
        random.random()
        torch.rand(1, generator=self.generator)
        return {
            "x": torch.stack([sum(torch.as_tensor(value) for value in each.values()) for each in samples]),
            "labels": torch.tensor(labels),
        }


def test_a_user_s_collator_that_fails_with_all_columns_gets_those_of_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collate, samples = without_unused_columns(Choices(), Named()), copy.deepcopy(SAMPLES)
    seed_generators(3)
    with caplog.at_level(logging.INFO, "trainer_kit"):
        batch = collate(samples)
    after = random.random(), torch.rand(1).item()
    assert batch["x"].tolist() == [[1, 1], [1, 1]]
    assert batch["labels"].tolist() == [1, 0], "the failed attempt has changed only samples of its own"
    assert [record.message for record in caplog.records] == [
        "the collator raises TypeError if it gets all columns, so these are left out: id and text "
        "(remove_unused_columns=False keeps them)"
    ]
    seed_generators(3)
    assert collate(copy.deepcopy(SAMPLES))["labels"].tolist() == [1, 0]
    assert (random.random(), torch.rand(1).item()) == after, "nor does it leave the generators elsewhere"


def test_the_error_of_a_user_s_collator_is_that_with_all_columns() -> None:
    def collate(samples: list[Any]) -> Any:
        raise KeyError(samples[0]["missing" if "text" in samples[0] else "elsewhere"])

    with pytest.raises(KeyError, match="missing"):
        without_unused_columns(collate, Named())(copy.deepcopy(SAMPLES))


def test_a_user_s_collator_with_a_generator_is_not_called_twice() -> None:
    with pytest.raises(TypeError):
        without_unused_columns(Choices(torch.Generator()), Named())(copy.deepcopy(SAMPLES))


def test_samples_that_cannot_be_copied_are_collated_as_they_are() -> None:
    samples = [{"x": torch.ones(1, requires_grad=True) * 2, "text": "a"}]
    batch = without_unused_columns(lambda samples: {"x": samples[0]["x"]}, Named())(samples)
    assert batch["x"] is samples[0]["x"]


def test_a_user_s_collator_for_a_transformers_model_with_keywords() -> None:
    class Keywords(PreTrainedModel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def forward(self, x: Any, labels: Any = None, **options: Any) -> Any:
            return x

    assert without_unused_columns(Choices(), Keywords())(copy.deepcopy(SAMPLES))["x"].tolist() == [[1, 1], [1, 1]]
    assert without_unused_columns(lambda samples: samples[0], Keywords())(SAMPLES) is SAMPLES[0]
