"""Text of a plan, in lines of 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from trainer_kit.planning.plot import curve
from trainer_kit.planning.sections import (
    Batch,
    Compute,
    Data,
    EventSection,
    Hardware,
    MemorySection,
    Model,
    ScheduleSection,
    StartSection,
    StepsSection,
    Storage,
)
from trainer_kit.utils.units import describe_shares, format_count, format_duration, format_si, format_size

WIDTH = 79
"""Columns of a line: some terminals wrap lines of 80."""

_LABEL = 13
_UNIT = re.compile(r"(?<=\d) (?=[A-Za-z]{1,5}\b)")


def labelled(label: str, *paragraphs: str) -> list[str]:
    """Format paragraphs next to a label, each on a new line; empty ones are omitted."""
    lines: list[str] = []
    for paragraph in filter(None, paragraphs):
        together = _UNIT.sub("\u00a0", paragraph)  # textwrap breaks no line there
        wrapped = textwrap.wrap(together, WIDTH - _LABEL, break_on_hyphens=False, break_long_words=False)
        lines += [line.replace("\u00a0", " ") for line in wrapped]
    return [f"{label if not number else '':<{_LABEL}}{line}" for number, line in enumerate(lines)]


def data_lines(data: Data) -> list[str]:
    """Format the datasets."""
    train = "train_dataset has no length" if data.train is None else f"{format_count(data.train, 'sample')} to train on"
    if data.train is not None and data.epoch is not None and data.epoch != data.train:
        train += f", {data.epoch:,} of them in each epoch"
    others = []
    for name, count in data.evaluation.items():
        others.append(f"{'an unknown number' if count is None else f'{count:,}'}{f' ({name})' if name else ''}")
    return labelled("data", train, f"{', '.join(others)} to evaluate" if others else "")


def batch_lines(batch: Batch) -> list[str]:
    """Format the factors of a step's samples."""
    factors = [f"{batch.per_device:,} per device"]
    factors += [f"{batch.full_devices:,} devices"] * (batch.full_devices > 1)
    factors += [f"{batch.accumulation:,} accumulated", format_count(batch.full_processes, "process")]
    kept = ""
    if (batch.full_devices, batch.full_processes) != (batch.devices, batch.processes):
        now = format_count(batch.processes, "process") if batch.devices == 1 else format_count(batch.devices, "device")
        kept = f"on_resize='keep': {now} with {describe_shares(batch.shares)} each"
    return labelled("a step", f"{format_count(batch.samples, 'sample')} = {' x '.join(factors)}", kept)


def steps_lines(steps: StepsSection, start: StartSection) -> list[str]:
    """Format the length and the start of the run."""
    length = format_count(steps.last, "step")
    if steps.per_epoch is not None and steps.epochs is not None:
        length += f" = {format_count(steps.epochs, 'epoch')} of {steps.per_epoch:,}"
    if steps.samples is not None and not steps.first:
        length += f", {format_count(steps.samples, 'sample')}"
    if start.checkpoint is None:
        begin = f"from the beginning, in {start.folder}"
    else:
        begin = f"from {start.checkpoint}: step {steps.first:,}; {steps.left:,} steps are left"
    return labelled("length", length) + labelled("begins", begin)


def model_lines(model: Model) -> list[str]:
    """Format the model."""
    trained = "all trained" if model.trainable == model.parameters else f"{model.trainable:,} of them trained"
    return labelled("model", f"{model.name}, {model.parameters:,} parameters, {trained}")


def hardware_lines(hardware: Hardware) -> list[str]:
    """Format device and precision, with the reasons for them."""
    return labelled("computes on", f"{hardware.device} ({hardware.strategy})", f"because {hardware.reason}") + labelled(
        "precision", f"{hardware.precision}, weights in {hardware.weights}", f"because {hardware.precision_reason}"
    )


