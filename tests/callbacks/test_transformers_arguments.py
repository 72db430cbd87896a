"""What a callback of transformers reads in its `args`, and what it writes there."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from kit.trainer import arguments
from transformers import SchedulerType, TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames, ParallelMode

from trainer_kit import DDP, FSDP, Trainer
from trainer_kit import TrainingArguments as Arguments
from trainer_kit.callbacks import from_transformers
from trainer_kit.callbacks.transformers_arguments import LiveArguments
from trainer_kit.run import Run


def theirs(**settings: Any) -> TrainingArguments:
    return TrainingArguments("unused", report_to="none", use_cpu=True, **settings)


def test_arguments_are_ours_then_those_of_transformers(make_run: Callable[..., Run]) -> None:
    args = LiveArguments(make_run(learning_rate=0.25, eval_strategy="epoch", pad_to_multiple_of=4))
    assert isinstance(args, TrainingArguments)
    assert (args.learning_rate, args.eval_delay, args.pad_to_multiple_of) == (0.25, 0, 4)
    assert (args.world_size, args.process_index, args.local_process_index, args.should_save) == (1, 0, 0, True)
    assert args.device.type == "cpu"
    with pytest.raises(AttributeError, match="learning_rat'"):
        args.learning_rat  # noqa: B018


def test_every_attribute_of_transformers_is_there(make_run: Callable[..., Run]) -> None:
    args = LiveArguments(make_run())
    expected = theirs()
    for name in dir(expected):
        if not name.startswith("_") and name != "distributed_state":
            assert callable(getattr(args, name)) == callable(getattr(expected, name)), name
    assert expected.to_dict().keys() <= args.to_dict().keys()
    assert expected.to_sanitized_dict().keys() <= args.to_sanitized_dict().keys()
    assert vars(args) == {name: getattr(args, name) for name in TrainingArguments.__dataclass_fields__}
    with pytest.raises(AttributeError, match=r"distributed_state.*use PartialState"):
        args.distributed_state  # noqa: B018


def test_the_kinds_of_values_are_those_of_transformers(make_run: Callable[..., Run]) -> None:
    args = LiveArguments(make_run(save_strategy="minutes", save_minutes=5, optim="muon", eval_strategy="epoch"))
    assert args.eval_strategy is IntervalStrategy.EPOCH
    assert args.logging_strategy is IntervalStrategy.STEPS
    assert args.lr_scheduler_type is SchedulerType.LINEAR
    assert args.save_strategy == "minutes"  # what transformers does not have stays as it is
    assert args.optim == "muon"
    assert args.ddp_timeout_delta == timedelta(seconds=1800)
    assert args.get_process_log_level() == logging.INFO
    assert args.hub_strategy.value == "every_save"
    assert (args.debug, args.accelerator_config.even_batches) == ([], True)


def test_another_process_logs_errors_only(make_run: Callable[..., Run]) -> None:
    args = LiveArguments(make_run(rank=1))
    assert (args.should_log, args.should_save, args.process_index) == (False, False, 1)
    assert args.get_process_log_level() == logging.ERROR


@pytest.mark.parametrize("steps", [7, 0.25])
def test_the_warmup_is_that_of_transformers(steps: float, make_run: Callable[..., Run]) -> None:
    args, expected = LiveArguments(make_run(warmup_steps=steps)), theirs(warmup_steps=steps)
    assert args.warmup_steps == expected.warmup_steps
    assert args.get_warmup_steps(10) == expected.get_warmup_steps(10)


def test_what_the_run_has_in_another_form_is_translated(make_run: Callable[..., Run]) -> None:
    run = make_run(
        mixed_precision="bf16", torch_compile={"backend": "eager"}, gradient_checkpointing=True, report_to=["jsonl"],
        eval_strategy="steps", float32_matmul_precision="high", per_device_train_batch_size=3, run_name="mine",
        shuffle=False,
    )  # fmt: skip
    run.strategy.precision = None  # not chosen before the training
    args = LiveArguments(run)
    expected = {
        "bf16": True, "fp16": False, "tf32": True, "torch_compile": True, "torch_compile_backend": "eager",
        "torch_compile_mode": None, "gradient_checkpointing": True, "per_device_eval_batch_size": 3,
        "run_name": "mine", "project": "huggingface", "report_to": ["jsonl"], "do_eval": True, "max_grad_norm": 1.0,
        "deepspeed": None, "optim": "adamw_torch", "train_sampling_strategy": "sequential", "fsdp": None,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in expected} == expected
    assert {name: args.to_dict()[name] for name in expected} == expected
    assert json.loads(args.to_json_string()) == args.to_dict()
    assert "run_name=mine,\n" in str(args)
    assert (args.train_batch_size, args.eval_batch_size) == (3, 3)
    assert (args.logging_dir, args.n_gpu, args.parallel_mode) == (
        str(run.args.log_dir), 0, ParallelMode.NOT_PARALLEL,
    )  # fmt: skip


@pytest.mark.parametrize("do_train", [False, True])
def test_what_the_script_reads_is_as_it_was_given(do_train: bool, make_run: Callable[..., Run]) -> None:
    args, expected = LiveArguments(make_run(do_train=do_train, use_cpu=True)), theirs(do_train=do_train)
    for name in ("do_train", "do_eval", "do_predict", "dataloader_pin_memory"):
        assert getattr(args, name) == getattr(expected, name), name
    assert args.include_num_input_tokens_seen == "non_padding"


def test_a_fused_optimizer_has_the_name_of_one(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.optimizer = torch.optim.AdamW(run.model.parameters(), fused=True)
    assert LiveArguments(run).optim is OptimizerNames.ADAMW_TORCH_FUSED


def test_what_a_strategy_was_given(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.strategy = DDP(find_unused_parameters=True, bucket_cap_mb=3, ddp_timeout=60)
    args = LiveArguments(run)
    assert (args.ddp_find_unused_parameters, args.ddp_static_graph, args.ddp_bucket_cap_mb) == (True, False, 3)
    assert args.ddp_timeout_delta == timedelta(seconds=60)


def test_a_copy_and_a_pickle_are_arguments_of_transformers(make_run: Callable[..., Run]) -> None:
    args = LiveArguments(make_run(learning_rate=0.25, eval_strategy="epoch"))
    for same in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert type(same) is TrainingArguments
        assert vars(same) == vars(args)
        assert same.eval_strategy is IntervalStrategy.EPOCH


@dataclasses.dataclass
class Own(Arguments):
    """Arguments of a user, with a field and a rule of their own."""

    ema: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learning_rate *= 2


def test_what_is_written_changes_the_arguments_of_the_run(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.args = Own(learning_rate=0.25)
    args = LiveArguments(run)
    args.eval_strategy = IntervalStrategy.EPOCH
    args.layer_lr_decay, args.ema, args.mine = 0.5, 0.75, "kept"
    assert (run.args.learning_rate, run.args.eval_strategy, run.args.layer_lr_decay) == (0.5, "epoch", 0.5)
    assert (LiveArguments(run).ema, LiveArguments(run).mine) == (0.75, "kept")
    assert {"ema", "layer_lr_decay", "nonfinite"} <= args.to_dict().keys()
    returned = args.set_save(strategy="steps", steps=3, total_limit=2).set_dataloader(train_batch_size=5)
    assert returned is args
    assert (run.args.save_strategy, run.args.save_steps, run.args.save_total_limit) == ("steps", 3, 2)
    assert (run.args.per_device_train_batch_size, args.save_strategy) == (5, SaveStrategy.STEPS)


def test_what_has_another_form_is_written_too(make_run: Callable[..., Run]) -> None:
    run = make_run(warmup_ratio=0.125)
    args = LiveArguments(run)
    args.bf16 = True
    assert run.args.mixed_precision == "bf16"
    args.fp16 = False
    assert run.args.mixed_precision == "bf16"
    args.bf16 = False
    assert run.args.mixed_precision == "no"
    for steps, own in ((0.25, (0, 0.25)), (0.5, (0, 0.5)), (7, (7, 0.0)), (0, (0, 0.0))):
        args.warmup_steps = steps
        assert (run.args.warmup_steps, run.args.warmup_ratio, args.warmup_steps) == (*own, steps)
    args.torch_compile_backend = "eager"
    args.torch_compile_mode = "default"
    assert run.args.torch_compile == {"backend": "eager", "mode": "default"}


def test_what_cannot_be_written_is_refused(make_run: Callable[..., Run]) -> None:
    run = make_run()
    args = LiveArguments(run)
    before = dataclasses.asdict(run.args)
    with pytest.raises(ValueError, match="learning_rate"):
        args.learning_rate = -1.0
    with pytest.raises(TypeError, match="PushToHub"):
        args.set_push_to_hub("me/model")
    with pytest.raises(AttributeError, match="train_batch_size"):
        args.train_batch_size = 3
    assert dataclasses.asdict(run.args) == before


class Cache(TrainerCallback):
    """Fills a cache on the first process, and reads it on all."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.seen: list[str] = []
        self.fsdp: bool | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._use(args, "init")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._use(args, "train")
        self.fsdp = args.fsdp

    def _use(self, args: Any, name: str) -> None:
        file = self.path / name
        with contextlib.ExitStack() as stack:
            for local in (False, True):
                stack.enter_context(args.main_process_first(local=local, desc="filling"))
                if args.process_index == 0:
                    time.sleep(0.2)
                    file.write_text(name)
        self.seen.append(file.read_text())


def fill(folder: str) -> tuple[list[str], bool | None]:
    callback = Cache(folder)
    data = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(8)]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    args = arguments(Path(folder), max_steps=1)
    Trainer(
        model, args, data, compute_loss=_loss, callbacks=[from_transformers(callback)], strategy=FSDP(units=["0"])
    ).train()
    return callback.seen, callback.fsdp


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["labels"])


@pytest.mark.distributed
def test_the_main_process_goes_first(tmp_path: Path) -> None:
    assert on_ranks(2, fill, str(tmp_path)) == [(["init", "train"], True)] * 2
