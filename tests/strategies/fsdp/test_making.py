"""Models made on the device "meta", and the buffers of a model whose parameters are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit.strategies.fsdp.making import fixed_buffers, make_on_meta, parameters_on_meta


class Model(nn.Module):
    """A tied weight, one that is on the host in any case, and a buffer of each kind: fixed, random, of weights."""

    def __init__(self, reads: str = "nothing") -> None:
        super().__init__()
        if reads == "a number":
            self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.register_buffer("angles", torch.arange(3.0) / 7, persistent=False)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(3) * 2, requires_grad=False)
        self.old = self.same = nn.Parameter(torch.FloatTensor(3).normal_())
        self.register_buffer("old_buffer", torch.FloatTensor(3).normal_())
        self.register_buffer("random", torch.rand(3))
        self.register_buffer("scaled", self.first.weight.detach() * 2)
        if reads == "a parameter":
            assert self.first.weight.sum().item() != 0


@pytest.mark.parametrize("reads", ["nothing", "a number"])
def test_a_model_has_no_values(reads: str) -> None:
    model = make_on_meta(lambda: Model(reads))
    tensors = [*model.parameters(), *model.buffers()]
    assert all(each.is_meta for each in tensors)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Model().named_parameters()]
    assert model.first.weight is model.second.weight
    assert model.old is model.same
    assert not model.frozen.requires_grad
    assert model.first.weight.requires_grad
    assert reads == "nothing" or model.rates[-1] == 1.0


def test_a_model_that_reads_its_parameters_cannot_be_made() -> None:
    with pytest.raises(RuntimeError, match="item"):
        make_on_meta(lambda: Model("a parameter"))
    assert not Model().first.weight.is_meta  # the hook is gone


def test_buffers_that_are_the_same_each_time_have_their_values() -> None:
    before = torch.get_rng_state()

    def seeded() -> nn.Module:
        torch.manual_seed(1)
        model = Model()
        model.angles *= 2
        return model

    values = fixed_buffers(seeded, ["angles", "random", "scaled", "absent"])
    assert values.keys() == {"angles"}
    assert torch.equal(values["angles"], torch.arange(3.0) / 7 * 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert fixed_buffers(lambda: Model("a parameter"), ["angles"]) == {}


def test_parameters_move_where_modules_register_them() -> None:
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert all(each.is_meta for each in model.parameters())
    assert not any(each.is_meta for each in model.buffers())
