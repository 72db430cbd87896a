from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml

from trainer_kit.config.arguments import TrainingArguments

NAN, INF = float("nan"), float("inf")

WRONG_VALUES: dict[str, list[Any]] = {
    "output_dir": [""],
    "num_train_epochs": [0, -1.0, NAN, INF, 10**400],
    "max_steps": [0, -2],
    "per_device_train_batch_size": [0, -8],
    "per_device_eval_batch_size": [0],
    "gradient_accumulation_steps": [0],
    "learning_rate": [-1e-9, NAN, INF],
    "layer_lr_decay": [0.0, 1.1],
    "weight_decay": [-0.1, NAN],
    "adam_beta1": [-0.1, 1.0, NAN],
    "adam_beta2": [-0.1, 1.0],
    "adam_epsilon": [0.0, -1e-8],
    "optim": ["adam", ""],
    "lr_scheduler_type": ["cyclic"],
    "lr_scheduler_kwargs": [{"power": "2"}, {"power": NAN}, {"power": True}, {1: 2}],
    "optim_args": ["", "momentum", "momentum=high", "momentum=0.9,momentum=0.5"],
    "warmup_steps": [-1, -0.1, 1.5],
    "warmup_ratio": [-0.1, 1.1, NAN],
    "max_grad_norm": [-1.0, INF],
    "max_grad_value": [0.0, -1.0],
    "mixed_precision": ["int8"],
    "float32_matmul_precision": ["tf32", ""],
    "label_smoothing_factor": [-0.1, 1.1],
    "neftune_noise_alpha": [0.0, -5],
    "seed": [-1, 2**63],
    "logging_strategy": ["best"],
    "logging_steps": [0, -0.5, 1.5, NAN],
    "eval_strategy": ["best"],
    "eval_steps": [0, 2.5],
    "label_names": [["a", "a"], [""]],
    "include_for_metrics": [["logits"]],
    "generation_max_length": [0],
    "generation_num_beams": [0],
    "save_strategy": ["never"],
    "save_steps": [0, 0.0],
    "save_total_limit": [0],
    "save_minutes": [0],
    "save_failures": ["ignore"],
    "save_best_limit": [0],
    "save_keep_every": [0],
    "max_rollbacks": [0],
    "max_shard_size": [0, "0GB", "5 apples", "GB", "-5GB"],
    "metric_for_best_model": [""],
    "dataloader_num_workers": [-1],
    "dataloader_prefetch_factor": [0],
    "dataloader_multiprocessing_context": ["thread"],
    "pad_to_multiple_of": [0],
    "pad_to_lengths": [[], [64, 0]],
    "profile": ["", "10", "0:3", "20:10", "10-20", "1:2:3"],
    "report_to": ["wnadb", ["tensorboard", "wnadb"], ["all", "jsonl"], ["none", "wandb"], [3], [dict]],
    "report_artifacts": [["model"], ["last"]],
    "run_name": [""],
    "project": [""],
    "logging_dir": [""],
    "log_level": ["loud"],
    "strategy": ["horovod"],
    "nonfinite": ["replace"],
}

