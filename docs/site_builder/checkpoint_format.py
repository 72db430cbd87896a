"""The fields of a checkpoint's JSON files, from the code that writes and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from site_builder.tables import code, sections, table
from trainer_kit import TrainState
from trainer_kit.checkpoint.format import trainer_state
from trainer_kit.checkpoint.format.manifest import STATE_FOLDER, FileEntry, Manifest
from trainer_kit.checkpoint.format.model_values import values_name
from trainer_kit.checkpoint.stateful_entries import BASE_STATE, CARRIED_STATE, OWN_STATES

_MEANINGS = {
    "counters": "The counters of the run, see below.",
    "evaluate": "Whether a resume begins with the evaluation of this step, which was interrupted.",
    "run_id": "ID of the run, the same after each resume.",
    "committed": "Checkpoints of the run that exist: folder, number in the run from 1, metric or null.",
    "shifts_labels": "Whether the model shifts labels, so that it predicts no first label; null if unknown.",
    "plan": "How the samples of a step were divided, see below.",
    "dataset_length": "Samples of the training dataset; null without a length.",
    "order": "What decides the order of samples.",
    "drop_last": "Whether an epoch drops its incomplete last batch.",
    "seed": "The seed of the arguments.",
    "optimizer": "Class of the optimizer.",
    "lr_scheduler": "Class of the schedule.",
    "processes": "Processes that read samples of their own.",
    "batch_size": "Samples of a micro-batch on one process.",
    "accumulation": "Micro-batches of a step on one process.",
    "units": "Samples of a step when each step number of the schedule was set, by the argument's name.",
    "devices": "Devices of one process, which share a micro-batch.",
    "full_processes": "Processes that the steps were made for; a run on another number keeps the same steps.",
    "full_devices": "Devices of one process that the steps were made for.",
}
"""Meaning of each value of `state/trainer.json` and of its `plan`."""

_STATES = {
    "trainer": "Counters and facts of the run, see below.",
    "optimizer": "State of the optimizer.",
    "lr_scheduler": "State of the schedule.",
    "precision": "State of the mixed precision, such as the scale of fp16.",
    "callbacks": "States of the callbacks.",
    "data": "Position of an iterable dataset or a sampler; null without one.",
    "ledger": "Seconds of the run by activity.",
    "log_means": "Sums of what `log_mean` has logged since the last record; absent without any.",
    CARRIED_STATE: "Buffers that are not persistent and random generators of the model, if they change after the first "
    "step: a list with one entry, or one for each process that reads samples of its own; absent without any.",
    values_name(): "Entries of the model's `state_dict` that are no tensors; absent without any.",
    BASE_STATE: "Where the frozen weights are that the checkpoint does not repeat; absent without any.",
}
"""Meaning of each state of a run. Each is a JSON file, and a safetensors file in addition where it has tensors."""


def checkpoint_format() -> str:
    """Return the fields of `manifest.json`, the files of `state/`, and the fields of `state/trainer.json`."""
    meanings = _meanings(Manifest)
    manifest = [[code(field.name), meanings[field.name]] for field in dataclasses.fields(Manifest)]
    manifest.append([code("checksum"), "Checksum of the other fields, as JSON with sorted keys and no spaces."])
    states = [[code(f"{STATE_FOLDER}/{name}.json"), _STATES[name]] for name in OWN_STATES]
    entry = " and ".join(code(field.name) for field in dataclasses.fields(FileEntry))
    counters = _meanings(TrainState)
    return (
        f"## manifest.json\n\n{table(['field', 'meaning'], manifest)}\n\n"
        f"Each file has {entry}: {(FileEntry.__doc__ or '').strip()}\n\n"
        "## state\n\nA state is a JSON file; its tensors, if it has some, are in a safetensors file of the same name. "
        f"Entries of `run.stateful` have their own names.\n\n{table(['file', 'content'], states)}\n\n"
        f"## state/trainer.json\n\n{_fields(trainer_state._TRAINER | trainer_state._FACTS, _MEANINGS)}\n\n"
        f"`counters` are the fields of [`TrainState`](trainer.md#trainer_kit.TrainState):\n\n"
        f"{_fields(trainer_state._COUNTERS | trainer_state._LATER_COUNTERS, counters)}\n\n"
        f"`plan` has:\n\n{_fields(trainer_state._PLAN | trainer_state._FULL_SIZE, _MEANINGS)}"
    )


def _fields(rules: Mapping[str, trainer_state.Rule], meanings: Mapping[str, str]) -> str:
    """Return a table of values, with the range of a number in one piece."""
    rows = [
        [code(name), allowed.replace("least ", "least&nbsp;"), meanings[name]] for name, (_, allowed) in rules.items()
    ]
    return table(["field", "value", "meaning"], rows)


def _meanings(kind: type) -> dict[str, str]:
    """Return the meanings of a class's attributes as those of its JSON."""
    return {name: text.replace("None", "null") for name, text in sections(kind)["attributes"].items()}
