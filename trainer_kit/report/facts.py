"""Facts of a run in words and single numbers: its end, its key figures, arguments and warnings."""

from __future__ import annotations

import collections
import math
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from trainer_kit.report import wording
from trainer_kit.report.history import ANATOMY, LoggedEvent, RunHistory, is_finite
from trainer_kit.report.panels import OWN_METRICS, Table, names_of, own_metrics
from trainer_kit.report.timeline import DOWN, LOST, REGROUP, Timeline
from trainer_kit.utils.units import format_count, format_duration, format_number, format_si, join_names, pluralize

ANATOMY_TITLE = "Memory by component"
ANATOMY_NOTE = "Activations: what is left of the peak of a step, temporary buffers included."

_GIB = "_gib"
_SHOWN_EVALUATIONS = 100


class Status(NamedTuple):
    """End of a run.

    Attributes:
        kind: "good", "bad" or "open".
        word: The status in one word or two.
        sentence: Details; may be empty.
    """

    kind: str
    word: str
    sentence: str


class Figure(NamedTuple):
    """A key figure: its name, its value, and a note that may be empty."""

    name: str
    value: str
    note: str = ""


def status(history: RunHistory) -> Status:
    """Return how the newest start of the run ended."""
    if not history.starts:
        return Status("open", "no training", "The log holds no start of a training.")
    begins = history.starts[-1].place
    last = {event.name: event for event in history.events if event.place >= begins}
    total = _whole(history.beginning.get("total_steps"))
    where = f"at step {history.step:,}" + ("" if total is None else f" of {total:,}")
    if "exception" in last:
        record = last["exception"].record
        if record.get("type") == "TrialPruned":
            return Status("open", "pruned", f"{wording.capitalized(where)}: optuna ended the trial.")
        error = f"{record.get('type', 'Error')}: {record.get('message', '')}"
        return Status("bad", "ended by an error", f"{wording.capitalized(where)}: {error}")
    if "end" not in last:
        return _unended(history.starts[-1], where)
    return _ended(last["end"], where, is_short=total is not None and history.step < total)


def _ended(end: LoggedEvent, where: str, is_short: bool) -> Status:
    """Return the status of a run that ended regularly, before or at its last step."""
    reason = str(end.record.get("reason") or "")
    if end.record.get("ending") == "signal":
        by = reason or f"a signal, exit code {end.record.get('exit_code')}"
        return Status("open", "ended by a signal", f"{by} {where}; train(resume_from_checkpoint=True) resumes it.")
    if is_short:
        because = reason or "a callback asked for it"
        return Status("open", "stopped early", f"{wording.capitalized(where)}: {because}.")
    return Status("good", "finished", "All steps were taken.")


def _unended(start: LoggedEvent, where: str) -> Status:
    """Return the status of a run without a recorded end; on this machine, the process shows whether it still runs."""
    recorded = start.record.get("environment")
    facts = recorded if isinstance(recorded, dict) else {}
    process = facts.get("process") if facts.get("host") == socket.gethostname() else None
    if not isinstance(process, int):
        return Status("open", "no end recorded", f"{wording.capitalized(where)}: it still runs, or it was killed.")
    try:
        is_there = psutil.Process(process).create_time() <= start.time
    except psutil.Error:
        is_there = False
    if is_there:
        return Status("open", "still running", f"{wording.capitalized(where)}, as process {process}.")
    why = "its process ended without a message: it was killed, or the machine went down"
    return Status("bad", "lost", f"{wording.capitalized(where)} {why}.")


def key_figures(history: RunHistory, timeline: Timeline | None) -> list[Figure]:
    """Return the most important figures that the log holds.

    Args:
        history: History of the run.
        timeline: Timeline of the run; None if the log lacks the data for it.
    """
    makers = (_steps, _time, _loss, _best, _throughput, _memory, _goodput, _parameters)
    return [figure for make in makers if (figure := make(history, timeline)) is not None]


def _steps(history: RunHistory, timeline: Timeline | None) -> Figure:
    total = _whole(history.beginning.get("total_steps"))
    epochs = history.curve("epoch")[1]
    notes = [f"of {total:,}"] if total is not None and total != history.step else []
    notes += [format_count(float(f"{epochs[-1]:.3g}"), "epoch")] if len(epochs) and epochs[-1] else []
    return Figure("Steps", f"{history.step:,}", ", ".join(notes))


