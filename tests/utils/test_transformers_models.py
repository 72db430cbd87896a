from __future__ import annotations

import inspect

import torch
from transformers import GPT2Config, GPT2Model

from trainer_kit.utils.transformers_models import is_transformers_model, loaded_from, place_of_use_cache


def test_a_transformers_model_is_known_by_its_class() -> None:
    model = GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))
    assert is_transformers_model(model)
    assert not is_transformers_model(model.h[0])
    assert not is_transformers_model(torch.nn.Sequential(model))


def test_where_use_cache_stands() -> None:
    model = GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))
    place = place_of_use_cache(model)
    assert place is not None
    assert [*inspect.signature(model.forward).parameters][place] == "use_cache"
    assert place_of_use_cache(model.h[0]) is None


def test_where_a_model_was_loaded_from() -> None:
    model = GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))
    assert loaded_from(model) is None
    assert loaded_from(torch.nn.Linear(1, 1)) is None
    model.config._name_or_path = "me/other"
    assert loaded_from(model) == "me/other"
    model.name_or_path = "me/tiny"
    assert loaded_from(model) == "me/tiny"
