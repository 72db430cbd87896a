"""The labels that metrics get: columns that are labels by their names, and lists with an entry for each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn

from trainer_kit import EvalPrediction, Trainer, TrainingArguments


class Detector(nn.Module):
    """Takes targets as a list of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        sizes = torch.stack([each["boxes"].sum() for each in labels])
        logits = self.layer(x)
        return {"loss": (logits[:, 0] - sizes).pow(2).mean(), "logits": logits}


class Tagger(nn.Module):
    """Has other names for its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, tag_labels: Any = None, class_labels: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean(), "logits": self.layer(x)}


def detections(length: int) -> list[dict[str, Any]]:
    return [
        {"x": torch.tensor([float(place)]), "labels": {"boxes": torch.full((1 + place % 2, 4), float(place))}}
        for place in range(length)
    ]


def listed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([each["x"] for each in samples]), "labels": [each["labels"] for each in samples]}


def arguments(folder: Any, **given: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", save_strategy="no",
        per_device_eval_batch_size=3, **given,
    )  # fmt: skip


def first_boxes(prediction: EvalPrediction) -> dict[str, Any]:
    assert len(prediction.predictions) == len(prediction.label_ids)
    return {"first": [each["boxes"][0, 0].item() for each in prediction.label_ids]}


def evaluated(folder: str, length: int) -> Any:
    args = arguments(folder, remove_unused_columns=False)
    trainer = Trainer(Detector(), args, data_collator=listed, compute_metrics=first_boxes)
    return trainer.evaluate(detections(length))["eval_first"]


@pytest.mark.parametrize("length", [9, 7])
def test_lists_of_labels_are_in_the_order_of_the_dataset(tmp_path: Any, length: int) -> None:
    assert evaluated(str(tmp_path), length) == [*range(length)]


@pytest.mark.distributed
def test_lists_of_labels_of_several_processes_are_too(tmp_path: Any) -> None:
    assert on_ranks(2, evaluated, str(tmp_path), 10)[0] == [*range(10)]


@pytest.mark.parametrize("columns", [["class_labels"], ["class_labels", "tag_labels"]])
def test_columns_that_forward_calls_labels_are_labels(tmp_path: Any, columns: list[str]) -> None:
    data = [{"x": torch.zeros(1), **dict.fromkeys(columns, place)} for place in range(7)]
    args = arguments(tmp_path)
    found = Trainer(Tagger(), args).predict(data).label_ids
    expected = [*range(7)]
    if len(columns) == 1:
        assert found.tolist() == expected
    else:
        assert [each.tolist() for each in found] == [expected, expected]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_traced_model_has_no_label_columns(tmp_path: Any) -> None:
    def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = model(batch["x"]).mean()
        return result

    model = torch.jit.trace(nn.Linear(1, 2), torch.ones(1, 1))
    found = Trainer(model, arguments(tmp_path), compute_loss=mean).evaluate([{"x": torch.zeros(1)}] * 3)
    assert found["eval_loss"] == pytest.approx(model.bias.mean().item())


class Count:
    def reset(self) -> None:
        self.batches = 0

    def update(self, predictions: Any, labels: Any) -> None:
        assert len(predictions) == len(labels)
        self.batches += 1

    def compute(self) -> int:
        return self.batches


def test_streaming_metrics_get_lists_of_labels_and_name_what_to_set_without_labels(tmp_path: Any) -> None:
    args = arguments(tmp_path, remove_unused_columns=False)
    trainer = Trainer(Detector(), args, data_collator=listed, metrics=Count())
    assert trainer.evaluate(detections(7))["eval_count"] == 3
    trainer = Trainer(Tagger(), arguments(tmp_path), metrics=Count())
    with pytest.raises(ValueError, match="with the entries x; set label_names to those that are labels"):
        trainer.evaluate([{"x": torch.zeros(1)}] * 3)


class Signals:
    """A batch of its own class, as speechbrain's PaddedBatch."""

    def __init__(self, samples: list[tuple[torch.Tensor, int]]) -> None:
        self.sig = torch.stack([x for x, _ in samples]), torch.ones(len(samples))
        self.lab = torch.tensor([label for _, label in samples])


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, signal: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(signal) * lengths[:, None]
        return logits


def test_a_prediction_without_labels_names_what_finds_them(tmp_path: Any) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(*batch.sig), batch.lab)

    data, given = [(torch.tensor([1.0]), 1)] * 3, {"compute_loss": compute_loss, "data_collator": Signals}
    sentence = (
        r"^no labels were found in the batch, a Signals, so Recognizer was called without compute_loss: .* missing 1 "
        r"required .* 'lengths'; name the columns that are labels in label_names=\[\.\.\.\]$"
    )
    with pytest.raises(ValueError, match=sentence):
        Trainer(Recognizer(), arguments(tmp_path), **given).predict(data)
    output = Trainer(Recognizer(), arguments(tmp_path, label_names=["lab"]), **given).predict(data)
    assert output.predictions.shape == (3, 2)
    assert output.label_ids.tolist() == [1, 1, 1]


def test_an_error_of_a_model_that_computes_its_loss_is_its_own(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'lengths'"):
        Trainer(Recognizer(), arguments(tmp_path)).predict([{"signal": torch.ones(1)}])
