"""`ProcessGroup`: the membership of this process in its run, from the rendezvous to the end of the process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import multiprocessing.util
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stub names fewer

from trainer_kit.config import environment
from trainer_kit.config.environment import Place
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.connections import Connections
from trainer_kit.strategies.watchdog.heartbeat import Heartbeat
from trainer_kit.strategies.watchdog.meeting import Meeting
from trainer_kit.utils.units import format_duration, pluralize

logger = logging.getLogger("trainer_kit")

JOIN_SECONDS = 300.0
"""Seconds that the processes wait for one another at the start."""

_REFUSAL_SECONDS = 10.0
_SILENCE_SECONDS, _ATTEMPT_SECONDS = 10.0, 2.0  # of a launcher whose machine may just be slow
_PATIENCE_SECONDS, _ELASTIC_PATIENCE_SECONDS = 30.0, 12.0
_EXPLAINS_SECONDS = 0.5
_LOOK_SECONDS = 0.1

SLOW_SECONDS = 60.0
"""Seconds until a warning names a process that others wait for; fewer with a short collective timeout."""


class Membership:
    """torch's process group and the heartbeat; one object for each process, shared by all its trainings.

    Args:
        heartbeat: Monitor of the other processes.
        owns_group: Whether trainer_kit created the process group, and so destroys it.
        connections: The group's connections.
        timeout: Seconds after which a collective fails.

    Attributes:
        lasting_connections: Those that stay open as long as all processes are there; votes and copies open others.
        current: The membership of this process; None before the rendezvous and after leaving.
    """

    current: Membership | None = None

    def __init__(
        self, heartbeat: Heartbeat, owns_group: bool, place: Place, connections: Connections, timeout: float
    ) -> None:
        self.heartbeat = heartbeat
        self.timeout = timeout
        self._has_warned = False
        self.owns_group = owns_group
        self.connections = connections
        self.lasting_connections = connections.copy()
        self._place = place
        self._at_exit = multiprocessing.util.Finalize(None, Membership.leave, exitpriority=9)

    @functools.cached_property
    def meeting(self) -> Meeting:
        """Where the processes wait for one another before a collective that some may have begun alone."""
        # A separate connection: the heartbeat's thread must not wait for this one's calls.
        store = PrefixStore(f"meeting/{self._place.restarts}", _connect(self._place, serves=False))
        return Meeting(store, self.heartbeat)

    @classmethod
    def join(
        cls, place: Place, device: torch.device, timeout: float, patience: float, location: tuple[str, str]
    ) -> Membership:
        """Join the process group, or return the current membership if there is one.

        Args:
            place: This process among those that a launcher started.
            device: Device of this process.
            timeout: Seconds after which a collective fails.
            patience: Seconds after which a process that does not answer counts as lost.
            location: Host name and device of this process; a GPU must be unique among the processes.

        Raises:
            ValueError: If the rendezvous fails, processes share a GPU, or the group that exists is for devices alone.
        """
        if cls.current is not None:
            cls.current.recover()  # of a training of another strategy
            cls.current.check_limits(timeout, patience)
            return cls.current
        owns_group, connections = not dist.is_initialized(), Connections()
        if owns_group:
            importlib.import_module("torch.distributed.nn.functional")  # later, its defaults would keep the group alive
            store = _meet(place)
            _wait_for_all(store, place, location)
            # Host tensors use gloo on GPU machines too, so that the host does not wait for the GPU.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with connections.opened(except_port=place.port):
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=place.rank,
                    world_size=place.world_size,
                    timeout=timedelta(seconds=timeout),
                    device_id=device if device.type == "cuda" else None,
                )
        else:
            _check_backends()
        # A separate connection: a waiting main thread may occupy the group's.
        watch = PrefixStore(f"heartbeat/{place.restarts}", _connect(place, serves=False))
        slow = min(SLOW_SECONDS, timeout / 4)
        # The launcher finds out which machine is gone, while all others already start again.
        explains_for = _EXPLAINS_SECONDS if environment.is_elastic() else None
        heartbeat = Heartbeat(
            watch, place.rank, place.world_size, patience=patience, slow=slow, explains_for=explains_for
        )
        if environment.is_elastic() and connections:
            heartbeat.break_off = connections.break_off
        cls.current = cls(heartbeat, owns_group, place, connections, timeout)
        cls.current.heartbeat.start()
        return cls.current

    @classmethod
    def leave(cls) -> None:
        """Stop the heartbeat, and destroy the group unless this process reported an error."""
        session, cls.current = cls.current, None
        if session is None:
            return
        session._at_exit.cancel()
        session.heartbeat.stop()
        if session.owns_group and dist.is_initialized() and not session.heartbeat.error:
            dist.destroy_process_group()

    def end_training(self, error: BaseException | None) -> None:
        """End a training, and report the error that ended it to the other processes.

        Args:
            error: The error, SystemExit included; None if the training ended without one.
        """
        self.heartbeat.next_round()
        if error is not None:
            self.heartbeat.report_failure(error)

    def check_limits(self, timeout: float, patience: float) -> None:
        """Warn once, on the main process, of limits that differ from those of the first training, which stay."""
        first = (self.timeout if self.owns_group else timeout, self.heartbeat.patience)
        if self._place.rank == 0 and (timeout, patience) != first and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ddp_timeout and heartbeat_timeout stay %g s and %g s, as in the first training of this program, "
                "instead of %g s and %g s", *first, timeout, patience,
            )  # fmt: skip

    def recover(self) -> None:
        """Retract the reported error of the last training, which the program has caught."""
        if self.heartbeat.error:
            self.heartbeat.take_back_failure()


class ProcessGroup:
    """A strategy's link to the other processes of the run.

    Args:
        place: This process among those that a launcher started.
        timeout: Seconds after which a collective fails because a process has not joined it.
        patience: Seconds after which a process that does not answer counts as lost.

    Attributes:
        goes_on: Whether the caller continues after a loss, so that no process waits for an explanation of it.
        is_newcomer: Whether this process prepares its training alone, until it joins the others.
    """

    def __init__(self, place: Place, timeout: float, patience: float) -> None:
        self.goes_on = False
        self.is_newcomer = environment.is_newcomer()
        self.place = place._replace(rank=0, world_size=1, local_world_size=1) if self.is_newcomer else place
        self.timeout = timeout
        self.patience = patience
        self._membership: Membership | None = None

    @property
    def is_own(self) -> bool:
        """Whether this process has joined a group that trainer_kit created."""
        return self._membership is not None and self._membership.owns_group

    @property
    def is_alone(self) -> bool:
        """Whether the run has only this process."""
        return self.place.world_size == 1

    @property
    def heartbeat(self) -> Heartbeat | None:
        """Monitor of the other processes; None before the rendezvous, and if there are no others."""
        return None if self._membership is None else self._membership.heartbeat

    def join(self, device: torch.device, location: tuple[str, str]) -> bool:
        """Join the process group at the first call; one that the program has already created is used.

        Args:
            device: Device of this process.
            location: Host name and device of this process.

        Returns:
            Whether this call joined the group.

        Raises:
            ValueError: If the rendezvous fails: no process answers, a port is in use, or processes are missing.
        """
        if self._membership is not None:
            self._membership.recover()
            return False
        if environment.is_elastic() and not environment.is_newcomer():  # an earlier training may have changed it
            self.place, self.is_newcomer = environment.place(), False
        if self.is_alone:
            return False
        self._membership = Membership.join(self.place, device, self.timeout, self.patience, location)
        return True

    def meet(self, what: str, remedy: str) -> None:
        """Wait until all processes are at this call, see `Meeting.join`."""
        if self._membership is not None:
            self._membership.meeting.join(what, remedy)

    def find_absent(self) -> list[str]:
        """Wait until all processes are at this call, see `Meeting.find_absent`."""
        return [] if self._membership is None else self._membership.meeting.find_absent()

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which connections are opened that `break_off` breaks too."""
        assert self._membership is not None, "setup() comes first"
        return self._membership.connections.opened(except_port=self.place.port)

    def break_off(self) -> None:
        """Let the collectives under way fail, here and on the other processes."""
        assert self._membership is not None, "setup() comes first"
        self._membership.connections.break_off()

    def leave(self) -> None:
        """Leave the process group; messages of the heartbeat are lost from then on."""
        Membership.leave()

    def join_again(self, place: Place, device: torch.device, location: tuple[str, str]) -> None:
        """Join the process group of another membership.

        Args:
            place: The new place of this process.
            device: See `join`.
            location: See `join`.
        """
        self.place, self._membership, self.is_newcomer = place, None, False
        self.join(device, location)

    def end_training(self, error: BaseException | None) -> None:
        """End a training; `error` is the error that ended it, None if it ended normally."""
        if self._membership is not None:
            self._membership.end_training(error)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Enclose calls that may wait for other processes.

        Raises:
            LostProcessError: If a collective fails; the message names the processes that are missing.
        """
        heartbeat = self.heartbeat
        if heartbeat is None:
            assert self.is_alone, "setup() comes first"
            yield
            return
        heartbeat.calls += 1
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not failed_to_communicate(error):
                raise
            waited = time.monotonic() - begin
            lost = LostProcessError(heartbeat.give_up(error) if self.goes_on else heartbeat.explain(error))
            lost.waited = waited
            raise lost from error

    def watch(self) -> Callable[[], None]:
        """Return a check for work without collectives, to be called often, where a lost process raises immediately.

        Raises:
            LostProcessError: By the check, if another process has ended or does not answer.
        """
        membership, due = self._membership, 0.0
        if membership is None or not self.goes_on:
            return lambda: None

        def check() -> None:
            nonlocal due
            if (now := time.monotonic()) < due:
                return
            due = now + _LOOK_SECONDS
            heartbeat = membership.heartbeat
            lost = [problem for problem in heartbeat.peers.problems() if problem.kind == "lost"]
            if lost or membership.lasting_connections.any_has_ended():
                closed = ConnectionError("closed by its other end")
                raise LostProcessError(heartbeat.give_up(closed, lost, sys._getframe(1)))

        return check


# A forked child hangs if a C++ thread enters Python during the fork (github.com/python/cpython/issues/112275), as
# gloo's threads do for microseconds after each collective. A pause before the fork lets them finish.
_FORKS_MAY_HANG = sys.version_info < ((3, 10, 15) if sys.version_info < (3, 11) else (3, 11, 10))
_REST_SECONDS = 0.005


def _let_threads_finish() -> None:
    if Membership.current is not None:
        time.sleep(_REST_SECONDS)


if _FORKS_MAY_HANG and hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_let_threads_finish)


def default_patience() -> float:
    """Return the seconds after which a process that does not answer counts as lost: fewer in an elastic run."""
    return _ELASTIC_PATIENCE_SECONDS if environment.is_elastic() else _PATIENCE_SECONDS


def failed_to_communicate(error: RuntimeError) -> bool:
    """Return whether an error comes from a collective, not from the user's code; gloo raises plain RuntimeErrors."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo/transport" in text or "application timeout" in text


