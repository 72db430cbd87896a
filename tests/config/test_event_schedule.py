"""The steps after which the arguments schedule an event."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit import TrainingArguments
from trainer_kit.config.event_schedule import Event, EventSchedule


def schedule(**given: Any) -> EventSchedule:
    return EventSchedule(TrainingArguments(use_cpu=True, **given))


@pytest.mark.parametrize(
    ("event", "given", "expected"),
    [
        ("log", {"logging_steps": 4}, [4, 8, 10]),
        ("log", {"logging_steps": 4, "logging_first_step": True}, [1, 4, 8, 10]),
        ("log", {"logging_strategy": "epoch", "logging_first_step": True}, [3, 7, 10]),
        ("log", {"logging_strategy": "no"}, []),
        ("evaluate", {"eval_strategy": "steps", "logging_steps": 4}, [4, 8, 10]),
        ("evaluate", {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 4}, [5, 10]),
        ("evaluate", {"eval_strategy": "epoch"}, [3, 7, 10]),
        ("evaluate", {}, []),
        ("save", {"save_strategy": "steps", "save_steps": 4}, [4, 8, 10]),
        ("save", {"save_strategy": "epoch"}, [3, 7, 10]),
        ("save", {"save_strategy": "minutes", "save_minutes": 5}, [10]),
        ("save", {"save_strategy": "best", "eval_strategy": "epoch"}, [10]),
        ("save", {"save_strategy": "steps", "save_steps": 20, "nonfinite": "rollback"}, [0, 10]),
        ("save", {"save_strategy": "no"}, []),
        ("log", {"logging_steps": 0.25}, [3, 6, 9, 10]),
        ("evaluate", {"eval_strategy": "steps", "eval_steps": 0.5}, [5, 10]),
        ("save", {"save_steps": 0.001}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_the_steps_of_an_event(event: Event, given: dict[str, Any], expected: list[int]) -> None:
    """In a run of 10 steps, which ends in the middle of its third epoch."""
    assert schedule(**given).steps(event, 0, 10, [3, 7]) == expected
    assert schedule(**given).steps(event, 4, 10, [7]) == [step for step in expected if step > 4]


def test_a_change_of_the_arguments_counts_from_then_on() -> None:
    args = TrainingArguments(use_cpu=True, logging_steps=4)
    changing = EventSchedule(args)
    assert not changing.is_due_after_step("log", 6, 10)
    args.logging_steps = 3
    assert changing.is_due_after_step("log", 6, 10)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"save_strategy": "best", "eval_strategy": "epoch"}, True),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "steps"}, True),
        ({"metric_for_best_model": "loss", "eval_strategy": "epoch", "save_strategy": "steps"}, False),
    ],
)
def test_whether_the_best_is_saved(given: dict[str, Any], expected: bool) -> None:
    assert schedule(**given).saves_best is expected