WRONG_TYPES: dict[str, list[Any]] = {
    "output_dir": [3],
    "num_train_epochs": ["3", None, True, 1j],
    "max_steps": [10.0, "10", True],
    "per_device_train_batch_size": [8.0, "8", True, None],
    "auto_find_batch_size": [1, None],
    "per_device_eval_batch_size": [8.5, True],
    "on_resize": [True, None],
    "gradient_accumulation_steps": [True, 1.0],
    "learning_rate": ["5e-5", None, False, [1e-4]],
    "layer_lr_decay": ["0.9", None],
    "weight_decay": [None],
    "adam_beta1": ["0.9"],
    "adam_beta2": [None],
    "adam_epsilon": [None],
    "optim": [None, 1],
    "lr_scheduler_type": [False],
    "lr_scheduler_kwargs": ["power=2", [("power", 2)]],
    "optim_args": [0.9, ["momentum=0.9"], {"momentum": 0.9}],
    "warmup_steps": ["0.1", None],
    "warmup_ratio": [None],
    "max_grad_norm": [None],
    "max_grad_value": ["1"],
    "mixed_precision": [False, None],
    "float32_matmul_precision": [True],
    "seed": [1.0, None],
    "torch_compile": [1, "yes", None, ["regional"]],
    "gradient_checkpointing": [0, "all", ["blocks.*"]],
    "label_smoothing_factor": ["0.1", None],
    "neftune_noise_alpha": ["5", True],
    "chunked_cross_entropy": [1, "liger"],
    "channels_last": [1, "yes"],
    "logging_strategy": [False],
    "logging_steps": ["0.1", True],
    "logging_first_step": ["no"],
    "eval_strategy": [False],
    "eval_steps": ["0.5"],
    "eval_on_start": [1],
    "label_names": ["labels", [1]],
    "eval_do_concat_batches": [0, "no"],
    "batch_eval_metrics": [1, "yes"],
    "include_for_metrics": ["loss", None],
    "predict_with_generate": [None],
    "generation_max_length": [8.0],
    "generation_num_beams": [True],
    "generation_config": ["folder", [1]],
    "save_strategy": [None],
    "save_steps": ["500"],
    "save_total_limit": [2.0],
    "save_minutes": ["30"],
    "async_save": [None],
    "save_failures": [None],
    "save_best_limit": [None],
    "save_keep_every": [2.5],
    "max_rollbacks": [None],
    "max_shard_size": [1.5, None, True],
    "load_best_model_at_end": [None],
    "metric_for_best_model": [3],
    "greater_is_better": ["True", 1],
    "dataloader_num_workers": [None],
    "dataloader_prefetch_factor": [1.5, "2"],
    "dataloader_multiprocessing_context": [1],
    "dataloader_timeout": [None, "1"],
    "dataloader_drop_last": [1],
    "shuffle": [0],
    "remove_unused_columns": ["yes"],
    "dataloader_pin_memory": [1],
    "group_by_length": [1],
    "pad_to_multiple_of": [8.0],
    "pad_to_lengths": [64, [64.5]],
    "report_to": [None, 3],
    "report_artifacts": [None, "last", [3]],
    "run_name": [3],
    "project": [3],
    "logging_dir": [3],
    "profile": [10, ["10:20"]],
    "disable_tqdm": ["no"],
    "log_level": [20],
    "use_cpu": ["cpu"],
    "strategy": [None],
    "nonfinite": [None],
    "resume_from_checkpoint": [3],
    "do_train": [1],
    "do_eval": [1],
    "do_predict": [1],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={value!r:.20}") for name in table for value in table[name]]


@pytest.mark.parametrize(("name", "value"), cases(WRONG_VALUES))
def test_a_value_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=") as raised:
        TrainingArguments(**{name: value})
    assert repr(value) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "value"), cases(WRONG_TYPES))
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name}=.* is not allowed; it must be ") as raised:
        TrainingArguments(**{name: value})
    assert repr(value) in str(raised.value)


def test_every_field_is_checked() -> None:
    assert {field.name for field in dataclasses.fields(TrainingArguments)} == set(WRONG_TYPES)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", -1.0, "it must be a finite number of at least 0"),
        ("per_device_eval_batch_size", 0, "it must be a whole number of at least 1, or None"),
        ("mixed_precision", "int8", "it must be one of 'no', 'fp16', 'bf16', 'fp8'"),
        ("use_cpu", 1, "it must be True or False, or None"),
        ("report_artifacts", ["model"], "it must be a list of 'report', 'best' and 'last'"),
        ("max_shard_size", "big", "it must be a number of bytes of at least 1, or a string such as '5GB' or '200MiB'"),
    ],
)
def test_the_message_says_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        TrainingArguments(**{name: value})
    assert str(raised.value) == f"{name}={value!r} is not allowed; {allowed}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "no", "eval_strategy": "epoch"}, "save_strategy='no'"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end=True needs .* eval_strategy='no'"),
        ({"save_strategy": "best"}, "save_strategy='best' needs .* eval_strategy='no'"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau"},
            "lr_scheduler_type='reduce_lr_on_plateau' steps at evaluations",
        ),
        ({"optim": "schedule_free_adamw"}, "optim='schedule_free_adamw' needs no schedule; set lr_scheduler_type="),
        ({"strategy": "xla", "use_cpu": True}, "strategy='xla' and use_cpu=True contradict each other"),
        ({"dataloader_prefetch_factor": 4}, "dataloader_prefetch_factor=4 needs workers; set dataloader_num_workers"),
        ({"dataloader_multiprocessing_context": "spawn"}, "dataloader_multiprocessing_context='spawn' needs workers"),
        ({"pad_to_lengths": [64], "pad_to_multiple_of": 8}, "pad_to_multiple_of=8 contradict each other"),
    ],
)
def test_values_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**settings)


def test_the_signature_is_that_of_the_dataclass() -> None:
    parameters = inspect.signature(TrainingArguments).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(TrainingArguments)]
    assert TrainingArguments("runs/a").output_dir == "runs/a"


def test_every_field_is_documented() -> None:
    assert TrainingArguments.__doc__ is not None
    for field in dataclasses.fields(TrainingArguments):
        assert f"\n    {field.name}: " in inspect.cleandoc(TrainingArguments.__doc__)


