"""The tables of other trainers' settings say what the code does with each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import pytest
import transformers
from site_builder.settings import (
    attributes_of_transformers,
    meaning,
    methods_of_transformers,
    settings_of_lightning,
    settings_of_transformers,
)
from transformers import Seq2SeqTrainingArguments

from trainer_kit import TrainingArguments
from trainer_kit.config.lightning_names import LIGHTNING_NAMES
from trainer_kit.config.other_names import NOT_A_SWITCH, OtherName, renamed
from trainer_kit.config.sources import OTHER_NAMES
from trainer_kit.config.transformers_names import ATTRIBUTES, TRANSFORMERS_NAMES


def rows(page: str) -> dict[str, str]:
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "names"), [(settings_of_transformers, TRANSFORMERS_NAMES), (settings_of_lightning, LIGHTNING_NAMES)]
)
def test_each_setting_has_a_row_that_says_something(page: Callable[[], str], names: Mapping[str, OtherName]) -> None:
    found = rows(page())
    assert found.keys() == names.keys()
    assert all(len(text) > 5 and NOT_A_SWITCH not in text for text in found.values())


def test_each_attribute_has_a_row() -> None:
    page = attributes_of_transformers()
    assert [name for name, text in ATTRIBUTES.items() if f"`{name}`" not in page or text not in page] == []


def test_each_field_of_transformers_is_on_its_page() -> None:
    page = settings_of_transformers()
    assert [each.name for each in dataclasses.fields(Seq2SeqTrainingArguments) if f"`{each.name}`" not in page] == []


def test_what_a_row_says_is_taken() -> None:
    taken = [
        pair
        for name in OTHER_NAMES
        for pair in re.findall(r"`(\w+=[^`]+)` is `([^`]+)`", meaning(name, OTHER_NAMES[name]))
    ]
    assert len(taken) > 10
    for theirs, own in taken:
        args = [eval(f"TrainingArguments({each})", {"TrainingArguments": TrainingArguments}) for each in (theirs, own)]
        assert args[0] == args[1], theirs


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_epochs", "`num_train_epochs`"),
        ("fp16", "`fp16=True` is `mixed_precision='fp16'`"),
        ("deepspeed", "DeepSpeed is not available; use strategy='fsdp'"),
        ("use_cache", "no effect: training does not use a cache"),
        ("torch_compile_mode", "`torch_compile={'mode': ...}`"),
        (
            "check_val_every_n_epoch",
            "`check_val_every_n_epoch=1` is `eval_strategy='epoch'`; else use eval_strategy='steps' and eval_steps=",
        ),
    ],
)
def test_a_row(name: str, text: str) -> None:
    assert meaning(name, OTHER_NAMES[name]) == text


def test_another_name_of_a_field() -> None:
    assert meaning("epochs", renamed("num_train_epochs")) == "`num_train_epochs`"


@pytest.mark.slow
def test_each_public_method_of_transformers_trainer_is_in_the_table_or_ours() -> None:
    page = methods_of_transformers()
    public = {name for name in vars(transformers.Trainer) if not name.startswith("_")}
    assert {name for name in public if f"`{name}`" not in page} == {
        "train", "predict", "log_metrics", "save_metrics", "save_state", "create_model_card", "is_world_process_zero",
        "is_local_process_zero",
    }  # fmt: skip
