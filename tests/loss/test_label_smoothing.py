"""The loss against smoothed labels is transformers', and a mean over the items of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit.trainer import arguments
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.trainer_pt_utils import LabelSmoother

from trainer_kit import Trainer
from trainer_kit.callback import Callback
from trainer_kit.loss.label_smoothing import smoothed_loss
from trainer_kit.run import Run

SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 13, "n_positions": 16}


def language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def texts(count: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        tokens = torch.randint(13, (6,), generator=generator)
        labels = tokens.clone()
        labels[: number % 4] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class Losses(Callback):
    """Keeps the loss of each record."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_transformers(shifts: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=generator).to(dtype)
    labels = torch.randint(7, (3, 5), generator=generator)
    labels[0, :3] = labels[2] = -100
    output = {"loss": logits.sum(), "logits": logits}
    expected = LabelSmoother(0.3)(output, labels, shift_labels=shifts)
    torch.testing.assert_close(smoothed_loss(output, labels, 0.3, shifts), expected, rtol=1e-6, atol=1e-6)


def test_training_and_evaluation_have_the_mean_over_all_items(tmp_path: Path) -> None:
    samples = texts()
    output = language_model()(**stacked(samples))
    theirs = LabelSmoother(0.2)(output, stacked(samples)["labels"], shift_labels=True)  # its sum is in float32
    expected = smoothed_loss(output, stacked(samples)["labels"], 0.2, shifts=True).item()
    assert expected == pytest.approx(theirs.item(), abs=1e-6)
    weights = []
    for number, (batch, accumulation) in enumerate([(8, 1), (2, 4), (3, 3)]):
        recorder = Losses()
        args = arguments(
            tmp_path / str(number), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
            max_steps=1, label_smoothing_factor=0.2, optim="sgd", learning_rate=0.1, logging_steps=1, max_grad_norm=0.0,
        )  # fmt: skip
        trainer = Trainer(language_model(), args, samples, samples, data_collator=stacked, callbacks=[recorder])
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-12)
        trainer.train()
        assert recorder.losses[0] == pytest.approx(expected, abs=1e-9)
        weights.append(torch.cat([each.detach().flatten() for each in trainer.run.model.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-9, atol=1e-12)


def test_evaluation_with_metrics_has_the_same_loss(tmp_path: Path) -> None:
    args = arguments(tmp_path, label_smoothing_factor=0.2, per_device_eval_batch_size=3)
    losses = [
        Trainer(language_model(), args, None, texts(), data_collator=stacked, compute_metrics=metrics).evaluate()
        for metrics in (None, lambda prediction: {"rows": len(prediction.predictions)})
    ]
    assert losses[0]["eval_loss"] == pytest.approx(losses[1]["eval_loss"], rel=1e-12)
    assert losses[1]["eval_rows"] == 8


def test_a_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=13)
    model = BertForSequenceClassification(config)
    samples = [{"input_ids": sample["input_ids"], "labels": torch.tensor(n % 2)} for n, sample in enumerate(texts())]
    args = arguments(tmp_path, label_smoothing_factor=0.2, per_device_eval_batch_size=3)
    found = Trainer(model, args, None, samples, data_collator=stacked).evaluate()["eval_loss"]
    model.eval()
    batch = stacked(samples)
    assert found == pytest.approx(LabelSmoother(0.2)(model(**batch), batch["labels"]).item(), abs=1e-6)


@pytest.mark.parametrize("given", [{"compute_loss": lambda model, batch: model(**batch).loss}, {"chunked": True}])
def test_it_is_refused_where_the_loss_is_another(tmp_path: Path, given: dict[str, Any]) -> None:
    chunked = given.pop("chunked", False)
    args = arguments(tmp_path, label_smoothing_factor=0.2, chunked_cross_entropy=chunked)
    with pytest.raises(ValueError, match=r"^label_smoothing_factor=0\.2 smooths the labels of the model's"):
        Trainer(language_model(), args, texts(), data_collator=stacked, **given).train()


@pytest.mark.parametrize(
    ("output", "labels"),
    [
        (torch.tensor(1.0), torch.tensor([1])),
        ({"logits": torch.ones(2, 3)}, None),
        ({"logits": torch.ones(2, 3)}, torch.ones(2)),
        ((torch.tensor(1.0), torch.ones(2, 3)), torch.ones(2, 3, dtype=torch.long)),
    ],
)
def test_a_model_without_classes_is_refused(output: Any, labels: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"^label_smoothing_factor=0\.1 needs logits of shape .*, but there are "):
        smoothed_loss(output, labels, 0.1, shifts=False)


def test_the_logits_of_a_named_tuple_are_its_field() -> None:
    class Output(NamedTuple):
        logits: torch.Tensor
        features: torch.Tensor

    logits, labels = torch.randn(2, 3), torch.tensor([0, 2])
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert smoothed_loss(Output(logits, torch.ones(2, 3)), labels, 0.1, shifts=False) == expected
