"""Launchers of an elastic run on this machine, whose ranks train nothing: they let newcomers in, and note their places.

    run = Joining(tmp_path)
    run.start(0); run.start(1)            # launchers as processes
    run.start(2, digest="other")          # its ranks prepare another training
    run.wait_for_text("joins", 0)         # in what a launcher says
    run.notes()                           # the places of each process, in order

A process that is started again has another ID. All ranks end when the folder has a file `end`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from kit.preloaded import PreloadedPython
from kit.ranks import free_port
from trainer_kit.utils import new_place

_SECONDS = 60.0


class Note(NamedTuple):
    """A place of a process."""

    pid: int
    machine: int
    rank: int
    world: int
    membership: int
    is_newcomer: bool


class Joining:
    """Launchers that are processes of this machine.

    Args:
        folder: An empty folder.
        fields: Fields of their `LaunchConfig`.
    """

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.folder = folder
        limits = {"num_nodes": 3, "min_nodes": 2, "last_call": 30.0, "start_timeout": 60.0, "num_processes": 3}
        self.fields = {**limits, "master_port": free_port(), "cpu": True, **fields}
        self.launchers: dict[int, PreloadedPython] = {}

    def start(self, machine: int, digest: str = "same", how: str = "") -> None:
        """Start a launcher; `how` says how its ranks prepare as newcomers, see `_prepare`."""
        fields = {**self.fields, "node_rank": machine, "rdzv_conf": {"is_host": machine == 0}}
        words = ["-m", "kit.joining", "launch", json.dumps(fields), str(self.folder), digest, how]
        root = Path(__file__).parents[1]
        paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", str(root.parent))])
        file = self.folder / f"said-{machine}"
        file.unlink(missing_ok=True)
        self.launchers[machine] = PreloadedPython(words, file, file, os.environ | {"PYTHONPATH": paths})

    def said(self, machine: int) -> str:
        return (self.folder / f"said-{machine}").read_text()

    def wait_for_text(self, text: str, machine: int) -> None:
        self.wait(lambda: text in self.said(machine), f"{text!r} of machine {machine}")

    def wait_for_places(self, world: int, after: int = 0) -> list[Note]:
        """Wait until so many ranks have a place in a membership after another one, and return their notes of it."""

        def now() -> list[Note]:
            last = [notes[-1] for notes in self.notes().values() if not notes[-1].is_newcomer]
            newest = max((note.membership for note in last if note.membership > after), default=0)
            return sorted((note for note in last if note.membership == newest), key=lambda note: note.rank)

        self.wait(lambda: [note.world for note in now()] == [world] * world, f"{world} ranks")
        return now()

    def wait(self, is_there: Any, what: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not is_there():
            said = {machine: self.said(machine) for machine in self.launchers}
            assert time.monotonic() < deadline, f"no {what}: {said}, {self.notes()}"
            time.sleep(0.05)

    def notes(self) -> dict[int, list[Note]]:
        """Return the notes of each process that has ever run."""
        files = sorted(self.folder.glob("notes-*"), key=lambda path: path.stat().st_mtime)
        lines = [[Note(*json.loads(line)) for line in path.read_text().splitlines()] for path in files]
        return {notes[0].pid: notes for notes in lines if notes}

    def exit_code(self, machine: int) -> int:
        return self.launchers[machine].wait(timeout=_SECONDS)

    def end(self) -> dict[int, int]:
        """Let all ranks end, and return the exit codes of the launchers."""
        (self.folder / "end").touch()
        return {machine: self.exit_code(machine) for machine in self.launchers}

    def close(self) -> None:
        (self.folder / "end").touch()
        for launcher in self.launchers.values():
            try:
                launcher.wait(timeout=10)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def launch(fields: str, folder: str, *words: str) -> None:
    """A launcher."""
    from trainer_kit.errors import ProcessesLeft, ProcessFailed
    from trainer_kit.launch.config import LaunchConfig
    from trainer_kit.launch.processes import run_processes

    config = LaunchConfig(**json.loads(fields))
    args = ["-m", "trainer_kit.launch.script", "-m", "kit.joining", "rank", folder, str(config.node_rank), *words]
    try:
        run_processes(config, sys.executable, args, say=lambda text: print(text, flush=True))
    except ProcessesLeft as left:
        sys.exit(left.exit_code)
    except ProcessFailed as failure:
        sys.exit(f"failed: {failure}")


def rank(folder: str, machine: str, digest: str, how: str) -> None:
    """A rank."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run, scratch = Path(folder), Path(os.environ["TRAINER_KIT_REGROUP_FOLDER"])
    words = ""
    _note(run, machine)
    if os.environ.get("TRAINER_KIT_NEWCOMER") == "1":
        _prepare(how)
        words = new_place.NEW + digest
    while not (run / "end").exists():
        number = os.environ["TRAINER_KIT_MEMBERSHIP"].split("/")[1] if not words else ""
        meeting = run / f"meeting-{number}"
        if not words and os.environ["RANK"] == "0":
            if not (run / "closed").exists():
                new_place.set_open(scratch, digest)
            if new_place.are_joining(scratch):
                meeting.touch()  # the vote of all ranks
        if words or meeting.exists():
            place = new_place.ask_for_place(scratch, int(os.environ["LOCAL_RANK"]), words or number, lambda: False)
            if place is None:
                sys.exit(143)
            os.environ.pop("TRAINER_KIT_NEWCOMER", None)
            os.environ.update(place)
            words = ""
            _note(run, machine)
        time.sleep(0.02)


def _prepare(how: str) -> None:
    if how == "fails":
        sys.exit(3)
    elif how == "ends":
        sys.exit(0)
    launcher = os.getppid()
    while how == "never ends" and os.getppid() == launcher:
        time.sleep(0.1)


def _note(run: Path, machine: str) -> None:
    membership = os.environ.get("TRAINER_KIT_MEMBERSHIP", "")
    number = int(membership.split("/")[1]) if membership else 0
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note = Note(os.getpid(), int(machine), *place, number, os.environ.get("TRAINER_KIT_NEWCOMER") == "1")
    with open(run / f"notes-{os.getpid()}", "a") as file:
        file.write(json.dumps(note) + "\n")


if __name__ == "__main__":
    {"launch": launch, "rank": rank}[sys.argv[1]](*sys.argv[2:])
