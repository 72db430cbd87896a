"""What is other on a GPU, told without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_kit.memory.cuda import AsOnCuda, use_foreach


def saved(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[tuple[torch.dtype, int]]:
    """Dtype and size of all that autograd keeps of a function as it computes on a GPU."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with AsOnCuda(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*inputs)
    return [(tensor.dtype, tensor.numel()) for tensor in kept.values()]


def test_dropout_keeps_its_mask_in_bytes() -> None:
    x = torch.randn(100, requires_grad=True)
    for function in (nn.functional.dropout, nn.Dropout(0.1), lambda x: torch.dropout(x, 0.1, True)):
        assert saved(function, x) == [(torch.bool, 100)]
    for function in (
        nn.Dropout(0.0),
        nn.Dropout(0.1).eval(),
        lambda x: nn.functional.dropout(x * 1, inplace=False, training=False),
    ):
        assert (torch.bool, 100) not in saved(function, x)


def attend(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x, None, 0.1)


def attend_by_name(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


def attend_in_layers(x: torch.Tensor) -> torch.Tensor:
    heads, _ = nn.MultiheadAttention(8, 1, dropout=0.1, batch_first=True)(x[0], x[0], x[0], need_weights=False)
    return heads


@pytest.mark.parametrize("function", [attend, attend_by_name, attend_in_layers])
def test_attention_keeps_no_scores_with_dropout(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(1, 2, 64, 8, requires_grad=True)
    assert max(size for _, size in saved(function, x)) < 2 * 64 * 64


def test_autocast_computes_more_in_float32() -> None:
    x = torch.randn(4, 8)
    with AsOnCuda(), torch.autocast("cpu", torch.bfloat16):
        low = nn.Linear(8, 8)(x)
        assert low.dtype is torch.bfloat16
        for name in ("softmax", "layer_norm", "pow", "sum", "norm"):
            result = {
                "softmax": lambda: nn.functional.softmax(low, -1),
                "layer_norm": lambda: nn.LayerNorm(8)(low),
                "pow": lambda: low**2,
                "sum": lambda: low.sum(),
                "norm": lambda: low.norm(),
            }[name]()
            assert result.dtype is torch.float32, name
        assert nn.functional.gelu(low).dtype is torch.bfloat16


def test_what_is_computed_again_is_computed_as_on_a_gpu() -> None:
    x = torch.randn(100, requires_grad=True)
    with AsOnCuda():
        checkpoint(
            nn.functional.dropout, x, use_reentrant=False
        ).sum().backward()  # raises where something else is kept
    assert x.grad is not None


def test_optimizers_step_with_all_parameters_at_once() -> None:
    weight = [nn.Parameter(torch.ones(3))]
    chosen = {
        "left": torch.optim.SGD(weight),
        "told": torch.optim.SGD(weight, foreach=False),
        "fused": torch.optim.AdamW(weight, fused=True),
    }
    for optimizer in chosen.values():
        use_foreach(optimizer)
    found = {name: optimizer.param_groups[0]["foreach"] for name, optimizer in chosen.items()}
    assert found == {"left": True, "told": False, "fused": None}
