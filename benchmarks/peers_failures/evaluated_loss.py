"""The eval_loss of the same language model on the same 32 texts of 2 to 16 tokens, in batches of 1, 8 and 32.

The true mean over all predicted tokens is computed by plain torch; a contender is right if its eval_loss is that, in
batches of any size.

    python benchmarks/peers_failures/evaluated_loss.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from contenders import IGNORED, language_model, own_trainer, show, stacked, texts, transformers_trainer

BATCHES = (1, 8, 32)
CONTENDERS = {"transformers": transformers_trainer, "trainer_kit": own_trainer}
SAMPLES = texts(34)[2:]  # each has a token to predict


def true_loss(model: Any) -> float:
    """Return the mean over all predicted tokens: a label is predicted from the tokens before it."""
    batch = stacked(SAMPLES)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))


def main() -> None:
    """Prints each contender's eval_loss for each size of the batches, and the true one."""
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        true = true_loss(language_model(name))
        for contender, make in CONTENDERS.items():
            losses = []
            for size in BATCHES:
                with tempfile.TemporaryDirectory() as folder:
                    options = {"per_device_eval_batch_size": size}
                    trainer = make(Path(folder), language_model(name), options, None, SAMPLES)
                    losses.append(trainer.evaluate()["eval_loss"])
            is_right = all(abs(loss - true) < 1e-5 * true for loss in losses)
            figures = ", ".join(f"{loss:.3f}" for loss in losses)
            show(contender, is_right, f"{name} has eval_loss {figures} in batches of 1, 8, 32; the mean is {true:.3f}")


if __name__ == "__main__":
    main()
