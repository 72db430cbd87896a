"""`log_mean` and the parts of a loss: true means over items, micro-batches, ranks and steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.ranks import on_ranks
from kit.trainer import arguments
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainer_kit import FSDP, Callback, Run, Strategy, Trainer, TrainingArguments, log_mean
from trainer_kit.loss.means import LoggedValue, PassLog, means_of, sum_values

LENGTH, WIDTH, CLASSES = 26, 4, 3


def samples(length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(WIDTH, generator=generator, dtype=torch.float64),
            "labels": torch.tensor(-100 if index % 5 == 1 else index * 7 % CLASSES),
        }
        for index in range(length)
    ]


class Model(nn.Module):
    """Its loss has two parts; it logs one of them, a mean over other items, and its loss, by `log_mean`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        valid = labels != -100
        cross_entropy = F.cross_entropy(logits, labels)
        penalty = logits[valid].pow(2).sum() / valid.sum() / CLASSES
        log_mean("wide", x.pow(2).mean(), x.numel())
        log_mean("again", cross_entropy)
        log_mean("right", (logits.argmax(-1) == labels)[valid].double().mean(), valid.sum())
        return {"loss": cross_entropy + penalty, "cross_entropy": cross_entropy, "penalty": penalty, "logits": logits}


NAMES = ("loss", "cross_entropy", "penalty", "wide", "again", "right")


