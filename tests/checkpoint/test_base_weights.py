"""`BaseWeights`: which weights a run keeps, which its checkpoints hold, and what a resume loads."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fake_peft import FakePeftModel, fake_peft

from trainer_kit import Callback, Run, Trainer, TrainingArguments, load_checkpoint_in_model
from trainer_kit.checkpoint import load_tensors, save_tensors, verify
from trainer_kit.errors import CheckpointError, SaveError


@pytest.fixture(autouse=True)
def peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", fake_peft())


def model(seed: int = 0, name: str = "") -> FakePeftModel:
    torch.manual_seed(seed)
    made = FakePeftModel("default")
    made.name_or_path = name
    return made


def trainer(
    given: FakePeftModel, folder: Path, *callbacks: Callback, evaluates: bool = False, **options: Any
) -> Trainer:
    rows = [{"x": torch.full((4,), float(number)), "labels": torch.ones(4)} for number in range(8)]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=(), **options
    )
    return Trainer(given, args, rows, rows if evaluates else None, callbacks=list(callbacks))


def state_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "state" / "frozen-base.json").read_text())
    return content


def test_weights_of_no_known_origin_are_kept_once_and_loaded_on_a_resume(tmp_path: Path) -> None:
    first = trainer(model(), tmp_path)
    first.train()
    (kept,) = tmp_path.glob("base-*")
    assert load_tensors(kept).keys() == {"base_layer.weight", "base_layer.bias"}
    for checkpoint in tmp_path.glob("checkpoint-*"):
        assert load_tensors(checkpoint).keys() == {"count"}
        assert state_of(checkpoint)["folder"] == kept.name
    second = trainer(model(seed=5), tmp_path)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = first.run.model.state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in second.run.model.state_dict().items())
    assert [*tmp_path.glob("base-*")] == [kept]


class Changing(Callback):
    """Changes the model at the end of step 3."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        self.change = change

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            self.change(run.model)


def snapshot(monkeypatch: pytest.MonkeyPatch, folder: Path, **tensors: torch.Tensor) -> None:
    """Put a repository someone/base with one file into a cache of the Hub."""
    save_tensors({name: each.detach() for name, each in tensors.items()}, folder, "part")
    hub = types.ModuleType("huggingface_hub")
    hub.try_to_load_from_cache = lambda name, file, revision: str(folder / file)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_what_a_repository_of_the_hub_holds_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = model(name="someone/base")
    given.config = types.SimpleNamespace(_commit_hash="1234abcd")  # type: ignore[assignment]
    snapshot(monkeypatch, tmp_path / "hub", renamed=given.base_layer.weight)
    (tmp_path / "hub" / "damaged.safetensors").write_bytes(b"no tensors")
    trainer(given, tmp_path / "run").train()
    found = state_of(tmp_path / "run" / "checkpoint-2")
    assert (found["name"], found["kept"], found["commit"]) == ("someone/base", ["base_layer.bias"], "1234abcd")
    other = model(seed=5)
    load_checkpoint_in_model(other, tmp_path / "run" / "checkpoint-2")
    assert torch.equal(other.base_layer.weight, given.base_layer.weight)
    assert torch.equal(other.base_layer.bias, given.base_layer.bias)
    (tmp_path / "hub" / "part.safetensors").unlink()
    message = r"'someone/base' \(commit 1234abcd\), but .* 'base_layer.weight' \(torch.float32 there, torch.float64 in"
    with pytest.raises(ValueError, match=message):
        load_checkpoint_in_model(model(seed=5).double(), tmp_path / "run" / "checkpoint-2")


def test_the_best_model_before_a_change_comes_from_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = model(name="someone/base")
    snapshot(monkeypatch, tmp_path / "hub", w=given.base_layer.weight, b=given.base_layer.bias)
    run = trainer(
        given, tmp_path / "run", Changing(lambda model: model.base_layer.weight.data.mul_(1e4)), eval_strategy="steps",
        eval_steps=2, load_best_model_at_end=True, metric_for_best_model="loss", evaluates=True,
    )  # fmt: skip
    run.train()
    assert run.run.state.best_step == 2
    assert torch.equal(given.base_layer.weight, model().base_layer.weight)


def test_weights_in_a_folder_are_kept_since_it_may_change(tmp_path: Path) -> None:
    given = model(name=str(tmp_path / "base"))
    save_tensors(dict(given.base_layer.state_dict()), tmp_path / "base")
    trainer(given, tmp_path / "run").train()
    found = state_of(tmp_path / "run" / "checkpoint-2")
    assert (found["name"], found["kept"]) == (str(tmp_path / "base"), ["base_layer.bias", "base_layer.weight"])


