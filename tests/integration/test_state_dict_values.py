"""Runs of models whose `state_dict` holds more than tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.copied_training import Cut
from kit.ranks import on_ranks
from kit.trainer import arguments
from kit.valued import SETTINGS, Valued
from torch import nn

from trainer_kit import DDP, FSDP, Accelerator, Trainer, load_checkpoint_in_model
from trainer_kit.callbacks import PeerCopies
from trainer_kit.checkpoint import find_checkpoints, verify
from trainer_kit.errors import CallbackError


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["labels"]).square().mean()


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, generator=generator), "labels": torch.randn(2, generator=generator)} for _ in range(8)]


def trainer(folder: Path, model: nn.Module, **changes: Any) -> Trainer:
    given = {each: changes.pop(each) for each in ("strategy", "weights", "callbacks") if each in changes}
    defaults: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    args = arguments(folder, **defaults | {"lr_scheduler_type": "constant"} | changes)
    return Trainer(model, args, train_dataset=rows(), eval_dataset=rows(), compute_loss=loss, **given)


def facts(model: Valued) -> tuple[Any, ...]:
    """All that a resume must restore, for a comparison by bits."""
    tensors = [model.linear.weight, model.linear.bias, model.counter.last]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]
    return (model.counter.passes, *(tuple(each.flatten().tolist()) for each in whole))


def resumed(folder: str, strategy: str | None = None) -> list[tuple[Any, ...]]:
    found, given = [], dict[str, Any]()
    for name, steps, resume in (("straight", 5, False), ("stopped", 3, False), ("stopped", 5, True)):
        model = Valued()
        if strategy is not None:
            given["strategy"] = DDP(device="cpu") if strategy == "ddp" else FSDP(device="cpu", units=["linear"])
        trainer(Path(folder, name), model, max_steps=steps, **given).train(resume_from_checkpoint=resume)
        found.append((*facts(model), repr(model.loaded)))
    return found


def check(found: list[tuple[Any, ...]], passes: int = 5) -> None:
    straight, stopped, again = found
    assert again[:-1] == straight[:-1] != stopped[:-1]
    assert straight[0] == passes
    assert (straight[-1], again[-1]) == ("None", repr(SETTINGS))


def test_a_resumed_run_has_the_bits_of_one_never_stopped(tmp_path: Path) -> None:
    check(resumed(str(tmp_path)))
    for each in find_checkpoints(tmp_path / "stopped" / "run"):
        verify(each)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_run_of_two_processes_resumes(tmp_path: Path, strategy: str) -> None:
    ranks = on_ranks(2, resumed, str(tmp_path), strategy)
    for each in ranks:
        check(each)
    assert ranks[0][0][1:3] == ranks[1][0][1:3]


def test_a_damaged_file_of_values_is_noticed_before_a_resume(tmp_path: Path) -> None:
    trainer(tmp_path, Valued()).train()
    path = tmp_path / "run" / "checkpoint-4" / "state" / "model_values.json"
    path.write_text(path.read_text().replace('"big"', '"pig"'))
    model = Valued()
    again = trainer(tmp_path, model, max_steps=6)
    again.train(resume_from_checkpoint=True)
    assert model.counter.passes == 6
    assert "big" in model.loaded


def test_copies_in_memory_have_them_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()

    def make(until: int | None) -> tuple[Valued, Trainer]:
        model, callbacks = Valued(), [PeerCopies(1, tmp_path / "memory"), Cut(until)]
        return model, trainer(tmp_path, model, save_steps=100, max_steps=6, callbacks=callbacks)

    with pytest.raises(CallbackError, match="PowerCutError"):
        make(4)[1].train()
    assert not find_checkpoints(tmp_path / "run")
    model, made = make(None)
    made.train(resume_from_checkpoint=True)
    assert model.counter.passes == made.run.state.step == 6
    assert repr(model.loaded) == repr(SETTINGS)


def test_the_best_model_has_its_values(tmp_path: Path) -> None:
    model = Valued()
    changes = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    changes |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    made = trainer(tmp_path, model, **changes)
    made.train()
    assert made.run.state.best_step == model.counter.passes == 2
    assert repr(model.loaded) == repr(SETTINGS)


def test_a_saved_folder_gives_weights_and_values(tmp_path: Path) -> None:
    made = trainer(tmp_path / "first", Valued())
    made.train()
    made.save_model(tmp_path / "saved")
    loaded, begun = Valued(), Valued()
    load_checkpoint_in_model(loaded, tmp_path / "saved")
    assert facts(loaded) == facts(made.run.model)  # type: ignore[arg-type]
    trainer(tmp_path / "next", begun, weights=tmp_path / "saved", max_steps=1).train()
    assert begun.counter.passes == 5
    from_checkpoint = Valued()
    trainer(tmp_path / "other", from_checkpoint, weights=tmp_path / "first" / "run" / "checkpoint-2").evaluate()
    assert from_checkpoint.counter.passes == 2


def test_an_accelerator_keeps_values(tmp_path: Path) -> None:
    accelerator, models = Accelerator(cpu=True), (Valued(), Valued())
    prepared = accelerator.prepare(*models)
    for number, model in enumerate(models):
        model.counter.passes = number + 5
    accelerator.save_state(str(tmp_path / "state"))
    assert accelerator.get_state_dict(prepared[0])["_metadata"] == SETTINGS
    accelerator.save_model(prepared[1], tmp_path / "saved")
    for model in models:
        model.counter.passes = 0
    accelerator.load_state(str(tmp_path / "state"))
    assert [model.counter.passes for model in models] == [5, 6]
    other = Valued()
    load_checkpoint_in_model(other, tmp_path / "saved")
    assert other.counter.passes == 6


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_values_that_cannot_be_kept_are_refused_before_training(tmp_path: Path, strategy: str) -> None:
    model = Valued({"size": 3, "activation": nn.functional.relu})
    made = trainer(tmp_path, model, save_strategy=strategy)
    if strategy == "no":
        made.train()
        return
    with pytest.raises(TypeError, match=r"^the model cannot be saved: state\['_metadata'\]\['activation'\] is of type"):
        made.train()
    assert model.counter.passes == 0
