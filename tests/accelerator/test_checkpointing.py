"""`save_state` and `load_state` in one process."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer_kit import load_checkpoint_in_model
from trainer_kit.accelerator import Accelerator, ProjectConfiguration, set_seed
from trainer_kit.checkpoint import CheckpointError, verify
from trainer_kit.checkpoint.format.json_files import checksum
from trainer_kit.checkpoint.format.manifest import FileEntry, Manifest
from trainer_kit.strategies.single import SingleDevice


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / 23) + 0.1 * torch.rand(4), index % 3


class Counter:
    """Something of the user's with a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class Loop:
    """A hand-written loop with all that is random: 3 epochs of 6 batches, dropout, accumulation over 2."""

    def __init__(self, workers: int = 0, precision: str = "no", **options: Any) -> None:
        set_seed(3)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, **options
        )  # fmt: skip
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30)
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, save_at: int = -1, folder: Path | None = None, style: str = "plain", epochs: int = 3) -> None:
        first = self.loader.epoch if style == "plain" else self.counter.value // len(self.loader)
        skip = None if style == "plain" else self.counter.value % len(self.loader)
        for _ in range(first, epochs):
            batches = self.loader if skip is None else self.accelerator.skip_first_batches(self.loader, skip)
            skip = None
            for inputs, targets in batches:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.cross_entropy(self.model(inputs), targets)
                    self.accelerator.backward(loss)
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.counter.value += 1
                if self.counter.value == save_at:
                    self.accelerator.save_state(folder)

    def result(self) -> list[Any]:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()
        scaler = self.accelerator.strategy.precision
        return [weights, self.scheduler.get_last_lr(), self.counter.value, scaler and scaler.state_dict()]


@pytest.mark.parametrize("style", ["plain", "skip"])
@pytest.mark.parametrize("save_at", [1, 4, 5, 6, 9, 12, 17])
def test_resuming_is_bitwise_equal(save_at: int, style: str, tmp_path: Path) -> None:
    """Saved within an optimizer step, at its end, at an epoch's last batch, and at the last batch but one."""
    whole = Loop()
    whole.train(save_at, tmp_path / "state")
    resumed = Loop()
    torch.rand(5)
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.counter.value == save_at
    resumed.train(style=style)
    assert resumed.result() == whole.result()
    assert whole.counter.value == 18


@pytest.mark.parametrize("style", ["plain", "skip"])
@pytest.mark.parametrize(("workers", "precision"), [(2, "no"), (0, "fp16"), (2, "bf16")])
def test_resuming_with_workers_and_mixed_precision(workers: int, precision: str, style: str, tmp_path: Path) -> None:
    whole = Loop(workers, precision)
    whole.train(9, tmp_path / "state")
    resumed = Loop(0, precision)
    resumed.accelerator.load_state(tmp_path / "state")
    resumed.train(style=style)
    assert resumed.result() == whole.result()
    if precision == "fp16":
        assert resumed.result()[3]["_growth_tracker"] == 9  # one a step