class Records(Callback):
    """Keeps the numbers of `NAMES` of records and evaluations."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.records.append({name: record[name] for name in NAMES if name in record})

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.evaluations.append({name: metrics[f"eval_{name}"] for name in NAMES})


def train(folder: Path | str, strategy: Strategy | None = None, **changes: Any) -> Records:
    records = Records()
    defaults = {"logging_steps": 2, "learning_rate": 0.1, "eval_strategy": "steps", "optim": "sgd"}
    args = arguments(Path(folder), **(defaults | changes))
    Trainer(Model(), args, samples(), samples(7), callbacks=[records], strategy=strategy).train()
    return records


def close(first: list[dict[str, float]], second: list[dict[str, float]]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys() == {*NAMES}
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=1e-12), name


def on_rank(folder: str, sharded: bool, **changes: Any) -> Records:
    return train(folder, FSDP(units=["Linear"]) if sharded else None, **changes)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one batch": {"per_device_train_batch_size": 8},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "evaluation in parts": {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_holds_means_over_items_and_steps(tmp_path: Path, layout: str) -> None:
    found = train(tmp_path / "found", **LAYOUTS[layout])
    each = train(tmp_path / "each", **{**LAYOUTS["one batch"], "logging_steps": 1, "eval_steps": 2})
    pairs = zip(each.records[::2], each.records[1::2], strict=True)
    close(found.records, [{name: (one[name] + other[name]) / 2 for name in NAMES} for one, other in pairs])
    close(found.evaluations, each.evaluations)
    for record in (*found.records, *found.evaluations):
        assert record["loss"] == pytest.approx(record["cross_entropy"] + record["penalty"], rel=1e-12)
        assert record["again"] == record["cross_entropy"]


def test_the_first_step_and_an_evaluation_by_hand(tmp_path: Path) -> None:
    found = train(tmp_path, **{**LAYOUTS["accumulation"], "logging_steps": 1, "learning_rate": 0.0})
    whole = {name: torch.stack([each[name] for each in samples(7)]) for name in ("x", "labels")}
    logits = Model().layer(whole["x"])
    valid = whole["labels"] != -100
    expected = {
        "cross_entropy": F.cross_entropy(logits, whole["labels"]),
        "penalty": logits[valid].pow(2).mean(),
        "wide": whole["x"].pow(2).mean(),
        "right": (logits.argmax(-1) == whole["labels"])[valid].double().mean(),
    }
    for evaluation in found.evaluations:
        assert {name: evaluation[name] for name in expected} == pytest.approx(
            {name: float(value.detach()) for name, value in expected.items()}, rel=1e-12
        )


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_log_the_means_of_one_process(tmp_path: Path, ranks: int, sharded: bool) -> None:
    """Some batches have no item, and some ranks no evaluation batch."""
    alone = train(tmp_path / "alone", per_device_train_batch_size=4 * ranks)
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 1}
    for records in on_ranks(ranks, on_rank, str(tmp_path / "ranks"), sharded, **changes):
        close(records.records, alone.records)
        close(records.evaluations, alone.evaluations)


def sometimes(folder: str) -> list[dict[str, Any]]:
    """Only the second rank logs, and only in some steps."""
    records: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            records.append({name: record.get(name) for name in ("step", "rare")})

    def compute_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if os.environ["RANK"] == "1" and float(batch["x"].detach().sum()) != 0:
            log_mean("rare", 2.5)
        loss: torch.Tensor = model(**batch)["loss"]
        return loss

    args = arguments(Path(folder), max_steps=2, logging_steps=1, per_device_train_batch_size=2)
    Trainer(Model(), args, samples(), compute_loss=compute_loss, callbacks=[Keep()]).train()
    return records


@pytest.mark.distributed
def test_a_value_of_one_rank_is_logged_on_all(tmp_path: Path) -> None:
    for records in on_ranks(2, sometimes, str(tmp_path)):
        assert records == [{"step": 1, "rare": 2.5}, {"step": 2, "rare": 2.5}]


def test_compute_loss_returns_parts_as_means_or_sums(tmp_path: Path) -> None:
    def means(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        output = model(**batch)
        return {name: output[name] for name in ("loss", "cross_entropy", "penalty")}, output

    def sums(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        count = (batch["labels"] != -100).sum()
        parts, _ = means(model, batch)
        return {name: (part * count).nan_to_num() for name, part in parts.items()}, count

    found = []
    for number, compute_loss in enumerate((means, sums)):
        records = Records()
        args = arguments(
            tmp_path / str(number), logging_steps=2, eval_strategy="steps", per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        Trainer(Model(), args, samples(), samples(7), compute_loss=compute_loss, callbacks=[records]).train()
        found.append(records)
    close(found[0].records, found[1].records)
    close(found[0].evaluations, found[1].evaluations)


def test_a_resume_in_an_interval_logs_the_same_bits(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    straight = train(tmp_path / "straight", **changes)
    records = Records()
    args = arguments(
        tmp_path / "straight", max_steps=4, logging_steps=2, learning_rate=0.1, eval_strategy="steps", optim="sgd",
        **changes,
    )  # fmt: skip
    Trainer(Model(), args, samples(), samples(7), callbacks=[records]).train(
        resume_from_checkpoint=tmp_path / "straight" / "run" / "checkpoint-3"
    )
    assert records.records == straight.records[1:]
    assert records.evaluations == straight.evaluations[1:]


class Detector(nn.Module):
    """Returns nothing but losses, as torchvision's detection models do in training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss_box": self.scale * 2.0, "loss_class": self.scale * x.mean() * 0 + 1.0}


