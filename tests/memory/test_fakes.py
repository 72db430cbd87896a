"""Fake copies, and values that are computed for real beside them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trainer_kit.memory.fakes import MOST_KNOWN, Fakes


def test_what_shares_memory_shares_it_in_the_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("part", model[0].weight.detach()[:2])
    model[0].weight.note = "of the user"
    copied = Fakes().copy(model)
    assert copied[1].weight is copied[0].weight
    assert copied[0].weight.note == "of the user"
    assert isinstance(copied[0].weight, FakeTensor)
    assert isinstance(copied[0].weight, nn.Parameter)
    assert copied.part.untyped_storage()._cdata == copied[0].weight.untyped_storage()._cdata
    assert not isinstance(model[0].weight, FakeTensor)


def test_an_optimizer_gets_the_parameters_of_the_copy() -> None:
    model, fakes = nn.Linear(4, 4), Fakes()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    copied, other = fakes.copy(model), fakes.copy(optimizer)
    assert other.param_groups[0]["params"][0] is copied.weight
    assert isinstance(other.state[copied.weight]["exp_avg"], FakeTensor)
    assert not isinstance(optimizer.state[model.weight]["exp_avg"], FakeTensor)


def test_whole_numbers_keep_their_values() -> None:
    fakes = Fakes()
    given = {"ids": torch.tensor([3, 4, 4]), "x": torch.randn(3, 5), "there": torch.ones(3, device="meta") > 0}
    batch = fakes.batch(given)
    with fakes.computing():
        assert batch["ids"].unique().tolist() == [3, 4]
        assert batch["there"].all()
        assert isinstance(batch["x"], FakeTensor)
        assert batch["x"][batch["ids"] == 4].shape == (2, 5)
        assert isinstance(batch["ids"].float(), FakeTensor)
        assert torch.arange(3).tolist() == [0, 1, 2]
        step = torch.tensor(0.0)
        step += 1
        assert step.item() == 1.0
        assert isinstance(torch.zeros(MOST_KNOWN + 1, dtype=torch.long), FakeTensor)
    assert given["ids"].tolist() == [3, 4, 4]


def test_values_that_are_not_known() -> None:
    fakes = Fakes()
    with fakes.computing():
        x = torch.randn(8)
        assert x.sum().item() == 1.0
        assert not (x > 0).any()
        with pytest.raises(ValueError, match=r"nonzero.*measure\(\) takes a real step"):
            x.nonzero()