@pytest.mark.parametrize("save_at", [4, 5, 6])
def test_batches_that_are_copied_ahead_of_their_use(
    save_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPUs get them: what was read beyond the checkpoint is read again."""

    def copied_ahead(_: SingleDevice, batches: Any) -> Iterator[Any]:
        waiting: list[Any] = []
        for item in batches:
            yield from waiting
            waiting = [item]
        yield from waiting

    monkeypatch.setattr(SingleDevice, "prepare_loader", copied_ahead)
    test_resuming_is_bitwise_equal(save_at, "plain", tmp_path)


def test_all_generators_go_on(tmp_path: Path) -> None:
    """What the loop itself draws, from whichever generator."""
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(tmp_path / "state")
    drawn = [(random.random(), np.random.rand(), np.random.normal(), float(torch.rand(()))) for _ in range(2)]
    accelerator.load_state(tmp_path / "state")
    assert [(random.random(), np.random.rand(), np.random.normal(), float(torch.rand(()))) for _ in range(2)] == drawn


def test_saved_between_epochs_and_from_within_the_same_program(tmp_path: Path) -> None:
    loop = Loop()
    loop.train(epochs=1)
    loop.accelerator.save_state(tmp_path / "state")
    loop.train()
    expected = loop.result()
    loop.accelerator.load_state(tmp_path / "state")
    assert loop.loader.epoch == 1
    loop.train()
    assert loop.result() == expected


def test_accelerates_further_arguments_are_named_and_have_no_effect(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="Accelerator.save_state: exclude_frozen_parameters without effect"):
        accelerator.save_state(tmp_path / "state", exclude_frozen_parameters=True)
    kept = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    with pytest.warns(UserWarning, match="Accelerator.load_state: strict and map_location without effect"):
        accelerator.load_state(tmp_path / "state", {"strict": False}, map_location="cpu")
    assert torch.equal(model.weight, kept)


def test_the_format_is_the_one_of_the_trainer(tmp_path: Path) -> None:
    loop = Loop()
    loop.train(3, tmp_path / "state")
    directory = tmp_path / "state"
    manifest = verify(directory)
    assert (manifest.step, manifest.world_size) == (1, 1)
    names = {path.name for path in directory.rglob("*") if path.is_file()}
    assert {"model.safetensors", "optimizer.safetensors", "lr_scheduler.json", "custom_Counter.json"} <= names
    assert {"rng-00000.json", "loaders.json", "gradients.safetensors", "arguments.json"} <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl", ".pth")) for name in names)
    assert json.loads((directory / "arguments.json").read_text())["gradient_accumulation_steps"] == 2
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    load_checkpoint_in_model(model, directory)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    def make() -> tuple[Accelerator, list[Any]]:
        accelerator = Accelerator(cpu=True)
        models = [nn.Linear(2, 3), nn.Linear(4, 5), nn.Linear(6, 7)]
        optimizers = [torch.optim.Adam(models[0].parameters()), torch.optim.SGD(models[1].parameters(), momentum=0.9)]
        counters = [Counter(), Counter()]
        accelerator.register_for_checkpointing(*counters)
        prepared = accelerator.prepare(*models, *optimizers)
        return accelerator, [*prepared, *counters]

    accelerator, saved = make()
    accelerator.backward(saved[0](torch.ones(1, 2)).sum() + saved[1](torch.ones(1, 4)).sum())
    for optimizer in saved[3:5]:
        optimizer.step()
    saved[5].value, saved[6].value = 11, 22
    accelerator.save_state(tmp_path / "state")
    assert {"model.safetensors", "model_1.safetensors", "model_2.safetensors"} <= {
        path.name for path in (tmp_path / "state").iterdir()
    }
    accelerator, loaded = make()
    accelerator.load_state(tmp_path / "state")
    for ours, theirs in zip(loaded[:3], saved[:3], strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    for ours, theirs in zip(loaded[3:5], saved[3:5], strict=True):
        assert str(ours.state_dict()) == str(theirs.state_dict())
    assert [each.value for each in loaded[5:]] == [11, 22]


def test_automatic_names_and_total_limit(tmp_path: Path) -> None:
    config = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(project_config=config)
    folder = tmp_path / "checkpoints"
    for number in range(4):
        assert loop.accelerator.save_iteration == number
        assert loop.accelerator.save_state("ignored") == str(folder / f"checkpoint_{number}")
        loop.counter.value += 1
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    resumed = Loop(project_dir=tmp_path, project_config=ProjectConfiguration(total_limit=2))
    resumed.accelerator.load_state()
    assert resumed.counter.value == 3
    resumed.accelerator.save_state()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_3", "checkpoint_4"]


def test_checkpoints_of_others_are_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    Loop(project_dir=tmp_path).accelerator.save_state()
    (folder / "checkpoint_7").mkdir()
    (folder / "checkpoint_7" / "mine").write_text("")
    loop = Loop(project_config=ProjectConfiguration(project_dir=tmp_path, total_limit=1))
    loop.accelerator.save_state()
    loop.accelerator.save_state()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "checkpoint_7", "checkpoint_9"]


def test_iteration_of_the_project(tmp_path: Path) -> None:
    loop = Loop(project_config=ProjectConfiguration(project_dir=tmp_path, iteration=5))
    assert Path(loop.accelerator.save_state()).name == "checkpoint_5"


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(project_dir=tmp_path)
    for loop.counter.value in range(2):
        newest = Path(loop.accelerator.save_state())
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        loop.accelerator.load_state()
    assert loop.counter.value == 0
    assert "checkpoint_1 is skipped" in caplog.text
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        loop.accelerator.load_state(newest)


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    loop = Loop()
    for loop.counter.value in (1, 2):
        loop.accelerator.save_state(tmp_path / "state")
    (tmp_path / "state").rename(tmp_path / ".replaced-state")  # killed between the two renames
    loop.counter.value = 0
    loop.accelerator.load_state(tmp_path / "state")
    assert loop.counter.value == 2


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_other_files_stay(is_checkpoint: bool, tmp_path: Path) -> None:
    loop = Loop()
    folder = tmp_path / "results"
    if is_checkpoint:
        loop.accelerator.save_state(folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("dear")
    (folder / "logs" / "link").symlink_to("../notes.txt")
    for loop.counter.value in (1, 2):
        loop.accelerator.save_state(folder)
    assert (folder / "logs" / "link").is_symlink()
    assert (folder / "logs" / "link").read_text() == "dear"
    assert (folder / "empty").is_dir()
    verify(folder)
    loop.counter.value = 0
    loop.accelerator.load_state(folder)
    assert loop.counter.value == 2
    assert not list(tmp_path.glob(".*"))


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "below")
    for folder in (tmp_path / "work", Path(".")):
        with pytest.raises(ValueError, match=r"is the working directory or contains it; give a folder below it"):
            Loop().accelerator.save_state(folder)
    assert (tmp_path / "work" / "below").is_dir()


@pytest.mark.parametrize("is_numbered", [False, True])
def test_hooks_save_and_load_models_their_own_way(is_numbered: bool, tmp_path: Path) -> None:
    """As diffusers' scripts do: the hook writes the model and takes its state out of the list."""
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model, other = accelerator.prepare(torch.nn.Linear(2, 2), torch.nn.Linear(3, 3))

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        assert [*models] == [model, other]
        assert len(weights) == 2
        torch.save(models[1].state_dict(), Path(folder) / "other.pt")
        weights.pop()

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "other.pt"))

    saving, loading = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)
    before = [each.weight.detach().clone() for each in (model, other)]
    for _ in range(2):
        folder = Path(accelerator.save_state(None if is_numbered else tmp_path / "state"))
    assert [path.name for path in sorted(folder.glob("*.safetensors"))] == ["model.safetensors"]
    for each in (model, other):
        torch.nn.init.zeros_(each.weight)
    accelerator.load_state(folder)
    assert torch.equal(model.weight, before[0])
    assert torch.equal(other.weight, before[1])
    loading.remove()
    with pytest.raises(ValueError, match="model_1"):
        accelerator.load_state(folder)
    saving.remove()
    accelerator.save_state(folder)
    accelerator.load_state(folder)


