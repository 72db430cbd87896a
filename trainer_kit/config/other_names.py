"""Names that other trainers have for the settings of `TrainingArguments`, and their translation."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

logger = logging.getLogger("trainer_kit")

_NEAR = 0.75
"""Similarity of spelling from which an unknown name is a misspelled field."""

_LONGEST = 200
_CONFLICT = "it gives "

NOT_A_SWITCH = "give True or False"
"""The sentence about the value of a switch that is neither."""


class Fields(NamedTuple):
    """Fields that stand for a setting.

    Attributes:
        values: Values by field; empty if the setting is what happens anyway.
        note: Reason why the setting has no effect; None if the fields have the same effect.
    """

    values: Mapping[str, Any] = {}
    note: str | None = None


class Refusal(NamedTuple):
    """The sentence about a setting that no field stands for."""

    sentence: str


OtherName = Callable[[Any], Fields | Refusal]
"""Translates the value of a setting."""


def plain(value: Any) -> Any:
    """Return the value of a member of an Enum, and other values as they are."""
    return value.value if isinstance(value, Enum) else value


def renamed(field: str) -> OtherName:
    """Return the translation of another name of a field."""
    return lambda value: Fields({field: value})


def switched(field: str, on: Any, off: Any = None) -> OtherName:
    """Return the translation of a switch that gives a field the value `on` or `off`; None leaves the field alone."""

    def translate(value: Any) -> Fields | Refusal:
        if value is None:
            return Fields()
        if not isinstance(value, bool):
            return Refusal(NOT_A_SWITCH)
        chosen = on if value else off
        return Fields() if chosen is None else Fields({field: chosen})

    return translate


def refused(sentence: str, *harmless: Any) -> OtherName:
    """Return the translation of a setting that only has a counterpart with the values `harmless`."""
    return lambda value: Fields() if _is_among(value, (None, *harmless)) else Refusal(sentence)


def ignored(note: str, *harmless: Any) -> OtherName:
    """Return the translation of a setting without effect on results, mentioned unless its value is `harmless`."""
    return lambda value: Fields(note=None if _is_among(value, (None, *harmless)) else note)


def by_value(field: str, values: Mapping[str, str], sentences: Mapping[str, str]) -> OtherName:
    """Return the translation of a field's values: `values` have another name here, `sentences` are refused."""

    def translate(value: Any) -> Fields | Refusal:
        value = plain(value)
        if isinstance(value, str) and value in sentences:
            return Refusal(sentences[value])
        return Fields({field: values.get(value, value) if isinstance(value, str) else value})

    return translate


def options_of(field: str, key: str) -> OtherName:
    """Return the translation of one option of a field that is a dict of options."""
    return lambda value: Fields() if value is None else Fields({field: {key: value}})


def read_json(value: Any) -> Any:
    """Return the dict that JSON text holds, and other values as they are."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _is_among(value: Any, harmless: Iterable[Any]) -> bool:
    value = plain(value)
    return any(type(value) is type(each) and value == each for each in harmless)


def translate(
    cls: type, settings: Mapping[str, Any], others: Mapping[str, OtherName], values: Mapping[str, OtherName]
) -> dict[str, Any]:
    """Return the fields of a dataclass that settings stand for.

    Args:
        cls: The dataclass.
        settings: Values by name.
        others: Translations of names that are no fields. Fields of the dataclass have precedence.
        values: Translations of the values of fields.

    Raises:
        TypeError: If any name has no counterpart, or several settings give a field different values; names them all.
        ValueError: If only values of fields have no counterpart; names them all.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    fields: dict[str, Any] = {}
    problems: dict[Any, str] = {}
    notes = []
    for name, value in settings.items():
        found = _translated(name, value, known, others, values)
        if isinstance(found, Refusal):
            problems[name] = found.sentence
            continue
        if found.note is not None:
            notes.append(f"{name}={plain(value)!r} ({found.note})")
        for field, own in found.values.items():
            try:
                fields[field] = _merged(fields[field], own) if field in fields else own
            except ValueError:
                problems[name] = f"{_CONFLICT}{field}={own!r}, but another setting gives {field}={fields[field]!r}"
    if problems:
        error = ValueError if set(problems) <= set(known) else TypeError
        raise error(_message(cls, settings, problems, known))
    if notes:
        logger.warning("settings without effect here: %s", ", ".join(notes))
    return fields


