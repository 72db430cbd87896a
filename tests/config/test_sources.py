"""Arguments from other sources than the constructor."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from pathlib import Path
from typing import Any, Tuple  # noqa: UP035

import pytest
import transformers

from trainer_kit import TrainingArguments
from trainer_kit.config.sources import OTHER_NAMES, with_other_names


def test_other_names_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("bf16: true\nmax_epochs: 2\n")
    args = TrainingArguments.load(tmp_path / "run.yaml")
    assert (args.mixed_precision, args.num_train_epochs) == ("bf16", 2)


def test_a_dataclass_with_other_names() -> None:
    @with_other_names
    @dataclasses.dataclass
    class Settings:
        num_train_epochs: float = 1.0

    settings: dict[str, Any] = {"max_epochs": 3}
    assert Settings(**settings) == Settings(3)
    assert "max_epochs" in OTHER_NAMES


def test_a_name_of_another_trainer_cannot_be_set_later() -> None:
    args = TrainingArguments()
    with pytest.raises(
        AttributeError, match=r"^TrainingArguments\.bf16 is set, which is not read: use mixed_precision="
    ):
        args.bf16 = True  # type: ignore[attr-defined]
    args.mine = 3  # type: ignore[attr-defined]
    assert copy.deepcopy(args).mine == pickle.loads(pickle.dumps(args)).mine == 3  # type: ignore[attr-defined]


def test_a_field_of_a_subclass_may_have_the_name_of_another_trainer() -> None:
    @dataclasses.dataclass
    class Mine(TrainingArguments):
        data_seed: int = dataclasses.field(default_factory=lambda: 4)

    args = Mine()
    args.data_seed = 5
    assert args.data_seed == 5


class Kind(enum.Enum):
    SMALL = "small"
    LARGE = "large"
    RANGE = (1, 2)

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        return next((each for each in cls if each.value == value.lower()), None)


@dataclasses.dataclass
class Extended(TrainingArguments):
    data: Path = Path("data")
    cache: Path | None = None
    sizes: tuple[int, ...] = (3, 4)
    span: tuple[float, str] = (0.5, "m")
    loose: tuple = (1,)  # type: ignore[type-arg]
    kind: Kind = Kind.SMALL
    other: Kind | None = None
    bare: Tuple = (1, 2)  # type: ignore[type-arg]  # noqa: UP006
    given: Any = None


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_fields_of_a_subclass_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    args = Extended(cache=Path("c"), sizes=(1,), kind=Kind.LARGE, other=Kind.RANGE)
    args.save(tmp_path / name)
    assert Extended.load(tmp_path / name) == args
    assert Extended.from_args(["--config", str(tmp_path / name)]) == args
    assert Extended.from_dict(args.to_dict()) == args


def test_fields_of_a_subclass_have_the_types_of_their_hints() -> None:
    args = Extended.from_args(["--data", "x", "--kind", "LARGE"])
    assert (args.data, args.kind) == (Path("x"), Kind.LARGE)
    with pytest.raises(TypeError, match=r"^data=3 is not allowed; it must be a path$"):
        Extended(data=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^span=\[1\] is not allowed; it must be a list of 2$"):
        Extended(span=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^kind='tiny' is not allowed; it must be one of 'small', 'large', \(1, 2\)$"):
        Extended(kind="tiny")  # type: ignore[arg-type]


def test_a_value_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"run\.yaml: cannot hold given=\{1, 2\}; give strings"):
        Extended(given={1, 2}).save(tmp_path / "run.yaml")
    assert not [*tmp_path.iterdir()]


THEIRS = "or give the Trainer transformers' own TrainingArguments, which have it"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fp16", ": use mixed_precision='fp16'"),
        ("data_seed", ": seed= determines the order of samples too"),
        ("world_size", f": use PartialState().num_processes of trainer_kit.accelerator, {THEIRS}"),
        ("local_rank", f": use PartialState().local_process_index of trainer_kit.accelerator, {THEIRS}"),
        ("evaluation_strategy", ": use eval_strategy"),
        ("overwrite_output_dir", ": leave it out"),
        ("width", ""),
    ],
)
def test_a_missing_attribute_says_what_stands_for_it(name: str, sentence: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(TrainingArguments(), name)
    assert str(raised.value) == f"'TrainingArguments' object has no attribute {name!r}{sentence}"


@dataclasses.dataclass
class _ModelArguments:
    width: int = 8


def test_hf_argument_parser_takes_the_arguments(monkeypatch: Any) -> None:
    parser = transformers.HfArgumentParser((TrainingArguments, _ModelArguments))  # type: ignore[arg-type]
    line = (
        "--output_dir out --learning_rate 3e-4 --warmup_steps 0.1 --save_steps 100 --eval_strategy steps "
        "--eval_steps 0.25 --max_shard_size 2GB --report_to jsonl html --torch_compile true --width 16 --seed 3 "
        "--mixed_precision bf16 --optim adamw_torch_fused --no_async_save --pad_to_lengths 64 128 --do_train "
        "--resume_from_checkpoint out/checkpoint-2"
    )
    args, model = parser.parse_args_into_dataclasses(line.split())
    assert model == _ModelArguments(16)
    assert args == TrainingArguments(
        "out", learning_rate=3e-4, warmup_ratio=0.1, save_steps=100, eval_strategy="steps", eval_steps=0.25,
        max_shard_size="2GB", report_to=["jsonl", "html"], torch_compile=True, seed=3, mixed_precision="bf16",
        async_save=False, pad_to_lengths=[64, 128], do_train=True, resume_from_checkpoint="out/checkpoint-2",
    )  # fmt: skip
    assert parser.parse_args_into_dataclasses([])[0] == TrainingArguments()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--use_cpu", {"use_cpu": True}),
        ("--use_cpu true --seed 3", {"use_cpu": True, "seed": 3}),
        ("--use-cpu false --greater_is_better", {"use_cpu": False, "greater_is_better": True}),
        ('--lr_scheduler_kwargs {"num_cycles":2}', {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        ("--bf16 --seed 3", {"mixed_precision": "bf16", "seed": 3}),
        ("--bf16 True --fp16 False", {"mixed_precision": "bf16"}),
        ("--fp16", {"mixed_precision": "fp16"}),
        ("--fp16 no", {}),
        ("--mixed-precision fp8", {"mixed_precision": "fp8"}),
    ],
)
def test_hf_argument_parser_takes_flags_and_dicts(line: str, expected: dict[str, Any]) -> None:
    parser = transformers.HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    assert parser.parse_args_into_dataclasses(line.split())[0] == TrainingArguments(**expected)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--bf16 maybe", "--bf16 takes true or false"),
        ("--mixed_precision", "--mixed_precision needs the name"),
        ("--bf16 --fp16", "bf16 and fp16 are both given as precision"),
        ("--mixed_precision fp16 --bf16", "fp16 and bf16 are both given as precision"),
        ("--mixed_precision no --bf16", "no and bf16 are both given as precision"),
    ],
)
def test_hf_argument_parser_names_a_wrong_precision(line: str, sentence: str, capsys: Any) -> None:
    parser = transformers.HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(line.split())
    assert sentence in capsys.readouterr().err


def test_hf_argument_parser_leaves_the_launchers_choices(monkeypatch: Any) -> None:
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "1")
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "bf16")
    parser = transformers.HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    args = parser.parse_args_into_dataclasses([])[0]
    assert args == TrainingArguments()
