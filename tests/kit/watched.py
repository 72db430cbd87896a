"""Processes that reduce over gloo under a `Heartbeat`; tests stop them, kill them and let them misbehave."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer_kit
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.connections import Connections
from trainer_kit.strategies.watchdog.heartbeat import Heartbeat

INTERVAL, PATIENCE, SLOW = 0.2, 1.5, 1.0


class Member:
    """One process of a run, with what a strategy does."""

    def __init__(self, rank: int, world_size: int, port: int, folder: Path, serves: bool, **options: float) -> None:
        self.rank, self.folder = rank, folder
        dist.set_debug_level(dist.DebugLevel.OFF)
        limit = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False, timeout=limit)
        self.connections = Connections()
        with self.connections.opened(except_port=port):
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=options.get("timeout", 60)),
            )
        own = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
        watch = dist.PrefixStore("heartbeat/0", own)
        interval, patience = options.get("interval", INTERVAL), options.get("patience", PATIENCE)
        self.heartbeat = Heartbeat(watch, rank, world_size, interval=interval, patience=patience, slow=SLOW)
        self.heartbeat.start()

    def reduce(self, number: int = 0) -> int:
        self.heartbeat.calls += 1
        tensor = torch.tensor([number])
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise LostProcessError(self.heartbeat.explain(error)) from error
        return int(tensor)

    def train(self, steps: int = 10**9) -> None:
        """Steps, until the tests write a file "end"."""
        for number in range(steps):
            if self.reduce((self.folder / "end").exists()):
                return
            self.heartbeat.steps += 1
            if number == 3 and steps > 5:
                self.is_ready()
            time.sleep(0.005)

    def is_ready(self) -> None:
        end = time.monotonic() + 60
        while not self.heartbeat.peers._beats() and time.monotonic() < end:
            time.sleep(0.01)
        (self.folder / f"ready-{self.rank}").touch()


def trains(member: Member) -> None:
    member.train()


def leaves_and_stays(member: Member) -> None:
    member.train(5)
    if member.rank == 1:
        member.heartbeat.stop()
        time.sleep(60)
    member.reduce()


def breaks_off_and_stays(member: Member) -> None:
    """The second one leaves after a collective has failed, as one does that goes on; the third one does nothing."""
    member.train(5)
    if member.rank == 1:
        member.heartbeat.give_up(RuntimeError("gloo/transport"))
        member.heartbeat.stop()
    if member.rank != 0:
        time.sleep(60)
    member.reduce()


def leaves_while_others_work(member: Member) -> None:
    """The first one ends in good order, and with it the store where it serves that."""
    member.train(5)
    if member.rank != 0:
        time.sleep(2 * PATIENCE)
        assert member.heartbeat._beats < 100  # its thread rests between them


def exits_without_a_word(member: Member) -> None:
    member.train(5)
    if member.rank == 1:
        os._exit(0)
    member.reduce()


def fails(member: Member) -> None:
    member.train(5)
    if member.rank == 1:
        error = ValueError("sample 7 is no number")
        member.heartbeat.report_failure(error)
        raise error
    member.reduce()


def fails_and_stays(member: Member) -> None:
    member.train(5)
    if member.rank == 1:
        member.heartbeat.report_failure(ValueError("sample 7 is no number"))
        time.sleep(60)
    member.reduce()


def sleeps(member: Member) -> None:
    def sleep_for_ever() -> None:
        time.sleep(60)

    member.train(5)
    if member.rank == 1:
        sleep_for_ever()
    member.reduce()


def waits_for_a_gpu(member: Member) -> None:
    """The engine hangs outside of the strategy, in a call that waits for a GPU, which waits for another process."""
    member.train(5)
    member.is_ready()
    names: dict[str, Any] = {"sleep": time.sleep}
    engine = Path(trainer_kit.__file__).parent / "loop" / "step_metrics.py"
    exec(compile("def item():\n    sleep(60)", str(engine), "exec"), names)
    names["item"]()


def works_on(member: Member) -> None:
    """One goes on without the others."""
    member.train(5)
    member.is_ready()
    time.sleep(2.5 * PATIENCE)


def holds_the_interpreter(member: Member) -> None:
    member.train(5)
    if member.rank == 1:
        ctypes.PyDLL(None).sleep(int(3 * PATIENCE))
    member.reduce()


def first_holds_the_interpreter(member: Member) -> None:
    member.train(5)
    if member.rank == 0:
        ctypes.PyDLL(None).sleep(int(3 * PATIENCE))
    member.reduce()


def is_told_to_leave(member: Member) -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: member.heartbeat.announce_leaving())
    member.train(5)
    member.is_ready()
    end = time.monotonic() + 30
    while not member.heartbeat.leaving and time.monotonic() < end:
        time.sleep(0.01)
    assert member.heartbeat.leaving
    member.reduce()


def sends_messages(member: Member) -> None:
    """All others send to the first one."""
    member.train(5)
    if member.rank > 0:
        assert member.heartbeat.send(f"from {member.rank}", f"text {member.rank}")
    else:
        for rank in (2, 1):
            assert member.heartbeat.receive(f"from {rank}", rank) == f"text {rank}"
    member.reduce()


def sends_as_its_last_duty(member: Member) -> None:
    """The last one sends before it ends because of another; the first one waits for that, and for one that is lost."""

    def send() -> None:
        time.sleep(2 * PATIENCE)
        member.heartbeat.send("last", "text")

    def receive() -> None:
        received = [member.heartbeat.receive("last", 2), member.heartbeat.receive("never", 1)]
        (member.folder / "received").write_text(str(received))

    member.heartbeat.last_duty = {0: receive, 2: send}.get(member.rank)
    member.train()


def is_woken(member: Member) -> None:
    """It breaks off its connections instead of ending."""
    member.heartbeat.break_off = member.connections.break_off
    try:
        member.train()
    except LostProcessError as error:
        (member.folder / f"woken-{member.rank}").write_text(str(error))
        os._exit(0)


def forks(member: Member) -> None:
    """A child has the parent's objects, handlers and open connections, and no thread of it."""
    member.train(5)
    child = os.fork()
    if child == 0:
        signal.alarm(3)  # it waits for nothing
        member.heartbeat.announce_leaving()
        for _ in range(2):
            member.heartbeat.report_failure(ValueError("of a child"))
        member.heartbeat.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(3 * INTERVAL)
    member.train(5)
    assert not member.heartbeat.leaving


def run(rank: int, world_size: int, port: int, folder: Path, what: str, options: dict[str, Any]) -> None:
    """The life of one process; what it prints goes to a file."""
    errors = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s", force=True)
    torch.set_num_threads(1)
    hosts = options.get("hosts")
    if hosts is not None:
        socket.gethostname = lambda: str(hosts[rank])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{rank}.json")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not options.get("first_serves", False))
    times = {name: options[name] for name in ("timeout", "patience") if name in options}
    member = Member(rank, world_size, port, folder, rank == 0 and options.get("first_serves", False), **times)
    try:
        globals()[what](member)
    except LostProcessError as error:
        member.heartbeat.report_failure(error)
        raise
    finally:
        member.heartbeat.stop()