def schedule_lines(schedule: ScheduleSection) -> list[str]:
    """Draw the learning rate, with its extremes next to it."""
    lines = ["", f"learning rate ({schedule.optimizer}, {schedule.name})"]
    if schedule.points:
        drawn = curve(schedule.points, width=WIDTH - _LABEL - 1)
        marks = {0: _rate(schedule.highest), len(drawn) - 1: _rate(schedule.lowest)}
        if schedule.highest == schedule.lowest:
            marks = {len(drawn) // 2: _rate(schedule.highest)}
        for number, line in enumerate(drawn):
            lines.append(f"{marks.get(number, ''):>{_LABEL - 2}} {'┤' if number in marks else '│'}{line}")
        first, last = schedule.points[0][0], schedule.points[-1][0]
        lines.append(f"{'':>{_LABEL - 1}}└{'─' * (WIDTH - _LABEL)}")
        begin, end = (
            f"step {first:,}: {_rate(schedule.points[0][1])}",
            f"step {last:,}: {_rate(schedule.points[-1][1])}",
        )
        lines.append(f"{'':>{_LABEL}}{begin}{end:>{WIDTH - _LABEL - len(begin)}}")
    return lines + labelled("", schedule.note)


def event_lines(events: Sequence[EventSection], callbacks: Sequence[str]) -> list[str]:
    """Format the steps of each event, and the callbacks that may request more."""
    lines = ["", "after which steps"]
    for event in events:
        lines += labelled(f"  {event.name}", _when(event))
    others = f"{', '.join(callbacks)} may request more, or stop the run" if callbacks else ""
    return lines + labelled("  callbacks", others)


def _when(event: EventSection) -> str:
    if not event.first:
        return event.rule if event.rule.startswith(("never", "not ")) else f"{event.rule}: never".removeprefix(": ")
    steps = ", ".join(f"{step:,}" for step in event.first)
    if event.last is not None and event.last != event.first[-1]:
        between = ", … " if event.count is None or event.count > len(event.first) + 1 else ", "
        steps += f"{between}{event.last:,}"
    count = "" if event.count is None else f" ({event.count:,})"
    return f"{event.rule}: {steps}{count}" if event.rule else f"{steps}{count}"


def storage_lines(storage: Storage) -> list[str]:
    """Format the checkpoints on the disk."""
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in storage.parts.items())
    unknown = f"and {storage.unknown}, whose size is not known" if storage.unknown else ""
    if storage.at_once is None:
        count = "how many will exist at the same time is unknown; save_total_limit limits it"
    else:
        count = f"at most {storage.at_once:,} at once: {format_size(storage.size * storage.at_once)}"
        count += f" ({storage.there:,} exist already)" * (storage.there > 0)
    free = f"{format_size(storage.free)} are free"
    copies = ""
    if storage.copies_folder is not None:
        copies = (
            f"copies in {storage.copies_folder}: {format_size(2 * storage.size)} on all machines together, twice that "
            "if there are several"
        )
    each = f"{format_size(storage.size)} each: {parts}"
    return ["", *labelled("checkpoints", each, unknown, f"{count}; {free}", copies)]


def memory_lines(memory: MemorySection) -> list[str]:
    """Format the memory of a step."""
    if memory.peak is None:
        return labelled("memory", f"not known: {memory.note}")
    available = "" if memory.available is None else f" of {format_size(memory.available)}"
    large = {name: size for name, size in memory.parts.items() if size >= 0.005 * memory.peak}
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in large.items())
    peak = f"{format_size(memory.peak)}{available}"
    return labelled("memory", f"{peak}, at the peak of a step with {memory.batch}", parts)


def compute_lines(compute: Compute) -> list[str]:
    """Format the FLOPs of the run."""
    work = f"{format_si(compute.step, 'FLOP')} a step, {format_si(compute.run, 'FLOP')} in all, with batches like this"
    if compute.seconds is None or compute.peak is None:
        return labelled("work", work, f"how long that takes at least is not known: {compute.peak_source}")
    is_bound = not compute.peak_source.startswith("measured")
    speed = "the peak of the device" if is_bound else "what the device reached just now"
    rate = format_si(compute.peak, "FLOP/s")
    bound = f"at {rate}, {speed} ({compute.peak_source}), that takes {format_duration(compute.seconds)}"
    bound += " at the very least" if is_bound else ", everything else aside"
    return labelled("work", work, bound)


def bullets(title: str, sentences: Iterable[str]) -> list[str]:
    """Format sentences as a list with a title; no lines without sentences."""
    lines: list[str] = []
    for sentence in sentences:
        lines += textwrap.wrap(
            sentence, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False,
            break_long_words=False,
        )  # fmt: skip
    return ["", title, *lines] if lines else []


def _rate(rate: float) -> str:
    return f"{rate:.3g}"
