from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2Model

from trainer_kit.utils.transformers_models import is_transformers_model


def test_a_transformers_model_is_known_by_its_class() -> None:
    model = GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))
    assert is_transformers_model(model)
    assert not is_transformers_model(model.h[0])
    assert not is_transformers_model(torch.nn.Sequential(model))
