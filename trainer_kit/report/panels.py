"""Curves of a report, with their notes and tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trainer_kit.report import wording
from trainer_kit.report.history import ANATOMY, SECONDS, Array, Places, RunHistory
from trainer_kit.utils.units import format_count, format_number

RUNS = 6
"""Largest number of distinguishable runs in one plot."""

_ROWS = 20
_METRICS = 12
_LOSSES = 4
OWN_METRICS = 12
"""Largest number of curves for callbacks' own metrics."""

_USUAL = frozenset(
    {
        "time", "step", "epoch", "loss", "learning_rate", "grad_norm", "skipped_steps", "samples_per_second",
        "steps_per_second", "tokens_per_second", "data_wait", "model_flops_per_second", "hardware_flops_per_second",
        "mfu", "goodput", "memory_gib", "peak_memory_gib", "reserved_memory_gib", "process_memory_gib",
        "device_memory_gib", "host_memory_gib", "fragmentation",
    }
)  # fmt: skip
_USUAL_GROUPS = (SECONDS, ANATOMY, "xla/", "compile/")
_LOG_RATIO = 50.0
_NO_METRICS = ("runtime", "samples_per_second", "steps_per_second")

Wording = Callable[[float], str]


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a plot.

    Attributes:
        label: Name of the line.
        style: Number of its colour and dashes.
        steps: Steps of the values, [records], ascending.
        values: The values, [records]; NaN and infinity are noted, not drawn.
        sparse: Whether a dot marks each value.
        best: Step of the best value, which is marked; None marks none.
    """

    label: str
    style: int
    steps: Array
    values: Array
    sparse: bool = False
    best: int | None = None

    def finite(self) -> Series:
        """Return the series without nonfinite values."""
        is_finite = np.isfinite(self.values)
        return dataclasses.replace(self, steps=self.steps[is_finite], values=self.values[is_finite])


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot over the steps.

    Attributes:
        key: Identifier in the page.
        title: Title of the plot.
        series: Lines of the plot, with at least one value each.
        word: Formats a value.
        from_zero: Whether the axis begins at zero.
        note: Additional remark; empty if there is none.
    """

    key: str
    title: str
    series: tuple[Series, ...]
    word: Wording = format_number
    from_zero: bool = False
    note: str = ""

    @functools.cached_property
    def is_logarithmic(self) -> bool:
        """Whether the range of positive values requires a logarithmic axis."""
        values = np.concatenate([series.finite().values for series in self.series])
        if self.from_zero or not len(values) or values.min() <= 0:
            return False
        middle = float(np.median(values))
        return bool(values.max() > _LOG_RATIO * middle or middle > _LOG_RATIO * values.min())

    def notes(self, columns: int) -> str:
        """Return the notes to the plot.

        Args:
            columns: Width of the plot in columns of pixels.
        """
        notes = [self.note] if self.note else []
        if self.is_logarithmic:
            notes.append("The scale is logarithmic.")
        if any(len(series.finite().steps) > columns for series in self.series):
            notes.append("Lines are means of several records, bands reach from the least to the greatest.")
        if not all(np.isfinite(series.values).all() for series in self.series):
            notes.append("Crosses mark values that are not finite.")
        return " ".join(notes)

    def description(self) -> str:
        """Describe the plot in sentences, as its text alternative."""
        sentences = [self._description_of(series) for series in self.series]
        scale = ["The scale is logarithmic."] if self.is_logarithmic else []
        return " ".join([f"{self.title} by step.", *sentences, *scale])

    def _description_of(self, series: Series) -> str:
        drawn = series.finite()
        missing = len(series.values) - len(drawn.values)
        gaps = f" {format_count(missing, 'value')} not finite." if missing else ""
        label = "" if len(self.series) == 1 and series.label == self.title else f"{series.label}: "
        if not len(drawn.values):
            return f"{label}no finite value.{gaps}"
        facts = [self._at(drawn, len(drawn.values) - 1, "last")]
        if len(drawn.values) > 1:
            facts.insert(0, self._at(drawn, 0, "first"))
            facts.append(self._at(drawn, int(np.argmin(drawn.values)), "least"))
            facts.append(self._at(drawn, int(np.argmax(drawn.values)), "greatest"))
        if series.best is not None:
            facts.append(self._at(drawn, int(np.flatnonzero(drawn.steps == series.best)[0]), "best"))
        return f"{label}{', '.join(facts)}.{gaps}"

    def _at(self, series: Series, index: int, what: str) -> str:
        return f"{what} {self.word(float(series.values[index]))} at step {series.steps[index]:,.0f}"

    def table(self, rows: int = _ROWS) -> Table:
        """Return the values at some steps, evenly spaced, including the first and the last.

        Args:
            rows: Approximate number of steps per line.
        """
        steps = np.unique(np.concatenate([_spread(series.steps, rows) for series in self.series]))
        columns = [self._cells(series, steps) for series in self.series]
        body = [[f"{step:,.0f}", *cells] for step, *cells in zip(steps.tolist(), *columns, strict=True)]
        return Table(
            ["Step", *(series.label for series in self.series)], body, max(len(series.steps) for series in self.series)
        )

    def _cells(self, series: Series, steps: Array) -> list[str]:
        places = np.searchsorted(series.steps, steps, side="right") - 1
        there = (places >= 0) & (series.steps[places] == steps)
        values = series.values[places].tolist()
        return [self.word(value) if is_there else "-" for value, is_there in zip(values, there.tolist(), strict=True)]