def _meet(place: Place) -> Store:
    """Connect to the rendezvous store, which torchrun's agent or rank 0 serves."""
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _connect(place, serves=place.rank == 0 and not agent_serves)
    return PrefixStore(f"trainer_kit/{place.restarts}", store)


def _check_backends() -> None:
    """Refuse a process group of the program's that cannot exchange what is on the host."""
    if "cpu:" not in (backends := dist.get_backend_config()):
        raise ValueError(
            f"the program's process group ({backends}) has no backend for tensors on the host; make it by "
            "torch.distributed.init_process_group('cpu:gloo,cuda:nccl') at the start of the script, before "
            "transformers' TrainingArguments or an Accelerator of accelerate, which make one for GPUs alone"
        )


def _wait_for_all(store: Store, place: Place, location: tuple[str, str]) -> None:
    """Wait until all processes have joined, and check that none share a GPU.

    A backend would wait longer and without a message; NCCL's own error does not name the processes that share a GPU.
    """
    keys = [f"arrived-{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], json.dumps(location))
    try:
        store.wait(keys, timedelta(seconds=JOIN_SECONDS))
    except dist.DistStoreError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise ValueError(
            f"{pluralize('rank', len(missing))} {', '.join(missing)} of {place.world_size} did not come to "
            f"{place.address}:{place.port} within {format_duration(JOIN_SECONDS)}; start all of them, with the "
            "same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
        ) from error
    except dist.DistNetworkError as error:
        raise ValueError(f"rank 0 at {place.address}:{place.port} ended before all processes had come") from error
    locations = [tuple(json.loads(each)) for each in store.multi_get(keys)]
    try:
        check_own_gpus(locations)
    except ValueError:
        if store.add("refused", 1) == place.world_size:
            store.set("all refused", "")
        elif place.rank == 0:  # this process may serve the store, which the others must still read
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["all refused"], timedelta(seconds=_REFUSAL_SECONDS))
        raise


