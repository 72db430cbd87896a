"""Show a run: curves, time, memory, evaluations, arguments and warnings, as one page, a picture or Markdown."""

from __future__ import annotations

import argparse
from pathlib import Path

EXIT_CODES = {0: "written"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the runs and the file to write."""
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="the output_dir of a run that wrote log.jsonl")
    parser.add_argument(
        "--compare",
        metavar="OTHER",
        type=Path,
        nargs="+",
        default=[],
        help="output_dir of more runs, shown in the same plots",
    )
    parser.add_argument("--open", action="store_true", help="open the report, as the system opens such files")
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write (default: RUN_DIR/report.FORMAT)")
    parser.add_argument("--format", help="html, png or md (default: as FILE ends, else html)")


def run(options: argparse.Namespace) -> int:
    """Write the report, print its path and return 0."""
    from trainer_kit.report import write_report

    path = write_report(options.folder, options.output, compare=options.compare, format=options.format)
    print(path)
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0
