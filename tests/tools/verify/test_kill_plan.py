"""The moment at which a start is killed."""

from __future__ import annotations

import pytest

from trainer_kit.tools.verify.kill_plan import checkpoint_step, choose_kill


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_the_kill_comes_after_the_checkpoint(steps: int) -> None:
    kills = [choose_kill(seed, checkpoint_step(seed, steps), steps, 2) for seed in range(200)]
    assert all(checkpoint_step(seed, steps) < kill.step <= steps for seed, kill in enumerate(kills))
    assert {kill.step for kill in kills} == {*range(2, steps + 1)}
    assert {kill.rank for kill in kills} == {0, 1}
    assert kills == [choose_kill(seed, checkpoint_step(seed, steps), steps, 2) for seed in range(200)]
