"""Small transformers models of several families, sharded by torch alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_kit.utils.box import Box, Part

_SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
}
_GROUPED = _SIZES | {"num_key_value_heads": 1, "max_position_embeddings": 32}

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**_GROUPED)),
    "qwen3": (transformers.Qwen3ForCausalLM, lambda: transformers.Qwen3Config(**_GROUPED, head_dim=8)),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        lambda: transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=32),
    ),
    "bert": (transformers.BertForMaskedLM, lambda: transformers.BertConfig(**_SIZES)),
    "modernbert": (
        transformers.ModernBertForMaskedLM,
        lambda: transformers.ModernBertConfig(**_SIZES, pad_token_id=0, cls_token_id=1, sep_token_id=2),
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        lambda: transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40),
    ),
    "mixtral": (
        transformers.MixtralForCausalLM,
        lambda: transformers.MixtralConfig(**_GROUPED, num_local_experts=2, num_experts_per_tok=1),
    ),
}


def family(kind: str) -> Any:
    """A model of a family, tied where the family ties."""
    model_class, config = FAMILIES[kind]
    return model_class(config())


def shard(model: nn.Module, *units: nn.Module, replicas: int = 1) -> Any:
    """Shards the children of each ModuleList, the given modules and the rest, over all processes of a replica."""
    count = torch.distributed.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, count), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    blocks = [child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module]
    outer = [block for block in blocks if not any(block is not other and _holds(other, block) for other in blocks)]
    for unit in (*outer, *units, model):
        fully_shard(unit, mesh=mesh)
    return model


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def placement(tensor: torch.Tensor) -> Part | None:
    """The part of a DTensor that lies here."""
    if not isinstance(tensor, DTensor):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.detach().to_local(), Box(tuple(tensor.shape), tuple(offsets), tuple(sizes))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on each process."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor
