"""Two machines: network namespaces of this one, each with a name of its own, joined by a cable that can be cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("machine-a", "machine-b")
INTERFACE = "cable"
LIMIT = 200  # seconds for a run
_AS_A_MACHINE = """
echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"
"""


class Ended(NamedTuple):
    """What is left of a command: its exit code, what it wrote, and when it ended (seconds of the monotonic clock)."""

    code: int
    out: str
    err: str
    time: float


class Command:
    """A command that runs on a machine; what it prints goes to files named `name` beside the folder `disk`."""

    def __init__(self, words: list[str], disk: Path, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self.out, self.err = disk.with_name(f"{name}.out"), disk.with_name(f"{name}.err")
        with open(self.out, "wb") as out, open(self.err, "wb") as err:  # not pipes, which fill up
            self.process = subprocess.Popen(
                words, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=disk, env=os.environ | environment
            )

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, path: Path) -> None:
        """Waits until there is such a file."""
        end = time.monotonic() + LIMIT
        while not path.exists():
            if not self.is_running() or time.monotonic() > end:
                raise AssertionError(f"{path} never came: {self.out.read_text()}{self.err.read_text()}")
            time.sleep(0.01)


class Machines:
    """Two machines joined by a cable. Each works in the same folder by name, where it has a disk of its own.

    Args:
        folder: Where these folders are made.

    Attributes:
        work: The folder in which both work, by the name that they use.
        disks: What each has there, by the name that others use.
    """

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.disks = [folder / host for host in HOSTS]
        self.commands: list[Command] = []
        run = uuid.uuid4().hex[:8]
        self.names = [f"tk-{run}-{number}" for number in range(2)]

    def build(self) -> None:
        self.work.mkdir(exist_ok=True)
        for disk in self.disks:
            (disk / "tmp").mkdir(parents=True, exist_ok=True)
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")

    def remove(self) -> None:
        """Ends what still runs there, and takes the machines away."""
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in map(int, found.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        for command in self.commands:
            command.process.wait(10)

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", INTERFACE, "up")

    def start(self, number: int, *words: str | Path, **environment: str) -> Command:
        """Starts a command of this Python on a machine."""
        own = ["unshare", "--uts", "--mount", "sh", "-c", _AS_A_MACHINE, HOSTS[number], self.disks[number], self.work]
        python = [sys.executable, "-W", "error::UserWarning:trainer_kit"]
        command = [str(word) for word in ("ip", "netns", "exec", self.names[number], *own, *python, *words)]
        settings = {
            "TMPDIR": str(self.work / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        }
        name = f"{len(self.commands) + 1}-{HOSTS[number]}"
        self.commands.append(Command(command, self.disks[number], name, settings))
        return self.commands[-1]


def finish(*commands: Command, within: float = LIMIT) -> list[Ended]:
    """Waits until all have ended."""
    end = time.monotonic() + within
    times: dict[Command, float] = {}
    while len(times) < len(commands):
        for command in commands:
            if command not in times and not command.is_running():
                times[command] = time.monotonic()
        if time.monotonic() > end:
            texts = [f"{command.name}: {command.out.read_text()}{command.err.read_text()}" for command in commands]
            raise AssertionError(f"no end within {within} s\n" + "\n".join(texts))
        time.sleep(0.02)
    return [
        Ended(command.process.wait(), command.out.read_text(), command.err.read_text(), times[command])
        for command in commands
    ]


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    machines = Machines(folder)
    try:
        machines.build()
        yield machines
    finally:
        machines.remove()


def why_not() -> str | None:
    """Why there cannot be two machines here; None where there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (packages iproute2 and util-linux)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with two_machines(Path(folder)):
                return None
        except subprocess.CalledProcessError as error:
            return f"may not make network namespaces, which needs root: {error.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
