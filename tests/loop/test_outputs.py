"""Models of transformers with several outputs: metrics and predictions are those of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from kit.architectures import ARCHITECTURES
from torch import nn

from trainer_kit import EvalPrediction, Trainer, TrainingArguments
from trainer_kit.loop import evaluation
from trainer_kit.loop.metrics import predictions_in


def vision(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
        num_labels=3, **given,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def images() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": place % 3} for place in range(7)]


def flat(tree: Any) -> list[np.ndarray]:
    return [tree] if isinstance(tree, np.ndarray) else [array for each in tree for array in flat(each)]


def structure(tree: Any) -> Any:
    return tree.shape if isinstance(tree, np.ndarray) else tuple(map(structure, tree))


def make_trainer(tmp_path: Path, model: nn.Module, **given: Any) -> Trainer:
    args = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        per_device_eval_batch_size=3,
    )
    return Trainer(model, args, eval_dataset=images(), **given)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [None, ["hidden_states"], ["hidden_states", "attentions"]])
def test_predictions_are_all_outputs_but_the_loss(tmp_path: Path, ignored: list[str] | None) -> None:
    model = vision(output_hidden_states=True, output_attentions=True, attn_implementation="eager")
    if ignored is not None:
        model.config.keys_to_ignore_at_inference = ignored
    their_args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=3
    )
    theirs = transformers.Trainer(model, their_args).predict(images()).predictions
    ours = make_trainer(tmp_path, model).predict(images()).predictions
    assert structure(ours) == structure(theirs)
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Scores:
    """Takes the logits alone."""

    def reset(self) -> None:
        self.rows = 0

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        assert logits.shape == (len(labels), 3)
        self.rows += len(logits)

    def compute(self) -> int:
        return self.rows


def test_streaming_metrics_get_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def accuracy(prediction: EvalPrediction) -> dict[str, Any]:
        logits, states = prediction.predictions
        return {"right": (logits.argmax(-1) == prediction.label_ids).sum(), "states": len(states)}

    model = vision(output_hidden_states=True)
    found = make_trainer(tmp_path, model, compute_metrics=accuracy, metrics=Scores()).evaluate()
    pixels, labels = (torch.stack([torch.as_tensor(each[name]) for each in images()]) for name in images()[0])
    right = (model.eval()(pixels).logits.argmax(-1) == labels).sum()
    assert [found[f"eval_{name}"] for name in ("scores", "states", "right")] == [7, 3, right]
    monkeypatch.setattr(evaluation, "outputs_in", None)  # nothing else is taken from the model's output
    assert make_trainer(tmp_path, model, metrics=Scores()).evaluate()["eval_scores"] == 7


def test_preprocess_logits_gets_all_outputs(tmp_path: Path) -> None:
    def first(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        logits, states = outputs
        assert len(states) == 3
        assert len(labels) == len(logits)
        found: torch.Tensor = logits
        return found

    model = vision(output_hidden_states=True)
    ours = make_trainer(tmp_path, model, preprocess_logits_for_metrics=first, metrics=Scores())
    assert ours.predict(images()).predictions.shape == (7, 3)
    assert ours.evaluate()["eval_scores"] == 7


class WithPart(nn.Module):
    """Returns a part of the loss before the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return transformers.utils.ModelOutput(loss=loss, part=loss.detach() * 2, logits=logits, cache=object())


def test_a_number_of_a_batch_is_an_output_too(tmp_path: Path) -> None:
    part, logits = make_trainer(tmp_path, WithPart()).predict([{"x": torch.ones(4), "labels": 1}] * 7).predictions
    assert (part.shape, logits.shape) == ((3,), (7, 3))


class Named(NamedTuple):
    part: torch.Tensor
    logits: torch.Tensor
    loss: torch.Tensor


class WithNames(WithPart):
    """Its output is a named tuple."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        output = super().forward(x, labels)
        return Named(output.part, output.logits, output.loss)


def test_the_loss_of_a_named_tuple_is_no_prediction(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = WithNames(), [{"x": torch.ones(4), "labels": 1}] * 7
    found = make_trainer(tmp_path, model).predict(data)
    inputs, labels = torch.ones(7, 4), torch.ones(7, dtype=torch.long)
    assert found.predictions.shape == (7, 3)
    assert found.metrics["test_loss"] == pytest.approx(model(inputs, labels).loss.item())
    each = make_trainer(
        tmp_path, model, compute_loss=lambda model, batch: model(**batch).loss.expand(3).mean()
    ).predict(data)
    assert np.array_equal(each.predictions, found.predictions)


def test_losses_by_sample_of_a_named_tuple_are_no_prediction() -> None:
    scores = torch.ones(2, 3)
    assert predictions_in(Named(torch.tensor(1.0), scores, torch.ones(2))) is scores


def test_passes_of_one_and_of_several_calls_have_the_same_predictions(tmp_path: Path) -> None:
    """Of a transformers model with several outputs, whose last batch has one sample."""

    def by_sample(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        rows = range(len(batch["labels"]))
        losses = [model(**{name: each[row : row + 1] for name, each in batch.items()}).loss for row in rows]
        return torch.stack(losses).sum() * 3, 3 * len(rows)

    torch.manual_seed(0)
    data = [{"input_ids": torch.arange(4) + 1, "labels": torch.arange(3) + i} for i in range(5)]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=2)
    mine = Trainer(ARCHITECTURES["t5"](), args, compute_loss=by_sample)
    found = [mine.predict(data).predictions for _ in range(2)]  # the first after probes
    assert found[0].shape[:2] == (5, 3)
    assert np.array_equal(found[0], found[1])
