"""Files of another run in the output folder, and their move into `earlier-N/`."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection
from pathlib import Path

from trainer_kit.checkpoint import find_checkpoints
from trainer_kit.checkpoint.format.discovery import is_of_transformers
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.utils.run_log import NAME as LOG
from trainer_kit.utils.run_log import LogFile

logger = logging.getLogger("trainer_kit")

_REPORTS = ("report.html", "report.md")
_EVENTS, _ARGUMENTS_TAG, _HEAD_BYTES = "events.out.tfevents.*", b"arguments/text_summary", 4096


def set_aside(output_dir: Path, keep: Collection[str], records: Collection[Path], goes_on: bool) -> None:
    """Move the files that this run does not resume from into `earlier-N/`, so that two runs never mix.

    These are checkpoints of another run, checkpoints of this run after the step at which it resumes, and damaged ones.

    Args:
        output_dir: Folder of the run.
        keep: Names of the checkpoints that stay.
        records: Log files and reports of another run below `output_dir`, which are moved too.
        goes_on: Whether this run resumes in its folder.
    """
    found = [directory for directory in find_checkpoints(output_dir) if directory.name not in keep]
    if not found and not records:
        return
    can_resume = not all(map(is_of_transformers, found))
    number = 1
    while (folder := output_dir / f"earlier-{number}").exists():
        number += 1
    folder.mkdir()
    for each in (*found, *records):
        target = folder / each.relative_to(output_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        each.rename(target)
    names = ", ".join(each.relative_to(output_dir).as_posix() for each in (*found, *records))
    if goes_on:
        logger.warning("moved %s, which this run does not resume from, from %s to %s", names, output_dir, folder)
        return
    remedy = "; to resume from the newest checkpoint, set resume_from_checkpoint=True" if can_resume else ""
    logger.warning("moved %s of another run from %s to %s%s", names, output_dir, folder, remedy)


def records_of(args: TrainingArguments) -> list[Path]:
    """Return the log, reports and TensorBoard events of an earlier run.

    Records of an evaluation before this training are not included, since an evaluation starts no run.
    """
    folder, found = Path(args.output_dir), list[Path]()
    with contextlib.suppress(OSError, ValueError):  # no log, or a damaged one
        records = itertools.chain.from_iterable(LogFile(folder / LOG).pieces())
        if any(record["event"] == "start" for record in records):
            found = [folder / name for name in (LOG, *_REPORTS) if (folder / name).is_file()]
    if args.log_dir.resolve().is_relative_to(folder.resolve()):  # a folder elsewhere may serve several runs
        found += sorted(path for path in args.log_dir.glob(_EVENTS) if _begins_a_run(path))
    return found


def _begins_a_run(events: Path) -> bool:
    """Return whether a TensorBoard file begins with a run's arguments, as the callback writes them."""
    if not events.is_file():
        return False
    with open(events, "rb") as file:
        return _ARGUMENTS_TAG in file.read(_HEAD_BYTES)
