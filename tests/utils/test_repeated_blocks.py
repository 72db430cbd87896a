from __future__ import annotations

import pytest
from kit.architectures import ARCHITECTURES
from torch import nn

from trainer_kit.utils.repeated_blocks import blocks_in_rows, can_be_block, repeated_blocks


@pytest.mark.parametrize(("name", "kinds"), [("gpt2", {"GPT2Block"}), ("bert", {"BertLayer"}), ("t5", {"T5Block"})])
def test_the_layers_of_a_transformer_are_its_blocks(name: str, kinds: set[str]) -> None:
    assert {type(block).__name__ for block in repeated_blocks(ARCHITECTURES[name]())} == kinds


def test_only_the_outermost_lists_of_one_class_count() -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
    assert [*repeated_blocks(nn.ModuleList(layers))] == layers
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    assert [*repeated_blocks(nn.ModuleList([mixed, nn.Linear(2, 2)]))] == []
    assert [*repeated_blocks(nn.ModuleList([nn.Linear(2, 2)]))] == []


def test_lists_in_a_list_stand_for_their_modules() -> None:
    rows = [nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Identity()]) for _ in range(2)]
    model = nn.Sequential(nn.ModuleList(rows))
    assert [*blocks_in_rows(model)] == [*rows[0]][:2] + [*rows[1]][:2]
    assert [*repeated_blocks(model)] == []  # a row is a layer
    assert [*blocks_in_rows(nn.ModuleList([model, nn.Linear(2, 2)]))] == [*blocks_in_rows(model)]
    rows[1][1] = rows[0][1]
    assert [*blocks_in_rows(model)] == [*[*rows[0]][:2], rows[1][0]]
    assert [*blocks_in_rows(nn.ModuleList([rows[0], nn.ModuleList([nn.Linear(2, 2)])]))] == []


def test_a_block_has_parameters_and_a_forward_pass() -> None:
    assert can_be_block(nn.Linear(2, 2))
    assert not can_be_block(nn.Tanh())
    assert not can_be_block(nn.ModuleList([nn.Linear(2, 2)]))
