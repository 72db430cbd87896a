"""Small trainings for the tests of XLA, the same on every strategy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from trainer_kit import Callback, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.callbacks import read_log
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.strategies.xla.strategy import XLA

BATCH = 8
VOCABULARY = 100
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class Net(torch.nn.Module):
    """Two layers that share their weight, and a third."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        logits = self.head(self.dropout(hidden))
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


class Points(Dataset[Any]):
    """Points of three classes."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 8, generator=generator)
        self.labels = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Texts(Dataset[Any]):
    """Rows of 3 to 20 tokens; labelled as a whole (`BertForSequenceClassification`), or by token."""

    def __init__(self, samples: int, by_token: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 21, (samples,), generator=generator).tolist()
        self.rows = [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
        self.by_token = by_token

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row if self.by_token else row[0] % 2}


class Tokenizer:
    """What `PadCollator` needs of one."""

    pad_token_id = 0
    padding_side = "right"
    model_input_names = ("input_ids", "attention_mask")


def net(dropout: float = 0.0) -> torch.nn.Module:
    """A small network."""
    return Net(dropout)


def bert(dropout: float = 0.0) -> torch.nn.Module:
    """A classifier of 2 layers."""
    config = BertConfig(
        **_SMALL, intermediate_size=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return BertForSequenceClassification(config)


def gpt2(dropout: float = 0.0) -> torch.nn.Module:
    """A language model of 2 layers whose head is its embedding."""
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**_SMALL, n_positions=64, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **ends)
    return GPT2LMHeadModel(config)


TASKS: dict[str, tuple[Any, Any]] = {
    "net": (net, Points),
    "bert": (bert, Texts),
    "gpt2": (gpt2, lambda samples: Texts(samples, by_token=True)),
}


def make_trainer(
    folder: Path,
    task: str = "net",
    strategy: Strategy | None = None,
    *,
    samples: int = 50,
    dropout: float = 0.0,
    callbacks: Iterable[Callback] = (),
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """A task's Trainer, whose batches are as large on any number of devices; `changes` are arguments.

    Adam's epsilon is large, since nobody can compare a step in the direction of a gradient that is only rounding.
    """
    make_model, make_dataset = TASKS[task]
    torch.manual_seed(0)
    strategy = strategy or SingleDevice("cpu")
    strategy.setup()
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": BATCH // strategy.devices,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "adam_epsilon": 1e-3,
        "warmup_steps": 2, "logging_steps": 3, "save_strategy": "no", "report_to": "jsonl", "disable_tqdm": True,
        "log_level": "warning",
    }  # fmt: skip
    args = TrainingArguments(**(arguments | changes))
    given: dict[str, Any] = {"processing_class": None if task == "net" else Tokenizer()} | (trainer or {})
    model = make_model(dropout)
    return Trainer(
        model, args, make_dataset(samples), make_dataset(21), callbacks=callbacks, strategy=strategy, **given
    )


def strategy(name: str) -> Strategy:
    """ "cpu", "xla" or "fsdp"."""
    return SingleDevice("cpu") if name == "cpu" else XLA(fsdp=name == "fsdp")


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The trained model's state, on the host, under the user's own names."""
    return {name: value.detach().cpu() for name, value in trainer.run.model.state_dict().items()}


def losses(folder: Path) -> list[float]:
    """The logged losses of a run."""
    return [record["loss"] for record in read_log(folder / "log.jsonl") if "loss" in record]


def compiled() -> int:
    """How many graphs torch_xla has compiled in this process."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


class Watch(Callback):
    """Writes down a number after each step."""

    def __init__(self, number: Any) -> None:
        self.number = number
        self.seen: list[Any] = []

    def on_step_end(self, run: Run) -> None:
        self.seen.append(self.number())
