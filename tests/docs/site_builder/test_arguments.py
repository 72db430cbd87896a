"""The table of arguments has each one, with its default, its meaning and the names that others give it."""

from __future__ import annotations

import dataclasses
import re

from site_builder.arguments import rows

from trainer_kit import TrainingArguments

ROWS = {re.sub("<.*?>", "", row[0]).strip("`"): row[1:] for row in rows()}


def test_each_argument_has_a_row_with_its_default_and_meaning() -> None:
    assert list(ROWS) == [field.name for field in dataclasses.fields(TrainingArguments)]
    assert ROWS["gradient_accumulation_steps"][0] == "`1`"
    assert ROWS["mixed_precision"][0] == "`'no'`, or the launcher's"
    assert "Micro-batches of one step" in ROWS["gradient_accumulation_steps"][1]
    assert all(len(meaning) > 20 and "Allowed" in meaning for _, meaning, *_ in ROWS.values())


def test_the_allowed_values_are_those_that_are_checked() -> None:
    assert "a finite number above 0" in ROWS["num_train_epochs"][1]
    assert "`'no'`, `'fp16'`, `'bf16'`, `'fp8'`" in ROWS["mixed_precision"][1]
    assert ", or None" in ROWS["max_grad_value"][1]


def test_other_names_stand_by_the_argument_that_they_become() -> None:
    theirs = {name: row[2] for name, row in ROWS.items()}
    assert theirs["learning_rate"] == "`learning_rate`"
    assert theirs["save_keep_every"] == ""
    assert {"`bf16`", "`fp16`"} <= {*theirs["mixed_precision"].split(", ")}
    assert "`evaluation_strategy`" in theirs["eval_strategy"]
    assert "`no_cuda`" in theirs["use_cpu"]
    assert ROWS["gradient_accumulation_steps"][1].endswith("<br>*Lightning:* `accumulate_grad_batches`.")
    assert "Lightning" not in ROWS["save_keep_every"][1]