def in_force(
    cls: type,
    file: Mapping[str, Any],
    settings: Mapping[str, Any],
    others: Mapping[str, OtherName],
    values: Mapping[str, OtherName],
) -> dict[str, Any]:
    """Return the settings of a file that the settings of a command line leave in force, whatever their names.

    A single option of a field that is a dict is added to those of the file.

    Args:
        cls: See `translate`.
        file: Settings of the file.
        settings: Settings of the command line.
        others: See `translate`.
        values: See `translate`.
    """
    known = [field.name for field in dataclasses.fields(cls)]

    def fields_of(name: str, value: Any) -> Mapping[str, Any]:
        found = _translated(name, value, known, others, values)
        return found.values if isinstance(found, Fields) else {}

    given = {field: own for pair in settings.items() for field, own in fields_of(*pair).items()}
    decided = {field for field, own in given.items() if not isinstance(own, Mapping)}
    kept: dict[str, Any] = {}
    for name, value in file.items():
        if name in settings:
            continue
        fields = fields_of(name, value)
        if decided & fields.keys():
            kept |= {field: own for field, own in fields.items() if field not in decided}
        else:
            kept[name] = value
    return kept


def attribute_sentence(name: str, value: Any, others: Mapping[str, OtherName], attributes: Mapping[str, str]) -> str:
    """Return what to use in place of an attribute of another trainer's arguments; "" if none is known.

    Args:
        name: Name of the attribute.
        value: The value that it is set to; True if it is read.
        others: Translations of settings that are no fields.
        attributes: Sentences about attributes that have a value only while a program runs.
    """
    if name in attributes or name not in others:
        return attributes.get(name, "")
    found = others[name](value)
    if isinstance(found, Refusal):
        return found.sentence
    if found.values:
        return f"use {', '.join(field if own is True else f'{field}={own!r}' for field, own in found.values.items())}"
    return found.note or "leave it out"


def _translated(
    name: Any, value: Any, known: list[str], others: Mapping[str, OtherName], values: Mapping[str, OtherName]
) -> Fields | Refusal:
    if name in known:
        return values[name](value) if name in values else Fields({name: value})
    return others[name](value) if name in others else Refusal(_hint(name, known, others))


def _merged(first: Any, second: Any) -> Any:
    """Return a value for a field that two settings give: options are put together, and imply True."""
    options = [value for value in (first, second) if isinstance(value, Mapping)]
    if options and all(isinstance(value, (bool, Mapping)) for value in (first, second)):
        return {key: value for each in options for key, value in each.items()}
    if first != second:
        raise ValueError
    return first


def _hint(name: Any, known: list[str], others: Mapping[str, OtherName]) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if name in _SYNONYMS:
        return f"the nearest known name is {_SYNONYMS[name]!r}"
    near = difflib.get_close_matches(str(name), [*known, *others], n=1, cutoff=_NEAR)
    return f"the nearest known name is {near[0]!r}" if near else "no setting has a similar name"


def _message(cls: type, settings: Mapping[str, Any], problems: Mapping[Any, str], known: list[str]) -> str:
    if len(problems) == 1:
        name, sentence = next(iter(problems.items()))
        if name in known or sentence.startswith(_CONFLICT):
            return f"{name}={_shown(settings[name])} is not allowed; {sentence}"
        return f"{cls.__name__} has no field {name!r}; {sentence}"
    lines = "".join(f"\n  {name}={_shown(settings[name])}: {sentence}" for name, sentence in problems.items())
    return f"{cls.__name__} does not take {len(problems)} of the settings:{lines}"


def _shown(value: Any) -> str:
    """Return a value in one line."""
    text = " ".join(repr(plain(value)).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


# Other programs' names of fields, if they are not similar in spelling.
_SYNONYMS = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "log_steps": "logging_steps",
    "warmup": "warmup_steps",
    **dict.fromkeys(("layer_decay", "llrd"), "layer_lr_decay"),
}

# Settings of other arguments, and arguments of the Trainer.
_ELSEWHERE = {
    **dict.fromkeys(
        ("min_lr", "min_learning_rate"),
        "give lr_scheduler_type='cosine_with_min_lr' and lr_scheduler_kwargs={'min_lr': ...}",
    ),
    "tokenizer": "give Trainer(processing_class=tokenizer)",
    "model": "give Trainer(model=)",
    "train_dataset": "give Trainer(train_dataset=)",
    "eval_dataset": "give Trainer(eval_dataset=)",
    "data_collator": "give Trainer(data_collator=)",
    "compute_metrics": "give Trainer(compute_metrics=)",
    "compute_loss_func": "give Trainer(compute_loss=)",
    "model_init": "give Trainer(model_init=)",
    "optimizers": "give Trainer(optimizer=, lr_scheduler=)",
    "optimizer_cls_and_kwargs": "give Trainer(optimizer=)",
    "preprocess_logits_for_metrics": "give Trainer(preprocess_logits_for_metrics=)",
    "processing_class": "give Trainer(processing_class=)",
    "train_sampler": "give Trainer(train_sampler=)",
}
