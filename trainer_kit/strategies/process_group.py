"""`ProcessGroup`: this process among those of its run, from the rendezvous to the end of the process."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # first of all: imported later, it would keep the group as a default for ever
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # its stub names fewer

from trainer_kit.config.environment import Place
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.watchdog.heartbeat import Heartbeat

logger = logging.getLogger("trainer_kit")

JOIN_SECONDS = 300.0
"""How long the processes wait for one another at the start."""

_REFUSAL_SECONDS = 10.0

SLOW_SECONDS = 60.0
"""After which a process that others wait for is named in a warning; earlier where the wait itself is to end soon."""


class Membership:
    """torch's process group and the heartbeat: one for each process, through all its trainings.

    Attributes:
        heartbeat: Watches over the other processes.
    """

    current: Membership | None = None

    def __init__(self, heartbeat: Heartbeat, owns_group: bool) -> None:
        self.heartbeat = heartbeat
        self.owns_group = owns_group

    @classmethod
    def join(
        cls, place: Place, device: torch.device, timeout: float, patience: float, location: tuple[str, str]
    ) -> Membership:
        """Meet the other processes; return the present membership where they have met before.

        Args:
            place: This process among those that a launcher started.
            device: Where it computes.
            timeout: Seconds after which a collective ends with an error.
            patience: Seconds after which a process that does not answer is taken for lost.
            location: Its machine and device, which no other process may have where it is a GPU.

        Raises:
            ValueError: If they cannot meet, or share a GPU.
        """
        if cls.current is not None:
            return cls.current
        owns_group = not dist.is_initialized()
        if owns_group:
            store = _meet(place)
            _wait_for_all(store, place, location)
            # On a GPU machine the host's own tensors go by gloo: nothing on the host waits for the GPU.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=timeout),
                device_id=device if device.type == "cuda" else None,
            )
        # A connection of its own: the group's may be in use by a main thread that waits.
        watch = PrefixStore(f"heartbeat/{place.restarts}", _connect(place, serves=False))
        slow = min(SLOW_SECONDS, timeout / 4)
        heartbeat = Heartbeat(watch, place.rank, place.world_size, patience=patience, slow=slow)
        cls.current = cls(heartbeat, owns_group)
        cls.current.heartbeat.start()
        return cls.current

    @classmethod
    def leave(cls) -> None:
        """Ends the heartbeat, and the group where no process is lost."""
        session, cls.current = cls.current, None
        if session is None:
            return
        session.heartbeat.stop()
        if session.owns_group and dist.is_initialized() and not session.heartbeat.error:
            dist.destroy_process_group()

    def end_training(self, error: BaseException | None) -> None:
        """End a training, which may have been preempted, and report the error that ended it to the others.

        A SystemExit is one too: the others wait for a process that exits in the middle of a training.
        """
        self.heartbeat.next_round()
        if error is not None:
            self.heartbeat.report_failure(error)

    def recover(self) -> None:
        """Take back the error that ended the last training: the program has caught it."""
        if self.heartbeat.error:
            self.heartbeat.take_back_failure()


class ProcessGroup:
    """A strategy's link to the other processes of the run.

    Args:
        place: This process among those that a launcher started.
        timeout: Seconds after which a collective ends with an error because some process has not come to it.
        patience: Seconds after which a process that does not answer is taken for lost.
    """

    def __init__(self, place: Place, timeout: float, patience: float) -> None:
        self.place = place
        self.timeout = timeout
        self.patience = patience
        self._membership: Membership | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes in the run."""
        return self.place.world_size == 1

    @property
    def heartbeat(self) -> Heartbeat | None:
        """Watches over the other processes; None before they have met, and where there are none."""
        return None if self._membership is None else self._membership.heartbeat

    def join(self, device: torch.device, location: tuple[str, str]) -> bool:
        """Meet the other processes, once; a process group that the program has made already is used.

        Args:
            device: Where this process computes.
            location: Its machine and device.

        Returns:
            Whether they have met in this call.

        Raises:
            ValueError: If they cannot meet: no process answers, a port is in use, or processes are missing.
        """
        if self._membership is not None:
            self._membership.recover()
            return False
        if self.is_alone:
            return False
        self._membership = Membership.join(self.place, device, self.timeout, self.patience, location)
        return True

    def end_training(self, error: BaseException | None) -> None:
        """End a training; `error` is what ended it, None where it ended in good order."""
        if self._membership is not None:
            self._membership.end_training(error)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Enclose what may wait for other processes: where it fails, the error names them."""
        heartbeat = self.heartbeat
        if heartbeat is None:
            assert self.is_alone, "setup() comes first"
            yield
            return
        heartbeat.calls += 1
        try:
            yield
        except RuntimeError as error:
            if not failed_to_communicate(error):
                raise
            raise LostProcessError(heartbeat.explain(error)) from error


multiprocessing.util.Finalize(None, Membership.leave, exitpriority=9)  # at the end of a multiprocessing child too

# A child waits for ever if, in the moment of the fork, a thread of C++ enters Python (github.com/python/cpython/issues/
# 112275), as gloo's do once after each collective. Their turn takes microseconds, so that they are given milliseconds.
_FORKS_MAY_HANG = sys.version_info < ((3, 10, 15) if sys.version_info < (3, 11) else (3, 11, 10))
_REST_SECONDS = 0.005


def _let_threads_finish() -> None:
    if Membership.current is not None:
        time.sleep(_REST_SECONDS)


if _FORKS_MAY_HANG and hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_let_threads_finish)


def failed_to_communicate(error: RuntimeError) -> bool:
    """Whether an error comes from a collective, not from the user's own code (gloo raises plain RuntimeErrors)."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error) or "application timeout" in str(error)


