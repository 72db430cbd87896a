"""Saves that not all processes make, as those of scripts which save under `is_main_process`."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader

from trainer_kit import Accelerator, SingleDevice
from trainer_kit.accelerator import save_meeting
from trainer_kit.accelerator.save_meeting import SaveMeeting
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.process_group import Membership
from trainer_kit.strategies.watchdog.heartbeat import Heartbeat

PATIENCE = 3.0

When = Callable[[Accelerator, int], bool]


def on_none(accelerator: Accelerator, step: int) -> bool:
    return False


def on_all(accelerator: Accelerator, step: int) -> bool:
    return step in (3, 6)


def on_main(accelerator: Accelerator, step: int) -> bool:
    return accelerator.is_main_process and step in (3, 6)


def on_main_at_the_end(accelerator: Accelerator, step: int) -> bool:
    return accelerator.is_main_process and step == 8


def train(folder: str, when: When) -> dict[str, Any]:
    """Train 8 steps and save in between; wait for others some seconds at the most."""
    accelerator = Accelerator(cpu=True)
    hasten(Membership.current.heartbeat)  # type: ignore[union-attr]
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(32, 3), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seconds, steps = [], 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if when(accelerator, steps):
                begin = time.monotonic()
                accelerator.save_state(f"{folder}/{steps}")
                seconds.append(time.monotonic() - begin)
    return {
        "weights": [each.tolist() for each in accelerator.unwrap_model(model).parameters()],
        "warnings": [str(each.message) for each in caught],
        "seconds": seconds,
    }


def hasten(heartbeat: Heartbeat) -> None:
    heartbeat.patience = heartbeat.peers.patience = PATIENCE
    heartbeat.interval = PATIENCE / 5


def load(folder: str) -> list[list[float]]:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(torch.randn(32, 3), batch_size=2))  # type: ignore[arg-type]
    accelerator.load_state(folder)
    return [each.tolist() for each in accelerator.unwrap_model(model).parameters()]


@pytest.mark.distributed
def test_the_main_process_saves_alone_where_the_others_train_on(tmp_path: Path) -> None:
    straight = on_ranks(2, train, str(tmp_path / "none"), on_none)
    together = on_ranks(2, train, str(tmp_path / "all"), on_all)
    main, other = on_ranks(2, train, str(tmp_path / "main"), on_main)
    assert main["weights"] == other["weights"] == straight[0]["weights"] == together[0]["weights"]
    assert not [text for each in (*together, other) for text in each["warnings"]]
    (warning,) = main["warnings"]
    assert warning.startswith("only the main process calls save_state() here (rank 1 ")
    assert "call it on all processes" in warning
    first, second = main["seconds"]
    assert first >= PATIENCE > second  # a call that is known does not wait
    for step in (3, 6):
        saved = on_ranks(2, load, str(tmp_path / "all" / str(step)))
        assert on_ranks(2, load, str(tmp_path / "main" / str(step))) == saved
        assert saved[0] == saved[1]


@pytest.mark.distributed
def test_the_main_process_saves_alone_after_the_others_have_ended(tmp_path: Path) -> None:
    main, _ = on_ranks(2, train, str(tmp_path), on_main_at_the_end)
    assert "only the main process calls save_state() here" in main["warnings"][0]
    assert on_ranks(2, load, str(tmp_path / "8"))[1] == main["weights"]


class Elsewhere(Collectives):
    """Of three processes, some of which wait elsewhere."""

    def __init__(self, rank: int, absent: list[int]) -> None:
        super().__init__(rank, rank, 3)
        self.absent = absent

    @property
    def is_alone(self) -> bool:
        return False

    def find_absent(self) -> list[str]:
        return [f"rank {rank} waits in backward" for rank in self.absent]


def meet(meeting: SaveMeeting, rank: int, absent: list[int], **settings: Any) -> bool:
    strategy = SingleDevice("cpu")
    strategy.collectives = before = Elsewhere(rank, absent)
    strategy.sharding.is_active = settings.pop("is_sharded", False)
    with meeting.together_or_alone(strategy, **{"is_within_step": False} | settings) as is_alone:
        assert is_alone == (strategy.collectives is not before)
        assert strategy.world_size == 3
        assert strategy.rank == rank
    assert strategy.collectives is before
    return is_alone


def test_a_call_that_the_main_process_alone_makes_is_found_out_once() -> None:
    def helper(absent: list[int]) -> bool:
        return meet(meeting, 0, absent)

    meeting = SaveMeeting()
    with pytest.warns(UserWarning, match=r"^only the main process calls save_state\(\) here \(rank 1 waits in"):
        assert [helper(absent) for absent in ([1, 2], [])] == [True, True]  # it is not asked again
    assert not helper([])  # from another line


def test_a_long_wait_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Late(Elsewhere):
        def find_absent(self) -> list[str]:
            time.sleep(0.2)
            return []

    monkeypatch.setattr(save_meeting, "_PATIENCE", 0.01)
    strategy = SingleDevice("cpu")
    strategy.collectives = Late(0, [])
    with SaveMeeting().together_or_alone(strategy, is_within_step=False) as is_alone:
        assert not is_alone
    (message,) = caplog.messages
    assert message.startswith("save_state() has waited for other processes for 0.01 s; call it on all of them")


def test_another_thread_does_not_save_alone() -> None:
    with ThreadPoolExecutor(1) as thread, pytest.raises(ValueError, match="another thread may exchange with them"):
        thread.submit(meet, SaveMeeting(), 0, [1, 2]).result()


@pytest.mark.parametrize(
    ("rank", "absent", "settings", "reason"),
    [
        (1, [0, 2], {}, "the main process writes"),
        (0, [2], {}, "some of the others do"),
        (1, [2], {}, "some of the others do"),
        (0, [1, 2], {"is_sharded": True}, "models are sharded"),
        (0, [1, 2], {"is_within_step": True}, "gradients are being accumulated"),
    ],
)
def test_a_save_that_needs_the_others_is_refused(
    rank: int, absent: list[int], settings: dict[str, Any], reason: str
) -> None:
    where = "; ".join(f"rank {each} waits in backward" for each in absent)
    message = f"rank {rank} calls save_state(), but {where}; call it on all processes, since {reason}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        meet(SaveMeeting(), rank, absent, **settings)


def test_a_call_that_is_known_is_refused_within_a_step() -> None:
    meeting, known = SaveMeeting(), pytest.warns(UserWarning, match="only the main process")
    for is_within_step in (False, True):
        with pytest.raises(ValueError, match=r"alone; call it on all") if is_within_step else known:
            meet(meeting, 0, [1, 2], is_within_step=is_within_step)