def test_files_of_a_hook_take_the_place_of_the_state_that_it_removed(tmp_path: Path) -> None:
    """accelerate's own hook: `save_pretrained(output_dir); weights.pop()`, with the names that a checkpoint uses."""
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "below").mkdir()
        (Path(folder) / "below" / "config.json").write_text("{}")
        save_file(weights.pop(), Path(folder) / "model.safetensors")

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(load_file(Path(folder) / "model.safetensors"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    for given in (None, tmp_path / "state", tmp_path / "state"):
        folder = Path(accelerator.save_state(given))
        assert_equal_tensors(load_file(folder / "model.safetensors"), before)
        assert (folder / "below" / "config.json").read_text() == "{}"
        torch.nn.init.zeros_(model.weight)
        accelerator.load_state(folder)
        assert_equal_tensors(model.state_dict(), before)
    assert not [*tmp_path.rglob(".*hooks*")]


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_hook_that_fails_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    folder = Path(accelerator.save_state(tmp_path / "state"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def save(models: list[Any], weights: list[Any], given: str) -> None:
        assert Path(given).name == "state"
        (Path(given) / "model.safetensors").write_bytes(b"half of it")
        raise OSError("the disk is full")

    accelerator.register_save_state_pre_hook(save)
    with pytest.raises(OSError, match="the disk is full"):
        accelerator.save_state(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    accelerator.load_state(folder)
    assert model.weight.isfinite().all()


def test_a_hook_may_remove_the_first_model(tmp_path: Path) -> None:
    """The second keeps its own name, and the first's config.json is not written for it."""
    accelerator = Accelerator(cpu=True)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    first.config = FakeConfig()  # type: ignore[assignment]
    accelerator.prepare(first, second)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.pop(0))
    loading = accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(0))
    folder, before = Path(accelerator.save_state(tmp_path / "state")), second.weight.detach().clone()
    assert [path.name for path in sorted(folder.glob("*.safetensors"))] == ["model_1.safetensors"]
    assert not (folder / "config.json").exists()
    torch.nn.init.zeros_(second.weight)
    accelerator.load_state(folder)
    assert torch.equal(second.weight, before)
    loading.remove()
    with pytest.raises(ValueError, match="model"):
        accelerator.load_state(folder)


class FakeConfig:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")


def test_an_empty_folder_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    loop = Loop()
    loop.accelerator.save_state(tmp_path / "state")
    verify(tmp_path / "state")


def test_the_launcher_is_told_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_PROGRESS_FILE", str(tmp_path / "progress"))
    loop = Loop()
    loop.train(5, tmp_path / "state")
    assert (tmp_path / "progress").read_text() == "2\n"


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(ValueError, match=r"save_state\(\) needs a folder; give it one, or give Accelerator project_di"):
        loop.accelerator.save_state()
    with pytest.raises(ValueError, match=r"load_state\(\) needs a folder"):
        loop.accelerator.load_state()
    with pytest.raises(ValueError, match="safe_serialization=False would write a pickle"):
        loop.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    with pytest.raises(ValueError, match=r"nowhere'\) names no folder; give one that save_state\(\) returned"):
        loop.accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"found no valid checkpoint in .*checkpoints"):
        Loop(project_dir=tmp_path).accelerator.load_state()
    with pytest.raises(TypeError, match=r"register_for_checkpointing\(\) got 3, which has no state_dict"):
        loop.accelerator.register_for_checkpointing(3)
    with pytest.raises(TypeError, match=r"got <class .*Counter'>, which has no state_dict"):
        loop.accelerator.register_for_checkpointing(Counter)


def test_a_state_of_other_objects(tmp_path: Path) -> None:
    loop = Loop()
    loop.accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"holds the state of 1 models, but 0 are prepared; prepare\(\) the same"):
        other.load_state(tmp_path / "state")
    loop.accelerator.register_for_checkpointing(Counter())
    with pytest.raises(ValueError, match="holds nothing for custom_Counter_1; register the same objects"):
        loop.accelerator.load_state(tmp_path / "state")
    wide = Accelerator(cpu=True)
    model = nn.Linear(3, 3)
    wide.prepare(model, torch.optim.SGD(model.parameters()), DataLoader(Augmented()))
    wide.prepare(torch.optim.lr_scheduler.StepLR(wide._prepared.optimizers[0], 1))
    with pytest.raises(ValueError, match="holds the weights of another model than this Linear"):
        wide.load_state(tmp_path / "state")


def test_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    from trainer_kit.checkpoint import take_snapshot, write_checkpoint

    directory = write_checkpoint(tmp_path, take_snapshot(3, {}, {"trainer": {}}, arguments={}))
    with pytest.raises(ValueError, match=r"checkpoint-3 holds no state of save_state\(\); a Trainer's is resumed by"):
        Accelerator(cpu=True).load_state(directory)


def test_events_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with caplog.at_level(logging.INFO, logger="trainer_kit"):
        loop.train(3, tmp_path / "state", epochs=1)
        loop.accelerator.load_state(tmp_path / "state")
        next(iter(loop.loader))
    assert f"saved {tmp_path / 'state'}" in caplog.text
    assert f"loaded {tmp_path / 'state'}, saved after 1 optimizer steps" in caplog.text
    assert "a loader resumes after batch 3 of epoch 0" in caplog.text


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("accelerator", lambda state: state.pop("counts"), "it lacks counts"),
        ("accelerator", lambda state: state.update(steps=-1), "steps=-1 makes no sense"),
        ("loaders", lambda state: state[0].update(position=-3), "[0].position=-3 makes no sense"),
        ("loaders", lambda state: state[0].pop("epoch"), "it lacks [0].epoch"),
        ("loaders", lambda state: state.clear(), "of the 1 loaders"),
    ],
)
def test_a_state_that_makes_no_sense_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, change: Any, reason: str
) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    loop = Loop(project_config=config)
    saved = [Path(loop.accelerator.save_state()) for _ in range(2)]
    path = saved[1] / "state" / f"{name}.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    before = Manifest.read(saved[1])
    files = {each: FileEntry((saved[1] / each).stat().st_size, checksum(saved[1] / each)) for each in before.files}
    (saved[1] / "manifest.json").write_text(json.dumps(Manifest.of(files, before.step, before.world_size).to_json()))
    Loop(project_config=config).accelerator.load_state()
    assert "checkpoint_1 is skipped" in caplog.text
    assert reason in caplog.text
    with pytest.raises(ValueError, match=re.escape(reason)):
        Loop(project_dir=tmp_path / "other").accelerator.load_state(saved[1])


