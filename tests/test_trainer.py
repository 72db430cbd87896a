"""The Trainer as its users meet it."""

from __future__ import annotations

import inspect
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scenarios.task import Net, Noisy, make_trainer
from torch import nn

from trainer_kit import (
    Callback,
    CallbackError,
    EvalPrediction,
    NonFiniteError,
    Run,
    Trainer,
    TrainingArguments,
    load_checkpoint_in_model,
)
from trainer_kit.callback import HOOKS
from trainer_kit.utils.rng import seed_generators


def arguments(tmp_path: Path, **changes: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"), "max_steps": 4, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "log_level": "warning", "save_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**(defaults | changes))


class Linear(nn.Module):
    """Returns its loss, for any kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(x), labels)


def points(length: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.tensor(index % 3)) for index in range(length)]


def test_trains_with_nothing_else_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = Trainer(Linear(), TrainingArguments(num_train_epochs=1, log_level="warning"), points()).train()
    assert result.global_step == 3
    assert math.isfinite(result.training_loss)
    assert {
        "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "peak_memory_gib",
    } <= set(result.metrics)  # fmt: skip
    assert result.metrics["peak_memory_gib"] > 0.01
    assert (tmp_path / "trainer_output" / "checkpoint-3" / "manifest.json").is_file()


@pytest.mark.parametrize("kind", ["tuple", "dict", "list"])
def test_kinds_of_batches(tmp_path: Path, kind: str) -> None:
    samples: list[Any] = points()
    if kind == "dict":
        samples = [{"x": x, "labels": labels} for x, labels in samples]
    elif kind == "list":
        samples = [list(sample) for sample in samples]
    torch.manual_seed(0)
    result = Trainer(Linear(), arguments(tmp_path), samples).train()
    torch.manual_seed(0)
    expected = Trainer(Linear(), arguments(tmp_path), points()).train()
    assert result.training_loss == expected.training_loss


def test_a_batch_that_is_one_tensor(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).square().mean()

    model = Mean()
    Trainer(model, arguments(tmp_path, learning_rate=0.1), torch.randn(20, 4)).train()
    assert not torch.equal(model.weight, torch.ones(4))


def test_trains_a_transformers_model_and_its_folder_loads(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    samples = [{"input_ids": [5, 6, index % 50], "labels": index % 2} for index in range(16)]
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, arguments(tmp_path, gradient_checkpointing=True), samples)
    trainer.train()
    trainer.save_model(tmp_path / "model", max_shard_size="10KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    config_file = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config_file["architectures"] == ["BertForSequenceClassification"]


def test_the_loss_learns_and_evaluate_agrees_with_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Linear()
    trainer = Trainer(model, arguments(tmp_path, max_steps=200, learning_rate=0.05), points(), points(7))
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    x, labels = (torch.stack(column) for column in zip(*points(7), strict=True))
    with torch.no_grad():
        expected = float(model(x, labels))
    last = trainer.evaluate()
    assert last["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert last["eval_loss"] < first


def test_hooks_come_in_the_documented_order(tmp_path: Path) -> None:
    calls: list[str] = []

    class Listener(Callback):
        pass

    for hook in HOOKS:
        setattr(Listener, hook, lambda self, run, *rest, hook=hook: calls.append(hook))
    args = arguments(
        tmp_path, num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=2, per_device_train_batch_size=5,
        eval_strategy="epoch", logging_steps=2, save_strategy="steps", save_steps=2, async_save=False,
    )  # fmt: skip
    Trainer(Linear(), args, points(), points(4), callbacks=[Listener()]).train()
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    evaluation = ["on_evaluate_begin", "on_evaluate_end", "on_evaluate"]
    epoch = ["on_epoch_begin", *step, *step, "on_epoch_end", "on_log", *evaluation, "on_save"]
    assert calls == ["on_init_end", "on_train_begin", *epoch, *epoch, "on_train_end", "on_exit"]


def test_callbacks_are_called_by_priority_then_in_order(tmp_path: Path) -> None:
    calls: list[str] = []

    class Listener(Callback):
        def __init__(self, name: str, priority: int) -> None:
            self.name, self.priority = name, priority

        def on_train_begin(self, run: Run) -> None:
            calls.append(self.name)

    listeners = [Listener("c", 5), Listener("a", -5), Listener("d", 5), Listener("b", -5)]
    Trainer(Linear(), arguments(tmp_path), points(), callbacks=listeners).train()
    assert calls == ["a", "b", "c", "d"]


@pytest.mark.parametrize("leaves", [False, True])
def test_the_end_of_training_has_its_figures_unless_a_signal_ends_it(tmp_path: Path, leaves: bool) -> None:
    found: list[dict[str, Any] | None] = []

    class End(Callback):
        def on_step_end(self, run: Run) -> None:
            if leaves:
                run.requests.exit_code = 143

        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            assert "train_loss" not in record

        def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
            if metrics is not None:
                metrics["mine"] = torch.tensor(2.5)
            found.append(metrics)

    trainer = Trainer(Linear(), arguments(tmp_path, logging_steps=1), points(), callbacks=[End()])
    if leaves:
        with pytest.raises(SystemExit):
            trainer.train()
        assert found == [None]
    else:
        result = trainer.train()
        assert found == [result.metrics]
        assert result.metrics["mine"] == 2.5
        assert result.metrics["train_loss"] == result.training_loss


def test_at_most_five_frames_from_train_to_the_users_loss(tmp_path: Path) -> None:
    depths = []

    def compute_loss(model: nn.Module, batch: Any) -> Any:
        names = [frame.function for frame in inspect.stack()]
        depths.append(names.index("train"))
        return model(*batch)

    Trainer(Linear(), arguments(tmp_path, max_steps=2), points(), compute_loss=compute_loss).train()
    assert depths
    assert max(depths) <= 5


def test_callback_that_raises_is_named_and_others_are_told(tmp_path: Path) -> None:
    told: list[BaseException] = []

    class Broken(Callback):
        def on_step_end(self, run: Run) -> None:
            raise KeyError("missing")

    class Witness(Callback):
        def on_exception(self, run: Run, error: BaseException) -> None:
            told.append(error)

    trainer = Trainer(Linear(), arguments(tmp_path), points(), callbacks=[Broken(), Witness()])
    with pytest.raises(CallbackError, match="callback Broken raised in on_step_end: KeyError: 'missing'") as caught:
        trainer.train()
    assert told == [caught.value]
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_that_raises_names_the_index_and_the_checkpoint_stays(tmp_path: Path, workers: int) -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if index == 11:
                raise OSError("no such picture")
            return super().__getitem__(index)

    trainer = make_trainer(tmp_path, dataset=Broken(), save_steps=1, dataloader_num_workers=workers)
    with pytest.raises(RuntimeError, match=r"index 11: OSError: no such picture"):
        trainer.train()
    steps = trainer.run.state.step
    assert steps == 0 or (tmp_path / f"checkpoint-{steps}" / "manifest.json").is_file()


def refused(tmp_path: Path, **changes: Any) -> str:
    given: dict[str, Any] = {"model": Linear(), "train_dataset": points()}
    with pytest.raises((ValueError, TypeError)) as caught:
        Trainer(args=arguments(tmp_path, **changes.pop("args", {})), **(given | changes)).train()
    return str(caught.value)


def test_bad_input_gets_one_sentence(tmp_path: Path) -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"logits": self.layer(x)}

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from points()

    named = [{"x": x, "labels": labels, "id": 1} for x, labels in points()]
    wrong = [(x, labels + 5) for x, labels in points()]
    assert "train_dataset is empty" in refused(tmp_path, train_dataset=[])
    assert "needs train_dataset" in refused(tmp_path, train_dataset=None)
    assert "Silent returned no loss" in refused(tmp_path, model=Silent())
    assert "column id" in refused(tmp_path, train_dataset=named)
    assert "labels" in (message := refused(tmp_path, train_dataset=wrong))
    assert "3 classes" in message
    assert "max_steps" in refused(tmp_path, train_dataset=Endless(), args={"max_steps": -1})
    assert "either model or model_init" in refused(tmp_path, model=None)
    assert "model is a int" in refused(tmp_path, model=3)
    assert "compute_loss returned" in refused(tmp_path, compute_loss=lambda model, batch: None)
    assert "pad_to_multiple_of=8 needs a tokenizer" in refused(tmp_path, args={"pad_to_multiple_of": 8})
    assert "gradient_checkpointing_enable" in refused(tmp_path, args={"gradient_checkpointing": True})
    frozen = Linear().requires_grad_(False)
    assert "no parameter that requires a gradient" in refused(tmp_path, model=frozen)


def test_output_dir_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen = []

    class Witness(Callback):
        def on_train_begin(self, run: Run) -> None:
            seen.append(run)

    args = arguments(tmp_path, output_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(ValueError, match=r"output_dir=.*cannot be written"):
        Trainer(Linear(), args, points(), callbacks=[Witness()]).train()
    assert not seen


def test_eval_strategy_without_a_set_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="eval_strategy='steps' has no effect without eval_dataset"):
        trainer = Trainer(Linear(), arguments(tmp_path, eval_strategy="steps", eval_steps=1), points())
    assert trainer.train().global_step == 4


def test_metric_for_best_model_that_is_not_there_names_what_is(tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="f1", save_strategy="best")
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_f1' is not among .* eval_loss"):
        Trainer(Linear(), args, points(), points(4)).train()


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    losses = []

    class Watch(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            losses.append(metrics["eval_loss"])

    args = arguments(
        tmp_path, max_steps=12, learning_rate=0.9, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=100, load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(Linear(), args, points(), points(7), callbacks=[Watch()])
    trainer.train()
    assert len(set(losses)) > 1
    assert losses[-1] != min(losses)
    assert trainer.evaluate()["eval_loss"] == min(losses)
    assert trainer.run.state.best_metric == min(losses[:12])


def test_predict_gives_every_sample_once_in_order(tmp_path: Path) -> None:
    model = Net()
    trainer = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=3))
    dataset = Noisy(10)
    output = trainer.predict(dataset)
    assert np.array_equal(output.label_ids, dataset.labels.numpy())
    assert output.predictions.shape == (10, 3)
    again = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=7)).predict(dataset)
    np.testing.assert_allclose(again.predictions, output.predictions, atol=1e-6)
    assert output.metrics["test_loss"] == pytest.approx(again.metrics["test_loss"], abs=1e-6)


def test_compute_metrics_and_streaming_metrics_agree(tmp_path: Path) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        return {"whole": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    metrics = {"streamed": MulticlassAccuracy(3, average="micro")}
    trainer = Trainer(
        Net(), arguments(tmp_path), eval_dataset=Noisy(10), compute_metrics=compute_metrics, metrics=metrics
    )
    for _ in range(2):
        result = trainer.evaluate()
        assert result["eval_streamed"] == pytest.approx(result["eval_whole"])


def test_several_evaluation_sets_by_name(tmp_path: Path) -> None:
    trainer = Trainer(Linear(), arguments(tmp_path), eval_dataset={"near": points(4), "far": points(5)})
    assert {"eval_near_loss", "eval_far_loss"} <= set(trainer.evaluate())


def test_modules_that_a_user_keeps_in_evaluation_mode_stay_so(tmp_path: Path) -> None:
    model = Net()
    trainer = Trainer(model, arguments(tmp_path), eval_dataset=Noisy(5))
    model.norm.eval()
    trainer.evaluate()
    assert not model.norm.training
    assert model.dropout.training


def test_model_init_is_seeded(tmp_path: Path) -> None:
    one = Trainer(model_init=Linear, args=arguments(tmp_path, seed=3)).run.model
    torch.rand(5)
    two = Trainer(model_init=Linear, args=arguments(tmp_path, seed=3)).run.model
    assert torch.equal(one.layer.weight, two.layer.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("as_function", [True, False])
def test_own_optimizer_and_scheduler(tmp_path: Path, as_function: bool) -> None:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    scheduler = make if as_function else make(optimizer)
    trainer = Trainer(model, arguments(tmp_path), points(), optimizer=optimizer, lr_scheduler=scheduler)
    trainer.train()
    assert trainer.run.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**4)


def test_plateau_schedule_steps_at_evaluations(tmp_path: Path) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)

    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, learning_rate=0.1)
    trainer = Trainer(Linear(), args, points(), points(4), lr_scheduler=plateau)
    trainer.train()
    assert trainer.run.optimizer is not None
    assert trainer.run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="ReduceLROnPlateau steps at evaluations"):
        Trainer(Linear(), arguments(tmp_path), points(), lr_scheduler=plateau).train()


def test_scheduler_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    other = torch.optim.SGD(Linear().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        Trainer(Linear(), arguments(tmp_path), points(), lr_scheduler=scheduler)


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (1.0, 3), (1.5, 5), (2.0, 6)])
def test_epochs_may_be_fractions(tmp_path: Path, epochs: float, steps: int) -> None:
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=epochs)
    assert Trainer(Linear(), args, points()).train().global_step == steps


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


class Poisoned(Linear):
    """Its loss is NaN in one step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, labels) * (float("nan") if self.calls == self.at else 1.0)


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


