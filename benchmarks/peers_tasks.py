"""The tasks of `benchmarks/peers.py`: models, samples and their order, the same for every contender."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import page
import torch
from torch.utils.data import Dataset

BATCH, LEARNING_RATE, CLIP = 8, 1e-3, 1.0
WIDTH, LENGTH, VOCABULARY = 256, 64, 1000


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to train, for how long, and when it is saved.

    Attributes:
        make: Makes the model.
        save_at: The step after which the checkpoint is saved, and from which it resumes.
        warm_up: Steps that are not timed.
        after: Steps after the save.
    """

    make: Callable[[], torch.nn.Module]
    save_at: int
    warm_up: int
    after: int

    @property
    def steps(self) -> int:
        """All steps of an uninterrupted run."""
        return self.save_at + self.after


class Net(torch.nn.Module):
    """Two layers; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def bert(layers: int = 2) -> torch.nn.Module:
    """A BERT that classifies, without dropout, so that all contenders compute the same losses."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: torch.nn.Module = BertForSequenceClassification(config)
    return model


def gpt2(layers: int = 2) -> torch.nn.Module:
    """A GPT-2 language model without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=layers, n_head=4, n_positions=LENGTH, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model: torch.nn.Module = GPT2LMHeadModel(config)
    return model


def tasks(is_quick: bool) -> dict[str, Task]:
    """Return the tasks by name; the quick ones only show that the losses are the same."""
    if is_quick:
        return {"MLP": Task(Net, 12, 4, 6), "GPT-2": Task(lambda: gpt2(1), 6, 2, 4)}
    return {
        "MLP": Task(Net, 800, 200, 50),
        "BERT": Task(bert, 24, 6, 10),
        "GPT-2": Task(gpt2, 24, 6, 10),
    }


class Samples(Dataset[Any]):
    """Random samples of a task.

    Args:
        name: Name of the task.
        places: The number of the sample at each index, for a contender that shuffles by itself; None: the index.
    """

    def __init__(self, name: str, places: list[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.name, self.places = name, places
        if name == "MLP":
            self.x = torch.randn(16_000, 16, generator=generator)
        else:
            self.x = torch.randint(0, VOCABULARY, (4000, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = self.x[index if self.places is None else self.places[index]]
        if self.name == "MLP":
            return {"x": x, "labels": (x[0] > 0).long()}
        if self.name == "BERT":
            return {"input_ids": x, "labels": x[0] % 2}
        labels = x.clone()
        labels[0] = -100  # which no token predicts, but transformers' Trainer would count
        return {"input_ids": x, "labels": labels}


class Recorder:
    """Notes when each training step begins, by hooks of the model, which are the same under every contender.

    Args:
        model: The model itself, not what a contender makes of it.
        at_step: Called before the forward pass of a step with the number of steps done; its time is not counted.

    Attributes:
        begins: Seconds since the epoch at which the forward pass of each step began.
        pauses: Seconds spent in `at_step`, by step.
        losses: The loss of each step.
    """

    def __init__(self, model: torch.nn.Module, at_step: Callable[[int], None]) -> None:
        self.begins: list[float] = []
        self.pauses: dict[int, float] = {}
        self.losses: list[torch.Tensor] = []
        self.at_step = at_step
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def _begin(self, model: torch.nn.Module, inputs: Any) -> None:
        # trainer_kit and others may call the model without gradients before the first step: that is no step.
        if not torch.is_grad_enabled() or len(self.losses) < len(self.begins):
            return
        now = time.time()
        self.begins.append(now)
        self.at_step(len(self.begins) - 1)
        if (pause := time.time() - now) > 1e-4:
            self.pauses[len(self.begins) - 1] = pause

    def _end(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self.losses.append(outputs["loss"].detach())

    def duration(self, step: int) -> float:
        """Seconds from the beginning of a step, counted from 0, to that of the next."""
        return self.begins[step + 1] - self.begins[step] - self.pauses.get(step, 0.0)


def peak_memory() -> tuple[int, int]:
    """Return the peak bytes of this process on the host and on the GPU."""
    on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return page.peak_memory(), on_device
