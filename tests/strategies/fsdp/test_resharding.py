"""Checkpoints under each layout are resumed under each other one, with the same bits of all states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.architectures import llama
from kit.ranks import on_ranks
from kit.token_training import whole

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA
from trainer_kit.checkpoint.format import ownership
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.utils.pytree import tensors

LAYOUTS: dict[str, tuple[int, Any]] = {
    "single": (1, None),
    "ddp 2": (2, lambda: DDP(device="cpu")),
    "fsdp 2": (2, lambda: FSDP(device="cpu")),
    "fsdp 3": (3, lambda: FSDP(device="cpu")),
    "fsdp 4": (4, lambda: FSDP(device="cpu")),
    "hsdp 2x2": (4, lambda: FSDP(device="cpu", mesh={"replicate": 2, "shard": 2})),
}
QUICK = [("single", "fsdp 2"), ("ddp 2", "fsdp 2"), ("fsdp 2", "single"), ("fsdp 2", "ddp 2"), ("fsdp 2", "fsdp 2")]
SLOW = [(one, other) for one in LAYOUTS for other in LAYOUTS if (one, other) not in QUICK and one != "single" != other]


class Held(Callback):
    """All tensors of the run when training begins, and at its end."""

    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []
        self.last: list[torch.Tensor] = []

    def on_train_begin(self, run: Run) -> None:
        self.first = held(run)

    def on_step_end(self, run: Run) -> None:
        self.last = held(run)


def held(run: Run) -> list[torch.Tensor]:
    assert run.optimizer is not None
    states = [*run.model.state_dict().values(), *tensors([*run.optimizer.state.values()])]
    return [whole(each).detach().clone() for each in states]


def train(folder: str, layout: str, steps: int, resume: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    ownership.PART_BYTES = 1000  # small models have several writers
    torch.manual_seed(0)
    world, make = LAYOUTS[layout]
    samples = [{"input_ids": torch.arange(4) + index, "labels": torch.arange(4) + index} for index in range(24)]
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        log_level="error", per_device_train_batch_size=12 // world, learning_rate=1e-2, lr_scheduler_type="constant",
    )  # fmt: skip
    ema, seen = EMA(decay=0.5), Held()
    model = llama(tie_word_embeddings=True).double()
    trainer = Trainer(model, args, samples, callbacks=[ema, seen], strategy=make and make())
    trainer.train(resume_from_checkpoint=resume)
    averages = [whole(each).clone() for each in ema.state_dict()["averages"].values()]
    return seen.first, [*seen.last, *averages]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "after"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)], ids=str
)
def test_a_resume_has_the_bits_of_the_checkpoint(tmp_path: Path, before: str, after: str) -> None:
    folder = str(tmp_path / "run")
    _, saved = on_ranks(LAYOUTS[before][0], train, folder, before, 2, False)[0]
    _, further = on_ranks(LAYOUTS[before][0], train, str(tmp_path / "whole"), before, 3, False)[0]
    for first, last in on_ranks(LAYOUTS[after][0], train, folder, after, 3, True):
        assert len(first) > 20
        for ours, theirs in zip(first, saved, strict=False):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(last, further, strict=True):
            assert torch.equal(ours, theirs) or before != after
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
