"""`nonfinite="rollback"`: a step that is not finite is undone with all since the newest checkpoint, and passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from scenarios.task import StopAt, digest, logged_losses

from trainer_kit import DDP, Callback, NonFiniteError, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA, read_log
from trainer_kit.checkpoint import read_state
from trainer_kit.data.sampling import permutation
from trainer_kit.errors import CallbackError

SAMPLES, BATCH, SEED = 40, 4, 42


class Points(torch.utils.data.Dataset[Any]):
    """Some samples are not finite."""

    def __init__(self, *bad: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
        self.x[[*bad]] = torch.inf
        self.labels = torch.randn(SAMPLES, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, *bad: int) -> None:
        self.points = Points(*bad)

    def __iter__(self) -> Any:
        return iter(self.points[index] for index in range(SAMPLES))


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x)[:, 0] - labels).square().mean()}


class Seen(Callback):
    def __init__(self) -> None:
        self.rollbacks: list[tuple[int, str]] = []

    def on_rollback(self, run: Run, directory: Path) -> None:
        self.rollbacks.append((run.state.step, directory.name))


def make(folder: Path, dataset: Any, *callbacks: Callback, strategy: Strategy | None = None, **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": BATCH, "learning_rate": 0.1,
        "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 2, "save_steps": 4,
        "use_cpu": True, "report_to": "jsonl", "disable_tqdm": True, "log_level": "error", "nonfinite": "rollback",
        "seed": SEED,
    }  # fmt: skip
    args = TrainingArguments(**(arguments | changes))
    return Trainer(Line(), args, dataset, Points(), callbacks=[EMA(decay=0.9), *callbacks], strategy=strategy)


class Turned(Line):
    """Its weights are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.middle.weight.data = self.middle.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.middle(x), labels)


