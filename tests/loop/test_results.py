"""What a script calls on its Trainer after training."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.ranks import on_ranks
from torch import nn

from trainer_kit import Trainer, TrainingArguments


def trainer(folder: Path, **given: Any) -> Trainer:
    rows = [{"input": torch.ones(2) * i, "labels": torch.tensor(0)} for i in range(4)]
    args = TrainingArguments(str(folder), **{"use_cpu": True, "report_to": "none", "max_steps": 2, **given})

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["input"]), batch["labels"])

    return Trainer(nn.Linear(2, 2), args, rows, {"a": rows[:2], "b": rows[2:]}, compute_loss=loss)


def test_metrics_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path).log_metrics("train", {"train_runtime": 3661.257, "loss": 0.123456, "epoch": 2, "n": "x"})
    assert capsys.readouterr().out.splitlines() == [
        "***** train metrics *****",
        "  epoch         =          2",
        "  loss          =     0.1235",
        "  n             =          x",
        "  train_runtime = 1:01:01.25",
    ]
    trainer(tmp_path).log_metrics("train", {})
    assert capsys.readouterr().out == "***** train metrics *****\n"


def test_metrics_are_written(tmp_path: Path) -> None:
    mine = trainer(tmp_path / "new")
    mine.save_metrics("train", {"loss": np.float32(0.5), "steps": 2})
    mine.save_metrics("eval", {"loss": 0.25, "accuracy": torch.tensor(0.75)})
    mine.save_metrics("test", {"loss": 9.0, "of": {"classes": torch.zeros(2)}}, combined=False)
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "new").iterdir()}
    assert found == {
        "train_results.json": {"loss": 0.5, "steps": 2},
        "eval_results.json": {"loss": 0.25, "accuracy": 0.75},
        "test_results.json": {"loss": 9.0, "of": {"classes": [0.0, 0.0]}},
        "all_results.json": {"loss": 0.25, "steps": 2, "accuracy": 0.75},
    }


def test_the_optimizer_and_the_schedule_are_those_of_the_run(tmp_path: Path) -> None:
    mine = trainer(tmp_path)
    assert (mine.optimizer, mine.lr_scheduler) == (None, None)
    mine.train()
    assert mine.optimizer is mine.run.optimizer
    assert mine.lr_scheduler is mine.run.lr_scheduler
    assert mine.lr_scheduler.get_last_lr() == [0.0]
    mine.optimizer = given = torch.optim.SGD(mine.model.parameters(), 0.25)  # for the next training
    mine.lr_scheduler = schedule = torch.optim.lr_scheduler.ConstantLR(mine.optimizer)
    assert (mine.optimizer, mine.lr_scheduler) == (given, schedule)
    mine.train()
    assert (mine.optimizer, mine.lr_scheduler) == (given, schedule) == (mine.run.optimizer, mine.run.lr_scheduler)
    mine.optimizer = mine.lr_scheduler = None
    assert (mine.optimizer, mine.lr_scheduler) == (None, None)
    mine.train()
    assert type(mine.optimizer) is torch.optim.AdamW


def test_a_script_of_transformers_ends_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = trainer(tmp_path, report_to="jsonl")
    mine.save_metrics("train", mine.train().metrics)
    mine.save_state()
    mine.create_model_card(
        finetuned_from="me/base", tasks=["text-classification"], dataset_tags="glue", dataset_args="mrpc", language=None
    )
    card = (tmp_path / "README.md").read_text()
    assert "base_model: me/base\n" in card
    assert "pipeline_tag: text-classification\n" in card
    assert "datasets: glue\n" in card or "datasets:\n- glue\n" in card
    assert json.loads((tmp_path / "all_results.json").read_text())["train_loss"] > 0
    mine.create_model_card(finetuned_from=str(tmp_path))
    assert str(tmp_path) not in (tmp_path / "README.md").read_text()
    (tmp_path / "log.jsonl").unlink()
    with caplog.at_level(logging.WARNING):
        mine.create_model_card()
    assert "no model card is written: it is made from log.jsonl, which report_to='jsonl' writes" in caplog.text


def test_attributes_of_the_run_can_be_read(tmp_path: Path) -> None:
    mine = trainer(tmp_path)
    assert (mine.model, mine.processing_class) == (mine.run.model, None)
    assert (mine.train_dataset, mine.eval_dataset) == (mine.run.train_dataset, mine.run.eval_dataset)
    with pytest.raises(AttributeError, match=r"Trainer\.model is set, which training here does not read"):
        mine.model = nn.Linear(1, 1)  # type: ignore[misc]


def test_a_dataset_is_chosen_by_name(tmp_path: Path) -> None:
    mine = trainer(tmp_path / "out")
    both, second = mine.evaluate(), mine.evaluate("b")
    assert both["eval_b_loss"] == second["eval_loss"]
    assert (tmp_path / "out").is_dir()
    with pytest.raises(ValueError, match="'c' is no name in the Trainer's eval_dataset: its names are 'a', 'b'"):
        mine.evaluate("c")
    with pytest.raises(ValueError, match=r"eval_dataset=\{\} holds no dataset; give at least one"):
        mine.evaluate({})


@pytest.mark.distributed
def test_the_main_process_writes(tmp_path: Path) -> None:
    assert on_ranks(2, on_a_rank, str(tmp_path)) == [(True, True), (False, False)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all_results.json", "rank0_results.json"]


def on_a_rank(folder: str) -> tuple[bool, bool]:
    mine = trainer(Path(folder), strategy="ddp")
    mine.run.strategy.setup()
    mine.save_metrics(f"rank{mine.run.strategy.collectives.rank}", {"loss": 1.0})
    return mine.is_world_process_zero(), mine.is_local_process_zero()
