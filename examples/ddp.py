"""Train one script on one process or on many; the results are the same.

    python examples/ddp.py                                          about 15 seconds on 2 CPU cores
    trainer-kit launch --num-processes 2 examples/ddp.py            the same training on two processes
    torchrun --nproc-per-node 2 examples/ddp.py                     started by PyTorch's own launcher
    trainer-kit launch --num-processes 2 examples/ddp.py --resume   resumes an interrupted run

A small recurrent network learns to predict the next letter in texts of many lengths. The batch of a step is divided
among the processes (`--batch-size` is the global batch size), and the loss is the mean over all tokens of the step. So
any number of processes takes the same steps and ends with the same loss, up to rounding.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer_kit import Trainer, TrainingArguments

LETTERS = 16


class Texts(Dataset[Any]):
    """Texts of 4 to 24 letters; each letter is the sum of the two before it, so it can be predicted."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.texts = [self._text(generator) for _ in range(length)]

    def _text(self, generator: torch.Generator) -> torch.Tensor:
        letters = torch.randint(1, LETTERS, (2,), generator=generator).tolist()
        for _ in range(int(torch.randint(2, 23, (), generator=generator))):
            letters.append(1 + (letters[-1] + letters[-2]) % (LETTERS - 1))
        return torch.tensor(letters)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"letters": self.texts[index]}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad letters with 0; the label of a letter is the next one, and -100 (ignored) after the last."""
    letters = nn.utils.rnn.pad_sequence([sample["letters"] for sample in samples], batch_first=True)
    labels = letters.roll(-1, dims=1)
    labels[:, -1] = 0
    return {"letters": letters, "labels": labels.masked_fill(labels == 0, -100)}


class NextLetter(nn.Module):
    """A small recurrent network that returns the mean loss over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 48, padding_idx=0)
        self.reader = nn.GRU(48, 96, batch_first=True)
        self.head = nn.Linear(96, LETTERS)

    def forward(self, letters: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.reader(self.embedding(letters))[0])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": scores}


def train(output_dir: str, steps: int, batch_size: int, resume: bool = False) -> dict[str, float]:
    """Train on the processes that the launcher started; return the figures on all of them."""
    torch.manual_seed(0)
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by the launcher; only the batch size depends on it
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=max(1, batch_size // processes),
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_steps=max(1, steps // 20),
        eval_strategy="steps",
        eval_steps=100,
        save_steps=100,
    )
    trainer = Trainer(NextLetter(), args, Texts(4000, seed=1), Texts(301, seed=2), data_collator=collate)
    trained = trainer.train(resume_from_checkpoint=resume)
    figures = trainer.evaluate() | {"train_loss": trained.training_loss, "processes": processes}
    if trainer.run.strategy.is_main:
        print(f"\n{processes} process(es): {trained.global_step} steps of {batch_size} texts")
        print(f"mean training loss {figures['train_loss']:.6f}, evaluation loss {figures['eval_loss']:.6f}")
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/ddp", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=48, help="texts of a step, over all processes (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="20 steps, to see that everything works")
    options = parser.parse_args(argv)
    return train(options.output_dir, 20 if options.short else 400, options.batch_size, options.resume)


if __name__ == "__main__":
    main()
