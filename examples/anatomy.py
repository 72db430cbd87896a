"""Where memory and time go: the exercise of transformers' guide "Model training anatomy".

    python examples/anatomy.py                 BERT-large on a GPU; on a CPU a small BERT, about 15 seconds on 2 cores
    python examples/anatomy.py --full          BERT-large on a CPU too: 16 GB of memory, and hours on 2 cores

512 sequences of 512 random tokens with random labels, in batches of 4 (on a CPU 32 sequences of 128 tokens): a model
cannot learn anything from them, but they cost as much as real ones. The example prints the memory before and after the
weights are loaded and after training, the time by activity, and the memory of a step by component: estimated before
training, and measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from trainer_kit import SingleDevice, Trainer, TrainingArguments, print_summary
from trainer_kit.memory import measure


def make_data(sequences: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of random tokens, without special ones, each with one of two labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 30_000, (sequences, tokens), generator=generator)
    labels = torch.randint(0, 2, (sequences,), generator=generator)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def make_model(is_large: bool) -> torch.nn.Module:
    """Return BERT-large, or a BERT with a thirtieth of its parameters."""
    if is_large:
        large = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        return BertForSequenceClassification(large)
    small = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    return BertForSequenceClassification(small)


def occupied(memory: Mapping[str, Any]) -> str:
    """Return the memory in use: of the GPU, as reported by NVIDIA or else by PyTorch; on a CPU, of the process."""
    gib = memory.get("device_memory_gib", memory.get("reserved_memory_gib", memory["memory_gib"]))
    return f"{gib * 1024:,.0f} MiB"


def activities(metrics: Mapping[str, Any]) -> str:
    """List the time of the run by activity, longest first; activities that took almost no time are left out."""
    seconds = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("seconds/")}
    whole = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return "\n".join(f"{name:<24}{value:>8.2f} s {value / whole:>7.1%}" for name, value in ordered if value >= 0.005)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train and print the anatomy; return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/anatomy", help="logs (%(default)s)")
    parser.add_argument("--full", action="store_true", help="BERT-large and 512 x 512 tokens on a CPU too")
    parser.add_argument("--short", action="store_true", help="8 sequences, to see that everything works")
    options = parser.parse_args(argv)

    strategy = SingleDevice()
    strategy.setup()
    is_large = options.full or strategy.device.type == "cuda"
    name, sequences, tokens = ("BERT-large", 512, 512) if is_large else ("a small BERT", 32, 128)
    data = make_data(8 if options.short else sequences, tokens)
    print(f"{name} on {strategy.device}, {len(data)} sequences of {tokens} tokens")

    print(f"memory, empty:             {occupied(strategy.device_info.memory()):>12}")
    torch.manual_seed(0)
    model = strategy.prepare(make_model(is_large))
    print(f"memory, weights loaded:    {occupied(strategy.device_info.memory()):>12}")

    args = TrainingArguments(
        output_dir=options.output_dir, num_train_epochs=1, per_device_train_batch_size=4, save_strategy="no",
        report_to="none",  # writers would use memory too
    )  # fmt: skip
    trainer = Trainer(model, args, data, strategy=strategy)
    estimated = trainer.estimate().anatomy
    result = trainer.train()
    print(f"memory, after training:    {occupied(strategy.device_info.memory()):>12}\n")
    print_summary(result)
    print(f"\nwhere the time went\n{activities(result.metrics)}")

    measured = measure(model, args, trainer.collate(data[:4]), device=strategy.device)
    print(f"\nwhere the memory of a step goes\n{estimated.table(measured)}")
    return {**result.metrics, "estimated": estimated.peak, "measured": measured.peak}


if __name__ == "__main__":
    main()
