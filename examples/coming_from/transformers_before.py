"""A small Llama learns to count, with transformers' Trainer.

Run it with `python examples/coming_from/transformers_before.py`.
"""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class PrintAccuracy(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **others):
        print(
            f"step {state.global_step}: {metrics['eval_accuracy']:.1%}"
        )


def accuracy(given):
    guesses = given.predictions.argmax(-1)[:, :-1]
    right = guesses == given.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


def count():
    starts, steps = torch.arange(31), torch.arange(1, 9)
    rows = torch.cartesian_prod(starts, steps)
    rows = rows[torch.randperm(len(rows))]
    counts = (rows[:, :1] + rows[:, 1:] * torch.arange(16)) % 31
    return [{"input_ids": row, "labels": row} for row in counts]


def main(output_dir, shuffle=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    args = TrainingArguments(
        output_dir,
        num_train_epochs=6,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        train_sampling_strategy="random" if shuffle else "sequential",
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
    )
    rows = count()
    trainer = Trainer(
        model,
        args,
        train_dataset=rows[:200],
        eval_dataset=rows[200:],
        compute_metrics=accuracy,
        callbacks=[PrintAccuracy()],
    )
    trained = trainer.train()
    return {"train_loss": trained.training_loss, **trainer.evaluate()}


if __name__ == "__main__":
    print(main("runs/before"))
