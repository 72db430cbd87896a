"""`BaseWeights`: which weights a run keeps, which its checkpoints hold, and what a resume loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fake_peft import FakePeftModel, fake_peft

from trainer_kit import Callback, Run, Trainer, TrainingArguments, load_checkpoint_in_model
from trainer_kit.checkpoint import load_tensors, save_tensors
from trainer_kit.errors import SaveError


@pytest.fixture(autouse=True)
def peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", fake_peft())


def model(seed: int = 0, name: str = "") -> FakePeftModel:
    torch.manual_seed(seed)
    made = FakePeftModel("default")
    made.name_or_path = name
    return made


def trainer(given: FakePeftModel, folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    rows = [{"x": torch.full((4,), float(number)), "labels": torch.ones(4)} for number in range(8)]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=(), **options
    )
    return Trainer(given, args, rows, callbacks=list(callbacks))


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


def test_what_the_files_of_the_base_hold_is_not_kept(tmp_path: Path) -> None:
    given = model(name=str(tmp_path / "base"))
    save_tensors({"renamed": given.base_layer.weight.detach()}, tmp_path / "base", "part")
    (tmp_path / "base" / "damaged.safetensors").write_bytes(b"no tensors")
    trainer(given, tmp_path / "run").train()
    found = state_of(tmp_path / "run" / "checkpoint-2")
    assert (found["name"], found["kept"]) == (str(tmp_path / "base"), ["base_layer.bias"])
    other = model(seed=5)
    with pytest.raises(ValueError, match=r"adapters for the weights of '.*base', but .* others in 'base_layer.weight'"):
        load_checkpoint_in_model(other, tmp_path / "run" / "checkpoint-2")
    with torch.no_grad():
        other.base_layer.weight.copy_(given.base_layer.weight)
    load_checkpoint_in_model(other, tmp_path / "run" / "checkpoint-2")
    assert torch.equal(other.base_layer.bias, given.base_layer.bias)


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