class OneWay(torch.optim.SGD):
    """Gives a state that torch's `load_state_dict` does not take."""

    def state_dict(self) -> dict[str, Any]:
        return {"sgd": super().state_dict()}


class Sharded(torch.optim.SGD):
    """Has a state only after a call, as torch's ZeroRedundancyOptimizer."""

    is_gathered = False

    def state_dict(self) -> dict[str, Any]:
        if not self.is_gathered:
            raise RuntimeError("the state is not gathered")
        return super().state_dict()


def test_an_optimizer_may_have_its_state_only_at_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, Sharded(model.parameters(), lr=0.1))
    assert caplog.messages == ["save_state() will raise: the state is not gathered"]
    with pytest.raises(RuntimeError, match="the state is not gathered"):
        accelerator.save_state(tmp_path / "state")
    optimizer.optimizer.is_gathered = True
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")


def test_an_optimizer_that_cannot_be_loaded_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    reason = r"OneWay.state_dict() returns 'sgd', which torch's load_state_dict() does not take"
    model, optimizer = accelerator.prepare(model, OneWay(model.parameters(), lr=0.1))
    assert [message.partition(", so that")[0] for message in caplog.messages] == [f"save_state() will raise: {reason}"]
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    with pytest.raises(ValueError, match=re.escape(reason)):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_fused_optimizer_of_parameters_with_gaps_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.randn(4, 4)[::2, ::2])
    with pytest.raises(ValueError, match=r"optimizer=AdamW is fused, but a parameter of shape .* has gaps in memory"):
        Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters(), fused=True))


