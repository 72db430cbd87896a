"""A run that stopped anywhere and went on ends with the bits of one that never stopped."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from scenarios.task import SAMPLES, Formats, Net, Noisy, StatelessStream, StopAt, Stream, digest, make_trainer

from trainer_kit import Callback, Run, load_checkpoint_in_model
from trainer_kit.data.sampling import permutation

STEPS = 24  # 62 samples in windows of 8: 8 steps an epoch, 3 epochs


def interrupted(folder: Path, steps: list[int], **changes: Any) -> str:
    for step in steps:
        make_trainer(folder, StopAt(step), **changes).train(resume_from_checkpoint=True)
    trainer = make_trainer(folder, **changes)
    trainer.train(resume_from_checkpoint=True)
    return digest(trainer)


def straight(folder: Path, **changes: Any) -> str:
    trainer = make_trainer(folder, **changes)
    trainer.train()
    assert trainer.run.state.step == STEPS
    return digest(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dataloader_num_workers": 2},
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
        {"optim": "sgd", "nonfinite": "skip"},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "fp16"},
        {"max_shard_size": "1KB"},
    ],
    ids=str,
)
def test_resumed_run_ends_with_the_same_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    expected = straight(tmp_path / "straight", **changes)
    assert interrupted(tmp_path / "interrupted", [3, 8, 17], **changes) == expected


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "muon"])
def test_weights_that_are_not_row_major_resume_with_the_same_bits(tmp_path: Path, optim: str) -> None:
    trainer = make_trainer(tmp_path / "straight", model=Formats(), optim=optim)
    trainer.train()
    make_trainer(tmp_path / "resumed", StopAt(10), model=Formats(), optim=optim).train()
    again = make_trainer(tmp_path / "resumed", model=Formats(), optim=optim)
    again.train(resume_from_checkpoint=True)
    assert digest(again) == digest(trainer)
    strides = [each.stride() for each in Formats().parameters()]
    assert [each.stride() for each in again.run.model.parameters()] == strides
    other = Formats()
    load_checkpoint_in_model(other, tmp_path / "resumed" / "checkpoint-24")
    assert [each.stride() for each in other.parameters()] == strides
    pairs = zip(other.parameters(), again.run.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


class OneElement(Net):
    """Has a buffer of one element with a stride, which torch calls contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.arange(12.0).view(3, 4)[:1, 2])


class Sliced(torch.optim.SGD):
    """Keeps each eleventh number that the parameters begin with, as Prodigy does: one with a stride for small ones."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("start", parameter.detach().flatten()[::11].clone())
            parameter.grad += 1e-3 * state["start"].mean()
        super().step(closure)


def resume_one_element(folder: str) -> bool:
    def train(name: str, *callbacks: Callback) -> str:
        torch.manual_seed(0)
        model = OneElement()
        optimizer = Sliced(model.parameters(), lr=0.1, momentum=0.9)
        trainer = make_trainer(Path(folder) / name, *callbacks, model=model, optimizer=optimizer, max_steps=6)
        trainer.train(resume_from_checkpoint=True)
        return digest(trainer)

    straight = train("straight")
    train("resumed", StopAt(3))
    return train("resumed") == straight


def test_one_element_with_a_stride_is_saved(tmp_path: Path) -> None:
    assert resume_one_element(str(tmp_path))


@pytest.mark.distributed
def test_ranks_save_one_element_with_a_stride(tmp_path: Path) -> None:
    assert all(on_ranks(2, resume_one_element, str(tmp_path)))


@pytest.mark.parametrize("stream", [Stream, StatelessStream])
@pytest.mark.filterwarnings("ignore:.*state_dict")
def test_streams_of_the_chaos_run_resume_with_the_same_bits(tmp_path: Path, stream: type[Any]) -> None:
    changes = {"max_steps": 12}
    trainer = make_trainer(tmp_path / "straight", dataset=stream(), **changes)
    trainer.train()
    make_trainer(tmp_path / "resumed", StopAt(9), dataset=stream(), **changes).train()
    again = make_trainer(tmp_path / "resumed", dataset=stream(), **changes)
    again.train(resume_from_checkpoint=True)
    assert digest(again) == digest(trainer)


def test_digest_tells_runs_apart(tmp_path: Path) -> None:
    assert straight(tmp_path / "one") != straight(tmp_path / "two", seed=1)


@pytest.mark.slow
def test_every_step_of_an_epoch_can_be_resumed(tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight", save_strategy="no")
    for step in range(1, 10):
        assert interrupted(tmp_path / f"at-{step}", [step], save_strategy="no") == expected, step


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_iterable_dataset_resumes_with_the_same_bits(tmp_path: Path, workers: int) -> None:
    changes = {"max_steps": 12, "dataloader_num_workers": workers}
    trainer = make_trainer(tmp_path / "straight", dataset=Stream(), **changes)
    trainer.train()
    resumed = tmp_path / "interrupted"
    for step in (2, 9):
        make_trainer(resumed, StopAt(step), dataset=Stream(), **changes).train(resume_from_checkpoint=True)
    last = make_trainer(resumed, dataset=Stream(), **changes)
    last.train(resume_from_checkpoint=True)
    assert digest(last) == digest(trainer)


class Recorder(Callback):
    """Keeps the dataset's marks of the samples that were trained on."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_substep_end(self, run: Run) -> None:
        self.seen += run.batch["mark"].tolist()

    def on_step_end(self, run: Run) -> None:
        self.on_substep_end(run)


