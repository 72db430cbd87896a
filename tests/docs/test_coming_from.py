"""What "Coming from" says of transformers' and Lightning's settings agrees with the tables of the code."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import transformers
from kit.guides import Guide

from trainer_kit import TrainingArguments
from trainer_kit.config.lightning_names import LIGHTNING_NAMES
from trainer_kit.config.sources import OTHER_NAMES

TEXT = Guide("docs/en/coming-from/index.md").text
OWN = {field.name for field in dataclasses.fields(TrainingArguments)}
THEIRS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}


def rows(title: str) -> list[tuple[str, str]]:
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.*?) \| (.*) \|$", section, re.MULTILINE)


def names(cell: str) -> set[str]:
    return set(re.findall(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b", " ".join(re.findall(r"`([^`]*)`", cell))))


def test_each_setting_of_transformers_in_the_table_is_known() -> None:
    named = {name for left, _ in rows("From transformers.Trainer") for name in names(left)} & THEIRS
    assert len(named) > 25
    assert named <= OWN | OTHER_NAMES.keys()


def test_the_counterparts_are_ours() -> None:
    for left, right in rows("From transformers.Trainer"):
        if left.startswith("`fp16=True`"):
            assert names(right) <= OWN
            assert {each for each in names(left) if each not in OWN} <= OTHER_NAMES.keys()
            return
    pytest.fail("there is no row of settings that are taken")


def test_the_settings_of_lightning_that_are_taken_are_in_the_code() -> None:
    row = next(row for row in rows("From Lightning") if row[0].startswith("`Trainer(max_epochs"))
    taken = names(row[0]) | names(row[1]) - {"trainer_kit"}
    assert taken <= OWN | LIGHTNING_NAMES.keys()


def test_the_example_is_taken() -> None:
    call = re.search(r"^args = (TrainingArguments\(\n.*?^\))$", TEXT, re.MULTILINE | re.DOTALL)
    assert call is not None
    names_in: dict[str, Any] = {"TrainingArguments": TrainingArguments}
    args = eval(call[1], names_in)
    assert (args.mixed_precision, args.warmup_ratio, args.eval_steps) == ("bf16", 0.03, 0.1)
