"""Places of the ranks of a machine: those that a newcomer's can expect, and what ranks that stay learn of new ones."""

from __future__ import annotations

import os
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from trainer_kit.config import environment
from trainer_kit.launch.published import Published


def expect_place(ranks: WorkerGroup, running: Published) -> None:
    """Give ranks the places after all of the running ones, which they can expect.

    Args:
        ranks: Ranks of this machine.
        running: The membership that runs.
    """
    group: Any = ranks  # torch declares its attributes as None
    machines, own = len(running.membership.machines), group.spec.local_world_size
    before, total = machines * own, (machines + 1) * own
    group.workers = [
        Worker(number, before + number, role_rank=before + number, world_size=total, role_world_size=total)
        for number in range(own)
    ]
    group.group_rank, group.group_world_size = machines, machines + 1
    group.master_addr, group.master_port = "localhost", running.port  # they need none before they have a place
    group.store = HashStore()


def variables_of(worker: Worker, group: WorkerGroup, starts: int) -> dict[str, str]:
    """Return the environment variables of the new place of a rank that stays in its process.

    Args:
        worker: The rank.
        group: All ranks of this machine.
        starts: Number of earlier starts.
    """
    return {
        "RANK": str(worker.global_rank),
        "WORLD_SIZE": str(worker.world_size),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(starts),
        environment.MEMBERSHIP: os.environ[environment.MEMBERSHIP],
    }