def _time(history: RunHistory, timeline: Timeline | None) -> Figure | None:
    restarts = len(history.starts) - 1
    notes = [format_count(restarts, "restart")] if restarts > 0 else []
    if timeline is not None:
        lost = {name: timeline.totals.get(name, 0.0) for name in (LOST, DOWN, REGROUP)}
        notes += [f"{format_duration(seconds)} {name}" for name, seconds in lost.items() if seconds >= 1]
        return Figure("Wall time", format_duration(timeline.wall), ", ".join(notes))
    if not history.starts or not math.isfinite(history.ends[-1] - history.starts[0].time):
        return None
    return Figure("Wall time", format_duration(history.ends[-1] - history.starts[0].time), ", ".join(notes))


def _loss(history: RunHistory, timeline: Timeline | None) -> Figure | None:
    values = history.curve("loss")[1]
    mean = history.summary.get("train_loss")
    if not len(values):
        return None if mean is None else Figure("Training loss", format_number(mean), "mean of the run")
    note = f"in the last record; mean {format_number(mean)}" if mean is not None else "in the last record"
    return Figure("Training loss", format_number(float(values[-1])), note)


def _best(history: RunHistory, timeline: Timeline | None) -> Figure | None:
    best = history.best
    return best and Figure(f"Best {best.name}", format_number(best.value), f"at step {best.step:,}")


def _throughput(history: RunHistory, timeline: Timeline | None) -> Figure | None:
    for unit in ("tokens", "samples"):
        name = f"{unit}_per_second"
        values = history.curve(name)[1]
        values = values[np.isfinite(values)]
        if len(values):
            return Figure("Throughput", f"{format_number(float(np.median(values)))} {unit}/s", "median of the records")
    rate = history.summary.get("train_samples_per_second")
    return None if rate is None else Figure("Throughput", f"{format_number(rate)} samples/s", "with all pauses")


def _memory(history: RunHistory, timeline: Timeline | None) -> Figure | None:
    values = history.curve("peak_memory_gib")[1]
    recorded: Any = history.summary.get("peak_memory_gib")
    peak = max(float(np.fmax.reduce(values, initial=-math.inf)), float(recorded) if is_finite(recorded) else -math.inf)
    return Figure("Peak memory", wording.size(peak), "of one device") if math.isfinite(peak) else None


def _goodput(history: RunHistory, timeline: Timeline | None) -> Figure | None:
    recorded: Any = history.summary.get("goodput")
    share: float | None = recorded if is_finite(recorded) else timeline.goodput if timeline is not None else None
    if share is None:
        return None
    mfu: Any = history.summary.get("mfu")
    note = f"MFU {wording.percent(float(mfu))}" if is_finite(mfu) else "forward, backward and optimizer"
    return Figure("Goodput", wording.percent(share), note)


def _parameters(history: RunHistory, timeline: Timeline | None) -> Figure | None:
    parameters, trainable = history.beginning.get("parameters"), history.beginning.get("trainable")
    if not isinstance(parameters, int):
        return None
    note = "all trained" if trainable == parameters else f"{format_number(trainable)} trained"
    return Figure("Parameters", format_si(parameters), note)


def anatomy(history: RunHistory) -> dict[str, float]:
    """Return the GiB by component in the record with the largest sum; empty if no record has them."""
    names = [name for name in history.names if name.startswith(ANATOMY)]
    if not names:
        return {}
    values = np.stack([history.column(name)[history.kept] for name in names], axis=1)
    values = np.where(np.isfinite(values), values, 0.0)
    if not values.sum():
        return {}
    row = values[int(values.sum(axis=1).argmax())]
    return {
        name.removeprefix(ANATOMY).removesuffix(_GIB): gib
        for name, gib in zip(names, row.tolist(), strict=True)
        if gib > 0
    }


