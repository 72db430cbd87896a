"""Writes Python documentation: a small GPT-2, trained from nothing on the Python language reference.

    python examples/language_model.py              3 to 5 minutes on 2 CPU cores
    python examples/language_model.py --resume     goes on where a run that was broken off stands

The text ships with Python itself (`help("with")` shows it), so nothing is downloaded. The last tenth of it is held out;
the tokenizer is made from the rest and saved beside the model, so that transformers can load both from a checkpoint.
The text is cut at random places, and a resumed run still sees the same pieces as one that was never stopped.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from trainer_kit import Strategy, Trainer, TrainingArguments
from trainer_kit.callbacks import read_log
from trainer_kit.callbacks.formatting import number

CONTEXT = 96
"""Tokens that the model sees at once, about 320 characters."""


class RandomCuts(Dataset[dict[str, torch.Tensor]]):
    """Pieces of a text from random places; an epoch is as many of them as the text is long."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(torch.randint(len(self.ids) - CONTEXT, ()))
        piece = self.ids[start : start + CONTEXT]
        return {"input_ids": piece, "labels": piece}


def load_texts() -> tuple[str, str]:
    """The language reference without its repetitions: nine tenths to train on, and the rest."""
    paragraphs = list(dict.fromkeys(part for text in topics.values() for part in re.split("\n{2,}", text.strip())))
    cut = len(paragraphs) * 9 // 10
    return "\n\n".join(paragraphs[:cut]), "\n\n".join(paragraphs[cut:])


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Byte pairs: the 2,048 pieces of words that `text` is best written with."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, initial_alphabet=alphabet, special_tokens=["<pad>"], show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def make_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """A GPT-2 of 3 layers, 0.9 million parameters."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=128, n_layer=3, n_head=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it uses anyway; transformers warns where it is not said
    return model


@torch.no_grad()
def write(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int) -> str:
    """Goes on with `prompt`, token by token."""
    model.eval()
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)
    for _ in range(tokens):
        scores = model(input_ids=ids[:, -CONTEXT:]).logits[:, -1] / 0.6
        ids = torch.cat([ids, torch.multinomial(scores.softmax(dim=-1), 1)], dim=1)
    return str(tokenizer.decode(ids[0]))


def plot(curves: Mapping[str, Sequence[tuple[int, float]]], width: int = 60, height: int = 12) -> str:
    """Curves of points (step, loss) as lines of text, each drawn with the character that is its name."""
    points = [(step, loss, mark) for mark, curve in curves.items() for step, loss in curve]
    low, high = min(loss for _, loss, _ in points), max(loss for _, loss, _ in points)
    last = max(step for step, _, _ in points)
    rows = [[" "] * (width + 1) for _ in range(height + 1)]
    for step, loss, mark in points:
        rows[round((high - loss) / (high - low or 1) * height)][round(step / last * width)] = mark
    labels = [f"{high:.2f}", *[""] * (height - 1), f"{low:.2f}"]
    lines = [f"{label:>6} |{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    return "\n".join([*lines, f"{'':>6} +{'-' * (width + 1)} step {last}"])


def main(argv: Sequence[str] | None = None, strategy: Strategy | None = None) -> dict[str, Any]:
    """Trains, shows the curve and writes a text; returns the figures, the curve and the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/language_model", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--prompt", default="A class definition", help="what the sampled text begins with")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="30 steps, to see that all works")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    text, held_out = load_texts()
    tokenizer = make_tokenizer(text)
    model = make_model(tokenizer)
    ids = torch.tensor(tokenizer.encode(text))
    held_out_ids = torch.tensor(tokenizer.encode(held_out))
    # The first token of a piece is not predicted, so that each piece begins with the last token of the one before.
    pieces = [held_out_ids[start : start + CONTEXT] for start in range(0, len(held_out_ids) - 1, CONTEXT - 1)]
    args = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=30 if options.short else 1500,
        per_device_train_batch_size=16,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=100,
        save_steps=100,
        save_total_limit=2,
    )
    trainer = Trainer(
        model, args, RandomCuts(ids), [{"input_ids": piece, "labels": piece} for piece in pieces],
        processing_class=tokenizer, strategy=strategy,
    )  # fmt: skip
    trained = trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]

    records = read_log(Path(args.output_dir) / "log.jsonl")
    curve = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out_curve = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    sample = write(model.cpu(), tokenizer, options.prompt, 10 if options.short else 150)
    bits = loss * (len(held_out_ids) - 1) / math.log(2) / len(held_out.encode())
    figures = trained.metrics
    print(f"\nloss per token: * training, o held out\n{plot({'*': curve, 'o': held_out_curve})}")
    print(f"\nit writes\n---------\n{sample}\n---------")
    print(f"on the held-out text: perplexity {math.exp(loss):.1f} per token, {bits:.2f} bits per byte")
    speed = figures["train_samples_per_second"] * CONTEXT
    print(
        f"{trained.global_step} steps in {figures['train_runtime']:.0f} s, {speed:,.0f} tokens/s, "
        f"peak memory in GiB: {number(figures['peak_memory_gib'])}"
    )
    print(f"curves:       tensorboard --logdir {args.log_dir}")
    print(f'the model:    GPT2LMHeadModel.from_pretrained("{args.output_dir}/checkpoint-{trained.global_step}")')
    print(f"go on after a break: python examples/language_model.py --output-dir {args.output_dir} --resume")
    return {**figures, "bits_per_byte": bits, "curve": curve, "sample": sample}


if __name__ == "__main__":
    main()
