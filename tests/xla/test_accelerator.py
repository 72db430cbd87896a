"""A loop written by hand under XLA: unchanged, the weights of a CPU, nothing compiled after the first epoch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from kit import xla_task
from kit.on_xla import on_cpu, on_xla
from kit.static_shapes import OnFour
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit.accelerator import Accelerator, DistributedType, ProjectConfiguration, set_seed
from trainer_kit.accelerator import accelerator as core

pytestmark = pytest.mark.xla

SAMPLES = 50
TEST_SAMPLES = 21


class Outcome(NamedTuple):
    """What came of a loop.

    Attributes:
        weights: Of the model, on the host.
        losses: Of the batches.
        right: Test samples that were classified right after each epoch.
        compiled: Graphs after each epoch, on XLA.
    """

    weights: dict[str, torch.Tensor]
    losses: list[float]
    right: list[int]
    compiled: list[int]


def compiled(accelerator: Accelerator) -> int:
    return xla_task.compiled() if accelerator.distributed_type is DistributedType.XLA else 0


def prepared(accelerator: Accelerator, task: str, dropout: float = 0.0) -> tuple[Any, ...]:
    """Model, optimizer, and loaders to train and test with, of 8 samples a batch on all devices together."""
    make_model, make_dataset = xla_task.TASKS[task]
    torch.manual_seed(0)
    model = make_model(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)
    loaders = [
        DataLoader(make_dataset(SAMPLES), batch_size=8, shuffle=True),
        DataLoader(make_dataset(TEST_SAMPLES), batch_size=8),
    ]
    if task == "gpt2":
        from trainer_kit.data.collate import PadCollator

        for loader in loaders:
            loader.collate_fn = PadCollator(xla_task.Tokenizer(), pad_to_lengths=[24])
    optimizer, *loaders, model = accelerator.prepare(optimizer, *loaders, model)
    return model, optimizer, *loaders


def test(accelerator: Accelerator, model: torch.nn.Module, loader: Any) -> int:
    """How many samples are classified right, each of them counted once."""
    labels = []
    right = 0
    model.eval()
    for batch in loader:
        with torch.no_grad():
            guesses = model(**{name: value for name, value in batch.items() if name != "labels"})["logits"].argmax(-1)
        guesses, targets = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right += int((guesses == targets).sum())
        labels += targets.tolist()
    model.train()
    assert labels == [sample.tolist() for sample in map(torch.as_tensor, (each["labels"] for each in loader.dataset))]
    return right


test.__test__ = False  # type: ignore[attr-defined]


def train(task: str, epochs: int = 3, order: str = "clears last") -> Outcome:
    """A loop with accumulated gradients, a schedule that begins and ends with a rate of 0, and clipping."""
    set_seed(3)
    accumulates = order == "clears last"
    accelerator = Accelerator(gradient_accumulation_steps=1 + accumulates, split_batches=True)
    model, optimizer, loader, test_loader = prepared(accelerator, task)
    schedule = accelerator.prepare(LambdaLR(optimizer, lambda step: min(step, 2) * max(10 - step, 0) / 16))
    losses, right, counts = [], [], []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                if not accumulates:
                    optimizer.zero_grad()
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                if accumulates:
                    optimizer.zero_grad()
            losses.append(loss.item())
        right.append(test(accelerator, model, test_loader) if task == "net" else 0)
        counts.append(compiled(accelerator))
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return Outcome(weights, losses, right, counts)


CASES = [("net", "clears last"), ("net", "clears first"), ("gpt2", "clears last")]


def outcomes() -> list[Outcome]:
    return [train(task, order=order) for task, order in CASES]


def on_a_cpu_of_four_devices() -> list[Outcome]:
    """Batches as for four devices: where the last of an epoch is short, samples are repeated."""
    with mock.patch.object(core, "choose_strategy", return_value=OnFour()):
        return outcomes()


@pytest.mark.parametrize(("devices", "reference"), [(1, outcomes), (4, on_a_cpu_of_four_devices)])
def test_a_loop_gives_the_weights_of_a_cpu_and_compiles_in_the_first_epoch_only(devices: int, reference: Any) -> None:
    found, expected = on_xla(devices, outcomes), on_cpu(reference)
    for case, ours, theirs in zip(CASES, found, expected, strict=True):
        assert ours.right == theirs.right, case
        assert ours.losses == pytest.approx(theirs.losses, abs=1e-5), case
        assert ours.weights.keys() == theirs.weights.keys()
        for name, value in theirs.weights.items():
            message = f"{case}, {name}: off by {(ours.weights[name] - value).abs().max()}"
            torch.testing.assert_close(ours.weights[name], value, rtol=0, atol=1e-5, msg=message)
        assert ours.compiled == [ours.compiled[0]] * 3, case
    assert found[0].right[0] > 0


def train_with_dropout(folder: Path, saves: tuple[int, ...] = (), stop: int = 0) -> Outcome:
    """Trains from the newest checkpoint to the end, or until `stop` batches were seen; saves amid a step."""
    set_seed(3)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project, split_batches=True)
    model, optimizer, loader, test_loader = prepared(accelerator, "net", dropout=0.3)
    schedule = accelerator.prepare(OneCycleLR(optimizer, 1e-2, total_steps=20))
    if folder.exists():
        accelerator.load_state()
    losses, right, counts, seen = [], [], [], 0
    for _ in range(loader.epoch, 3):
        for batch in loader:
            seen += 1
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if seen in saves:
                    accelerator.save_state()
            losses.append(loss.item())
            if seen == stop:
                break
        if seen == stop:
            break
        right.append(test(accelerator, model, test_loader))
        counts.append(compiled(accelerator))
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return Outcome(weights, losses, right, counts)


@pytest.mark.parametrize("devices", [1, 4])
def test_resuming_goes_on_with_the_same_bits(devices: int, tmp_path: Path) -> None:
    straight = on_xla(devices, train_with_dropout, tmp_path / "straight")
    saving = on_xla(devices, train_with_dropout, tmp_path / "saving", (3, 6, 10))
    assert saving.losses == straight.losses
    assert saving.compiled == straight.compiled  # what is saved is there already
    assert len({*straight.losses}) == 21
    for stop in (3, 10):  # amid an accumulation, and at the end of one
        folder = tmp_path / f"stopped at {stop}"
        on_xla(devices, train_with_dropout, folder, (stop,), stop)
        resumed = on_xla(devices, train_with_dropout, folder)
        assert resumed.losses == straight.losses[stop:]
        assert resumed.right == straight.right[-len(resumed.right) :]
        for name, value in straight.weights.items():
            assert torch.equal(resumed.weights[name], value), (stop, name)


def test_what_else_a_script_may_do(tmp_path: Path) -> None:
    def script() -> None:
        accelerator = Accelerator()
        assert accelerator.distributed_type is DistributedType.XLA
        assert accelerator.device.type == "xla"
        assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
        assert accelerator.is_main_process
        assert accelerator.is_local_main_process
        draws_follow_the_seed(accelerator)
        prepares_in_two_calls(accelerator)
        saves_what_any_machine_reads(accelerator)
        gathers(accelerator)

    def draws_follow_the_seed(accelerator: Accelerator) -> None:
        drawn = []
        for seed in (1, 2, 1):
            set_seed(seed)
            drawn.append(torch.rand(2, device=accelerator.device).tolist())
        assert drawn[0] == drawn[2] != drawn[1]
        assert torch.rand(2, device=Accelerator().device).tolist() == drawn[0]  # that was set before

    def prepares_in_two_calls(accelerator: Accelerator) -> None:
        model = xla_task.net()
        parameters = list(model.parameters())
        optimizer = accelerator.prepare(torch.optim.SGD(parameters, lr=1.0))
        model = accelerator.prepare(model)
        assert model.first.weight is model.second.weight
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(2):  # batches that no prepared loader gives
            batch = {
                "x": torch.ones(4, 8).to(accelerator.device),
                "labels": torch.zeros(4).long().to(accelerator.device),
            }
            accelerator.backward(1000 * model(**batch)["loss"])
            norm = accelerator.clip_grad_norm_(parameters, 0.25)
            assert norm is not None
            optimizer.step()
            optimizer.zero_grad()
        assert norm.item() > 1
        moved = torch.stack([(new - old).norm() for new, old in zip(model.parameters(), before, strict=True)]).norm()
        assert 0.25 < moved.item() <= 0.5 + 1e-4  # two clipped steps

    def saves_what_any_machine_reads(accelerator: Accelerator) -> None:
        model = accelerator.prepare(xla_task.gpt2())
        state = accelerator.get_state_dict(model)
        assert not any(value.requires_grad for value in state.values())
        accelerator.save({"state": state, "step": 3}, tmp_path / "state.pt")
        accelerator.save_model(model, tmp_path / "model")
        assert accelerator.free_memory(model) == [None]

    def gathers(accelerator: Accelerator) -> None:
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(21)), batch_size=2))
        counts = []
        for _ in range(2):
            rows = [row for (batch,) in loader for row in accelerator.gather_for_metrics(batch).tolist()]
            assert rows == list(range(21))
            counts.append(compiled(accelerator))
        assert counts[1] == counts[0]  # though what is divided over devices is read
        ones = torch.ones(3, device=accelerator.device)
        assert accelerator.pad_across_processes(ones) is ones
        assert accelerator.reduce(ones, "mean").tolist() == accelerator.gather(ones).tolist() == [1, 1, 1]

    on_xla(4, script)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)["state"]
    assert {value.device.type for value in saved.values()} == {"cpu"}
    assert torch.equal(saved["lm_head.weight"], saved["transformer.wte.weight"])
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "computes_in", "off_by"),
    [
        ({"mixed_precision": "bf16"}, "torch.float32", 0.02),
        ({"mixed_precision": "fp16"}, "torch.float32", 0.01),
        ({"mixed_precision": "bf16", "downcast_bf16": True}, "torch.bfloat16", 0.05),
    ],
)
def test_mixed_precision(options: dict[str, Any], computes_in: str, off_by: float) -> None:
    def run(**options: Any) -> tuple[list[float], str, str]:
        set_seed(0)
        accelerator = Accelerator(split_batches=True, **options)
        model, optimizer, loader, _ = prepared(accelerator, "net")
        losses = []
        for batch in loader:
            logits = model(batch["x"])["logits"]
            assert logits.dtype == torch.float32
            loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return [loss.item() for loss in losses], str(losses[0].dtype), str(next(model.parameters()).dtype)

    expected, _, _ = on_cpu(lambda: run())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mixed_precision='fp16' on XLA")
        found, loss, weight = on_xla(1, lambda: run(**options))
    assert (loss, weight) == ("torch.float32", computes_in)
    assert found == pytest.approx(expected, abs=off_by)
    assert found != expected
