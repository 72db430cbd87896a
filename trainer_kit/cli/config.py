"""Ask what to start, and keep the answers for `trainer-kit launch`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_kit.config import environment
from trainer_kit.launch.config import DEFAULT_PORT, LaunchConfig, count_gpus, default_path, write_basic_config

EXIT_CODES = {0: "the file is written, or existed already"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file to write and the option to write without questions."""
    parser.add_argument("--config", metavar="FILE", help=f"the file to write (default: {default_path()})")
    parser.add_argument("--default", action="store_true", help="write the defaults without asking, if there is no file")


def run(options: argparse.Namespace) -> int:
    """Write the file, unless it exists and `--default` is given; return 0."""
    path = Path(options.config) if options.config else default_path()
    if not options.default:
        ask().save(path)
    elif not write_basic_config(save_location=path):
        return 0
    hint = "" if path == default_path() else f" --config {path}"
    print(f"Written to {path}. Start with: trainer-kit launch{hint} script.py")
    return 0


def ask() -> LaunchConfig:
    """Ask the user for a configuration; repeat a question after an invalid answer.

    Raises:
        ValueError: If the input ends before the last question.
    """
    config, gpus, has_tpu = LaunchConfig(), count_gpus(), environment.xla_device_type() == "TPU"
    config = _ask(config, "num_nodes", "How many machines", _number)
    if config.num_nodes > 1:
        config = _ask(config, "node_rank", "Which of them is this one, counted from 0", _number)
        config = _ask(config, "master_addr", "Name or address of machine 0", str)
        config = _ask(dataclasses.replace(config, master_port=DEFAULT_PORT), "master_port", "Its port", _number)
    if gpus or has_tpu:
        there = "is a TPU" if has_tpu else "are GPUs"
        config = _ask(config, "cpu", f"Train on the CPU though there {there} (yes or no)", _yes_or_no)
    config = dataclasses.replace(config, tpu=has_tpu and not config.cpu)
    if not config.tpu:  # on a TPU one process drives all devices
        usual = "as many as GPUs" if gpus and not config.cpu else "one a machine"
        config = _ask(config, "num_processes", "How many processes, on all machines together", _number, usual)
    config = _ask(config, "mixed_precision", "Mixed precision (no, fp16, bf16 or fp8)", str)
    return _ask(config, "max_restarts", "How often to restart after a failure", _number, "0")


def _ask(
    config: LaunchConfig, field: str, question: str, read: Callable[[str], Any], default: str | None = None
) -> LaunchConfig:
    """Ask for one field and return the changed `config`; an empty answer keeps the field."""
    value = getattr(config, field)
    shown = default or ("no" if value is False else value)
    while True:
        try:
            answer = input(f"{question} [{shown}]: ").strip()
        except EOFError as error:
            raise ValueError("the answers ended before the questions; use --default to write without asking") from error
        try:
            changed = dataclasses.replace(config, **{field: read(answer) if answer else value})
            changed.local_processes()
        except ValueError as error:
            print(f"  {error}")
        else:
            return changed


def _number(answer: str) -> int:
    if not answer.isdecimal():
        raise ValueError(f"{answer!r} is no whole number")
    return int(answer)


def _yes_or_no(answer: str) -> bool:
    if answer.lower() not in ("y", "yes", "n", "no"):
        raise ValueError(f"{answer!r} is no answer; say yes or no")
    return answer.lower().startswith("y")