def test_copies_from_another_machine_are_verified_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Loop(), Loop()
    first.accelerator.save_state(tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    session = second.accelerator.strategy.session
    monkeypatch.setattr(session, "fetch_checkpoint", lambda directory: tmp_path / "copy")
    monkeypatch.setattr(session, "release_checkpoint_copies", lambda: shutil.rmtree(tmp_path / "copy"))
    second.accelerator.load_state(tmp_path / "state")
    assert not (tmp_path / "copy").exists()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        second.accelerator.load_state(tmp_path / "state")


def test_a_state_of_lbfgs_comes_back(tmp_path: Path) -> None:
    def made() -> tuple[Accelerator, Any, Any]:
        set_seed(0)
        model = nn.Linear(4, 3)
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

    def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 4)) - torch.arange(3.0)).square().sum()
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)

    first, second = made(), made()
    step(*first)
    first[0].save_state(tmp_path / "state")
    second[0].load_state(tmp_path / "state")
    for each in (first, second):
        step(*each)
    assert torch.equal(first[1].weight, second[1].weight)


def test_a_resume_does_not_see_what_a_save_hook_drew(tmp_path: Path) -> None:
    def drawn(resumes: bool) -> list[float]:
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        accelerator.prepare(nn.Linear(2, 1))
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: torch.rand(3))
        if resumes:
            accelerator.load_state(str(tmp_path / "state"))
        else:
            accelerator.save_state(str(tmp_path / "state"))
        return torch.rand(4).tolist()  # type: ignore[no-any-return]

    assert drawn(False) == drawn(True)
