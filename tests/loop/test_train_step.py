"""One optimizer step: clipping, and steps that are not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear, Poisoned
from kit.ranks import on_ranks
from kit.trainer import arguments
from torch import nn

from trainer_kit import (
    Callback,
    NonFiniteError,
    Run,
    Trainer,
    load_checkpoint_in_model,
)


def test_gradients_are_clipped_by_norm_and_value(tmp_path: Path) -> None:
    norms, largest = [], []

    class Watch(Callback):
        def on_optimizer_step(self, run: Run) -> None:
            gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            largest.append(max(float(gradient.abs().max()) for gradient in gradients))

    Trainer(Linear(), arguments(tmp_path, max_grad_norm=0.01), points(), callbacks=[Watch()]).train()
    assert max(norms) == pytest.approx(0.01, rel=1e-3)
    largest.clear()
    args = arguments(tmp_path, max_grad_norm=0, max_grad_value=0.02)
    Trainer(Linear(), args, points(), callbacks=[Watch()]).train()
    assert max(largest) == pytest.approx(0.02)


def test_the_loss_of_many_micro_batches_in_16_bits(tmp_path: Path) -> None:
    """A sum in 16 bits stops growing."""

    class Constant(Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (super().forward(x, labels) * 0 + 2.5).bfloat16()

    args = arguments(
        tmp_path,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1024,
        max_steps=1,
        dataloader_drop_last=True,
    )
    assert Trainer(Constant(), args, points(1024)).train().training_loss == 2.5


def test_nonfinite_stop_names_step_loss_and_parameter(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=10, logging_steps=4, save_strategy="steps", save_steps=2)
    with pytest.raises(NonFiniteError, match=r"step 3 is not finite: loss nan, .*layer\.weight.*checkpoint-2"):
        Trainer(Poisoned(at=3), args, points()).train()
    model = Linear()
    load_checkpoint_in_model(model, tmp_path / "run" / "checkpoint-2")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not (tmp_path / "run" / "checkpoint-4").exists()


def test_nonfinite_stop_sees_a_step_in_which_no_label_counts(tmp_path: Path) -> None:
    """Its gradients may not be finite all the same, and hold the weights still."""

    class Unlabelled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.weight * x).sum() * torch.tensor(float("inf"))}

    samples = [{"x": torch.ones(2), "labels": torch.tensor(-100)} for _ in range(8)]
    with pytest.raises(NonFiniteError, match="is not finite"):
        Trainer(Unlabelled(), arguments(tmp_path, max_steps=4, logging_steps=2), samples).train()


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_nonfinite_skip_leaves_the_step_out(tmp_path: Path, optim: str) -> None:
    weights, records = [], []

    class Watch(Callback):
        def on_step_end(self, run: Run) -> None:
            weights.append([parameter.detach().clone() for parameter in run.model.parameters()])

        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            records.append(record)

    args = arguments(tmp_path, nonfinite="skip", optim=optim, logging_steps=4)
    result = Trainer(Poisoned(at=3), args, points(), callbacks=[Watch()]).train()
    assert all(torch.equal(before, after) for before, after in zip(weights[1], weights[2], strict=True))
    assert not all(torch.equal(before, after) for before, after in zip(weights[2], weights[3], strict=True))
    assert records[0]["skipped_steps"] == 1
    assert math.isfinite(result.training_loss)


def test_nonfinite_ignore_logs_what_there_is(tmp_path: Path) -> None:
    result = Trainer(Poisoned(at=3), arguments(tmp_path, nonfinite="ignore"), points()).train()
    assert math.isnan(result.training_loss)


def test_gradients_from_before_do_not_count(tmp_path: Path) -> None:
    def train(*before: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        model = Linear()
        for sample in before:
            (100 * model(sample[None], torch.tensor([1]))).backward()
        Trainer(model, arguments(tmp_path, optim="sgd", learning_rate=0.1), points()).train()
        return model.layer.weight.detach()

    assert torch.equal(train(torch.ones(4)), train())


def test_sparse_gradients_are_clipped_and_trained(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(10, 3, sparse=sparse)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.table(x).sum(1), labels)

    samples = [(torch.tensor([index % 10, index % 3]), torch.tensor(index % 3)) for index in range(20)]
    tables = []
    for sparse in (True, False):
        model = Table(sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        Trainer(model, arguments(tmp_path, max_grad_norm=0.1), samples, optimizer=optimizer).train()
        tables.append(model.table.weight.detach())
    torch.testing.assert_close(*tables)


def test_the_parameter_is_named_right_where_experts_take_turns(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)
            self.calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            loss = nn.functional.cross_entropy((self.a if self.calls % 2 else self.b)(x), labels)
            return loss * (float("nan") if self.calls == 4 else 1.0)

    with pytest.raises(NonFiniteError, match=r"step 4 is not finite: .* b\.weight"):
        Trainer(Experts(), arguments(tmp_path, max_steps=6), points()).train()


class Rounding(torch.optim.SGD):
    """Adds noise to the weights, as an optimizer that rounds stochastically does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.rand_like(parameter), alpha=1e-2)


class Noise(Callback):
    def on_pre_optimizer_step(self, run: Run) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-2)


def noisy_weights(folder: str, size: int, accumulation: int, noise: str) -> Any:
    """Weights of this rank after a training with an optimizer, or a callback, that draws random numbers."""
    torch.manual_seed(0)
    model = Linear().double()
    samples = [(x.double(), labels) for x, labels in points(23)]
    args = arguments(
        Path(folder), per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=7
    )
    optimizer = (Rounding if noise == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)
    Trainer(model, args, samples, optimizer=optimizer, callbacks=[Noise()] if noise == "callback" else []).train()
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.distributed
@pytest.mark.parametrize("noise", ["optimizer", "callback"])
def test_ranks_draw_the_same_numbers_in_an_update(tmp_path: Path, noise: str) -> None:
    first, second = on_ranks(2, noisy_weights, str(tmp_path / "two"), 3, 1, noise)
    assert first == second
    if noise == "optimizer":
        alone = noisy_weights(str(tmp_path / "one"), 3, 2, noise)
        assert first.keys() == alone.keys()
        for name, value in first.items():
            torch.testing.assert_close(torch.tensor(alone[name]), torch.tensor(value), rtol=1e-12, atol=1e-12)