class Marked(Noisy):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index) | {"mark": torch.tensor(index)}


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (3, 5), (1, 1), (16, 2)])
def test_another_layout_goes_on_with_each_sample_once(tmp_path: Path, batch_size: int, accumulation: int) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(x), labels)

    def train(recorder: Recorder, stop: int | None, **changes: Any) -> None:
        callbacks = [recorder] if stop is None else [recorder, StopAt(stop)]
        trainer = make_trainer(
            tmp_path, *callbacks, model=Plain(), dataset=Marked(), num_train_epochs=2, eval_strategy="no", **changes
        )
        trainer.events.callbacks = []
        trainer.train(resume_from_checkpoint=True)

    before, after = Recorder(), Recorder()
    train(before, 3)
    train(after, None, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation)
    both = before.seen + after.seen
    for epoch in range(2):
        assert both[epoch * SAMPLES : (epoch + 1) * SAMPLES] == permutation(SAMPLES, 42, epoch).tolist()


def test_schedule_ends_with_the_training_under_another_layout(tmp_path: Path) -> None:
    make_trainer(tmp_path, StopAt(12), lr_scheduler_type="linear", warmup_steps=0).train()
    rates = []

    class Rates(Callback):
        def on_optimizer_step(self, run: Run) -> None:
            assert run.optimizer is not None
            rates.append(run.optimizer.param_groups[0]["lr"])

    again = make_trainer(tmp_path, Rates(), lr_scheduler_type="linear", warmup_steps=0, gradient_accumulation_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.run.state.step == 12 + 2 + 4  # half of the second epoch and the third, in windows twice as large
    # Three epochs of 4 such windows, of which half are done.
    assert rates == [pytest.approx(1e-2 * (12 - place) / 12) for place in range(6, 12)]


def test_first_start_with_resume_says_that_there_is_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="trainer_kit"):
        make_trainer(tmp_path, log_level="info", max_steps=1).train(resume_from_checkpoint=True)
    assert f"no checkpoint in {tmp_path} yet" in caplog.text


