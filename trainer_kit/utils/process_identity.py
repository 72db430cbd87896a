"""Identity of a process: its user, its system, and its start, which no later process with its number shares.

The import of psutil takes 6 ms of that of the Trainer, so each use imports it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal


def user_name() -> str:
    """Return the name of this process's user."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"


def system_id() -> str:
    """Return boot ID and PID namespace, which distinguish systems and containers with the same host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return sys.platform


def start_time(process: int) -> str | None:
    """Return the exact start time of a process, which identifies it if a PID is reused; None if it has ended."""
    try:
        if sys.platform == "linux":  # psutil's time changes with the system's clock
            fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
            return None if fields[0] in (b"Z", b"X") else fields[19].decode()
    except OSError:
        return None
    import psutil

    try:
        found = psutil.Process(process)
        return None if found.status() == psutil.STATUS_ZOMBIE else repr(found.create_time())
    except (OSError, psutil.Error):
        return None


def process_state(process: int) -> Literal["runs", "stopped", "traced", "gone", ""]:
    """Return the system's state of a process.

    Returns:
        "stopped" as by Ctrl-Z, "traced" if a debugger has stopped it, or "" if it is not visible from this one.
    """
    import psutil

    try:
        status = psutil.Process(process).status()
    except (psutil.NoSuchProcess, ValueError):  # the latter for what can be no process
        return "gone"
    except psutil.Error:
        return ""
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    if status == psutil.STATUS_STOPPED:
        return "stopped"
    return "traced" if status == psutil.STATUS_TRACING_STOP else "runs"
