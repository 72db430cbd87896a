"""Operations are compared with products of matrices that are counted by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_kit.profiling import flops
from trainer_kit.profiling.flops import FlopCounter, Flops, count_on_fakes


def product(rows: int, inner: int, columns: int) -> int:
    """Multiplications and additions of a product of two matrices."""
    return 2 * rows * inner * columns


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


FORWARD = product(3, 4, 8) + product(3, 8, 2)
WEIGHTS = product(4, 3, 8) + product(8, 3, 2)  # their gradients
INSIDE, INPUT = product(3, 2, 8), product(3, 8, 4)  # gradients of what lies between the layers, and of the input


def test_a_linear_layer_takes_two_products_backward_where_its_input_needs_a_gradient() -> None:
    with FlopCounter() as counter:
        mlp()(torch.randn(3, 4)).sum().backward()
    assert counter.flops == Flops(FORWARD, WEIGHTS + INSIDE)
    assert counter.flops.model == counter.flops.hardware == FORWARD + WEIGHTS + INSIDE
    with FlopCounter() as counter:
        mlp()(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert counter.flops == Flops(FORWARD, WEIGHTS + INSIDE + INPUT)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_gradients_no_backward_pass(context: Any) -> None:
    with FlopCounter() as counter, context():
        mlp()(torch.randn(3, 4))
    assert counter.flops == Flops(FORWARD)


@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_attention(kernel: SDPBackend, key_heads: int) -> None:
    batch, heads, length, keys, size = 2, 6, 5, 7, 4
    query = torch.randn(batch, heads, length, size, requires_grad=True)
    key, value = (torch.randn(batch, key_heads, keys, size, requires_grad=True) for _ in range(2))
    with sdpa_kernel(kernel), FlopCounter() as counter:
        try:
            output = scaled_dot_product_attention(query, key, value, enable_gqa=heads != key_heads)
        except RuntimeError as error:
            pytest.skip(f"this torch has no such kernel for grouped heads: {error}")
        output.sum().backward()
    scores = batch * heads * product(length, size, keys)
    again = scores if kernel == SDPBackend.FLASH_ATTENTION else 0  # which does not keep them
    assert counter.flops == Flops(2 * scores, 4 * scores, again)


def test_values_of_another_size_than_keys() -> None:
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4)
    value = torch.randn(1, 2, 7, 3)
    with torch.inference_mode(), FlopCounter() as counter:
        scaled_dot_product_attention(query, key, value)
    assert counter.flops.forward == 2 * (product(5, 4, 7) + product(5, 7, 3))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions(groups: int) -> None:
    layer = nn.Conv2d(4, 8, (3, 5), padding=1, groups=groups)
    image = torch.randn(2, 4, 9, 9, requires_grad=True)
    with FlopCounter() as counter:
        output = layer(image)
        output.sum().backward()
    rows, columns = output.shape[2:]
    once = groups * product(2 * rows * columns, 4 // groups * 3 * 5, 8 // groups)
    assert counter.flops == Flops(once, 2 * once)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(groups: int) -> None:
    layer = nn.ConvTranspose1d(4, 8, 3, stride=2, groups=groups)
    with FlopCounter() as counter:
        layer(torch.randn(2, 4, 10)).sum().backward()
    once = groups * product(2 * 10, 4 // groups, 8 // groups * 3)
    assert counter.flops == Flops(once, once)  # the image needs no gradient


def test_recurrent_layers() -> None:
    rows = 11 * 3
    with FlopCounter() as counter:
        nn.LSTM(5, 7, 2, bidirectional=True)(torch.randn(11, 3, 5))[0].sum().backward()
    first, second = (product(rows, inputs + 7, 4 * 7) for inputs in (5, 2 * 7))  # four gates
    once = 2 * (first + second)  # two directions
    assert counter.flops == Flops(once, 2 * once)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
def test_products_of_groups() -> None:
    """As mixtures of experts have them: three experts for 24 tokens."""
    tokens = torch.randn(24, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(3, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([8, 16, 24], dtype=torch.int32)
    with FlopCounter() as counter:
        nn.functional.grouped_mm(tokens, experts, offs=ends).float().pow(2).sum().backward()
    once = product(24, 16, 32)
    assert counter.flops == Flops(once, 2 * once)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_told_apart(reentrant: bool) -> None:
    layers, inputs = mlp(), torch.randn(3, 4, requires_grad=True)
    with FlopCounter() as counter:
        checkpoint(layers, inputs, use_reentrant=reentrant).sum().backward()
    # Without reentrance torch stops where the last tensor that it needs is there: before the last product.
    again = FORWARD if reentrant else product(3, 4, 8)
    assert counter.flops == Flops(FORWARD, WEIGHTS + INSIDE + INPUT, again)


def gpt2(**config: Any) -> GPT2LMHeadModel:
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **config))


def texts() -> dict[str, torch.Tensor]:
    ids = torch.arange(12).reshape(2, 6) % 11
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def recompute(model: GPT2LMHeadModel, reentrant: bool) -> None:
    """Turns activation checkpointing on, which transformers 5 renamed."""
    name = next(each for each in ("activation", "gradient") if hasattr(model, f"{each}_checkpointing_enable"))
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": {"use_reentrant": reentrant}})
    model.train()


def counted(model: nn.Module) -> Flops:
    with FlopCounter() as counter:
        model(**texts()).loss.backward()
    return counter.flops


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_in_a_transformer(reentrant: bool) -> None:
    model = gpt2(attn_implementation="eager")
    plain = counted(model)
    recompute(model, reentrant)
    assert counted(model)[:2] == plain[:2]
    tokens = 12
    layer = product(tokens, 8, 24) + product(tokens, 8, 8) + 2 * product(tokens, 8, 32)
    layer += 2 * 2 * 2 * product(6, 4, 6)  # texts, heads, the scores and their product with the values
    assert plain.forward == 2 * layer + product(tokens, 8, 11)
    assert counted(model).recomputed == 2 * layer  # to the dropout at its end


def test_the_sum_is_that_of_torchs_own_counter() -> None:
    model = gpt2(attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(**texts()).loss.backward()
    assert counted(model).hardware == counter.get_total_flops()


def test_a_gradient_of_gradients_is_no_recomputation() -> None:
    layers, inputs = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(3, 4, requires_grad=True)
    with FlopCounter() as counter:
        (gradient,) = torch.autograd.grad(layers(inputs).sum(), inputs, create_graph=True)
        gradient.pow(2).sum().backward()
    assert counter.flops.recomputed == 0
    # The gradient of the input takes two products. Of their four factors three need a gradient in turn: not the ones
    # that come from the sum.
    assert counter.flops == Flops(FORWARD, 3 * INPUT + 2 * INSIDE)


def test_counting_changes_no_bits() -> None:
    found = []
    for context in (contextlib.nullcontext(), FlopCounter()):
        torch.manual_seed(0)
        model = gpt2(resid_pdrop=0.2)
        recompute(model, reentrant=False)
        with context:
            model(**texts()).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_fake_tensors_are_counted() -> None:
    with FakeTensorMode(), FlopCounter() as counter:
        nn.Linear(100_000, 100_000)(torch.randn(8, 100_000)).sum().backward()
    assert counter.flops == Flops(product(8, 100_000, 100_000), product(8, 100_000, 100_000))


def test_nested_tensors_are_counted_by_their_values() -> None:
    texts = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with FlopCounter() as counter:
        nn.Linear(8, 4)(texts).values().sum().backward()
    assert counter.flops == Flops(product(8, 8, 4), product(8, 8, 4))


def test_a_formula_that_fails_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> tuple[int, int]:
        raise AssertionError("another number of heads")

    monkeypatch.setitem(flops._FORMULAS, torch.ops.aten.addmm, fail)
    with FlopCounter() as counter:
        mlp()(torch.randn(3, 4)).sum().backward()
    assert counter.flops.forward == 0
    assert counter.uncounted == {"aten.addmm.default": "AssertionError: another number of heads"}


def test_compiled_functions_stay_compiled() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            calls.append(len(graph.graph.nodes))
            return graph.forward(*values)

        return run

    layers = torch.compile(mlp(), backend=backend)
    with FlopCounter() as counter:
        layers(torch.randn(3, 4)).sum().backward()
    assert calls
    assert counter.flops == Flops(FORWARD, WEIGHTS + INSIDE)


class Returns(nn.Module):
    """Returns what `what` makes of its layers' output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers, self.what = mlp(), what

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.what == "logits":
            return logits
        return {"loss": loss, "logits": logits} if self.what == "loss" else (loss, {"logits": logits})


@pytest.mark.parametrize("batch", [dict, tuple])
@pytest.mark.parametrize("what", ["loss", "tuple", "logits"])
def test_a_compiled_model_is_counted_without_running(what: str, batch: Any) -> None:
    model = Returns(what)
    model.compile(backend=lambda graph, inputs: pytest.fail("it was compiled"))
    columns = {"x": torch.randn(3, 4), "labels": torch.tensor([0, 1, 1])}
    given = columns if batch is dict else tuple(columns.values())
    assert count_on_fakes(model, given, contextlib.nullcontext()) == Flops(FORWARD, WEIGHTS + INSIDE)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_looks_at_values_cannot_be_counted_without_running() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError, match="DataDependent"):
        count_on_fakes(Looks(), {"x": torch.randn(3)}, contextlib.nullcontext())


def test_counts_add_up() -> None:
    one, other = Flops(6, 4, 2), Flops(1, 2, 1)
    assert one.plus(other) == Flops(7, 6, 3)
    assert one.minus(other) == Flops(5, 2, 1)
    assert one.times(1.5) == Flops(9, 6, 3)
