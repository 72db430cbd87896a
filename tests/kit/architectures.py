"""Tiny transformers models of the architectures that are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 32

_SPECIAL = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
_SHARED: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 16}
_BERT = {**_SHARED, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
_T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}


def llama(**changes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**_LLAMA, **changes}))


def mistral(**changes: Any) -> nn.Module:
    return MistralForCausalLM(MistralConfig(**{**_LLAMA, **changes}))


def qwen3(**changes: Any) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**{**_LLAMA, "head_dim": 8, **changes}))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2, bos_token_id=0, eos_token_id=0)),
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "qwen3": qwen3,
    "bert": lambda: BertForMaskedLM(BertConfig(**_BERT)),
    "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(**_BERT, **_SPECIAL)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**_T5, decoder_start_token_id=0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_LLAMA, num_local_experts=2)),
}
"""Makes a model by the name of its architecture."""
