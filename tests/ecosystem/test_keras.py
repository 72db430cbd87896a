"""keras: the page "Coming from keras" names what exists, and its script trains as ours does from the same weights."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.name_tables import Names, example, named, problems, public, version
from kit.trainer import arguments

from trainer_kit import Callback, Run, Trainer, load_checkpoint_in_model

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
"""The warnings are keras' own."""


@pytest.fixture(autouse=True)
def keras(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    return pytest.importorskip("keras")


def names(keras: Any) -> Names:
    functions = (keras.Model.compile, keras.Model.fit)
    return Names({"model": keras.Model, "keras": keras}, (keras.callbacks.Callback,), functions)


def test_each_name_exists(keras: Any) -> None:
    assert problems("keras", names(keras)) == []
    assert importlib.metadata.version("keras").startswith(f"{version('keras').split()[1]}.")


def test_what_is_public_is_on_the_page(keras: Any) -> None:
    functions = (keras.Model.compile, keras.Model.fit)
    wanted = {name for function in functions for name in inspect.signature(function).parameters} - {"self"}
    wanted |= {name for name in dir(keras.callbacks.Callback) if name.startswith(("on_", "set_"))}
    wanted |= public(keras.callbacks)
    assert wanted - named("keras") == set()


def make_model(keras: Any) -> Any:
    layers = [
        keras.layers.Dense(32, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.5, name="dropout"),
        keras.layers.Dense(4, name="scores"),
    ]
    model = keras.Sequential(layers, name="classifier")
    model.build((None, 8))
    return model


def compute_loss(model: Any, batch: Any) -> torch.Tensor:
    rows, labels = batch
    return torch.nn.functional.cross_entropy(model(rows, training=model.training), labels)


def test_a_keras_model_trains_as_it_is(tmp_path: Path, keras: Any) -> None:
    keras.utils.set_random_seed(0)
    rows = torch.randn(64, 8)
    dataset = torch.utils.data.TensorDataset(rows, rows[:, :4].argmax(-1))
    model, args = make_model(keras), arguments(tmp_path, max_steps=60, learning_rate=1e-2)
    trainer = Trainer(model, args, dataset, dataset, compute_loss=compute_loss)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    trainer.save_model(tmp_path / "model")
    other = make_model(keras)
    load_checkpoint_in_model(other, tmp_path / "model", strict=False)
    with torch.no_grad():
        assert torch.equal(model(rows), other(rows))

    model.train()
    with torch.no_grad():
        assert not torch.equal(model(rows, training=model.training), model(rows, training=model.training))  # dropout
        assert torch.equal(model(rows), model(rows))  # none, in spite of train()


class StopAt(Callback):
    """Saves and ends a run after a step, as an interruption does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        run.requests.save = run.requests.stop = run.state.step == self.step


def test_a_keras_model_resumes_to_the_same_bits(tmp_path: Path, keras: Any) -> None:
    def train(folder: Path, *callbacks: Callback, resume: bool = False) -> dict[str, torch.Tensor]:
        keras.utils.clear_session()  # names as in a fresh process
        keras.utils.set_random_seed(0)
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        dataset = torch.utils.data.TensorDataset(rows, rows[:, :4].argmax(-1))
        model, args = make_model(keras), arguments(folder, max_steps=20, save_strategy="epoch")
        trainer = Trainer(model, args, dataset, compute_loss=compute_loss, callbacks=callbacks)
        assert trainer.train(resume_from_checkpoint=resume).global_step in (20, 13)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    whole = train(tmp_path / "whole")
    stopped = train(tmp_path / "stopped", StopAt(13))
    resumed = train(tmp_path / "stopped", resume=True)
    assert any(not torch.equal(stopped[name], value) for name, value in whole.items())
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_the_script_trains_the_same_from_the_same_weights(
    tmp_path: Path, keras: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = keras.Sequential.fit

    def fit_from_torch_s_weights(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        torch.manual_seed(0)  # as the other script
        layers = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)]
        self.build(images.shape)
        self.set_weights([each for layer in layers for each in (layer.weight.detach().T, layer.bias.detach())])
        return fit(self, images, *args, **options)

    monkeypatch.setattr(keras.Sequential, "fit", fit_from_torch_s_weights)
    before = example("keras_before")(str(tmp_path / "before"), shuffle=False)
    after = example("keras_after")(str(tmp_path / "after"), shuffle=False)
    for name in ("eval_loss", "eval_accuracy"):
        assert after[name] == pytest.approx(before[name], rel=1e-3)