class Table(NamedTuple):
    """A table of texts.

    Attributes:
        head: Names of the columns.
        body: The rows.
        of: Number of rows without omissions.
    """

    head: list[str]
    body: list[list[str]]
    of: int


def panels(histories: Sequence[RunHistory]) -> list[Panel]:
    """Return the plots that these runs have values for; several runs share each plot."""
    makers = (_loss, _metrics, _own_metrics, _learning_rate, _gradient_norm, _throughput, _efficiency, _memory)
    found = [panel for make in makers for panel in make(histories)]
    return [panel for panel in found if panel.series]


def _loss(histories: Sequence[RunHistory]) -> list[Panel]:
    names = [name for history in histories for name in _evaluated(history) if _is_loss(name)]
    if len(histories) > 1:
        train = Panel("loss", "Training loss", _compared(histories, "loss"))
        evaluated = [
            Panel(name, wording.capitalized(_said(name)), _compared_evaluations(histories, name))
            for name in dict.fromkeys(names)
        ]
        return [train, *evaluated[:_LOSSES]]
    series = [*_compared(histories, "loss", "training")]
    for name in names[:_LOSSES]:
        series.append(_evaluation(histories[0], name, _said(name).removesuffix(" loss"), len(series)))
    return [Panel("loss", "Loss", tuple(series))]


def _metrics(histories: Sequence[RunHistory]) -> list[Panel]:
    names = dict.fromkeys(name for history in histories for name in _evaluated(history) if not _is_loss(name))
    return [
        Panel(name, wording.capitalized(_said(name)), _compared_evaluations(histories, name))
        for name in [*names][:_METRICS]
    ]


def own_metrics(history: RunHistory) -> list[str]:
    """Return the names of callbacks' own metrics in the records, in the order of their first appearance."""
    return [name for name in history.names if name not in _USUAL and not name.startswith(_USUAL_GROUPS)]


def _own_metrics(histories: Sequence[RunHistory]) -> list[Panel]:
    names = dict.fromkeys(name for history in histories for name in own_metrics(history)[:OWN_METRICS])
    return [Panel(name, name, _compared(histories, name, name)) for name in [*names][:OWN_METRICS]]


def _learning_rate(histories: Sequence[RunHistory]) -> list[Panel]:
    return [
        Panel("learning_rate", "Learning rate", _compared(histories, "learning_rate", "Learning rate"), from_zero=True)
    ]


def _gradient_norm(histories: Sequence[RunHistory]) -> list[Panel]:
    note = "Norm of all gradients together, before clipping."
    return [Panel("grad_norm", "Gradient norm", _compared(histories, "grad_norm", "Gradient norm"), note=note)]


def _throughput(histories: Sequence[RunHistory]) -> list[Panel]:
    for unit in ("tokens", "samples"):
        name = f"{unit}_per_second"
        if all(name in history.names for history in histories):
            title = f"{unit.capitalize()} per second"
            return [Panel(name, title, _compared(histories, name, title), from_zero=True)]
    return []


def _efficiency(histories: Sequence[RunHistory]) -> list[Panel]:
    kinds = {
        "goodput": ("goodput", "Goodput: share of the time spent on forward, backward and optimizer."),
        "mfu": ("model FLOPs utilization", "MFU: the model's FLOP/s as a share of the device's peak."),
        "data_wait": ("waiting for data", ""),
    }
    there = [name for name in kinds if any(name in history.names for history in histories)]
    if len(histories) > 1:
        return [
            Panel(
                name, wording.capitalized(kinds[name][0]), _compared(histories, name), wording.percent, from_zero=True
            )
            for name in there[:2]
        ]
    series = _several(histories[0], {name: kinds[name][0] for name in there})
    note = " ".join(kinds[name][1] for name in there if kinds[name][1])
    return [Panel("efficiency", "Use of time and device", series, wording.percent, from_zero=True, note=note)]


