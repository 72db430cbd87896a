"""Learning rates of loops as accelerate's users write them, compared with accelerate's own on as many processes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit.ranks import on_ranks
from kit.static_shapes import OnFour
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import accelerator as trainer_kit_accelerator
from trainer_kit.accelerator import Accelerator
from trainer_kit.accelerator import accelerator as core

PEAK = 0.1
EPOCHS = 2


@dataclasses.dataclass(frozen=True)
class Script:
    """A training script, as far as it matters for its rates.

    Attributes:
        schedule: How it makes its schedule, see `make_schedule`.
        accumulation: Batches of an optimizer step.
        samples: Of its dataset, in batches of 6.
        max_steps: Ends it, and its schedule where that is "max_train_steps"; None: goes through all epochs.
        step: Where it calls `scheduler.step()`: "batch", or "epoch" for an epoch's end.
        by_hand: Whether it counts batches itself, as older scripts do, instead of `accumulate`.
        overflows: Optimizer steps whose fp16 gradients overflow.
        options: Of the Accelerator.
        plugin: Of GradientAccumulationPlugin.
    """

    schedule: str = "linear"
    accumulation: int = 1
    samples: int = 144
    max_steps: int | None = None
    step: str = "batch"
    by_hand: bool = False
    overflows: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    plugin: tuple[tuple[str, Any], ...] = ()


SCRIPTS = {
    "transformers, epochs": Script(),
    "transformers, epochs, accumulation": Script(accumulation=3),
    "transformers, an odd number of batches": Script(samples=133, accumulation=2),
    "transformers, max_train_steps": Script(max_steps=7),
    "transformers, max_train_steps, accumulation": Script(max_steps=5, accumulation=2),
    "older transformers": Script(accumulation=2, by_hand=True),
    "notebook": Script("one cycle"),
    "notebook, an odd number of batches": Script("one cycle", samples=133),
    "notebook, accumulation": Script("one cycle", accumulation=4),
    "notebook, adjusted for accumulation": Script("one cycle of steps", accumulation=4),
    "notebook, not adjusted for accumulation": Script(
        "one cycle of steps", accumulation=4, plugin=(("adjust_scheduler", False), ("sync_each_batch", True))
    ),
    "split_batches": Script(options=(("split_batches", True),)),
    "split_batches, accumulation": Script("one cycle", accumulation=2, options=(("split_batches", True),)),
    "overflows": Script(overflows=(1, 2, 5)),
    "overflows, accumulation": Script("one cycle", accumulation=2, overflows=(0, 3)),
    "without the optimizer": Script(accumulation=2, options=(("step_scheduler_with_optimizer", False),)),
    "an epoch's end": Script("StepLR", step="epoch", options=(("step_scheduler_with_optimizer", False),)),
    "an epoch's end, with the optimizer": Script("StepLR", step="epoch"),
    "plateau": Script("plateau", step="epoch"),
    "no multiple of the steps": Script("StepLR", samples=138, accumulation=3),
}


def make_schedule(script: Script, optimizer: Any, loader: Any, processes: int) -> Any:
    """As transformers' examples (run_clm_no_trainer.py) and accelerate's guides do."""
    steps_per_epoch = math.ceil(len(loader) / script.accumulation)
    if script.schedule == "linear":
        from transformers import get_scheduler

        steps = EPOCHS * steps_per_epoch if script.max_steps is None else script.max_steps * processes
        return get_scheduler("linear", optimizer, num_warmup_steps=2 * processes, num_training_steps=steps)
    if script.schedule == "one cycle":
        return OneCycleLR(optimizer, max_lr=PEAK, epochs=EPOCHS, steps_per_epoch=len(loader))
    if script.schedule == "one cycle of steps":
        return OneCycleLR(optimizer, max_lr=PEAK, epochs=EPOCHS, steps_per_epoch=steps_per_epoch)
    if script.schedule == "plateau":
        return ReduceLROnPlateau(optimizer, patience=1)
    return StepLR(optimizer, 3, gamma=0.5)


def run(
    library: str, script: Script, load: Path | None = None, save: tuple[int, Path] | None = None, limit: int = 1000
) -> list[float]:
    """The rate at each optimizer step, and the one after the last.

    Args:
        library: "accelerate" or "trainer_kit".
        script: What to run.
        load: A checkpoint to go on from.
        save: The optimizer step after which a checkpoint is saved, and where; the script ends there.
        limit: Optimizer steps at most.
    """
    import accelerate.utils

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate's, and torch's of schedules that step more often than optimizers
        theirs = library == "accelerate"
        module: Any = accelerate.utils if theirs else trainer_kit_accelerator
        make: Any = accelerate.Accelerator if theirs else Accelerator
        options = dict(script.options)
        if theirs and options.pop("split_batches", False):
            options["dataloader_config"] = module.DataLoaderConfiguration(split_batches=True)
        if not script.by_hand:
            plugin = module.GradientAccumulationPlugin(num_steps=script.accumulation, **dict(script.plugin))
            options["gradient_accumulation_plugin"] = plugin
        if script.overflows and not theirs:
            options["mixed_precision"] = "fp16"
        try:
            accelerator = make(cpu=True, **options)
            if script.overflows and theirs:  # where it makes none on its own
                accelerator.scaler = torch.amp.GradScaler("cpu")
            return list(itertools.islice(_loop(accelerator, script, load, save), limit))
        finally:
            if theirs:
                accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
                accelerate.state.GradientState._reset_state()


def _loop(accelerator: Any, script: Script, load: Path | None, save: tuple[int, Path] | None) -> Iterator[float]:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=PEAK)
    loader: Any = DataLoader(TensorDataset(torch.randn(script.samples, 3)), batch_size=6)
    schedule = make_schedule(script, optimizer, loader, accelerator.num_processes)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if load is not None:
        accelerator.load_state(str(load))
    done = 0
    for _ in range(EPOCHS):
        for number, (inputs,) in enumerate(loader):
            ends = number % script.accumulation == 0 or number == len(loader) - 1
            if script.by_hand:
                accelerator.backward(model(inputs).mean() / script.accumulation)
                if not ends:
                    continue
            rate = optimizer.param_groups[0]["lr"]
            if script.by_hand:
                _step(script, optimizer, schedule)
            else:
                with accelerator.accumulate(model):
                    scale = math.inf if done in script.overflows else 0.01
                    accelerator.backward(model(inputs).mean() * scale)
                    _step(script, optimizer, schedule)
            if not accelerator.sync_gradients:
                continue
            yield rate
            done += 1
            if save is not None and done == save[0]:
                accelerator.save_state(str(save[1]))
            if done in (script.max_steps, save and save[0]):
                break
        if script.step == "epoch":
            schedule.step(1.0) if script.schedule == "plateau" else schedule.step()
        if done in (script.max_steps, save and save[0]):
            break
    yield optimizer.param_groups[0]["lr"]


def _step(script: Script, optimizer: Any, schedule: Any) -> None:
    optimizer.step()
    if script.step == "batch":
        schedule.step()
    optimizer.zero_grad()


def run_all(library: str) -> dict[str, list[float]]:
    return {name: run(library, script) for name, script in SCRIPTS.items()}


@pytest.mark.scenario
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_rates_are_accelerate_s(processes: int) -> None:
    theirs = on_ranks(processes, run_all, "accelerate")[0]
    for ours in on_ranks(processes, run_all, "trainer_kit"):
        for name in SCRIPTS:
            assert ours[name] == theirs[name], name
    for name in (
        "transformers, epochs",
        "transformers, max_train_steps",
        "transformers, max_train_steps, accumulation",
    ):
        assert theirs[name][-1] == 0, name  # as their makers meant
    assert theirs["notebook"][-1] < PEAK / 100
    assert theirs["overflows"][1:4] == [PEAK / 2] * 3  # amid the warmup, where two steps were left out


def once() -> list[float]:
    """A loop written for trainer_kit: its schedule is made for the optimizer's steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer="once")
    model: Any = nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=PEAK)
    loader: Any = DataLoader(TensorDataset(torch.randn(144, 3)), batch_size=6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = math.ceil(len(loader) / 2)
    schedule = accelerator.prepare(OneCycleLR(optimizer, PEAK, total_steps=EPOCHS * steps + 1))
    rates = []
    for _ in range(EPOCHS):
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates += schedule.get_last_lr()
    assert schedule.last_epoch == len(rates) == EPOCHS * steps
    return rates


@pytest.mark.scenario
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_schedule_of_the_optimizer_s_steps_steps_once(processes: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    steps = EPOCHS * math.ceil(24 / processes / 2)
    plain = OneCycleLR(optimizer, PEAK, total_steps=steps + 1)
    expected = []
    for _ in range(steps):
        optimizer.step()
        plain.step()
        expected += plain.get_last_lr()
    assert on_ranks(processes, once) == [expected] * processes
    assert expected[-1] == pytest.approx(PEAK / 25 / 1e4)


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["transformers, epochs, accumulation", "transformers, max_train_steps", "notebook"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3)])
def test_a_schedule_goes_on_as_accelerate_s(before: int, after: int, name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    rates: dict[str, list[float]] = {}
    for library in ("accelerate", "trainer_kit"):
        folder = tmp_path / library
        begun = on_ranks(before, run, library, script, save=(3, folder))[0]
        rates[library] = begun + on_ranks(after, run, library, script, load=folder, limit=4)[0]
    assert rates["trainer_kit"] == rates["accelerate"]
    assert len(rates["accelerate"]) == 8
    if before == after:
        straight = on_ranks(before, run, "trainer_kit", script)[0]
        assert begun == straight[:4]
        assert rates["trainer_kit"][4:] == straight[3:7]


def test_a_schedule_loaded_by_another_number_of_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "state"
    with mock.patch.object(core, "choose_strategy", return_value=OnFour()):
        run("trainer_kit", Script(), save=(2, folder))
    with caplog.at_level(logging.WARNING):
        assert run("trainer_kit", Script(), load=folder, limit=1)
    assert "saved where a schedule steps 4 times with each optimizer step, here 1" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run("trainer_kit", Script(), save=(2, tmp_path / "same"))
        run("trainer_kit", Script(), load=tmp_path / "same")
    assert caplog.text == ""


def test_devices_of_one_process_count_as_processes(caplog: pytest.LogCaptureFixture) -> None:
    """As XLA's do: the notebook guide's schedule is at its end when the training is."""
    with mock.patch.object(core, "choose_strategy", return_value=OnFour()), caplog.at_level(logging.WARNING):
        rates = run("trainer_kit", SCRIPTS["notebook"])
    assert "a schedule steps 4 times with each optimizer step, once for each device" in caplog.text
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    plain = OneCycleLR(optimizer, PEAK, total_steps=48)
    expected = list(plain.get_last_lr())
    for _ in range(48):
        optimizer.step()
        plain.step()
        expected += plain.get_last_lr()
    assert rates == expected[::4]


def test_an_unknown_way_to_step() -> None:
    with pytest.raises(ValueError, match="step_scheduler_with_optimizer='twice' is not known; use True, False or"):
        Accelerator(cpu=True, step_scheduler_with_optimizer="twice")  # type: ignore[arg-type]
