"""List, verify, compare and remove checkpoints."""

from __future__ import annotations

import argparse
import reprlib
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.utils.units import format_count, format_size

if TYPE_CHECKING:
    from trainer_kit.checkpoint.format.compare import Comparison
    from trainer_kit.checkpoint.format.inventory import CheckpointEntry, CheckpointProgress

_SHOWN = 20
_ELEMENTS = " elements that differ"

EXIT_CODES = {
    0: "done; with verify, all are valid; with diff, they are equal",
    1: "with verify, one is damaged; with diff, they differ",
    2: "with diff, one cannot be read",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their folders."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    action = _add(actions, "ls", "show the checkpoints of a run: when written, how large, valid or why not")
    action.add_argument("folder", metavar="RUN_DIR", type=Path, help="the output_dir of a run")
    action.add_argument("--quick", action="store_true", help="compare the sizes of files only, not their checksums")

    action = _add(actions, "verify", "compare every file with its checksum; exit code 1 if one is damaged")
    action.add_argument("folder", metavar="RUN_DIR", type=Path, help="the output_dir of a run, or one checkpoint")

    summary = "name what differs and by how much; exit code 1 if anything does, 2 if one cannot be read"
    action = _add(actions, "diff", summary)
    action.add_argument("a", metavar="A", type=Path, help="a checkpoint")
    action.add_argument("b", metavar="B", type=Path, help="another one")
    action.add_argument("--all", action="store_true", help=f"show all differences, not the first {_SHOWN} of a kind")

    action = _add(actions, "prune", "remove the checkpoints of a run that need not stay, without asking")
    action.add_argument("folder", metavar="RUN_DIR", type=Path, help="the output_dir of a run")
    action.add_argument(
        "--keep", metavar="N", type=_count_of, required=True, help="number of newest checkpoints that stay"
    )
    action.add_argument(
        "--keep-best", metavar="N", type=_count_of, default=1, help="number of best ones that stay too (default: 1)"
    )
    action.add_argument(
        "--keep-every", metavar="K", type=_count_of, help="each K-th one that the run wrote stays too (default: none)"
    )
    action.add_argument("--damaged", action="store_true", help="also remove those that are not valid")
    action.add_argument("--dry-run", action="store_true", help="remove nothing, only say what would be removed")


def _add(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def _count_of(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Run the action and return the exit code: 0, or 1 if something is damaged or differs."""
    actions = {"ls": _list, "verify": _verify, "diff": _diff, "prune": _prune}
    return actions[options.action](options)


def _list(options: argparse.Namespace) -> int:
    from trainer_kit.checkpoint.format.inventory import CRASH_PREFIX, checkpoints_at, inspect, newest_progress
    from trainer_kit.utils.run_lock import holder_of

    found = checkpoints_at(options.folder)
    best = _best(newest_progress(found))
    width = max(len(directory.name) for directory in found)
    print(f"{'checkpoint':{width}}  {'written':16}       size")
    entries = []
    for directory in found:
        entry = inspect(directory, quick=options.quick)
        entries.append(entry)
        is_whole = "sizes right" if options.quick else "valid"
        state = f"invalid: {entry.problem}" if entry.problem else is_whole
        row = f"{directory.name:{width}}  {_written(entry):16}  {format_size(entry.size):>9}  "
        _print_row(row, f"{state}{best.get(directory.name, '')}")
    whole = [entry.directory.name for entry in entries if entry.problem is None]
    resumable = [name for name in whole if not name.startswith(CRASH_PREFIX)]
    total = format_size(sum(entry.size for entry in entries))
    goes_on = f"training would resume from {resumable[-1]}" if resumable else "none to resume from"
    crashed = found[0].name.startswith(CRASH_PREFIX)
    count = format_count(len(entries), "crash" if crashed else "checkpoint")
    print(f"{count}, {len(whole)} valid, {total}; {goes_on}")
    if (holder := holder_of(options.folder)) is not None:
        print(f"in use: {holder} trains here")
    if others := _others(options.folder, found):
        print(f"also there: {', '.join(others)}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from trainer_kit.checkpoint.format.inventory import checkpoints_at, inspect

    is_valid = True
    for directory in checkpoints_at(options.folder):
        entry = inspect(directory)
        is_valid = is_valid and entry.problem is None
        files = len(entry.manifest.files) if entry.manifest else 0
        what = f"valid, {format_count(files, 'file')}, {format_size(entry.size)}"
        _print_row(f"{directory.name}: ", f"invalid: {entry.problem}" if entry.problem else what)
    return 0 if is_valid else 1


def _diff(options: argparse.Namespace) -> int:
    from trainer_kit.checkpoint import CheckpointError
    from trainer_kit.checkpoint.format.compare import compare

    try:
        found = compare(options.a, options.b)
    except CheckpointError as error:
        print(f"trainer-kit checkpoints diff: {error}", file=sys.stderr)
        return 2
    for side, directory, manifest in zip("AB", (options.a, options.b), found.manifests, strict=True):
        processes = format_count(manifest.world_size, "process")
        _print_row(f"{side}  ", f"{directory}: step {manifest.step}, {processes}, torch {manifest.torch_version}, "
                   f"{_local(manifest.time)}")  # fmt: skip
    if found.is_equal:
        print(f"equal: {format_count(found.tensors, 'tensor')} bit for bit, and all other values")
        return 0
    _print_differences(found, None if options.all else _SHOWN)
    return 1


def _prune(options: argparse.Namespace) -> int:
    from trainer_kit.checkpoint import CheckpointError, Retention
    from trainer_kit.checkpoint.format.discovery import at_work
    from trainer_kit.checkpoint.format.inventory import checkpoints_at, excess, inspect, newest_progress
    from trainer_kit.checkpoint.format.retention import delete_checkpoint
    from trainer_kit.utils.run_lock import holder_of

    entries = [inspect(directory) for directory in checkpoints_at(options.folder)]
    known = newest_progress(entry.directory for entry in entries if entry.problem is None)
    if known is None:
        raise CheckpointError(f"{options.folder} holds no valid checkpoint of a Trainer; nothing is removed")
    retention = Retention(options.keep, options.keep_best, options.keep_every, known.greater_is_better)
    damaged = [entry for entry in entries if entry.problem is not None]
    removable = [entry for entry in damaged if options.damaged and entry.is_damaged]
    gone = [*excess(entries, known, retention), *removable]
    if (holder := holder_of(options.folder)) is not None:
        print(f"in use: {holder} trains here, and removes checkpoints by its own arguments, too")
    elif busy := at_work(options.folder):
        print(f"a process is writing here ({busy[0].name}); its run removes checkpoints by its own arguments, too")
    removed = [entry for entry in gone if options.dry_run or delete_checkpoint(entry.directory)]
    for entry in removed:
        what = "would be removed" if options.dry_run else "removed"
        _print_row(f"{entry.directory.name}: ", f"{what}, {format_size(entry.size)}")
    for entry in damaged:
        if entry not in removable:
            hint = " (--damaged removes it)" if entry.is_damaged else ""
            _print_row(f"{entry.directory.name}: ", f"left, invalid: {entry.problem}{hint}")
    stay = [entry.directory.name for entry in entries if entry not in removed]
    freed = format_size(sum(entry.size for entry in removed))
    print(f"{freed} {'would be ' if options.dry_run else ''}freed; {len(stay)} stay: {', '.join(stay)}")
    return 0 if removed == gone else 1


def _print_differences(found: Comparison, limit: int | None) -> None:
    values = [f"{place}  {_change(*pair)}" for place, pair in found.values.items()]
    changed = [f"{name}  {a} -> {b}" for name, (a, b) in found.changed.items()]
    counts = [f"{each.differing:,} of {each.elements:,}" for each in found.differing]
    width = max([len(_ELEMENTS), *map(len, counts)])
    rows = [
        f"{each.largest:>9.3g} {each.relative:>9.3g} {count:>{width}}  {each.name}"
        + (f" (NaN: {each.nans[0]:,} in A, {each.nans[1]:,} in B)" if any(each.nans) else "")
        for each, count in zip(found.differing, counts, strict=True)
    ]
    if rows:
        header = f"{'largest':>9} {'relative':>9} {_ELEMENTS:>{width}}  tensor"
        _print_section(f"{len(rows):,} of {format_count(found.tensors, 'tensor')} differ", rows, limit, header)
    else:
        print(f"\n{format_count(found.tensors - len(changed), 'tensor')} equal bit for bit")
    _print_section("tensors of another shape or dtype", changed, limit)
    _print_section("other values that differ", values, limit)
    _print_section("other files that differ", found.files, limit)
    for side, names in zip("AB", found.only_in, strict=True):
        _print_section(f"only in {side}", names, limit)


def _print_section(title: str, lines: Sequence[str], limit: int | None, header: str | None = None) -> None:
    if not lines:
        return
    shown = lines[:limit]
    print(f"\n{title}:", *([header] if header else []), *(line if header else f"  {line}" for line in shown), sep="\n")
    if len(shown) < len(lines):
        print(f"  … and {len(lines) - len(shown):,} more (--all shows them)")


def _print_row(start: str, text: str) -> None:
    """Print a row; long text wraps below its beginning in a terminal."""
    width = shutil.get_terminal_size(fallback=(10_000, 24)).columns
    lines = textwrap.wrap(text, max(20, width - len(start)), break_long_words=False, break_on_hyphens=False)
    print(start + f"\n{' ' * len(start)}".join(lines), flush=True)


def _best(known: CheckpointProgress | None) -> dict[str, str]:
    """Return the note on the best checkpoint, by checkpoint name."""
    if known is None or known.best_step is None:
        return {}
    return {f"checkpoint-{known.best_step}": f", the best ({known.metric_name} {known.best_metric:.4g})"}


def _others(folder: Path, found: Sequence[Path]) -> list[str]:
    """Return the run's other folders: crashes, and checkpoints that were moved aside."""
    from trainer_kit.checkpoint import find_checkpoints

    crashes = sorted(each.name for each in folder.glob("crash-*") if each.is_dir() and each not in found)
    aside = [(each.name, len(find_checkpoints(each))) for each in find_checkpoints(folder, "earlier-")]
    return [*crashes, *(f"{name} ({format_count(number, 'checkpoint')})" for name, number in aside)]


def _written(entry: CheckpointEntry) -> str:
    return _local(entry.manifest.time) if entry.manifest else "-"


def _local(time: str) -> str:
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M")


def _change(a: Any, b: Any) -> str:
    """Describe two values briefly; long lists by the number of differing items."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 40
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b) > short.maxlist:
        differing = sum(repr(one) != repr(other) for one, other in zip(a, b, strict=True))
        return f"{differing:,} of {len(a):,} items differ"
    return f"{short.repr(a)} -> {short.repr(b)}"
