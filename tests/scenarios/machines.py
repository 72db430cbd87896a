"""Machines: network namespaces of this one, each with a name of its own and a cable to a switch that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kit.preloaded import PreloadedPython
from kit.releases import without_gloo

ADDRESSES = tuple(f"10.77.0.{number}" for number in (1, 2, 3, 4, 5))
HOSTS = ("machine-a", "machine-b", "machine-c", "machine-d", "machine-e")
INTERFACE = "cable"
LIMIT = 200  # seconds for a run
_NEW_NAMESPACES = 0x04000000 | 0x00020000  # CLONE_NEWUTS and CLONE_NEWNS of linux/sched.h
_CLONE_NEWNET = 0x40000000
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
    """A command that runs on a machine; what it prints goes to files.

    Args:
        name: Of the files.
        start: Starts it; its arguments are the files.
    """

    def __init__(self, name: Path, start: Callable[[Path, Path], PreloadedPython | subprocess.Popen[bytes]]) -> None:
        self.name = name.name
        self.out, self.err = name.with_name(f"{name.name}.out"), name.with_name(f"{name.name}.err")
        self.process = start(self.out, self.err)

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
    """Machines on one switch. Each works in the same folder by name, where it has a disk of its own.

    Args:
        folder: Where these folders are made.
        count: Number of machines.

    Attributes:
        work: The folder in which both work, by the name that they use.
        disks: What each has there, by the name that others use.
    """

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.work = folder / "work"
        self.disks = [folder / host for host in HOSTS[:count]]
        self.commands: list[Command] = []
        run = uuid.uuid4().hex[:8]
        self.names = [f"tk-{run}-{number}" for number in range(count)]
        self.switch = f"tk-{run}-switch"

    def build(self) -> None:
        self.work.mkdir(exist_ok=True)
        for disk in self.disks:
            (disk / "tmp").mkdir(parents=True, exist_ok=True)
        for name in (self.switch, *self.names):
            _ip("netns", "add", name)
        _ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "switch", "up")
        for number, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=False)):
            port = f"port{number}"
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self.switch)
            _ip("-n", self.switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")

    def remove(self) -> None:
        """Ends what still runs there, and takes the machines away."""
        for number, name in enumerate(self.names):
            self.kill(number)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", self.switch], capture_output=True, check=False)
        for command in self.commands:
            command.process.wait(10)

    def kill(self, number: int) -> None:
        """Ends all processes of a machine at once."""
        self.signal(number, signal.SIGKILL)

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Sends a signal to all processes of a machine."""
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True, check=False)
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, kind)

    def cut(self, number: int = 1) -> None:
        _ip("-n", self.names[number], "link", "set", INTERFACE, "down")

    def mend(self, number: int = 1) -> None:
        _ip("-n", self.names[number], "link", "set", INTERFACE, "up")

    def split(self, count: int) -> None:
        """Joins the first machines by a switch of their own, out of reach of the others."""
        _ip("-n", self.switch, "link", "add", "second", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "second", "up")
        for number in range(count):
            _ip("-n", self.switch, "link", "set", f"port{number}", "master", "second")

    def rejoin(self, count: int) -> None:
        """Joins them to the others again."""
        for number in range(count):
            _ip("-n", self.switch, "link", "set", f"port{number}", "master", "switch")

    def start(self, number: int, *words: str | Path, preloaded: bool = True, **environment: str) -> Command:
        """Starts a command of this Python on a machine; a `preloaded` one has imported torch before."""
        settings = {
            "TMPDIR": str(self.work / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        }
        command, env = [*map(str, words)], os.environ | settings
        machine = (HOSTS[number], str(self.disks[number]), str(self.work))

        def fork(out: Path, err: Path) -> PreloadedPython:
            return PreloadedPython(command, out, err, env, _enter, (self.names[number], *machine))

        def execute(out: Path, err: Path) -> subprocess.Popen[bytes]:
            own = ["unshare", "--uts", "--mount", "sh", "-c", _AS_A_MACHINE, *machine]
            python = [sys.executable, "-W", "error::UserWarning:trainer_kit"]
            words = ["ip", "netns", "exec", self.names[number], *own, *python, *command]
            with open(out, "wb") as out_file, open(err, "wb") as err_file:  # not pipes, which fill up
                return subprocess.Popen(words, stdout=out_file, stderr=err_file, stdin=subprocess.DEVNULL, env=env)

        name = self.disks[number].with_name(f"{len(self.commands) + 1}-{HOSTS[number]}")
        self.commands.append(Command(name, fork if preloaded else execute))
        return self.commands[-1]


def _enter(network: str, host: str, disk: str, work: str) -> None:
    """Move this process to a machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) or libc.unshare(_NEW_NAMESPACES):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(host)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", disk, work], check=True)
    os.chdir(work)
    tempfile.tempdir = None
    warnings.filterwarnings("error", category=UserWarning, module=r"trainer_kit\Z")


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
        Ended(each.process.wait(), without_gloo(each.out.read_text()), each.err.read_text(), times[each])
        for each in commands
    ]


@contextmanager
def made_machines(folder: Path, count: int = 2) -> Iterator[Machines]:
    machines = Machines(folder, count)
    try:
        machines.build()
        yield machines
    finally:
        machines.remove()


def why_not() -> str | None:
    """Why there cannot be several machines here; None where there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (packages iproute2 and util-linux)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with made_machines(Path(folder)):
                return None
        except subprocess.CalledProcessError as error:
            return f"may not make network namespaces, which needs root: {error.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
