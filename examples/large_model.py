"""Pretrain a Llama that is sharded over processes, resume on another number of them, and generate a text.

    python examples/large_model.py                                                     one process
    trainer-kit launch --fsdp --num-processes 2 examples/large_model.py                each holds half of the model
    trainer-kit launch --fsdp --num-processes 3 examples/large_model.py --resume       resumes an interrupted run

The text is the Python language reference, as in `language_model.py`. Each step has 24 pieces of it, whatever the number
of processes, so that a run may resume on another number. The default model has 4.5 million parameters and takes 5 to 10
minutes on 2 CPU cores; with `--width 4096 --layers 32` it has 7 billion. The trained folder holds weights,
configuration and tokenizer, and transformers loads it on one process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from language_model import CONTEXT, RandomCuts, load_texts, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainer_kit import Trainer, TrainingArguments

PIECES_PER_STEP = 24


def generate(folder: Path, prompt: str, tokens: int) -> str:
    """Load a folder with transformers, and continue `prompt`."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, temperature=0.6)
    return str(tokenizer.decode(written[0]))


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train on the processes that the launcher started; return the figures, and the text on the main process."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # set by the launcher; only the batch size depends on it
    text, held_out = load_texts()
    tokenizer = make_tokenizer(text)
    ids, held_out_ids = (torch.tensor(tokenizer.encode(each)) for each in (text, held_out))
    pieces = [held_out_ids[start : start + CONTEXT] for start in range(0, len(held_out_ids) - 1, CONTEXT - 1)]
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, hidden_size=options.width,
        intermediate_size=3 * options.width, num_hidden_layers=options.layers, num_attention_heads=options.width // 64,
        bos_token_id=None, eos_token_id=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=30 if options.short else 500,
        per_device_train_batch_size=PIECES_PER_STEP // processes,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
        logging_steps=10,
        save_steps=10 if options.short else 100,
        save_total_limit=2,
    )
    trainer = Trainer(
        args=args,
        train_dataset=RandomCuts(ids),
        eval_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        processing_class=tokenizer,
        model_init=lambda: LlamaForCausalLM(config),  # whole on the main process alone
    )
    trained = trainer.train(resume_from_checkpoint=options.resume)
    figures = trained.metrics | trainer.evaluate() | {"processes": processes}
    folder = Path(args.output_dir) / "model"
    trainer.save_model(folder)
    if trainer.run.strategy.is_main:
        figures["text"] = generate(folder, options.prompt, 10 if options.short else 80)
        print(f"\n{processes} process(es): {trained}")
        print(f"loss on held-out text {figures['eval_loss']:.3f}; {folder} continues {options.prompt!r}:")
        print(figures["text"])
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/large_model", help="checkpoints, logs, model (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="width of the model, a multiple of 64 (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (%(default)s)")
    parser.add_argument("--prompt", default="A class definition", help="how the generated text begins")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="30 steps, to see that everything works")
    return train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
