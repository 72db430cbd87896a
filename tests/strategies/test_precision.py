from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit import Callback, Precision, Run, Trainer, TrainingArguments
from trainer_kit.strategies import choose_strategy

CPU = torch.device("cpu")


@pytest.mark.parametrize(("mode", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_forward_passes_compute_in_the_modes_dtype(mode: str, dtype: torch.dtype) -> None:
    precision = Precision(mode)
    precision.setup(CPU)
    layer = nn.Linear(2, 2)
    with precision.autocast(CPU):
        assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32
    assert (precision.scaler is not None) == (mode == "fp16")


def test_a_models_own_dtype_is_left_alone() -> None:
    with Precision("no").autocast(CPU):
        assert nn.Linear(2, 2, dtype=torch.float64)(torch.ones(1, 2).double()).dtype == torch.float64


def test_weights_of_float16_cannot_be_scaled() -> None:
    precision, layer = Precision("fp16"), nn.Linear(2, 2).half()
    precision.setup(CPU)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    precision.scaled(layer(torch.ones(1, 2).half()).sum()).backward()
    with pytest.raises(ValueError, match=r"mixed_precision='fp16' .* needs weights in float32, .* model\.float\(\)"):
        precision.unscale(optimizer)


@pytest.mark.parametrize("mode", ["fp32", "float16", "", None])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"mixed_precision=.* is not known; use one of 'no', 'fp16', 'bf16'"):
        Precision(mode)


@pytest.mark.parametrize(("given", "expected"), [("high", "high"), ("medium", "medium"), (None, "highest")])
def test_matrix_products_of_float32_have_the_precision_given(given: str | None, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        args = TrainingArguments(use_cpu=True, float32_matmul_precision=given)
        strategy = choose_strategy(args)
        assert torch.get_float32_matmul_precision() == "highest"
        strategy.setup()
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_scaler_is_kept() -> None:
    one, other, plain = Precision("fp16"), Precision("fp16"), Precision("bf16")
    for precision in (one, other, plain):
        precision.setup(CPU)
    assert one.scaler is not None
    one.scaler.scale(torch.ones(()))
    one.scaler.update(128.0)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert other.state_dict()["scale"] == 128.0
    assert plain.state_dict() == {}
    plain.load_state_dict(one.state_dict())  # resumed in another precision
    other.load_state_dict({})
    assert other.state_dict()["scale"] == 128.0


class Classifier(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.factor = factor

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels) * self.factor, "logits": logits}


def points() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(index % 3)} for index in range(40)]


def make_trainer(tmp_path: Any, model: nn.Module, mode: str, **given: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(tmp_path), mixed_precision=mode, use_cpu=True, max_steps=given.pop("max_steps", 20),
        learning_rate=0.05, gradient_accumulation_steps=2, per_device_train_batch_size=4, report_to="none",
        disable_tqdm=True, log_level="error", save_strategy="no", max_grad_norm=given.pop("max_grad_norm", 1.0),
        nonfinite=given.pop("nonfinite", "stop"), logging_steps=5,
    )  # fmt: skip
    return Trainer(model, args, points(), points(), **given)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_training_in_half_precision_comes_near_to_full(tmp_path: Any, mode: str) -> None:
    expected = make_trainer(tmp_path, Classifier(), "no").train().training_loss
    for max_grad_norm in (0.0, 1.0):
        trainer = make_trainer(tmp_path, Classifier(), mode, max_grad_norm=max_grad_norm)
        assert trainer.train().training_loss == pytest.approx(expected, rel=0.02)
        assert trainer.run.state.skipped_steps == 0
        assert all(parameter.dtype == torch.float32 for parameter in trainer.run.model.parameters())


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
def test_a_sum_with_its_count_trains_as_the_mean_does(tmp_path: Any, mode: str) -> None:
    def pair(model: nn.Module, batch: Any) -> Any:
        logits = model(**batch)["logits"].float()
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)

    mean, summed = (
        make_trainer(tmp_path, Classifier(), mode),
        make_trainer(tmp_path, Classifier(), mode, compute_loss=pair),
    )
    assert summed.train().training_loss == pytest.approx(mean.train().training_loss, rel=1e-3)
    for one, other in zip(mean.run.model.parameters(), summed.run.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("nonfinite", ["stop", "skip", "ignore"])
def test_fp16_finds_its_scale_whatever_nonfinite_says(tmp_path: Any, nonfinite: str) -> None:
    records: list[dict[str, Any]] = []

    class Watch(Callback):
        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            records.append(record)

    model = Classifier(factor=1e4)  # its scaled loss overflows fp16 gradients at first
    trainer = make_trainer(tmp_path, model, "fp16", nonfinite=nonfinite, callbacks=[Watch()])
    result = trainer.train()
    skipped = trainer.run.state.skipped_steps
    assert 0 < skipped < 15
    assert records[0]["skipped_steps"] <= skipped
    assert math.isfinite(result.training_loss)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_evaluation_computes_in_the_modes_dtype_too(tmp_path: Any) -> None:
    seen: list[torch.dtype] = []

    class Watching(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            output = super().forward(x, labels)
            seen.append(output["logits"].dtype)
            return output

    make_trainer(tmp_path, Watching(), "bf16").evaluate()
    assert set(seen) == {torch.bfloat16}
