"""Reports of runs from their logs: a page, a picture or Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FORMATS = ("html", "png", "md")


def write_report(
    run_dir: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    compare: Iterable[str | os.PathLike[str]] = (),
    format: str | None = None,
) -> Path:
    """Write a report of a run, or of several in comparison.

    Args:
        run_dir: The `output_dir` of a run that wrote `log.jsonl`, or that file.
        output: Path of the report; None for `report.` and the format in `run_dir`.
        compare: More runs to show in the same plots.
        format: "html" (one page without network access), "png" (a picture) or "md" (Markdown, for pull requests); None
            for the ending of `output`, else "html".

    Returns:
        The path of the report.

    Raises:
        FileNotFoundError: If a run has no log.
        ImportError: If matplotlib is missing.
        OSError: If the file cannot be written.
        ValueError: If the format is unknown, there are too many runs, or a log is empty, damaged or of a newer version.
    """
    from trainer_kit.report.history import RunHistory
    from trainer_kit.report.panels import RUNS

    format = _format(output, format)
    folders = [run_dir, *compare]
    if len(folders) > RUNS:
        raise ValueError(f"{len(folders)} runs cannot be distinguished in one plot; compare at most {RUNS}")
    histories = [RunHistory(folder) for folder in folders]
    path = Path(output) if output is not None else histories[0].path.parent / f"report.{format}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "html":
        from trainer_kit.report.page import page

        _write(path, page(histories))
    elif format == "md":
        from trainer_kit.report.markdown import markdown

        _write(path, markdown(histories))
    else:
        from trainer_kit.report.drawing import picture

        picture(histories, path)
    return path


def _format(output: str | os.PathLike[str] | None, format: str | None) -> str:
    found = format
    if found is None:
        found = "html" if output is None else Path(output).suffix.removeprefix(".").lower()
    if found not in FORMATS:
        what = f"{os.fspath(output)} ends with no" if format is None and output is not None else f"{found!r} is no"
        raise ValueError(f"{what} format of a report; use one of: {', '.join(FORMATS)}")
    return found


def _write(path: Path, text: str) -> None:
    """Write the text atomically, so that an open page is never incomplete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