def test_defaults_agree_with_transformers() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    ours = TrainingArguments()
    for name in (
        *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type"),
        *("max_grad_norm", "seed", "logging_strategy", "eval_strategy", "save_strategy", "save_steps"),
        *(
            "load_best_model_at_end",
            "dataloader_drop_last",
            "remove_unused_columns",
            "dataloader_num_workers",
            "dataloader_pin_memory",
        ),
    ):
        assert getattr(ours, name) == theirs[name], name


def test_members_of_string_enums_are_taken_by_value() -> None:
    members: dict[str, Any] = {
        "eval_strategy": transformers.IntervalStrategy.STEPS,
        "save_strategy": transformers.trainer_utils.SaveStrategy.BEST,
        "lr_scheduler_type": transformers.SchedulerType.WARMUP_STABLE_DECAY,
        "optim": transformers.training_args.OptimizerNames.ADAMW_TORCH_FUSED,
    }
    values = TrainingArguments(**members).to_dict()
    for name, value in (
        ("eval_strategy", "steps"),
        ("save_strategy", "best"),
        ("lr_scheduler_type", "warmup_stable_decay"),
        ("optim", "adamw_torch"),
    ):
        assert values[name] == value
        assert type(values[name]) is str
    unknown: dict[str, Any] = {"lr_scheduler_type": transformers.SchedulerType.GREEDY}
    with pytest.raises(ValueError, match=r"^lr_scheduler_type='greedy' is not allowed; it is not available"):
        TrainingArguments(**unknown)


def test_values_become_plain_python_types() -> None:
    args = TrainingArguments(
        Path("runs") / "a",  # type: ignore[arg-type]
        num_train_epochs=3,
        learning_rate=np.float32(0.5),
        per_device_train_batch_size=np.int64(4),
        report_to=("jsonl",),  # type: ignore[arg-type]
    )
    assert args.output_dir == str(Path("runs") / "a")
    for name, kind in (("num_train_epochs", float), ("learning_rate", float), ("per_device_train_batch_size", int)):
        assert type(getattr(args, name)) is kind
    assert args.report_to == ["jsonl"]
    json.dumps(args.to_dict())


@pytest.mark.parametrize(
    ("given", "reporters"),
    [
        ("none", []),
        (["none"], []),
        ([], []),
        ("all", ["tensorboard", "jsonl", "html"]),
        (["all"], ["tensorboard", "jsonl", "html"]),
        ("jsonl", ["jsonl"]),
        (["jsonl", "tensorboard", "jsonl"], ["tensorboard", "jsonl"]),
    ],
)
def test_report_to(given: str | list[str], reporters: list[str]) -> None:
    assert TrainingArguments(report_to=given).report_to == reporters


def test_none_is_replaced_by_what_it_stands_for() -> None:
    args = TrainingArguments("out", logging_steps=7, per_device_train_batch_size=3)
    assert args.eval_steps == 7
    assert args.eval_batch_size == 3
    assert args.log_dir == Path("out/logs")
    assert args.metric_for_best_model is None
    assert args.greater_is_better is None
    given = dataclasses.replace(args, eval_steps=5, per_device_eval_batch_size=4, logging_dir="elsewhere")
    assert (given.eval_steps, given.eval_batch_size, given.log_dir) == (5, 4, Path("elsewhere"))


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("USERPROFILE", "/home/someone")
    args = TrainingArguments("~/runs", logging_dir="~/logs")
    assert (args.output_dir, args.log_dir) == ("/home/someone/runs", Path("/home/someone/logs"))


@pytest.mark.parametrize(
    ("settings", "metric", "greater"),
    [
        ({"load_best_model_at_end": True}, "eval_loss", False),
        ({"save_strategy": "best"}, "eval_loss", False),
        ({"metric_for_best_model": "loss"}, "eval_loss", False),
        ({"metric_for_best_model": "accuracy"}, "eval_accuracy", True),
        ({"metric_for_best_model": "eval_accuracy"}, "eval_accuracy", True),
        ({"metric_for_best_model": "valid_loss"}, "eval_valid_loss", False),
        ({"metric_for_best_model": "perplexity", "greater_is_better": False}, "eval_perplexity", False),
        ({"metric_for_best_model": "loss", "greater_is_better": True}, "eval_loss", True),
    ],
)
def test_the_best_metric(settings: dict[str, Any], metric: str, greater: bool) -> None:
    args = TrainingArguments(eval_strategy="steps", **settings)
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, greater)


def test_defaults_are_not_shared() -> None:
    first, numbers = TrainingArguments(), {"power": 2.0}
    assert isinstance(first.report_to, list)
    first.report_to.clear()
    first.lr_scheduler_kwargs["power"] = 1
    assert TrainingArguments().report_to == ["tensorboard", "jsonl", "html"]
    assert TrainingArguments().lr_scheduler_kwargs == {}
    TrainingArguments(lr_scheduler_kwargs=numbers).lr_scheduler_kwargs.clear()
    assert numbers == {"power": 2.0}


