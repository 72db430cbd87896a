"""`Meetings`: launchers that meet, whose machines are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kit.ranks import free_port
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.elastic_rendezvous import ElasticRendezvous


class Meetings:
    """Rendezvous of a run whose machines are threads of this process."""

    def __init__(self) -> None:
        self.port, self.said = free_port(), list[str]()
        self.made: list[ElasticRendezvous] = []
        self.stopped = threading.Event()

    def machine(self, number: int, **fields: Any) -> ElasticRendezvous:
        limits = {"num_nodes": 3, "min_nodes": 2, "last_call": 30.0, "start_timeout": 30.0}
        config = LaunchConfig(
            node_rank=number,
            master_port=self.port,
            cpu=True,
            **{**limits, **fields, "rdzv_conf": {"is_host": number == 0}},
        )
        self.made.append(ElasticRendezvous(config, self.said.append, self.stopped.is_set, by_command=True))
        if number == 0:  # so that none asks at a port that is not served yet, where it might meet itself
            self.made[0]._linked()
        return self.made[-1]

    def close(self) -> None:
        """Let all machines leave."""
        self.stopped.set()
        for machine in reversed(self.made):
            machine.shutdown()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Return the values of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=60) for future in futures]
