"""A replayed step has the loss and the gradients of the step that the training loop took."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios.task import Net, make_trainer

from trainer_kit import Callback, Run
from trainer_kit.data.sampling import mix
from trainer_kit.loss.batch import count
from trainer_kit.loss.loss import Loss
from trainer_kit.loss.replay import ReplayBatch, replay
from trainer_kit.strategies.single import SingleDevice

Figures = tuple[float, dict[str, list[Any]]]


class StepRecorder(Callback):
    """The micro-batches of the first step, its loss and its gradients."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.figures: Figures = (0.0, {})

    def on_substep_end(self, run: Run) -> None:
        self.batches.append(copy.deepcopy(run.batch))

    def on_pre_optimizer_step(self, run: Run) -> None:
        self.batches.append(copy.deepcopy(run.batch))
        assert run.local_loss is not None
        self.figures = (float(run.local_loss), gradients(run.model))


def gradients(model: torch.nn.Module) -> dict[str, list[Any]]:
    return {name: each.grad.tolist() for name, each in model.named_parameters() if each.grad is not None}


def summed(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"]
    return loss * len(batch["labels"])


LOSSES = {"model": None, "mean": lambda model, batch: model(**batch)["loss"]}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_replay_has_the_bits_of_the_step(tmp_path: Path, kind: str) -> None:
    """Of three micro-batches whose labels differ in number, with dropout."""
    recorder, model = StepRecorder(), Net()
    samples = [{"x": torch.full((8,), i / 9), "labels": torch.tensor(-100 if i % 4 == 1 else i % 3)} for i in range(12)]
    trainer = make_trainer(
        tmp_path, recorder, dataset=samples, model=model, max_steps=1, gradient_accumulation_steps=3, save_strategy="no"
    )
    trainer.compute_loss = LOSSES[kind]
    before = copy.deepcopy(model)
    trainer.train()
    assert len(recorder.batches) == 3
    strategy = SingleDevice("cpu")
    strategy.setup()
    seeds = [mix(trainer.args.seed, 0, start) for start in (0, 4, 8)]
    micro_batches = [
        ReplayBatch(batch, count(batch, 4), seed) for batch, seed in zip(recorder.batches, seeds, strict=True)
    ]
    assert len({each.counts.labels for each in micro_batches}) > 1
    total = torch.zeros(())
    for share in replay(Loss(before, before, LOSSES[kind]), micro_batches, strategy):
        share.backward()
        total = total + share.detach()
    assert (float(total), gradients(before)) == recorder.figures


def test_a_dummy_batch_has_no_weight() -> None:
    strategy, model = SingleDevice("cpu"), Net().eval()
    strategy.setup()
    batch = {"x": torch.ones(2, 8), "labels": torch.tensor([0, 1])}
    counts = count(batch, 2)
    pair = [ReplayBatch(batch, counts), ReplayBatch(batch, counts.as_nothing())]
    for compute_loss in (None, lambda model, batch: (summed(model, batch), 2)):
        share, nothing = (each.detach() for each in replay(Loss(model, model, compute_loss), pair, strategy))
        assert torch.equal(share, model(**batch)["loss"].detach())
        assert float(nothing) == 0.0
