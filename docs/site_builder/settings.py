"""The tables of other trainers' settings and methods: what each becomes, or why it has no counterpart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from site_builder.tables import code, table
from trainer_kit import TrainingArguments
from trainer_kit.config.lightning_names import LIGHTNING_NAMES
from trainer_kit.config.other_names import NOT_A_SWITCH, Fields, OtherName, Refusal
from trainer_kit.config.transformers_names import ATTRIBUTES, TRANSFORMERS_NAMES
from trainer_kit.utils.overrides import REPLACEMENTS

_ANY = object()
"""Stands for any value of a setting that is renamed."""

_SAMPLES: tuple[Any, ...] = (
    *(_ANY, 1, True, False, 0.5, {}),
    *("16-mixed", "bf16-mixed", "32-true", "linear", "sequential", "group_by_length"),
)
"""Values that show which argument a setting becomes: each setting takes one of them."""

Names = Mapping[str, OtherName]


def settings_of_transformers() -> str:
    """Return the settings of transformers that are arguments too, and the table of all others."""
    same = [field.name for field in dataclasses.fields(TrainingArguments) if field.name in fields_of_transformers()]
    return (
        f"The same name, with the same meaning: {', '.join(map(code, same))}.\n\n"
        f"{_table('transformers', TRANSFORMERS_NAMES)}"
    )


def attributes_of_transformers() -> str:
    """Return the table of the attributes of transformers' arguments that have a value only while a program runs."""
    return _by_sentence("transformers' TrainingArguments", ATTRIBUTES)


def settings_of_lightning() -> str:
    """Return the table of Lightning's settings."""
    return _table("Lightning", LIGHTNING_NAMES)


def methods_of_transformers() -> str:
    """Return the table of the methods and attributes of transformers' Trainer, with what stands for them."""
    return _by_sentence("transformers' Trainer", {n: text for n, text in REPLACEMENTS.items() if n[0] != "_"})


def _by_sentence(trainer: str, sentences: Mapping[str, str]) -> str:
    """Return a table with one row for each sentence, with all of its names."""
    names: dict[str, list[str]] = {}
    for name, sentence in sentences.items():
        names.setdefault(sentence, []).append(code(name))
    return table([trainer, "trainer_kit"], [(", ".join(each), sentence) for sentence, each in names.items()])


def _table(trainer: str, names: Names) -> str:
    rows = [(code(name), meaning(name, translate)) for name, translate in sorted(names.items())]
    return table([trainer, "trainer_kit"], rows)


def meaning(name: str, translate: OtherName) -> str:
    """Return the arguments that a setting becomes, or the sentence why it becomes none."""
    answers = list(_answers(translate))
    fields = [(value, answer) for value, answer in answers if isinstance(answer, Fields)]
    for value, answer in fields:
        if value is _ANY and answer.values:
            return _text(answer.values)
    taken = {(value, _text(answer.values)): None for value, answer in fields if answer.values}  # 1 and True are one key
    parts = [f"{code(f'{name}={value!r}')} is {text}" for value, text in taken]
    reasons = [f"no effect: {answer.note}" for _, answer in fields if answer.note]
    sentences = [answer.sentence for _, answer in answers if isinstance(answer, Refusal)]
    for text in [*reasons, *sentences][:1]:
        if text != NOT_A_SWITCH:
            parts.append(f"else {text}" if taken else text)
    return "; ".join(parts)


def other_names(names: Names) -> dict[str, list[str]]:
    """Return another trainer's settings that become a field, by field."""
    found: dict[str, list[str]] = {}
    for name, translate in names.items():
        fields = {field: None for _, each in _answers(translate) if isinstance(each, Fields) for field in each.values}
        for field in fields:
            found.setdefault(field, []).append(name)
    return found


def _answers(translate: OtherName) -> Iterator[tuple[Any, Fields | Refusal]]:
    for value in _SAMPLES:
        try:
            yield value, translate(value)
        except (AttributeError, TypeError, ValueError):
            continue  # a translation of another kind of value


def _text(fields: Mapping[str, Any]) -> str:
    return ", ".join(_field(name, value) for name, value in fields.items())


def _field(name: str, value: Any) -> str:
    if value is _ANY:
        return code(name)
    if isinstance(value, dict) and _ANY in value.values():
        return code(f"{name}={{{next(iter(value))!r}: ...}}")
    return code(f"{name}={value!r}")


@functools.cache
def fields_of_transformers() -> frozenset[str]:
    """Return the names of the fields of transformers' `Seq2SeqTrainingArguments`."""
    from transformers import Seq2SeqTrainingArguments

    return frozenset(field.name for field in dataclasses.fields(Seq2SeqTrainingArguments))
