"""Places that a newcomer's ranks can expect, and what ranks that stay learn of new ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

from trainer_kit.config import environment
from trainer_kit.launch.membership import Membership
from trainer_kit.launch.places import expect_place, variables_of
from trainer_kit.launch.published import Published


def test_a_newcomer_expects_the_places_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous: Any = None
    group = WorkerGroup(WorkerSpec("trainer_kit", 2, rendezvous, entrypoint=sys.executable))
    expect_place(group, Published(Membership(4, ("a", "b", "c")), port=4000))
    monkeypatch.setenv(environment.MEMBERSHIP, "run/5/4/0")
    assert [worker.local_rank for worker in group.workers] == [0, 1]
    assert [variables_of(worker, group, 4) for worker in group.workers] == [
        {
            "RANK": rank, "WORLD_SIZE": "8", "ROLE_RANK": rank, "ROLE_WORLD_SIZE": "8", "GROUP_RANK": "3",
            "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "4000",
            "TORCHELASTIC_RESTART_COUNT": "4", environment.MEMBERSHIP: "run/5/4/0",
        }
        for rank in ("6", "7")
    ]  # fmt: skip
