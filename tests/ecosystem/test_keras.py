"""keras: the page "Coming from keras" names what exists, and its script trains as ours does from the same weights."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.name_tables import Names, example, named, problems, public, version

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]  # keras' own


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