def check_own_gpus(locations: Sequence[tuple[str, ...]]) -> None:
    """Check that no two processes share a GPU.

    Args:
        locations: Host name and device of each process, by rank.

    Raises:
        ValueError: If two do; the message names the first two.
    """
    for rank, location in enumerate(locations):
        first = locations.index(location)
        if first != rank and not location[1].startswith(("cpu", "xla")):
            raise ValueError(
                f"ranks {first} and {rank} on {location[0]} share one GPU ({location[1]}): more processes than GPUs; "
                "start fewer, or train on the CPU (use_cpu=True, launch --cpu)"
            )


def _check_launcher(place: Place) -> None:
    """Check that the launcher answers that has served the store since before this process began.

    Raises:
        ValueError: If it is gone; torch would try for as long as it waits for a store that may still come.
    """
    deadline = time.monotonic() + _SILENCE_SECONDS
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=_ATTEMPT_SECONDS).close()
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or time.monotonic() >= deadline:
                raise ValueError(
                    f"rank {place.rank} found no launcher at {place.address}:{place.port}, which has served the store "
                    f"of this start: its machine is lost ({error})"
                ) from error
            time.sleep(0.1)
        else:
            return


def _connect(place: Place, serves: bool) -> TCPStore:
    where = f"{place.address}:{place.port}"
    if environment.is_elastic() and not serves:
        _check_launcher(place)
    try:
        return TCPStore(
            place.address,
            place.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
    except dist.DistNetworkError as error:
        if serves:
            raise ValueError(
                f"the port {place.port} of this machine cannot be used for the rendezvous ({error}); set MASTER_PORT "
                "(launch --master-port) to a free one"
            ) from error
        raise ValueError(
            f"rank {place.rank} found no process at {where} within {format_duration(JOIN_SECONDS)}; start rank 0 "
            "first, and check MASTER_ADDR and MASTER_PORT (launch --master-addr --master-port)"
        ) from error