CHANGES: dict[str, Callable[[Any], object]] = {
    "data": lambda model: model.base_layer.weight.data.mul_(2),
    "fused": lambda model: torch.optim.SGD(
        [setattr(model.base_layer.weight, "grad", torch.ones(4, 4)) or model.base_layer.weight], lr=1, fused=True
    ).step(),
    "replaced": lambda model: setattr(
        model.base_layer, "weight", torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    ),
    "other name": lambda model: setattr(model, "base_layer", torch.nn.Sequential(model.base_layer)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_kind_of_change_of_a_frozen_weight_is_saved(change: str, tmp_path: Path) -> None:
    first = trainer(model(), tmp_path, Changing(CHANGES[change]))
    first.train()
    expected = first.run.model.state_dict()
    other = model(seed=5)
    if change == "other name":
        other.base_layer = torch.nn.Sequential(other.base_layer)  # type: ignore[assignment]
    load_checkpoint_in_model(other, tmp_path / "checkpoint-4")
    assert all(torch.equal(each, expected[name]) for name, each in other.state_dict().items())


def test_a_copy_of_the_same_bits_is_no_change(tmp_path: Path) -> None:
    trainer(model(), tmp_path, Changing(lambda model: model.base_layer.weight.data.add_(0))).train()
    assert load_tensors(tmp_path / "checkpoint-4").keys() == {"count"}


def test_a_resume_needs_no_base_if_the_model_has_it_and_never_begins_again_without_it(tmp_path: Path) -> None:
    trainer(model(), tmp_path).train()
    (kept,) = tmp_path.glob("base-*")
    (kept / "model.safetensors").write_bytes(b"damaged")
    again = trainer(model(), tmp_path)
    with pytest.raises(CheckpointError, match="the frozen weights of checkpoint-4 cannot be read"):
        trainer(model(seed=5), tmp_path).train(resume_from_checkpoint=True)
    again.train(resume_from_checkpoint=True)
    assert again.run.state.step == 4
    assert (tmp_path / f"damaged-1-{kept.name}").is_dir()
    verify(tmp_path / "checkpoint-4")  # the base was written again


def test_a_weight_that_was_trained_and_then_frozen_is_exported(tmp_path: Path) -> None:
    given = model()
    given.base_layer.bias.requires_grad_(True)
    run = trainer(given, tmp_path / "run", Changing(lambda model: model.base_layer.weight.data.mul_(2)))
    run.train()
    given.requires_grad_(False)
    run.save_model(tmp_path / "saved")
    assert load_tensors(tmp_path / "saved").keys() == {"count", "base_layer.bias", "base_layer.weight"}


@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_a_saved_model_whose_frozen_weights_lie_elsewhere_is_warned_of(
    save_strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(model(), tmp_path / "run", save_strategy=save_strategy)
    run.train()
    run.save_model(tmp_path / "saved")
    kept = [*(tmp_path / "run").glob("base-*")]
    where = f"only {kept[0]} holds" if kept else "no file holds"
    assert bool(kept) == (save_strategy == "steps")
    said = [each for each in caplog.messages if "lacks the frozen weights below the adapters" in each]
    assert len(said) == 1
    assert where in said[0]


def test_a_name_without_files_is_no_reference(tmp_path: Path) -> None:
    trainer(model(name="someone/unknown"), tmp_path).train()
    found = state_of(tmp_path / "checkpoint-2")
    assert found["name"] is None
    assert len(found["kept"]) == 2


class Unfreezing(Callback):
    def on_step_end(self, run: Run) -> None:
        given: Any = run.model
        if run.state.step == 3:
            given.base_layer.bias.requires_grad_(True)
            with torch.no_grad():
                given.base_layer.weight.mul_(2)


def test_weights_that_change_during_the_run_are_saved(tmp_path: Path) -> None:
    first = trainer(model(), tmp_path, Unfreezing())
    first.train()
    assert load_tensors(tmp_path / "checkpoint-2").keys() == {"count"}
    other = model()
    load_checkpoint_in_model(other, tmp_path / "checkpoint-4")
    assert torch.equal(other.base_layer.weight, 2 * model().base_layer.weight)


def test_a_base_that_cannot_be_written_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("trainer_kit.checkpoint.base_weights.write_kept", full)
    with pytest.raises(SaveError, match=r"the frozen weights of the model could not be written to .*: No space left"):
        trainer(model(), tmp_path).train()


def test_a_run_without_checkpoints_keeps_nothing(tmp_path: Path) -> None:
    trainer(model(), tmp_path, save_strategy="no").train()
    assert not [*tmp_path.glob("base-*")]


def test_a_plan_counts_the_weights_of_a_checkpoint_alone(tmp_path: Path) -> None:
    plan = trainer(model(), tmp_path).plan().to_dict()
    assert f"{(16 + 1) * 4}" in json.dumps(plan)
    assert not [*tmp_path.glob("base-*")]
