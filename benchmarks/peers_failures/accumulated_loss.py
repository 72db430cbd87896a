"""One step over 8 texts of 1 to 16 tokens: whole, and as 4 micro-batches of 2 by gradient accumulation.

The step over the whole batch is computed by plain torch; a contender is right if its weights are the same. The first
model is a plain module that returns the mean over its batch's tokens, the second one is of transformers.

    python benchmarks/peers_failures/accumulated_loss.py
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import (
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

TEXTS, BATCH, ACCUMULATION = 8, 2, 4
OPTIONS = {
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "max_steps": 1,
    "max_grad_norm": 0.0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "a plain module": token_model,
    "LlamaForCausalLM": functools.partial(language_model, "LlamaForCausalLM"),
}


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def sgd(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return an optimizer whose step is the gradient, and a constant schedule."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def whole_batch(model: torch.nn.Module) -> None:
    """Take a step of plain torch over the whole batch."""
    optimizer, _ = sgd(model)
    model(**stacked(texts(TEXTS)))["loss"].backward()
    optimizer.step()


def transformers(model: torch.nn.Module, folder: Path) -> None:
    """Take a step of transformers' Trainer."""
    transformers_trainer(folder, model, OPTIONS, texts(TEXTS), optimizers=sgd(model)).train()


def lightning(model: torch.nn.Module, folder: Path) -> None:
    """Take a step of Lightning's Trainer."""
    trainer = lightning_trainer(folder, max_steps=1, accumulate_grad_batches=ACCUMULATION, enable_checkpointing=False)
    trainer.fit(lightning_module(model, sgd(model)[0]), loader(texts(TEXTS), BATCH))


def keras(model: TokenModel) -> None:
    """Take a step of keras' `fit`, whose optimizer accumulates the gradients."""
    made = keras_model(model, {"learning_rate": 1.0, "gradient_accumulation_steps": ACCUMULATION})
    batch = stacked(texts(TEXTS))
    made.fit(batch["input_ids"].numpy(), batch["labels"].numpy(), batch_size=BATCH, shuffle=False, verbose=0)
    embedding, kernel, bias = map(torch.as_tensor, made.get_weights())
    model.load_state_dict({"embedding.weight": embedding, "head.weight": kernel.T, "head.bias": bias})


def trainer_kit(model: torch.nn.Module, folder: Path) -> None:
    """Take a step of trainer_kit's Trainer."""
    optimizer, scheduler = sgd(model)
    own_trainer(folder, model, OPTIONS, texts(TEXTS), optimizer=optimizer, lr_scheduler=scheduler).train()


def loop(kind: Any, model: torch.nn.Module) -> None:
    """Take a step of the loop that accelerate's guide to gradient accumulation shows first."""
    accelerator = kind(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    data: Any = texts(TEXTS)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=BATCH)
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model)[0], loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Prints how far each contender's step is from the right one."""
    from accelerate import Accelerator

    from trainer_kit import Accelerator as OwnAccelerator

    for name, make in MODELS.items():
        before, model = weights_of(make()), make()
        whole_batch(model)
        right = weights_of(model)
        with tempfile.TemporaryDirectory() as folder:
            contenders: dict[str, Callable[[Any], None]] = {
                "transformers": functools.partial(transformers, folder=Path(folder) / "theirs"),
                "accelerate": functools.partial(loop, Accelerator),
                "trainer_kit": functools.partial(trainer_kit, folder=Path(folder) / "ours"),
                "trainer_kit's Accelerator": functools.partial(loop, OwnAccelerator),
            }
            if has("lightning"):
                contenders["lightning"] = functools.partial(lightning, folder=Path(folder) / "lightning")
            if has("keras") and make is token_model:
                contenders["keras"] = keras
            for contender, take_step in contenders.items():
                take_step(model := make())
                error = float((weights_of(model) - right).abs().max() / (right - before).abs().max())
                is_right = error < 1e-6
                what = "takes the step of the whole batch" if is_right else f"takes a step that is off by {error:.0%}"
                show(contender, is_right, f"{name} {what}")


if __name__ == "__main__":
    main()