def test_damaged_checkpoint_is_passed_over_with_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = straight(tmp_path / "straight")
    folder = tmp_path / "damaged"
    make_trainer(folder, StopAt(10)).train()
    weights = folder / "checkpoint-10" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))
    assert interrupted(folder, []) == expected
    assert "checkpoint-10" in caplog.text
    assert "model.safetensors" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": Noisy(60)}, "has 60 samples, but .* was made with 62"),
        ({"seed": 7}, "seed=7, but .* seed=42"),
        ({"optim": "sgd"}, "optimizer is SGD, but .* AdamW"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, max_steps=4, **changes).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_checkpoint_of_another_model_names_the_first_tensors(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    other = make_trainer(tmp_path, max_steps=4)
    other.run.model.head = torch.nn.Linear(8, 5)
    with pytest.raises(ValueError, match=r"head\.weight"):
        other.train(resume_from_checkpoint=True)


def test_a_model_whose_state_cannot_be_asked_for_is_refused_at_the_start(tmp_path: Path) -> None:
    class Short(Net):
        def state_dict(self) -> Any:  # type: ignore[override]
            return super().state_dict()

    trainer = make_trainer(tmp_path)
    trainer.run.model = Short()
    with pytest.raises(TypeError, match=r"the model cannot be saved: .*keep_vars.*take \*args and \*\*kwargs"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_change_of_the_working_directory_does_not_part_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaves(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 3:
                os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = {"report_to": ["jsonl", "tensorboard"], "max_steps": 6, "save_steps": 2}
    trainer = make_trainer(Path("run"), Leaves(), **options)
    trainer.train()
    trainer.save_model()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert {"checkpoint-2", "checkpoint-6", "log.jsonl", "logs", "model.safetensors"} <= set(
        os.listdir(tmp_path / "run")
    )


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ("nowhere", "'nowhere' does not exist; give a checkpoint's folder, the output_dir of a run to resume"),
        ("file", "file' is a file; give a checkpoint's folder"),
        ("empty", "empty' holds no checkpoint: it has neither a manifest.json nor folders named checkpoint-STEP"),
        ("empty", "; there are checkpoint-2 in "),
    ],
)
def test_a_wrong_path_is_answered_with_what_to_give(tmp_path: Path, request_: str, sentence: str) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make_trainer(tmp_path).train(
            resume_from_checkpoint=request_ if request_ == "nowhere" else str(tmp_path / request_)
        )


@pytest.mark.parametrize("word", ["True", "true"])
def test_a_command_lines_true_resumes_from_the_newest_checkpoint(tmp_path: Path, word: str) -> None:
    make_trainer(tmp_path, max_steps=2, resume_from_checkpoint=word).train()  # nothing to resume from yet
    trainer = make_trainer(tmp_path, max_steps=4, resume_from_checkpoint=word)
    trainer.train()
    assert trainer.run.state.step == 4
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


def test_the_word_false_begins_a_new_run(tmp_path: Path) -> None:
    for steps in (2, 3):
        trainer = make_trainer(tmp_path, max_steps=steps, report_to="jsonl", resume_from_checkpoint="False")
        trainer.train()
        assert trainer.run.state.step == steps
    assert (tmp_path / "earlier-1" / "log.jsonl").exists()


def test_what_to_do_with_a_checkpoint_of_transformers_trainer(tmp_path: Path) -> None:
    theirs = tmp_path / "checkpoint-8"
    theirs.mkdir()
    (theirs / "trainer_state.json").write_text("{}")
    sentence = (
        f"; {theirs} is a checkpoint of transformers' Trainer, whose optimizer state is a pickle that is not read: "
        f"Trainer(weights={str(theirs)!r}) begins with its weights"
    )
    for request in (theirs, tmp_path):
        with pytest.raises(ValueError, match=f"{re.escape(sentence)}$"):
            make_trainer(tmp_path / "run").train(resume_from_checkpoint=request)


def test_a_model_that_cannot_be_saved_is_refused_before_its_first_step(tmp_path: Path) -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("odd", torch.zeros(3, dtype=torch.int32).to_sparse())

    steps = Steps()
    with pytest.raises(TypeError, match=r"cannot be saved: tensor 'odd' is sparse .* or set save_strategy='no'"):
        make_trainer(tmp_path, steps, model=Odd()).train()
    assert steps.taken == 0
    make_trainer(tmp_path, steps, model=Odd(), save_strategy="no", max_steps=2).train()
    assert steps.taken == 2


class Steps(Callback):
    """Counts the steps."""

    taken = 0

    def on_step_begin(self, run: Run) -> None:
        self.taken += 1


def test_retention_over_restarts_keeps_what_it_should(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=5).train()
    make_trainer(tmp_path, max_steps=8).train(resume_from_checkpoint=True)
    left = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert left[-1] == 8
    assert 5 in left  # what this start resumed from
    assert len(left) == 3


def test_the_first_step_has_the_rate_of_the_longer_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lr_scheduler_type": "linear", "warmup_steps": 0}
    make_trainer(tmp_path, num_train_epochs=1, **changes).train()
    rates = []

    class Rates(Callback):
        def on_optimizer_step(self, run: Run) -> None:
            assert run.optimizer is not None
            rates.append(run.optimizer.param_groups[0]["lr"])

    make_trainer(tmp_path, Rates(), num_train_epochs=2, **changes).train(resume_from_checkpoint=True)
    assert rates[:2] == [pytest.approx(1e-2 * (16 - step) / 16) for step in (8, 9)]


def test_a_folder_in_which_nothing_is_whole_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        make_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=tmp_path)
    assert (tmp_path / "checkpoint-1").is_dir()


def test_the_best_model_is_found_where_the_run_began(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "same"}

    def train(folder: Path, *callbacks: Callback, resume: Path | None = None) -> Any:
        trainer = make_trainer(folder, *callbacks, **changes)
        trainer.compute_metrics = lambda _: {"same": 1.0}  # the first evaluation, at step 4, stays the best
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.run.state.best_step == 4
        return trainer.run.model.state_dict()

    best = train(tmp_path / "one", StopAt(8))
    moved_on = train(tmp_path / "two", resume=tmp_path / "one" / "checkpoint-8")
    assert all(torch.equal(value, best[name]) for name, value in moved_on.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"weight_decay": 0.0}, "groups of .* parameters"), ({"freeze": True}, "groups of .* parameters")],
)
def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    freeze = changes.pop("freeze", False)
    trainer = make_trainer(tmp_path, max_steps=4, **changes)
    if freeze:
        trainer.run.model.head.requires_grad_(False)  # type: ignore[operator, union-attr]
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)


def test_a_schedule_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).train()
    trainer = make_trainer(tmp_path, max_steps=4)
    trainer.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"lr_scheduler is StepLR, but .* Schedule"):
        trainer.train(resume_from_checkpoint=True)
