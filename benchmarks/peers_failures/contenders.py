"""What the scripts of this folder share: a small model with its data, trainers without output, and the printed line.

Each script sets the same task to trainer_kit and to the installed peers, and prints for each what happened. A line says
"right" or "wrong" by a comparison that the script makes, not by the name of the contender.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH, IGNORED = 32, 16, -100
_SETTINGS = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}


def show(contender: str, is_right: bool, what: str) -> None:
    """Print what happened with a contender, with the version of a peer."""
    version = "" if contender.startswith("trainer_kit") else f" {importlib.metadata.version(contender)}"
    print(f"{contender}{version}, {'right' if is_right else 'wrong'}: {what}", flush=True)


class TokenModel(nn.Module):
    """Predicts a token from the one at the same place; its loss is the mean over the labels of the batch.

    Args:
        width: Size of the hidden layer.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits of `input_ids` and `labels`, both of shape [samples, tokens]."""
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "logits": logits}


def token_model(width: int = 8) -> TokenModel:
    """Return a model in float64 with the same weights at each call."""
    torch.manual_seed(0)
    return TokenModel(width).double()


class Regression(nn.Module):
    """A linear model that notes on which samples it is trained.

    Attributes:
        seen: Numbers of the samples, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of `x`, shape [samples, 4]."""
        if torch.is_grad_enabled():
            self.seen += number.tolist()
        return {"loss": (self.layer(x).squeeze(-1) - x.sum(-1)).square().mean()}


def rows(samples: int) -> list[dict[str, torch.Tensor]]:
    """Return samples for `Regression`, each with its number."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": each, "number": torch.tensor(number)} for number, each in enumerate(x)]


def language_model(name: str) -> Any:
    """Return a small language model of transformers with random weights, whose losses differ from text to text.

    Args:
        name: Name of its class, "LlamaForCausalLM" or "GPT2LMHeadModel".
    """
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    others = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "use_cache": False, "bos_token_id": 0}
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes, **others, eos_token_id=0, intermediate_size=64)).double()


def texts(number: int) -> list[dict[str, torch.Tensor]]:
    """Return texts of 1 to `LENGTH` tokens, padded; each is one token again and again, so that losses differ."""
    found = []
    for index in range(number):
        length = 1 + index * (LENGTH - 1) // max(1, number - 1)
        input_ids = torch.full((LENGTH,), index % VOCABULARY)
        labels = torch.where(torch.arange(LENGTH) < length, input_ids, IGNORED)
        found.append({"input_ids": input_ids, "labels": labels})
    return found


def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the batch of samples."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def transformers_trainer(
    folder: Path, model: nn.Module, options: Mapping[str, Any], train: Any = None, evaluation: Any = None, **others: Any
) -> Any:
    """Return transformers' Trainer, which prints nothing.

    Args:
        folder: Its `output_dir`.
        model: The model.
        options: Further fields of its TrainingArguments.
        train: Training dataset.
        evaluation: Evaluation dataset.
        others: Further arguments of the Trainer.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    defaults = {"logging_strategy": "no", "train_sampling_strategy": "sequential"}
    args = transformers.TrainingArguments(str(folder), **{**_SETTINGS, **defaults, **options})
    trainer = transformers.Trainer(model, args, train_dataset=train, eval_dataset=evaluation, **others)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer


def own_trainer(
    folder: Path, model: nn.Module, options: Mapping[str, Any], train: Any = None, evaluation: Any = None, **others: Any
) -> Any:
    """Return trainer_kit's Trainer with the same settings; see `transformers_trainer`."""
    from trainer_kit import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(folder), **{**_SETTINGS, "shuffle": False, **options})
    return Trainer(model, args, train, evaluation, **others)


def has(package: str) -> bool:
    """Return whether a package is installed; the scripts leave a peer out that is not."""
    return importlib.util.find_spec(package) is not None


def lightning_module(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Return a LightningModule as its guide writes one: its steps return and log the mean loss of their batch.

    Args:
        model: The model, which is called with the batch.
        optimizer: Its optimizer; None: AdamW.
    """
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            loss = self.model(**batch)["loss"]
            self.log("eval_loss", loss, batch_size=len(next(iter(batch.values()))))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters()) if optimizer is None else optimizer

    return Module()


def lightning_trainer(folder: Path, **options: Any) -> Any:
    """Return Lightning's Trainer, which prints nothing.

    Args:
        folder: Its `default_root_dir`.
        options: Further arguments of the Trainer.
    """
    from lightning.pytorch import Trainer

    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(default_root_dir=folder, accelerator="cpu", devices=1, **{**silent, **options})


def keras_on_torch() -> Any:
    """Return the package keras on the backend torch."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    return keras


def keras_model(model: TokenModel, optimizer: Mapping[str, Any]) -> Any:
    """Return a keras model on the backend torch, with the layers, the weights and the loss of a `TokenModel`.

    Args:
        model: The model.
        optimizer: Arguments of its optimizer, SGD.
    """
    keras = keras_on_torch()
    keras.config.set_floatx("float64")
    width = model.embedding.embedding_dim
    made = keras.Sequential([keras.layers.Embedding(VOCABULARY, width), keras.layers.Dense(VOCABULARY)])
    made.build((None, LENGTH))
    made.set_weights([each.detach().numpy().T for each in (model.embedding.weight.T, *model.head.parameters())])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=IGNORED)
    made.compile(keras.optimizers.SGD(**optimizer), loss)
    return made


def loader(samples: list[dict[str, torch.Tensor]], batch_size: int) -> Any:
    """Return a DataLoader of samples in their order."""
    data: Any = samples
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a script of this folder in a process of its own, whose output can be read."""
    command = [sys.executable, "-W", "ignore", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process; return its exit code and the last line that it printed, of errors if it failed."""
    output, errors = process.communicate(timeout=300)
    lines = (errors if process.returncode else output).strip().splitlines()
    return process.returncode, lines[-1] if lines else ""
