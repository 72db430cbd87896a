"""The translation of other trainers' names."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.config.other_names import (
    Fields,
    Refusal,
    by_value,
    ignored,
    options_of,
    read_json,
    refused,
    renamed,
    switched,
    translate,
)
from trainer_kit.config.sources import OTHER_NAMES


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("learing_rate", "learning_rate"),
        ("lr", "learning_rate"),
        ("batch_size", "per_device_train_batch_size"),
        ("warmup_step", "warmup_steps"),
        ("warmup", "warmup_steps"),
        ("llrd", "layer_lr_decay"),
        ("max_epoch", "max_epochs"),
        ("evaluation_strateg", "evaluation_strategy"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(unknown: str, nearest: str) -> None:
    message = f"^TrainingArguments has no field '{unknown}'; the nearest known name is '{nearest}'$"
    settings: dict[str, Any] = {unknown: 1}
    for make in (lambda given: TrainingArguments(**given), TrainingArguments.from_dict):
        with pytest.raises(TypeError, match=message):
            make(settings)
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(TrainingArguments(), **settings)


def test_the_floor_of_a_schedule_is_an_option_of_it() -> None:
    with pytest.raises(TypeError, match="no field 'min_lr'; give lr_scheduler_type='cosine_with_min_lr' and"):
        TrainingArguments(**{"min_lr": 1e-5})  # type: ignore[arg-type]


def test_a_name_that_is_like_no_other_gets_no_hint() -> None:
    with pytest.raises(TypeError, match=r"^TrainingArguments has no field 'flavour'; no setting has a similar name$"):
        TrainingArguments(**{"flavour": 1})  # type: ignore[arg-type]


def test_all_settings_without_counterpart_are_named_together() -> None:
    settings: dict[str, Any] = {"push_to_hub": True, "seed": 3, "deepspeed": "z.json", "sead": 1, "optim": "lion_8bit"}
    with pytest.raises(TypeError) as raised:
        TrainingArguments(**settings)
    assert str(raised.value).splitlines() == [
        "TrainingArguments does not take 4 of the settings:",
        "  push_to_hub=True: use Trainer(callbacks=[PushToHub('me/my-model')]) of trainer_kit.callbacks",
        "  deepspeed='z.json': DeepSpeed is not available; use strategy='fsdp'",
        "  sead=1: the nearest known name is 'seed'",
        "  optim='lion_8bit': it is not available; give Trainer(optimizer=), made with bitsandbytes.optim",
    ]


def test_a_taken_name_does_not_become_a_field() -> None:
    args = TrainingArguments(**{"bf16": True, "max_epochs": 2})  # type: ignore[arg-type]
    assert (args.mixed_precision, args.num_train_epochs) == ("bf16", 2)
    assert not {"bf16", "max_epochs"} & args.to_dict().keys()
    assert TrainingArguments.from_dict(args.to_dict()) == args


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bf16": True, "fp16": True},
            "fp16=True is not allowed; it gives mixed_precision='fp16', but another .*='bf16'",
        ),
        ({"max_epochs": 1, "num_train_epochs": 2}, "num_train_epochs=2 is not allowed; it gives num_train_epochs=2"),
        ({"warmup_steps": 0.1, "warmup_ratio": 0.2}, "warmup_steps=0.1 and warmup_ratio=0.2 contradict each other"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        TrainingArguments(**settings)


def test_options_of_one_field_are_put_together() -> None:
    for given in (
        {"torch_compile_mode": "default", "torch_compile_backend": "eager"},
        {"torch_compile": True, "torch_compile_mode": "default", "torch_compile_backend": "eager"},
        {"torch_compile_mode": "default", "torch_compile": {"backend": "eager"}},
        {"torch_compile_mode": "default", "torch_compile": False, "torchdynamo": "eager"},
    ):
        settings: dict[str, Any] = dict(given)
        assert TrainingArguments(**settings).torch_compile == {"mode": "default", "backend": "eager"}


def test_settings_without_effect_are_mentioned_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"ignore_data_skip": True, "use_cache": True, "dataloader_persistent_workers": 4}
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        assert TrainingArguments(**settings) == TrainingArguments()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("settings without effect here: ignore_data_skip=True (a resume continues")
    assert "dataloader_persistent_workers=4" in caplog.messages[0]
    assert "use_cache" not in caplog.messages[0]


def test_no_field_is_in_the_table_of_other_names() -> None:
    assert not {field.name for field in dataclasses.fields(TrainingArguments)} & OTHER_NAMES.keys()


def test_a_field_has_precedence_over_another_name() -> None:
    @dataclasses.dataclass
    class Own:
        push_to_hub: bool = False

    assert translate(Own, {"push_to_hub": True}, {"push_to_hub": refused("no")}, {}) == {"push_to_hub": True}


def test_the_translations() -> None:
    assert renamed("a")(3) == Fields({"a": 3})
    switch = switched("a", "on", "off")
    assert [switch(value) for value in (True, False, None)] == [Fields({"a": "on"}), Fields({"a": "off"}), Fields()]
    assert switched("a", "on")(False) == Fields()
    assert switch("yes") == Refusal("give True or False")
    assert [refused("no", 0)(value) for value in (None, 0, False, 1)] == [Fields()] * 2 + [Refusal("no")] * 2
    assert ignored("why", 0)(0) == Fields()
    assert ignored("why", 0)(1) == Fields(note="why")
    named = by_value("a", {"old": "new"}, {"gone": "no"})
    assert [named(value) for value in ("old", "x", "gone", 3)] == [
        *(Fields({"a": "new"}), Fields({"a": "x"})), Refusal("no"), Fields({"a": 3}),
    ]  # fmt: skip
    assert options_of("a", "k")(None) == Fields()
    assert options_of("a", "k")(1) == Fields({"a": {"k": 1}})
    assert [read_json(value) for value in ('{"a": 1}', "{a", "a", 1)] == [{"a": 1}, "{a", "a", 1]


def test_an_argument_of_the_trainer_is_sent_there() -> None:
    settings: dict[str, Any] = {"tokenizer": 1}
    with pytest.raises(TypeError, match=r"no field 'tokenizer'; give Trainer\(processing_class=tokenizer\)$"):
        TrainingArguments(**settings)
