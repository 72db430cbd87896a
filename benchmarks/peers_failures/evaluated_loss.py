"""The eval_loss of the same model on the same 32 texts of 2 to 16 tokens, in batches of 1, 8 and 32.

The true mean over all predicted tokens is computed by plain torch; a contender is right if its eval_loss is that, in
batches of any size.

    python benchmarks/peers_failures/evaluated_loss.py
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import (
    IGNORED,
    TokenModel,
    has,
    keras_model,
    language_model,
    lightning_module,
    lightning_trainer,
    loader,
    own_trainer,
    show,
    stacked,
    texts,
    token_model,
    transformers_trainer,
)

BATCHES = (1, 8, 32)
SAMPLES = texts(35)[3:]  # each has a token to predict
MODELS: dict[str, Callable[[], Any]] = {
    "a plain module": token_model,
    "LlamaForCausalLM": functools.partial(language_model, "LlamaForCausalLM"),
    "GPT2LMHeadModel": functools.partial(language_model, "GPT2LMHeadModel"),
}


def by_trainer(make: Callable[..., Any], model: Any, folder: Path, size: int) -> float:
    """Evaluate with a Trainer of transformers' kind."""
    trainer = make(folder, model, {"per_device_eval_batch_size": size}, None, SAMPLES)
    return float(trainer.evaluate()["eval_loss"])


def by_lightning(model: Any, folder: Path, size: int) -> float:
    """Evaluate with Lightning's Trainer."""
    trainer = lightning_trainer(folder)
    [metrics] = trainer.validate(lightning_module(model), loader(SAMPLES, size), verbose=False)
    return float(metrics["eval_loss"])


def by_keras(model: Any, folder: Path, size: int) -> float:
    """Evaluate with keras' `evaluate`."""
    batch = stacked(SAMPLES)
    inputs, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    return float(keras_model(model, {}).evaluate(inputs, labels, batch_size=size, verbose=0))


def true_loss(model: Any) -> float:
    """Return the mean over all predicted tokens: a language model predicts a label from the tokens before it."""
    batch = stacked(SAMPLES)
    with torch.no_grad():
        if isinstance(model, TokenModel):
            return float(model(**batch)["loss"])
        logits = model.eval()(input_ids=batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))


def main() -> None:
    """Prints each contender's eval_loss for each size of the batches, and the true one."""
    contenders: dict[str, Callable[[Any, Path, int], float]] = {
        "transformers": functools.partial(by_trainer, transformers_trainer),
        "trainer_kit": functools.partial(by_trainer, own_trainer),
    }
    if has("lightning"):
        contenders["lightning"] = by_lightning
    if has("keras"):
        contenders["keras"] = by_keras
    for name, make in MODELS.items():
        true = true_loss(make())
        for contender, evaluate in contenders.items():
            if contender == "keras" and make is not token_model:
                continue
            losses = []
            for size in BATCHES:
                with tempfile.TemporaryDirectory() as folder:
                    losses.append(evaluate(make(), Path(folder), size))
            is_right = all(abs(loss - true) < 1e-5 * true for loss in losses)
            figures = ", ".join(f"{loss:.3f}" for loss in losses)
            show(contender, is_right, f"{name} has eval_loss {figures} in batches of 1, 8, 32; the mean is {true:.3f}")


if __name__ == "__main__":
    main()
