"""Six steps over 24 samples of which one holds a NaN, with the defaults, and what is left of the model.

A contender is right if the weights are finite afterwards.

    python benchmarks/peers_failures/nan_loss.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from contenders import (
    Regression,
    has,
    keras_on_torch,
    lightning_module,
    lightning_trainer,
    loader,
    own_trainer,
    rows,
    show,
    stacked,
    transformers_trainer,
)

BAD = 9
OPTIONS = {"per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 1}


def samples() -> list[dict[str, torch.Tensor]]:
    """Return the samples, of which one holds a NaN."""
    found = rows(24)
    found[BAD]["x"][0] = torch.nan
    return found


def state_of(parameters: Iterable[torch.Tensor]) -> tuple[bool, str]:
    """Return whether all weights are finite, and the same in words."""
    weights = torch.nn.utils.parameters_to_vector(parameters)
    lost = int((~weights.isfinite()).sum())
    return lost == 0, f"{lost} of {len(weights)} weights are NaN"


def transformers(folder: Path) -> None:
    """Train with transformers' Trainer."""
    model = Regression()
    trainer = transformers_trainer(folder, model, {**OPTIONS, "logging_strategy": "steps"}, samples())
    result = trainer.train()
    losses = ", ".join(f"{record['loss']:.2f}" for record in trainer.state.log_history if "loss" in record)
    is_finite, words = state_of(model.parameters())
    show("transformers", is_finite, f"ends after step {result.global_step} with logged losses {losses}; {words}")


def lightning(folder: Path) -> None:
    """Train with Lightning's Trainer."""
    model = Regression()
    trainer = lightning_trainer(folder, max_steps=6, enable_checkpointing=False)
    trainer.fit(lightning_module(model), loader(samples(), 4))
    is_finite, words = state_of(model.parameters())
    show("lightning", is_finite, f"ends after step {trainer.global_step}; {words}")


def keras() -> None:
    """Train with keras' `fit`."""
    package = keras_on_torch()
    package.utils.set_random_seed(0)
    model = package.Sequential([package.layers.Dense(1)])
    model.compile("adam", "mse")
    inputs = stacked(samples())["x"].numpy()
    model.fit(inputs, inputs.sum(-1), batch_size=4, shuffle=False, verbose=0)
    weights = [torch.as_tensor(each).flatten() for each in model.get_weights()]
    is_finite, words = state_of(weights)
    show("keras", is_finite, f"ends after step {int(model.optimizer.iterations)}; {words}")


def trainer_kit(folder: Path) -> None:
    """Train with trainer_kit's Trainer."""
    from trainer_kit.errors import NonFiniteError

    model = Regression()
    try:
        own_trainer(folder, model, OPTIONS, samples()).train()
        end = "ends without an error"
    except NonFiniteError as error:
        end = f"stops with NonFiniteError: {str(error).partition(':')[0]}"
    is_finite, words = state_of(model.parameters())
    show("trainer_kit", is_finite, f"{end}; {words}")


def main() -> None:
    """Prints what is left of the model."""
    with tempfile.TemporaryDirectory() as folder:
        transformers(Path(folder) / "theirs")
        trainer_kit(Path(folder) / "ours")
        if has("lightning"):
            lightning(Path(folder) / "lightning")
        if has("keras"):
            keras()


if __name__ == "__main__":
    main()
