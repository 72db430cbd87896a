"""The Trainer as its users meet it."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments
from scenarios.task import Noisy, make_trainer
from torch import nn

from trainer_kit import (
    Callback,
    CallbackError,
    Run,
    Trainer,
    TrainingArguments,
)


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
    assert "column id" in refused(tmp_path, train_dataset=named, args={"remove_unused_columns": False})
    assert "labels" in (message := refused(tmp_path, train_dataset=wrong))
    assert "3 classes" in message
    assert "max_steps" in refused(tmp_path, train_dataset=Endless(), args={"max_steps": -1})
    assert "either model or model_init" in refused(tmp_path, model=None)
    assert "model is a int" in refused(tmp_path, model=3)
    assert "compute_loss returned" in refused(tmp_path, compute_loss=lambda model, batch: None)
    assert "pad_to_multiple_of=8 needs a tokenizer" in refused(tmp_path, args={"pad_to_multiple_of": 8})
    assert "finds no block that Linear repeats" in refused(tmp_path, args={"gradient_checkpointing": True})
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


def test_model_init_is_seeded(tmp_path: Path) -> None:
    one = Trainer(model_init=Linear, args=arguments(tmp_path, seed=3)).run.model
    torch.rand(5)
    two = Trainer(model_init=Linear, args=arguments(tmp_path, seed=3)).run.model
    assert torch.equal(one.layer.weight, two.layer.weight)  # type: ignore[union-attr, arg-type]


def test_train_can_be_called_again(tmp_path: Path) -> None:
    trainer = Trainer(Linear(), arguments(tmp_path), points())
    first = trainer.train().training_loss
    second = trainer.train()
    assert second.global_step == 4
    assert second.training_loss != first  # the model goes on from where it is


def test_a_second_training_keeps_the_model_and_a_given_optimizer_alone(tmp_path: Path) -> None:
    begun, optimizers = [], []

    class Watch(Callback):
        def on_train_begin(self, run: Run) -> None:
            begun.append({name: value.clone() for name, value in run.model.state_dict().items()})
            optimizers.append(run.optimizer)

    trainer = Trainer(model_init=Linear, args=arguments(tmp_path), train_dataset=points(), callbacks=[Watch()])
    trainer.train()
    trained = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    torch.testing.assert_close(begun[1], trained, rtol=0, atol=0)
    assert optimizers[0] is not optimizers[1]
    model = Linear()
    given = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, arguments(tmp_path), points(), optimizer=given)
    for steps in (4, 8):
        trainer.train()
        assert {int(state["step"]) for state in given.state.values()} == {steps}


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
    with pytest.raises(TypeError, match="train_dataset is a dict of train, test; give one dataset"):
        train(Linear(), {"train": points(), "test": points()})
    with pytest.raises(ValueError, match="optimizer holds no parameter of this Linear"):
        train(Linear(), points(), optimizer=torch.optim.SGD(Linear().parameters(), lr=0.1))
    several = [torch.optim.SGD(Linear().parameters(), lr=0.1)] * 2
    with pytest.raises(TypeError, match=r"optimizer is a list; give one torch.optim.Optimizer, .*examples/gan.py"):
        train(Linear(), points(), optimizer=several)
    with pytest.raises(TypeError, match="optimizer is a function; call it"):
        train(Linear(), points(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(TypeError, match="optimizer is a LBFGS"):
        train(model := Linear(), points(), optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="lr_scheduler gave None; give a scheduler"):
        train(Linear(), points(), lr_scheduler=lambda optimizer: None)
    with pytest.raises(TypeError, match="lr_scheduler gave 'linear'"):
        train(Linear(), points(), lr_scheduler="linear")
    with torch.device("meta"):
        empty = Linear()
    with pytest.raises(ValueError, match=r"layer\.weight is on the meta device.*strategy='fsdp'"):
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


def test_a_column_that_only_kwargs_take_is_told_once(tmp_path: Path) -> None:
    class Taking(Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return super().forward(x, labels)

    samples = [{"x": x, "labels": labels, "weigths": torch.ones(())} for x, labels in points()]
    with pytest.warns(UserWarning, match="no parameter for the column weigths") as caught:
        Trainer(Taking(), arguments(tmp_path), samples).train()
    assert len(caught) == 1


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
