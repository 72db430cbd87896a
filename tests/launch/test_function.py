"""A function in a process of the launcher."""

from __future__ import annotations

import os

import pytest
from kit import launched
from kit.launching import run

from trainer_kit.errors import ProcessFailed


@pytest.mark.distributed
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_function_gets_its_place_and_its_values_come_back(start_method: str) -> None:
    value = {"a": [1.5, None]}
    values = run(launched.place, value, "$$a ${local_rank}", start_method=start_method, mixed_precision="bf16")
    assert values == {
        rank: (str(rank), str(rank), "2", "bf16", "1", value, "$$a ${local_rank}") for rank in range(2)
    }  # fmt: skip


@pytest.mark.distributed
def test_a_function_has_a_session_of_its_own() -> None:
    """Otherwise Ctrl-C in a terminal would reach it twice."""
    assert len({os.getsid(0), *run(os.getsid, 0).values()}) == 3


@pytest.mark.distributed
def test_a_value_that_cannot_be_sent_back() -> None:
    with pytest.raises(ProcessFailed, match="TypeError: the value that unpicklable returned cannot be sent back"):
        run(launched.unpicklable)