def test_train_can_be_called_again(tmp_path: Path) -> None:
    trainer = Trainer(Linear(), arguments(tmp_path), points())
    first = trainer.train().training_loss
    second = trainer.train()
    assert second.global_step == 4
    assert second.training_loss != first  # the model goes on from where it is


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_compile_trains_and_saves_plain_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Linear()
    trainer = Trainer(model, arguments(tmp_path, torch_compile=True), points())
    compiled = trainer.train().training_loss
    torch.manual_seed(0)
    plain = Trainer(Linear(), arguments(tmp_path), points()).train().training_loss
    assert compiled == pytest.approx(plain, abs=1e-5)
    trainer.save_model(tmp_path / "model")
    load_checkpoint_in_model(Linear(), tmp_path / "model")


def test_gradients_from_before_do_not_count(tmp_path: Path) -> None:
    def train(*before: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        model = Linear()
        for sample in before:
            (100 * model(sample[None], torch.tensor([1]))).backward()
        Trainer(model, arguments(tmp_path, optim="sgd", learning_rate=0.1), points()).train()
        return model.layer.weight.detach()

    assert torch.equal(train(torch.ones(4)), train())


def test_a_run_that_was_told_to_leave_can_still_be_evaluated(tmp_path: Path) -> None:
    class Leave(Callback):
        def on_step_end(self, run: Run) -> None:
            run.requests.stop, run.requests.exit_code = True, 130

    trainer = Trainer(Linear(), arguments(tmp_path), points(), points(5), callbacks=[Leave()])
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 130
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1.5}])
def test_the_part_of_an_epoch_at_the_end_is_evaluated(tmp_path: Path, length: dict[str, Any]) -> None:
    evaluated = []

    class Recorder(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            evaluated.append(run.state.step)

    args = arguments(tmp_path, per_device_train_batch_size=5, eval_strategy="epoch", **length)
    result = Trainer(Linear(), args, points(), points(5), callbacks=[Recorder()]).train()
    assert evaluated[-1] == result.global_step
    assert len(set(evaluated)) == len(evaluated)


def test_what_cannot_be_trained_gets_one_sentence(tmp_path: Path) -> None:
    class Detached(Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(x, labels).detach()

    def train(model: nn.Module, dataset: Any, **given: Any) -> None:
        Trainer(model, arguments(tmp_path), dataset, **given).train()

    with pytest.raises(ValueError, match="the loss depends on no parameter of this Detached"):
        train(Detached(), points())
    with pytest.raises(ValueError, match=r"Linear\.forward.* a batch, which is a tuple of 2: too many positional"):
        train(nn.Linear(4, 3), points())
    with pytest.raises(ValueError, match=r"a dict with the entries x: missing a required argument: 'labels'"):
        train(Linear(), [{"x": torch.ones(4)}])
    with pytest.raises(TypeError, match="train_dataset is a DataLoader; give its dataset"):
        train(Linear(), torch.utils.data.DataLoader(points()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="train_dataset is a dict of train, test; give one dataset"):
        train(Linear(), {"train": points(), "test": points()})
    with pytest.raises(ValueError, match="optimizer holds no parameter of this Linear"):
        train(Linear(), points(), optimizer=torch.optim.SGD(Linear().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="optimizer is a LBFGS"):
        train(model := Linear(), points(), optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="lr_scheduler gave None; give a scheduler"):
        train(Linear(), points(), lr_scheduler=lambda optimizer: None)
    with pytest.raises(TypeError, match="lr_scheduler gave 'linear'"):
        train(Linear(), points(), lr_scheduler="linear")
    with torch.device("meta"):
        empty = Linear()
    with pytest.raises(ValueError, match=r"layer\.weight is on the meta device"):
        train(empty, points())


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_callback_whose_state_raises_is_named(tmp_path: Path, method: str) -> None:
    class Keeper(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"kept": 1}

    args = arguments(tmp_path, save_strategy="steps")
    Trainer(Linear(), args, points(), callbacks=[Keeper()]).train()

    def fail(*_: Any) -> Any:
        raise KeyError("kept")

    keeper = Keeper()
    setattr(keeper, method, fail)
    trainer = Trainer(Linear(), args, points(), callbacks=[keeper])
    with pytest.raises(CallbackError, match=f"callback Keeper raised in {method}: KeyError"):
        trainer.train(resume_from_checkpoint=method == "load_state_dict")


def test_predictions_leave_out_what_a_model_did_not_give(tmp_path: Path) -> None:
    class WithNothing(Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(x, labels), self.layer(x), None

    seen = []
    trainer = Trainer(
        WithNothing(), arguments(tmp_path), compute_metrics=lambda each: seen.append(each.predictions.shape) or {}
    )
    trainer.evaluate(points(5))
    assert seen == [(5, 3)]


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


def test_a_column_that_only_kwargs_take_is_told_once(tmp_path: Path) -> None:
    class Taking(Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return super().forward(x, labels)

    samples = [{"x": x, "labels": labels, "weigths": torch.ones(())} for x, labels in points()]
    with pytest.warns(UserWarning, match="no parameter for the column weigths") as caught:
        Trainer(Taking(), arguments(tmp_path), samples).train()
    assert len(caught) == 1


def test_training_again_with_a_schedule_that_ran_its_course_is_refused(tmp_path: Path) -> None:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=6)
    trainer = Trainer(model, arguments(tmp_path), points(), optimizer=optimizer, lr_scheduler=scheduler)
    trainer.train()
    with pytest.raises(ValueError, match="lr_scheduler has run its course"):
        trainer.train()


def test_a_metric_without_a_prefix(tmp_path: Path) -> None:
    assert "loss" in Trainer(Linear(), arguments(tmp_path), eval_dataset=points()).evaluate(metric_key_prefix="")


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


def test_evaluating_leaves_the_generators_alone(tmp_path: Path) -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.random_sample()), random.random()

    trainer = Trainer(Linear(), arguments(tmp_path), eval_dataset=points())
    seed_generators(3)
    expected = draws()
    seed_generators(3)
    trainer.evaluate()
    assert draws() == expected


def test_a_plain_model_gets_no_mask_that_it_does_not_take(tmp_path: Path) -> None:
    class Tokenizer:
        pad_token_id = 0

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.table(input_ids).sum(1), labels)

    samples = [{"input_ids": [1] * (1 + index % 4), "labels": index % 3} for index in range(16)]
    assert Trainer(Bag(), arguments(tmp_path), samples, processing_class=Tokenizer()).train().global_step == 4