def anatomy_table(histories: Sequence[RunHistory]) -> Table:
    """Return a table of the components of all runs."""
    parts = [anatomy(history) for history in histories]
    names = list(dict.fromkeys(name for part in parts for name in part))
    head = ["Component", *(["Size", "Share"] if len(parts) == 1 else names_of(histories))]
    rows = []
    for name in names:
        cells = [wording.size(part[name]) if name in part else "-" for part in parts]
        if len(parts) == 1:
            cells.append(wording.percent(parts[0][name] / sum(parts[0].values())))
        rows.append([name, *cells])
    sums = [wording.size(sum(part.values())) for part in parts]
    return Table(head, [*rows, ["together", *sums, *(["100 %"] if len(parts) == 1 else [])]], len(rows) + 1)


def evaluations(history: RunHistory, rows: int = _SHOWN_EVALUATIONS) -> Table | None:
    """Return a table of the evaluations; None if there are none.

    Args:
        history: History of the run.
        rows: Largest number of rows; more evaluations are thinned out evenly, and the best one stays.
    """
    records = history.evaluations
    names = list(dict.fromkeys(name for record in records for name in record if name not in ("event", "time", "step")))
    names = [name for name in names if not name.endswith(("_samples_per_second", "_steps_per_second"))]
    if not records:
        return None
    places = set(np.linspace(0, len(records) - 1, min(rows, len(records))).round().astype(int).tolist())
    best = None if history.best is None else history.best.step
    bests = [place for place, record in enumerate(records) if record["step"] == best]
    body = []
    for place in sorted(places | {*bests[-1:]}):
        record = records[place]
        mark = " (best)" if place in bests[-1:] else ""
        body.append([f"{record['step']:,}{mark}", *(_cell(name, record.get(name)) for name in names)])
    return Table(["step", *names], body, len(records))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return format_duration(value) if name.endswith("_runtime") and is_finite(value) else format_number(value)


class Warned(NamedTuple):
    """A warning, its source, the number of its occurrences, and the step of the first."""

    message: str
    source: str
    times: int
    step: int


def warnings(history: RunHistory) -> list[Warned]:
    """Return the warnings of all starts, without repeats."""
    records = [event.record for event in history.events if event.name == "warning"]
    counts = collections.Counter(str(record.get("message")) for record in records)
    first = {str(record.get("message")): record for record in reversed(records)}
    return [
        Warned(message, str(first[message].get("source", "")), number, first[message]["step"])
        for message, number in counts.items()
    ]


def notices(history: RunHistory) -> list[str]:
    """Return remarks about the log itself."""
    found = []
    if history.cut:
        lines = join_names(history.cut)
        noun = pluralize("Line", len(history.cut))
        found.append(
            f"{noun} {lines} of {history.path.name} {'was' if len(history.cut) == 1 else 'were'} cut short when the "
            "process ended, and left out; all others are shown."
        )
    gone = int((~history.kept).sum())
    if gone:
        found.append(
            f"{format_count(gone, 'record')} of steps that were taken again after a restart or rollback "
            f"{'is' if gone == 1 else 'are'} not in the curves."
        )
    if left := own_metrics(history)[OWN_METRICS:]:
        numbers = format_count(len(left), "more number")
        found.append(f"{numbers} of callbacks, from {left[0]} on, only in {history.path.name}.")
    return found


def environment(history: RunHistory) -> list[tuple[str, str]]:
    """Return names and values of the run's environment."""
    recorded = history.beginning.get("environment")
    facts = dict(recorded) if isinstance(recorded, dict) else {}
    facts.setdefault("trainer_kit", history.beginning.get("trainer_kit", "unknown"))
    return [(str(name), format_number(value)) for name, value in facts.items()]


def arguments(history: RunHistory) -> list[tuple[str, str, bool]]:
    """Return name and value of each argument, and whether it differs from its default; changed ones first."""
    from trainer_kit.config.arguments import TrainingArguments

    usual = TrainingArguments().to_dict()
    rows = [
        (name, _shown(value), name not in usual or usual[name] != value) for name, value in history.arguments.items()
    ]
    return sorted(rows, key=lambda row: not row[2])


def differing(histories: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    """Return the arguments that differ between the runs, each with its values."""
    known = [history.arguments for history in histories]
    names = list(dict.fromkeys(name for arguments in known for name in arguments))
    rows = [(name, [_shown(arguments[name]) if name in arguments else "-" for arguments in known]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