def test_a_dict_of_losses_is_summed_and_its_parts_are_kept(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            records.append(record)

    data = [{"x": torch.ones(2)}] * 8
    args = arguments(tmp_path, max_steps=1, learning_rate=0.0)
    Trainer(Detector(), args, data, callbacks=[Keep()]).train()
    assert (records[0]["loss"], records[0]["loss_box"], records[0]["loss_class"]) == (3.0, 2.0, 1.0)


def test_the_recomputation_of_activations_logs_nothing(tmp_path: Path) -> None:
    calls = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            log_mean("calls", float(len(calls)))
            result: torch.Tensor = self.layer(x)
            return result

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.pow(2).mean()

    records: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            records.append(record)

    args = arguments(tmp_path, max_steps=1, gradient_checkpointing=True)
    Trainer(Deep(), args, [{"x": torch.ones(2)}] * 8, callbacks=[Keep()]).train()
    assert len(calls) == 4
    assert records[0]["calls"] == 1.5


def test_outside_of_a_pass_nothing_is_logged() -> None:
    log_mean("loss", float("nan"))
    assert Model()(torch.zeros(2, WIDTH, dtype=torch.float64), torch.zeros(2, dtype=torch.long))["loss"] > 0


@pytest.mark.parametrize(
    ("arguments_of_call", "error", "message"),
    [
        (("loss", 1.0), ValueError, "'loss' is a number that each record"),
        (("runtime", 1.0), ValueError, "'runtime' is a number that each record"),
        (("", 1.0), TypeError, "log_mean got the name ''"),
        (("kl", torch.ones(2)), TypeError, "'kl' is a Tensor of shape"),
        (("kl", "high"), TypeError, "'kl' is 'high'"),
        (("kl", 1.0, -1), ValueError, "count=-1; give a number of at least 0"),
        (("kl", 1.0, torch.ones(3)), TypeError, "'count of kl' is a Tensor"),
    ],
)
def test_what_cannot_be_logged(tmp_path: Path, arguments_of_call: Any, error: type[Exception], message: str) -> None:
    def compute_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        log_mean(*arguments_of_call)
        return model(**batch)["loss"]

    with pytest.raises(error, match=message):
        Trainer(Model(), arguments(tmp_path, max_steps=1), samples(), compute_loss=compute_loss).train()


def test_a_step_that_does_not_fit_is_counted_once(tmp_path: Path) -> None:
    """The first pass runs out of memory after it has logged; the step is repeated in parts."""
    is_first = [True]

    def compute_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        loss = model(**batch)
        if is_first.pop() if is_first else False:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss["loss"]

    names = ("loss", "wide", "again", "right")
    found: list[list[dict[str, float]]] = []
    for finds in (True, False):
        records = Records()
        args = arguments(
            tmp_path / str(finds), max_steps=2, logging_steps=1, optim="sgd", per_device_train_batch_size=8,
            auto_find_batch_size=finds,
        )  # fmt: skip
        is_first[:] = [True] * finds
        Trainer(Model(), args, samples(), compute_loss=compute_loss, callbacks=[records]).train()
        found.append([{name: record[name] for name in names} for record in records.records])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_a_pass_without_items_logs_nothing() -> None:
    values = [LoggedValue("a", float("nan"), None), LoggedValue("b", 2.0, 3)]
    assert sum_values(values, 0, lambda number: number, needs_items=True) == {}
    assert means_of([sum_values(values, 0, lambda number: number)]) == {"b": 2.0}
    assert sum_values([LoggedValue("a", float("nan"), 0)], 2, lambda number: number) == {}
    on_device = sum_values([LoggedValue("a", 4.0, None), LoggedValue("a", 7.0, 1)], 3, lambda number: number)
    assert means_of([on_device]) == {"a": 19 / 4}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile itself
def test_what_is_in_half_precision_or_compiled_is_logged(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.layer(x)
            log_mean("half", result.mean() * 0 + 3)
            return result.float().pow(2).mean()

    for number, changes in enumerate([{"mixed_precision": "bf16"}, {"torch_compile": {"backend": "eager"}}]):
        records: list[dict[str, Any]] = []

        class Keep(Callback):
            def __init__(self, records: list[dict[str, Any]]) -> None:
                self.records = records

            def on_log(self, run: Run, record: dict[str, Any]) -> None:
                self.records.append(record)

        args: TrainingArguments = arguments(tmp_path / str(number), max_steps=2, logging_steps=1, **changes)
        Trainer(Half(), args, [{"x": torch.ones(2)}] * 8, callbacks=[Keep(records)]).train()
        assert [record["half"] for record in records] == [3.0, 3.0]


def test_an_estimate_runs_the_passes_without_values(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1)
    assert Trainer(Model(), args, samples()).estimate("1GiB").to_dict()


class Logging(Linear):
    """Logs constants by `log_mean` after each pass, and returns others with its loss."""

    def __init__(self, logged: dict[str, float] | None = None, returned: dict[Any, float] | None = None) -> None:
        super().__init__()
        self.logged, self.returned = logged or {}, returned or {}

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        for name, value in self.logged.items():
            log_mean(name, value)
        return {"loss": super().forward(x, labels), **self.returned}


@pytest.mark.parametrize("name", ["eval_loss", "eval_runtime", "accuracy", "eval_accuracy"])
def test_a_logged_name_of_an_evaluation_is_refused(tmp_path: Path, name: str) -> None:
    def evaluated(model: nn.Module) -> dict[str, Any]:
        args = arguments(tmp_path)
        return Trainer(
            model, args, eval_dataset=points(4), compute_metrics=lambda prediction: {"accuracy": 0.5},
            preprocess_logits_for_metrics=lambda logits, labels: labels,
        ).evaluate()  # fmt: skip

    metric = f"eval_{name.removeprefix('eval_')}"
    with pytest.raises(ValueError, match=f"log_mean has got '{metric}', which is also the name of a metric"):
        evaluated(Logging({name: 7.0}, {"logits": 0.0}))
    own = evaluated(Logging(None, {"logits": 0.0, "other": 3.0}))
    found = evaluated(Logging(None, {"logits": 0.0, "other": 3.0, name: 7.0}))
    assert found["eval_other"] == 3.0
    assert found[metric] != 7.0
    assert found.keys() == own.keys()


def test_two_names_that_the_prefix_makes_one_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(Logging({"kl": 1.0, "eval_kl": 2.0}), arguments(tmp_path), eval_dataset=points(4))
    with pytest.raises(ValueError, match="log_mean has got 'eval_kl'"):
        trainer.evaluate()


class Waits(Callback):
    """Gives a metric to each record."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def metrics(self, run: Run) -> dict[str, Any]:
        return {"wait": 0.25}

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.records.append(record)


def test_a_logged_name_of_a_callback_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="log_mean has got 'wait', which is also the name of a metric"):
        Trainer(Logging({"wait": 7.0}), args, points(), callbacks=[Waits()]).train()
    waits = Waits()
    Trainer(Logging(None, {"wait": 7.0}), args, points(), callbacks=[waits]).train()
    assert [record["wait"] for record in waits.records] == [0.25]


def test_an_output_may_have_any_keys(tmp_path: Path) -> None:
    returned = {"step": 9.0, "epoch": 9.0, "runtime": 9.0, 3: 9.0, "": 9.0, "kl": 2.0}
    waits = Waits()
    trainer = Trainer(Logging(None, returned), arguments(tmp_path, max_steps=1), points(), callbacks=[waits])
    trainer.train()
    (record,) = waits.records
    assert (record["step"], record["kl"]) == (1, 2.0)
    assert not {3, "", "runtime"} & record.keys()
    assert trainer.evaluate(points(4))["eval_kl"] == 2.0


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_a_value_is_the_one_at_the_time_of_the_call(tmp_path: Path, make: Any) -> None:
    class Changing(Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            value, count = make([2.0]), make([3.0])
            log_mean("kept", value)
            log_mean("counted", 1.0, count)
            log_mean("counted", 5.0, 1)
            value *= 0
            count *= 0
            return super().forward(x, labels)

    metrics = Trainer(Changing(), arguments(tmp_path), eval_dataset=points(4)).evaluate()
    assert (metrics["eval_kept"], metrics["eval_counted"]) == (2.0, 2.0)


def test_a_part_of_an_output_is_a_copy() -> None:
    log, part = PassLog(), torch.tensor(2.0)
    log.add_parts({"part": part})
    part.zero_()
    assert float(log.values[0].value) == 2.0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float16])
def test_counts_on_a_device_do_not_overflow(dtype: torch.dtype) -> None:
    count = torch.ones((), dtype=dtype, device="meta")
    sums = sum_values([LoggedValue("a", 1.0, count), LoggedValue("a", 1.0, count)], 2, lambda number: number)
    total, counted = sums["a"]
    assert counted.dtype == (torch.float32 if dtype.is_floating_point else torch.int64)
    assert total.dtype == torch.float32
