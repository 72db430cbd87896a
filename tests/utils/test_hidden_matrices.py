from __future__ import annotations

import transformers
from kit.models import Embedded
from torch import nn

from trainer_kit.utils.hidden_matrices import hidden_matrices


def test_embeddings_and_the_head_are_no_hidden_matrices() -> None:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    assert names(model) == {
        *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    assert "score.weight" not in names(transformers.LlamaForSequenceClassification(config))


def names(model: nn.Module) -> set[str]:
    hidden = hidden_matrices(model)
    return {name for name, each in model.named_parameters() if each in hidden}


def test_a_plain_models_last_matrix_is_its_head() -> None:
    assert names(Embedded()) == {"first.weight"}
    assert names(nn.Sequential(nn.Linear(3, 2))) == set()


def test_a_model_that_has_no_output_embeddings_has_a_head() -> None:
    class Refusing(Embedded):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert names(Refusing()) == {"first.weight"}
