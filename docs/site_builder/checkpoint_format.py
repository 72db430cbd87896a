"""The fields of a checkpoint's JSON files, from the code that writes and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from site_builder.tables import code, sections, table
from trainer_kit import TrainState
from trainer_kit.checkpoint.format import trainer_state
from trainer_kit.checkpoint.format.manifest import FileEntry, Manifest


def checkpoint_format() -> str:
    """Return the fields of `manifest.json` and `state/trainer.json`."""
    meanings = sections(Manifest)["attributes"]
    manifest = [[code(field.name), meanings[field.name]] for field in dataclasses.fields(Manifest)]
    entry = ", ".join(code(field.name) for field in dataclasses.fields(FileEntry))
    counters = sections(TrainState)["attributes"]
    return (
        f"## manifest.json\n\n{table(['field', 'meaning'], manifest)}\n\n"
        f"Each file has {entry}: {(FileEntry.__doc__ or '').strip()}\n\n"
        f"## state/trainer.json\n\n{table(['field', 'value'], _rules(trainer_state._TRAINER))}\n\n"
        f"`counters` are the fields of [`TrainState`](trainer.md#trainer_kit.TrainState):\n\n"
        f"{table(['field', 'value', 'meaning'], [[*row, counters.get(name, '')] for name, row in _counters()])}"
    )


def _rules(rules: Mapping[str, trainer_state.Rule]) -> list[list[str]]:
    return [[code(name), rule[1]] for name, rule in rules.items()]


def _counters() -> list[tuple[str, list[str]]]:
    rules = trainer_state._COUNTERS
    return list(zip(rules, _rules(rules), strict=True))
