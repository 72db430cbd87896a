"""Runs a user's script or module as one rank, like a direct start.

`python -m trainer_kit.launch.script [-m] target arguments…`. The only difference from a direct start: an exception goes
to the launcher, without the frames of this file.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from trainer_kit.launch.failures import LEAVING, is_reported, write_failure
from trainer_kit.utils.streams import guard_standard_streams

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main() -> None:
    """Run the script or module in `sys.argv`.

    Raises:
        SystemExit: With 1 after an exception, with 130 after Ctrl-C, or the script's own.
    """
    _leave_with_the_launcher()
    faulthandler.enable()
    guard_standard_streams()
    if not sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # makes the file readable while it grows
    try:
        run_as_main(sys.argv[1:])
    except SystemExit as error:
        if error.code not in (None, 0, *LEAVING):
            write_failure(error, own_files=[__file__])
        raise
    except BaseException as error:
        error.__traceback__ = write_failure(error, own_files=[__file__])
        sys.last_value = error  # as the interpreter does, for exit handlers
        if not _is_shown_by_launcher(error):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def run_as_main(words: list[str]) -> None:
    """Run a script or a module in this process, as Python runs its main program.

    Args:
        words: The script, or "-m" and a module, then its arguments, which become `sys.argv`.

    Raises:
        BaseException: Any error of the script.
    """
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    target = sys.argv[0]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    # `python -m` puts the current folder first, which is right for a module only.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    # Not by runpy, which removes the module when the script ends: threads and pickle may still need it.
    path = os.path.abspath(target)
    loader = SourceFileLoader("__main__", path)
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __cached__=None, __builtins__=builtins)
    exec(loader.source_to_code(loader.get_data(path), path), vars(module))


def _is_shown_by_launcher(error: BaseException) -> bool:
    """Return whether the launcher shows the error: the first rank of a machine shares its terminal."""
    is_usual = sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__.startswith("torch.")
    is_first = os.environ.get("LOCAL_RANK") == "0"
    return is_reported() and is_usual and is_first and not isinstance(error, KeyboardInterrupt)


def _leave_with_the_launcher() -> None:
    """Request SIGTERM at the end of the launcher, which can then forward no signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