def _memory(histories: Sequence[RunHistory]) -> list[Panel]:
    kinds = {
        "peak_memory_gib": "peak",
        "memory_gib": "in use",
        "reserved_memory_gib": "reserved",
        "process_memory_gib": "process, as the driver counts",
        "device_memory_gib": "whole device",
        "host_memory_gib": "host",
    }
    if len(histories) > 1:
        series = _compared(histories, "peak_memory_gib")
        return [Panel("memory", "Peak memory", series, wording.size, from_zero=True)]
    there = {name: label for name, label in kinds.items() if name in histories[0].names}
    return [Panel("memory", "Memory", _several(histories[0], there), wording.size, from_zero=True)]


def _evaluated(history: RunHistory) -> list[str]:
    """Return the names of the evaluations' metrics, without those of speed."""
    names = dict.fromkeys(name for record in history.evaluations for name in record)
    return [
        name
        for name in names
        if name not in ("event", "time", "step", "epoch") and not name.endswith(_NO_METRICS)
        and any(_is_number(record.get(name)) for record in history.evaluations)
    ]  # fmt: skip


def _is_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _said(name: str) -> str:
    """Return the name of an evaluation's metric in words: "evaluation loss" for eval_loss."""
    first, *words = name.split("_")
    return " ".join(["evaluation" if first == "eval" else first, *words])


def _evaluation(history: RunHistory, name: str, label: str, style: int) -> Series:
    records = [record for record in history.evaluations if _is_number(record.get(name))]
    steps = {record["step"]: float(record[name]) for record in records}  # the later of two at one step
    best = history.best.step if history.best is not None and history.best.name == name else None
    values = np.array([*steps.values()], np.float64)
    return Series(label, style, np.array([*steps], np.float64), values, sparse=True, best=best)


def _compared_evaluations(histories: Sequence[RunHistory], name: str) -> tuple[Series, ...]:
    labels = names_of(histories) if len(histories) > 1 else [wording.capitalized(_said(name))]
    series = [_evaluation(history, name, labels[style], style) for style, history in enumerate(histories)]
    return tuple(each for each in series if len(each.values))


def _compared(histories: Sequence[RunHistory], name: str, label: str = "") -> tuple[Series, ...]:
    """Return one metric of each run, labelled by the runs; the metric of a single run is labelled `label`."""
    labels = names_of(histories) if len(histories) > 1 else [label]
    series = [Series(labels[style], style, *history.curve(name)) for style, history in enumerate(histories)]
    return tuple(each for each in series if len(each.values))


def _several(history: RunHistory, names: dict[str, str]) -> tuple[Series, ...]:
    """Return several metrics of one run."""
    series = [Series(label, style, *history.curve(name)) for style, (name, label) in enumerate(names.items())]
    return tuple(each for each in series if len(each.values))


def names_of(histories: Sequence[RunHistory]) -> list[str]:
    """Return the runs' names; equal names are extended by parts of their paths."""
    paths = [history.path.resolve().parent for history in histories]
    names = [history.name for history in histories]
    for depth in range(2, max(len(path.parts) for path in paths) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return names


def _spread(steps: Array, rows: int) -> Array:
    if len(steps) <= rows:
        return steps
    places: Places = np.linspace(0, len(steps) - 1, rows).round().astype(np.int64)
    return np.asarray(steps[places], np.float64)


class Thin(NamedTuple):
    """A line reduced to one value per column of pixels.

    Attributes:
        steps: Mean step of each column.
        low: Minimum in the column.
        mean: Mean of the column.
        high: Maximum in the column.
    """

    steps: Array
    low: Array
    mean: Array
    high: Array


def thin(series: Series, columns: int) -> Thin:
    """Return minimum, mean and maximum in each of `columns` equal parts of the steps, without empty parts."""
    steps, values = series.steps, series.values
    if len(steps) <= columns:
        return Thin(steps, values, values, values)
    span = float(steps[-1] - steps[0]) or 1.0
    column = np.minimum(((steps - steps[0]) * (columns / span)).astype(np.int64), columns - 1)
    firsts = np.flatnonzero(np.diff(column, prepend=-1))
    sizes = np.diff(firsts, append=len(steps))
    return Thin(
        np.add.reduceat(steps, firsts) / sizes,
        np.minimum.reduceat(values, firsts),
        np.add.reduceat(values, firsts) / sizes,
        np.maximum.reduceat(values, firsts),
    )