def test_replace_checks_again() -> None:
    args = TrainingArguments()
    args.learning_rate = -1.0
    with pytest.raises(ValueError, match=r"^learning_rate=-1\.0"):
        dataclasses.replace(args)


def test_copies_are_equal() -> None:
    args = TrainingArguments("out", seed=7, report_to="none")
    assert copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == args


def test_a_subclass_adds_fields() -> None:
    args = _MoreArguments.from_dict({"label_smoothing": 0.1, "layers": (1, 2), "seed": 3})
    assert isinstance(args, _MoreArguments)
    assert (args.label_smoothing, args.layers, args.seed) == (0.1, [1, 2], 3)
    with pytest.raises(TypeError, match=r"^_MoreArguments has no field 'label_smooting'; .* 'label_smoothing'$"):
        _MoreArguments.from_dict({"label_smooting": 0.1})
    with pytest.raises(TypeError, match=r"^label_smoothing='a'"):
        _MoreArguments.from_dict({"label_smoothing": "a"})


@dataclasses.dataclass
class _MoreArguments(TrainingArguments):
    label_smoothing: float = 0.0
    layers: list[int] = dataclasses.field(default_factory=list)


SETTINGS: dict[str, Any] = {
    "output_dir": "out/é: #1",
    "learning_rate": 1e-5,
    "adam_epsilon": 1e-300,
    "max_grad_value": 0.1,
    "mixed_precision": "no",
    "eval_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "report_to": "none",
    "seed": 2**63 - 1,
}


def test_to_dict_and_back() -> None:
    args = TrainingArguments(**SETTINGS)
    values = args.to_dict()
    assert set(values) == {field.name for field in dataclasses.fields(args)}
    assert TrainingArguments.from_dict(values) == args
    values["lr_scheduler_kwargs"].clear()
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_to_a_file_and_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"arguments{suffix}"
    for args in (TrainingArguments(**SETTINGS), TrainingArguments()):
        args.save(path)
        assert TrainingArguments.load(path) == TrainingArguments.load(str(path)) == args


def test_files_are_read_by_the_formats_own_readers(tmp_path: Path) -> None:
    args = TrainingArguments(**SETTINGS)
    args.save(tmp_path / "a.json")
    args.save(tmp_path / "a.yaml")
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == args.to_dict()
    assert yaml.safe_load((tmp_path / "a.yaml").read_text(encoding="utf-8")) == args.to_dict()


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("learning_rate: 5e-4\neval_strategy: no\nmixed_precision: no\nuse_cpu: true\nreport_to: [jsonl]\n")
    args = TrainingArguments.load(path)
    assert args == TrainingArguments(learning_rate=5e-4, use_cpu=True, report_to="jsonl")


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.json", "{", ValueError, "is no valid JSON: "),
        ("a.json", "[1]", ValueError, "holds a list, but must hold fields and their values"),
        ("a.json", '{"seed": NaN}', TypeError, "seed=nan is not allowed"),
        ("a.json", '{"seeds": 1}', TypeError, "TrainingArguments has no field 'seeds'; .* 'seed'$"),
        ("a.json", '{"max_steps": 0}', ValueError, "max_steps=0 is not allowed"),
        ("a.yaml", "a: [", ValueError, "is no valid YAML: "),
        ("a.yaml", "", ValueError, "holds a NoneType"),
        ("a.yaml", "1: 2", TypeError, "TrainingArguments has no field 1;"),
        ("a.yaml", "seed: !!python/object/apply:os.getpid []", ValueError, "is no valid YAML: "),
        ("a.yaml", "learning_rate: .nan", ValueError, "learning_rate=nan is not allowed"),
        ("a.toml", "seed = 1", ValueError, r"cannot tell the format by its ending; use \.json, \.yaml or \.yml"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str, error: type[Exception], message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(error, match=message) as raised:
        TrainingArguments.load(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    for name in ("a.json", "a.yaml"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="is no valid"):
            TrainingArguments.load(tmp_path / name)


def test_a_missing_file_and_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        TrainingArguments.load(tmp_path / "missing.json")
    with pytest.raises(ValueError, match=r"a\.txt: cannot tell the format"):
        TrainingArguments().save(tmp_path / "a.txt")


def test_the_module_needs_neither_torch_nor_yaml() -> None:
    # The package itself may import torch, so the two modules are run without it.
    script = (
        "import importlib.util, sys, types\n"
        "package = sys.modules['trainer_kit'] = types.ModuleType('trainer_kit')\n"
        f"package.__path__ = [{str(Path(inspect.getfile(TrainingArguments)).parents[1])!r}]\n"
        "import trainer_kit.config.arguments as arguments\n"
        "arguments.TrainingArguments()\n"
        "print([name for name in ('torch', 'yaml', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
