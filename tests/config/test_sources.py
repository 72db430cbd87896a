"""Arguments from other sources than the constructor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass
class _ModelArguments:
    width: int = 8


def test_hf_argument_parser_takes_the_arguments(monkeypatch: Any) -> None:
    parser = transformers.HfArgumentParser((TrainingArguments, _ModelArguments))  # type: ignore[arg-type]
    line = (
        "--output_dir out --learning_rate 3e-4 --warmup_steps 0.1 --save_steps 100 --eval_strategy steps "
        "--eval_steps 0.25 --max_shard_size 2GB --report_to jsonl html --torch_compile true --width 16 --seed 3 "
        "--mixed_precision bf16 --optim adamw_torch_fused --no_async_save --pad_to_lengths 64 128"
    )
    args, model = parser.parse_args_into_dataclasses(line.split())
    assert model == _ModelArguments(16)
    assert args == TrainingArguments(
        "out", learning_rate=3e-4, warmup_ratio=0.1, save_steps=100, eval_strategy="steps", eval_steps=0.25,
        max_shard_size="2GB", report_to=["jsonl", "html"], torch_compile=True, seed=3, mixed_precision="bf16",
        async_save=False, pad_to_lengths=[64, 128],
    )  # fmt: skip
    assert parser.parse_args_into_dataclasses([])[0] == TrainingArguments()


def test_hf_argument_parser_leaves_the_launchers_choices(monkeypatch: Any) -> None:
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "1")
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "bf16")
    parser = transformers.HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    args = parser.parse_args_into_dataclasses([])[0]
    assert args == TrainingArguments()
