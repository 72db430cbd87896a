from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.state import Requests, Stateful, TrainState, is_stateful


@given(
    st.builds(
        TrainState,
        **{
            field.name: st.floats(allow_nan=False) if "float" in str(field.type) else st.integers(0, 2**60)
            for field in dataclasses.fields(TrainState)
        },
    )
)
def test_a_state_comes_back_from_its_dict(state: TrainState) -> None:
    other = TrainState()
    other.load_state_dict(state.state_dict())
    assert other == state


def test_a_fresh_state_is_plain_json() -> None:
    state = TrainState()
    assert json.loads(json.dumps(state.state_dict(), allow_nan=False)) == state.state_dict()
    assert all(value in (0, None, []) for value in state.state_dict().values())


def test_a_state_that_lacks_a_counter_is_not_taken_for_a_whole_one() -> None:
    values = TrainState(step=3).state_dict()
    del values["position"]
    with pytest.raises(KeyError, match="position"):
        TrainState().load_state_dict(values)


@pytest.mark.parametrize(
    ("epoch", "position", "length", "expected"), [(0, 0, 10, 0.0), (1, 5, 10, 1.5), (3, 7, 0, 3.0), (2, 0, 7, 2.0)]
)
def test_epochs_are_a_fraction(epoch: int, position: int, length: int, expected: float) -> None:
    assert TrainState(epoch=epoch, position=position, epoch_length=length).epochs == expected


@pytest.mark.parametrize(
    ("position", "length", "epoch", "left"),
    [(0, 10, 2, 0), (9, 10, 2, 9), (10, 10, 3, 0), (12, 10, 3, 0), (12, 0, 2, 12), (8, 20, 2, 8)],
)
def test_an_epoch_that_got_shorter_may_be_over(position: int, length: int, epoch: int, left: int) -> None:
    """For example with dataloader_drop_last and a larger batch after a resume."""
    state = TrainState(epoch=2, position=position, epoch_length=15)
    state.enter_epochs_of(length)
    assert (state.epoch, state.position, state.epoch_length) == (epoch, left, length)


def test_requests_begin_unasked() -> None:
    assert dataclasses.astuple(Requests()) == (False, False, False, False, False, False, False, None, None, None)


def test_what_can_be_kept_in_a_checkpoint() -> None:
    assert isinstance(torch.nn.Linear(1, 1), Stateful)
    assert isinstance(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), Stateful)
    assert isinstance(TrainState(), Stateful)
    assert not isinstance(object(), Stateful)
    assert not math.isnan(TrainState().loss_sum)


def test_a_state_that_needs_arguments_is_none() -> None:
    class Positioned:
        def state_dict(self, num_samples: int, num_workers: int = 0) -> dict[str, Any]:
            return {"position": num_samples}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    class Optional(Positioned):
        def state_dict(self, num_samples: int = 0, num_workers: int = 0) -> dict[str, Any]:
            return {}

    assert not is_stateful(Positioned())
    assert is_stateful(Optional())
    assert is_stateful(torch.nn.Linear(1, 1))
    assert not is_stateful([])