def _meet(place: Place) -> Store:
    """The store through which the processes find one another; torchrun's agent keeps one, else rank 0 does."""
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _connect(place, serves=place.rank == 0 and not agent_serves)
    return PrefixStore(f"trainer_kit/{place.restarts}", store)


def _wait_for_all(store: Store, place: Place, location: tuple[str, str]) -> None:
    """Waits until all processes have come; a backend would wait for them without a word, and for longer.

    Compares their devices too, since NCCL's own error does not say which processes share one.
    """
    keys = [f"arrived-{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], json.dumps(location))
    try:
        store.wait(keys, timedelta(seconds=JOIN_SECONDS))
    except dist.DistStoreError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise ValueError(
            f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {place.world_size} did not come to "
            f"{place.address}:{place.port} within {JOIN_SECONDS:.0f} s; start all of them, with the same MASTER_ADDR, "
            "MASTER_PORT and WORLD_SIZE"
        ) from error
    except dist.DistNetworkError as error:
        raise ValueError(f"rank 0 at {place.address}:{place.port} ended before all processes had come") from error
    locations = [tuple(json.loads(each)) for each in store.multi_get(keys)]
    try:
        check_own_gpus(locations)
    except ValueError:
        if store.add("refused", 1) == place.world_size:
            store.set("all refused", "")
        elif place.rank == 0:  # the store may end with this process, and the others must read it first
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["all refused"], timedelta(seconds=_REFUSAL_SECONDS))
        raise


def check_own_gpus(locations: Sequence[tuple[str, ...]]) -> None:
    """Refuses processes that share a GPU.

    Args:
        locations: Machine and device of each process, by rank.

    Raises:
        ValueError: Naming the first two.
    """
    for rank, location in enumerate(locations):
        first = locations.index(location)
        if first != rank and not location[1].startswith(("cpu", "xla")):
            raise ValueError(
                f"ranks {first} and {rank} on {location[0]} share one GPU ({location[1]}): more processes than GPUs; "
                "start fewer, or train on the CPU (use_cpu=True, launch --cpu)"
            )


def _connect(place: Place, serves: bool) -> TCPStore:
    where = f"{place.address}:{place.port}"
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
            f"rank {place.rank} found no process at {where} within {JOIN_SECONDS:.0f} s; start rank 0 first, and check "
            "MASTER_ADDR and MASTER_PORT (launch --master-addr --master-port)"
        ) from error