def test_moments_that_are_not_row_major_come_back(tmp_path: Path) -> None:
    """After a rollback a fused AdamW, which pairs moments and weights by memory, goes on as one that does not."""

    def trainer(*bad: int, fused: bool) -> Trainer:
        made = make(tmp_path / f"fused-{fused}", Points(*bad))
        made.run.model = Turned()
        made.optimizer = torch.optim.AdamW(made.run.model.parameters(), lr=0.1, fused=fused)
        return made

    order = permutation(SAMPLES, SEED, 0).tolist()
    weights = []
    for fused in (True, False):
        made = trainer(order[24], fused=fused)  # of the seventh step; the newest checkpoint is the fourth's
        made.train()
        assert made.run.state.rollbacks == 2  # the sample comes in the second epoch too
        weights.append([each.detach() for each in made.run.model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def by_hand(batches: list[list[int]], points: Points) -> torch.Tensor:
    """The weights after SGD over these batches."""
    model = Line()
    for indices in batches:
        model.zero_grad()
        model(points.x[indices], points.labels[indices])["loss"].backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return model.linear.weight.detach()


def batches(*passed_over: tuple[int, int]) -> list[list[int]]:
    """The batches of two epochs without those of these (epoch, number)."""
    return [
        permutation(SAMPLES, SEED, epoch)[number * BATCH : (number + 1) * BATCH].tolist()
        for epoch in range(2)
        for number in range(SAMPLES // BATCH)
        if (epoch, number) not in passed_over
    ]


def number_of(sample: int, epoch: int) -> int:
    return permutation(SAMPLES, SEED, epoch).tolist().index(sample) // BATCH


def test_the_bad_steps_are_passed_over_and_all_else_is_trained_on_once(tmp_path: Path) -> None:
    bad, seen = 17, Seen()
    trainer = make(tmp_path, Points(bad), seen, max_rollbacks=2)
    output = trainer.train()
    passed_over = [(epoch, number_of(bad, epoch)) for epoch in range(2)]
    expected = by_hand(batches(*passed_over), Points(bad))
    torch.testing.assert_close(trainer.run.model.state_dict()["linear.weight"], expected, rtol=1e-12, atol=1e-12)
    assert output.global_step == 2 * SAMPLES // BATCH - 2
    state = trainer.run.state
    assert state.passed_over == [(epoch, number * BATCH, (number + 1) * BATCH) for epoch, number in passed_over]
    assert (state.rollbacks, state.samples) == (2, 2 * SAMPLES - 2 * BATCH)
    first = passed_over[0][1]  # steps before the bad one
    assert seen.rollbacks[0] == (first // 4 * 4, f"checkpoint-{first // 4 * 4}")
    steps = [step for step, _, _ in logged_losses(tmp_path)]
    assert steps == sorted(set(steps))
    assert sum(record["event"] == "rollback" for record in read_log(tmp_path / "log.jsonl")) == 2
    counters = (read_state(tmp_path / f"checkpoint-{output.global_step}", "trainer") or {})["counters"]
    assert counters["passed_over"] == state.passed_over


@pytest.mark.slow
def test_a_run_that_goes_back_and_is_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    straight = make(tmp_path / "straight", Points(17))
    straight.train()
    for step in (1, 5, 9, 12, 17):
        folder = tmp_path / str(step)
        make(folder, Points(17), StopAt(step)).train()
        resumed = make(folder, Points(17))
        resumed.train(resume_from_checkpoint=True)
        assert digest(resumed) == digest(straight), step


def test_it_stops_when_it_has_gone_back_often_enough(tmp_path: Path) -> None:
    seen = Seen()
    with pytest.raises(NonFiniteError, match="is not finite"):
        make(tmp_path, Points(17, 3, 25), seen, max_rollbacks=1).train()
    assert len(seen.rollbacks) == 1


def test_it_goes_back_to_the_beginning_where_no_checkpoint_was_due(tmp_path: Path) -> None:
    seen, bad = Seen(), permutation(SAMPLES, SEED, 0)[5].item()
    trainer = make(tmp_path, Points(bad), seen, save_steps=1000, num_train_epochs=1)
    trainer.train()
    assert seen.rollbacks == [(0, "checkpoint-0")]
    expected = by_hand(batches((0, 1))[: SAMPLES // BATCH - 1], Points(bad))
    torch.testing.assert_close(trainer.run.model.state_dict()["linear.weight"], expected, rtol=1e-12, atol=1e-12)


def test_an_iterable_dataset_is_read_on_past_the_bad_window(tmp_path: Path) -> None:
    seen = Seen()
    trainer = make(tmp_path, Stream(13), seen, max_steps=SAMPLES // BATCH - 1)
    trainer.train()
    order = [[*range(start, start + BATCH)] for start in range(0, SAMPLES, BATCH) if start != 12]
    expected = by_hand(order, Points(13))
    torch.testing.assert_close(trainer.run.model.state_dict()["linear.weight"], expected, rtol=1e-12, atol=1e-12)
    assert len(seen.rollbacks) == 1


def test_the_end_is_looked_at_too(tmp_path: Path) -> None:
    bad = permutation(SAMPLES, SEED, 0)[-1].item()
    trainer = make(tmp_path, Points(bad), num_train_epochs=1, logging_strategy="no")
    trainer.train()
    assert trainer.run.model.state_dict()["linear.weight"].isfinite().all()


class Ends(Callback):
    """Remembers at which steps epochs ended."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_rollback(self, run: Run, directory: Path) -> None:
        self.seen = [end for end in self.seen if end <= (run.state.step, run.state.epochs)]  # not what was undone

    def on_epoch_end(self, run: Run) -> None:
        self.seen.append((run.state.step, run.state.epochs))


class Place(torch.utils.data.IterableDataset[Any]):
    """Knows where it stands."""

    def __init__(self, *bad: int) -> None:
        self.points, self.place = Points(*bad), 0

    def __iter__(self) -> Any:
        while self.place < SAMPLES:
            self.place += 1
            yield self.points[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("save_steps", [4, 100])
def test_a_dataset_that_knows_its_place_is_set_back(tmp_path: Path, save_steps: int) -> None:
    ends = Ends()
    trainer = make(tmp_path, Place(5, 13, 30), ends, max_steps=14, save_steps=save_steps, max_rollbacks=6)
    trainer.train()
    assert ends.seen == [(7, 1.0), (14, 2.0)]
    assert trainer.run.state.epochs == 2.0
    order = [[*range(start, start + BATCH)] for start in range(0, SAMPLES, BATCH) if start not in (4, 12, 28)]
    expected = by_hand(2 * order, Points(5, 13, 30))
    torch.testing.assert_close(trainer.run.model.state_dict()["linear.weight"], expected, rtol=1e-12, atol=1e-12)


def test_an_error_after_it_is_none_of_a_step(tmp_path: Path) -> None:
    class Raises(Callback):
        def on_rollback(self, run: Run, directory: Path) -> None:
            raise LookupError("nothing was found")

    bad = permutation(SAMPLES, SEED, 0)[6 * BATCH].item()
    with pytest.raises(CallbackError, match="raised in on_rollback"):
        make(tmp_path, Points(bad), Raises(), save_steps=3).train()
    (crash,) = tmp_path.glob("crash-*")
    assert crash.name == "crash-6"
    report = read_state(crash, "report")
    assert report is not None
    assert report["missing"] == ["batch: no step was being taken"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Damage(Callback):
        def on_save(self, run: Run, directory: Path) -> None:
            if directory.name == "checkpoint-4":
                path = directory / "model.safetensors"
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)

    bad, seen = permutation(SAMPLES, SEED, 0)[7 * BATCH].item(), Seen()
    trainer = make(tmp_path, Points(bad), Damage(), seen, num_train_epochs=1, log_level="warning")
    trainer.train()
    assert seen.rollbacks == [(0, "checkpoint-0")]
    assert "checkpoint-4 is skipped" in caplog.text
    expected = by_hand(batches((0, 7))[: SAMPLES // BATCH - 1], Points(bad))
    torch.testing.assert_close(trainer.run.model.state_dict()["linear.weight"], expected, rtol=1e-12, atol=1e-12)


def test_without_a_checkpoint_the_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer_kit.checkpoint.contribution.write_part", full)
    with pytest.raises(NonFiniteError, match="is not finite"):
        make(tmp_path, Points(17)).train()


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_epoch_whose_end_is_passed_over_ends(tmp_path: Path, epochs: int) -> None:
    """Where the checkpoint stands right before the window, and where steps come between."""

    class Evaluated(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            evaluated.append(run.state.step)

    evaluated: list[int] = []
    bad = permutation(SAMPLES, SEED, 0)[-1].item()
    for save_steps in (3, 4):
        ends = Ends()
        evaluated.clear()
        trainer = make(
            tmp_path / str(save_steps), Points(bad), ends, Evaluated(), num_train_epochs=epochs, save_steps=save_steps,
            eval_strategy="epoch", max_rollbacks=5,
        )  # fmt: skip
        trainer.train()
        last = trainer.run.state.step
        assert last == epochs * SAMPLES // BATCH - epochs
        assert ends.seen == [(9, 1.0), (last, 2.0)][:epochs]
        assert sorted({*evaluated} - {10}) == [9, last][:epochs]


def test_no_checkpoints_no_going_back() -> None:
    with pytest.raises(ValueError, match="nonfinite='rollback' needs checkpoints"):
        TrainingArguments(nonfinite="rollback", save_strategy="no")


def _of_ranks(folder: Path) -> tuple[list[tuple[int, str]], torch.Tensor]:
    seen = Seen()
    trainer = make(folder, Points(17), seen, strategy=DDP(), per_device_train_batch_size=BATCH // 2)
    trainer.train()
    return seen.rollbacks, trainer.run.model.state_dict()["linear.weight"]


@pytest.mark.distributed
def test_all_processes_go_back_together(tmp_path: Path) -> None:
    (first, one), (second, two) = on_ranks(2, _of_ranks, tmp_path)
    assert first == second
    assert len(first) == 2
    assert torch.equal(one, two)
    expected = by_hand(batches(*((epoch, number_of(17, epoch)) for epoch in range(2))), Points(17))
    torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
