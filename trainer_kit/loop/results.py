"""`ResultMethods`: what a script calls on its Trainer after training, under the names of transformers' Trainer."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.disk import write_file
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.run import Run
from trainer_kit.utils.run_log import NAME

logger = logging.getLogger("trainer_kit")

_CARD_FIELDS = {"finetuned_from": "base_model", "tasks": "pipeline_tag", "dataset_tags": "datasets"}
"""Fields of transformers' model card, and those of `huggingface_hub.ModelCardData`."""

_ONLY_TEXT = ("dataset", "dataset_args")
"""Fields of transformers' model card that are sentences in it, without a place in the metadata."""


class ResultMethods:
    """Methods and attributes of the Trainer that show and write the results of a run.

    Attributes:
        run: The run.
    """

    run: Run
    _given_optimizer: Any
    _given_lr_scheduler: Any
    _set_for_next: set[str]

    @property
    def args(self) -> TrainingArguments:
        """The arguments of the run."""
        return self.run.args

    @args.setter
    def args(self, args: Any) -> None:
        if args is not self.run.args:
            raise AttributeError(
                f"{type(self).__name__}.args is set, but holds the arguments of the run; change its fields, or make "
                "another Trainer"
            )

    @property
    def model(self) -> torch.nn.Module:
        """The user's model."""
        return self.run.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer or processor; None without one."""
        return self.run.processing_class

    @property
    def train_dataset(self) -> Any:
        """The training dataset; None without one."""
        return self.run.train_dataset

    @property
    def eval_dataset(self) -> Any:
        """The dataset of evaluations, or a dict of several; None without one."""
        return self.run.eval_dataset

    @property
    def optimizer(self) -> Any:
        """The optimizer of the run; before a training, what was given or set for it, or None."""
        return self._given_optimizer if self._is_next("optimizer") else self.run.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._given_optimizer = optimizer
        self._set_for_next.add("optimizer")

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of the run; before a training, what was given or set for it, or None."""
        return self._given_lr_scheduler if self._is_next("lr_scheduler") else self.run.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, lr_scheduler: Any) -> None:
        self._given_lr_scheduler = lr_scheduler
        self._set_for_next.add("lr_scheduler")

    def _is_next(self, name: str) -> bool:
        """Return whether the next training's is to be shown: none has begun, or another one was set since."""
        return name in self._set_for_next or getattr(self.run, name) is None

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process of all machines."""
        return self.run.strategy.is_main

    def is_local_process_zero(self) -> bool:
        """Return whether this is the main process of its machine."""
        return self.run.strategy.collectives.is_local_main

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics on the main process: numbers with four decimals, durations as hours, minutes and seconds.

        Args:
            split: Part of the data, such as "train".
            metrics: The metrics.
        """
        if not self.run.strategy.is_main:
            return
        shown = {name: _shown(name, metrics[name]) for name in sorted(metrics)}
        width, end = max(map(len, shown), default=0), max(map(len, shown.values()), default=0)
        lines = [f"  {name:{width}} = {value:>{end}}\n" for name, value in shown.items()]
        sys.stdout.write(f"***** {split} metrics *****\n{''.join(lines)}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `SPLIT_results.json` in `output_dir`, on the main process.

        Args:
            split: Part of the data, such as "train".
            metrics: The metrics.
            combined: Whether to add them to `all_results.json` too, which keeps those of other calls.
        """
        if not self.run.strategy.is_main:
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{split}_results.json", metrics)
        if combined:
            path = folder / "all_results.json"
            earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write(path, {**earlier, **metrics})

    def save_state(self) -> None:
        """Write nothing: each checkpoint holds the state of the run, and `log.jsonl` its history."""
        logger.info("save_state() writes nothing: the checkpoints hold the state of the run, that of the end included")

    def create_model_card(self, **metadata: Any) -> None:
        """Write `README.md` to `output_dir`, on the main process: a model card made from the run.

        Without `log.jsonl`, there is no card, and the log says so.

        Args:
            **metadata: Fields of the card, under transformers' names (`finetuned_from`, `tasks`, `dataset_tags`) or
                those of `huggingface_hub.ModelCardData`.
        """
        from trainer_kit.report.card import model_card  # at the end of a run, if at all

        folder = Path(self.args.output_dir)
        if not self.run.strategy.is_main:
            return
        if not (folder / NAME).exists():
            logger.warning("no model card is written: it is made from %s, which report_to='jsonl' writes", NAME)
            return
        fields = {_CARD_FIELDS.get(name, name): each for name, each in metadata.items() if name not in _ONLY_TEXT}
        if isinstance(task := fields.get("pipeline_tag"), (list, tuple)):
            fields["pipeline_tag"] = task[0] if task else None
        if isinstance(names := fields.get("datasets"), str):
            fields["datasets"] = [names]
        if Path(str(fields.get("base_model"))).is_dir():  # a card names no folders
            fields["base_model"] = None
        given = {name: value for name, value in fields.items() if value is not None}
        write_file(folder / "README.md", [model_card(folder, **given).encode()])


def _shown(name: str, value: Any) -> str:
    if name.endswith("_runtime") and isinstance(value, (int, float)):
        return f"{datetime.timedelta(seconds=int(value))}.{int(value % 1 * 100):02d}"
    return str(round(value, 4)) if isinstance(value, float) else str(value)


def _write(path: Path, metrics: Mapping[str, Any]) -> None:
    text = json.dumps(metrics, indent=4, sort_keys=True, default=lambda value: value.tolist())  # of torch or numpy
    write_file(path, [f"{text}\n".encode()])
