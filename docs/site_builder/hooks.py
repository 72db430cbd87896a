"""The hooks in the order in which they are called, and the callbacks that ship with trainer_kit."""

from __future__ import annotations

import inspect

from site_builder import api
from site_builder.tables import code, first_sentence, table
from trainer_kit import Callback, TrainingArguments, callbacks
from trainer_kit.callback import HOOKS
from trainer_kit.callbacks import default_callbacks

_ON_TERMINAL = {
    callbacks.Progress: "on a terminal or in a notebook",
    callbacks.Console: "elsewhere, in place of `Progress`",
}
"""Where a run shows its progress by which callback."""


def callbacks_page() -> str:
    """Return the hooks, the callbacks, and the names of both."""
    rows = [[_link(hook), code(_parameters(hook)), first_sentence(getattr(Callback, hook))] for hook in HOOKS]
    return (
        "## The hooks in the order in which they are called\n\n"
        "[The life of a run](trainer.md#trainer_kit.Trainer) shows them around the work of a step.\n\n"
        f"{table(['hook', 'parameters', 'meaning'], rows)}\n\n"
        "For each record, `metrics(run)` is called before `on_log`; at the end, `summary(run)` before `on_train_end`. "
        "`state_dict()` and `load_state_dict(state)` are part of each checkpoint.\n\n"
        f"## The callbacks\n\n{(inspect.getdoc(callbacks) or '').partition(chr(10))[2].strip()}\n\n"
        f"{table(['callback', 'priority', 'by default', 'meaning'], _shipped())}\n\n"
        f"{api.listing('callbacks')}"
    )


def _link(hook: str) -> str:
    return f"[`{hook}`](#trainer_kit.Callback.{hook})"


def _parameters(hook: str) -> str:
    return ", ".join(list(inspect.signature(getattr(Callback, hook)).parameters)[1:])


def _shipped() -> list[list[str]]:
    defaults = {type(each) for each in default_callbacks(TrainingArguments())} - {*_ON_TERMINAL}
    named = [getattr(callbacks, name) for name in callbacks.__all__]
    kinds = [kind for kind in named if inspect.isclass(kind) and issubclass(kind, Callback)]
    return [
        [
            f"[`{kind.__name__}`](#trainer_kit.callbacks.{kind.__name__})",
            str(kind.priority),
            "yes" if kind in defaults else _ON_TERMINAL.get(kind, ""),
            first_sentence(kind),
        ]
        for kind in sorted(kinds, key=lambda kind: (kind.priority, kind.__name__))
    ]
