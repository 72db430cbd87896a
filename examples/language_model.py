"""Train a small GPT-2 from scratch on the Python language reference, and sample from it.

    python examples/language_model.py              3 to 5 minutes on 2 CPU cores
    python examples/language_model.py --steps 60   about 10 seconds
    python examples/language_model.py --resume     resumes an interrupted run

The text ships with Python itself (`help("with")` shows it), so nothing is downloaded. The last tenth of it is held out.
The tokenizer is trained on the rest and saved with the model, so that transformers can load both from a checkpoint. The
text is cut at random places; a resumed run still sees the same pieces as one that was never stopped.
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

CONTEXT = 96
"""Length of the context in tokens, about 320 characters."""


class RandomCuts(Dataset[dict[str, torch.Tensor]]):
    """Random pieces of a text; an epoch has as many tokens as the text."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(torch.randint(len(self.ids) - CONTEXT, ()))
        piece = self.ids[start : start + CONTEXT]
        return {"input_ids": piece, "labels": piece}


def load_texts() -> tuple[str, str]:
    """Return the language reference without its repetitions: nine tenths for training, and the rest."""
    paragraphs = list(dict.fromkeys(part for text in topics.values() for part in re.split("\n{2,}", text.strip())))
    cut = len(paragraphs) * 9 // 10
    return "\n\n".join(paragraphs[:cut]), "\n\n".join(paragraphs[cut:])


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer with 2,048 tokens on `text`."""
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
    """Return a GPT-2 with 3 layers and 0.9 million parameters."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=128, n_layer=3, n_head=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, but transformers warns if it is not set
    return model


@torch.no_grad()
def write(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int) -> str:
    """Continue `prompt`, token by token."""
    model.eval()
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)
    for _ in range(tokens):
        scores = model(input_ids=ids[:, -CONTEXT:]).logits[:, -1] / 0.6
        ids = torch.cat([ids, torch.multinomial(scores.softmax(dim=-1), 1)], dim=1)
    return str(tokenizer.decode(ids[0]))


def plot(curves: Mapping[str, Sequence[tuple[int, float]]], width: int = 60, height: int = 12) -> str:
    """Draw curves of points (step, loss) as text; the name of a curve is the character it is drawn with."""
    points = [(step, loss, mark) for mark, curve in curves.items() for step, loss in curve]
    low, high = min(loss for _, loss, _ in points), max(loss for _, loss, _ in points)
    last = max(step for step, _, _ in points)
    rows = [[" "] * (width + 1) for _ in range(height + 1)]
    for step, loss, mark in points:
        rows[round((high - loss) / (high - low or 1) * height)][round(step / last * width)] = mark
    labels = [f"{high:.2f}", *[""] * (height - 1), f"{low:.2f}"]
    lines = [f"{label:>6} |{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    return "\n".join([*lines, f"{'':>6} +{'-' * (width + 1)} step {last}"])


def train(
    output_dir: str, steps: int, prompt: str, sample_tokens: int, resume: bool = False, strategy: Strategy | None = None
) -> dict[str, Any]:
    """Train, plot the loss and sample a text; return the figures, the curve and the text."""
    torch.manual_seed(0)
    text, held_out = load_texts()
    tokenizer = make_tokenizer(text)
    model = make_model(tokenizer)
    ids = torch.tensor(tokenizer.encode(text))
    held_out_ids = torch.tensor(tokenizer.encode(held_out))
    # The first token of a piece is not predicted, so each piece begins with the last token of the one before.
    pieces = [held_out_ids[start : start + CONTEXT] for start in range(0, len(held_out_ids) - 1, CONTEXT - 1)]
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
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
    trained = trainer.train(resume_from_checkpoint=resume)
    loss = trainer.evaluate()["eval_loss"]

    records = read_log(Path(args.output_dir) / "log.jsonl")
    curve = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out_curve = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    sample = write(model.cpu(), tokenizer, prompt, sample_tokens)
    bits = loss * (len(held_out_ids) - 1) / math.log(2) / len(held_out.encode())
    print(f"\nloss per token: * training, o held out\n{plot({'*': curve, 'o': held_out_curve})}")
    print(f"\nsampled text\n------------\n{sample}\n------------")
    print(f"held-out text: perplexity {math.exp(loss):.1f} per token, {bits:.2f} bits per byte")
    print(f"{trained}, {trained.metrics['train_samples_per_second'] * CONTEXT:,.0f} tokens/s")
    print(f"curves:       tensorboard --logdir {args.log_dir}")
    print(f'the model:    GPT2LMHeadModel.from_pretrained("{args.output_dir}/checkpoint-{trained.global_step}")')
    return {**trained.metrics, "bits_per_byte": bits, "curve": curve, "sample": sample}


def main(argv: Sequence[str] | None = None, strategy: Strategy | None = None) -> dict[str, Any]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/language_model", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--prompt", default="A class definition", help="how the sampled text begins")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="30 steps, to see that everything works")
    options = parser.parse_args(argv)
    steps, tokens = (30, 10) if options.short else (options.steps, min(options.steps, 150))
    return train(options.output_dir, steps, options.prompt, tokens, options.resume, strategy)


if __name__ == "__main__":
    main()
