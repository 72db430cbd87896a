"""The chunked cross entropy of a linear layer against torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from trainer_kit.loss.linear_cross_entropy import LEAST_ROWS, linear_cross_entropy_sum

Sum = Callable[..., torch.Tensor]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


def reference(hidden: Any, weight: Any, bias: Any, targets: Any, ignore_index: int = -100, changes: Any = ()) -> Any:
    logits = functional.linear(hidden, weight, bias)
    for change in changes:
        logits = change(logits)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(exact, targets, ignore_index=ignore_index, reduction="sum")


def inputs(rows: int, width: int, classes: int, dtype: torch.dtype, bias: bool = True) -> list[Any]:
    generator = torch.Generator().manual_seed(rows * 1000 + classes)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return [made(rows, width), made(classes, width), made(classes) if bias else None]


def targets_of(rows: int, classes: int, ignored: float = 0.0, ignore_index: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    targets = torch.randint(0, classes, (rows,), generator=generator)
    return targets.where(torch.rand(rows, generator=generator) >= ignored, ignore_index)


def gradients(total: Sum, given: list[Any], targets: torch.Tensor, factor: float = 0.3, **options: Any) -> list[Any]:
    """The sum, divided by the valid targets and scaled, and the gradients of all inputs."""
    loss = total(*given, targets, **options) * factor / max(1, int((targets != -100).sum()))
    return [loss, *torch.autograd.grad(loss, [each for each in given if each is not None and each.requires_grad])]


def check_close(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        largest = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * max(1.0, largest))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 20),
    width=st.integers(1, 6),
    classes=st.integers(1, 9),
    chunk=st.integers(1, 24),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    bias=st.booleans(),
    dtype=st.sampled_from([*TOLERANCES]),
    ignore_index=st.sampled_from([-100, 0]),
)
def test_sum_and_gradients_are_those_of_torch(
    rows: int, width: int, classes: int, chunk: int, ignored: float, bias: bool, dtype: torch.dtype, ignore_index: int
) -> None:
    given, targets = inputs(rows, width, classes, dtype, bias), targets_of(rows, classes, ignored, ignore_index)
    options: dict[str, Any] = {"ignore_index": ignore_index}
    found = gradients(linear_cross_entropy_sum, given, targets, rows=chunk, **options)
    check_close(found, gradients(reference, given, targets, **options), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_changes_of_the_logits_are_part_of_the_gradient(dtype: torch.dtype) -> None:
    given, targets = inputs(11, 4, 7, dtype), targets_of(11, 7, 0.3)
    changes = [lambda logits: logits / 1.5, torch.tanh, lambda logits: 1.5 * logits]
    found = gradients(linear_cross_entropy_sum, given, targets, rows=3, changes=changes)
    check_close(found, gradients(reference, given, targets, changes=changes), TOLERANCES[dtype])


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2), (0, 1), (0, 2)])
def test_inputs_without_gradient_get_none(frozen: tuple[int, ...]) -> None:
    given, targets = inputs(9, 4, 6, torch.float64), targets_of(9, 6)
    for number in frozen:
        given[number].requires_grad_(False)
    found = gradients(linear_cross_entropy_sum, given, targets, rows=4)
    check_close(found, gradients(reference, given, targets), 1e-12)


def test_without_gradients_it_is_the_same_sum() -> None:
    given, targets = inputs(9, 4, 6, torch.float64), targets_of(9, 6)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        total = linear_cross_entropy_sum(*given, targets, rows=2)
    assert counter.get_total_flops() == 2 * 9 * 4 * 6  # one product of matrices
    assert not total.requires_grad
    check_close([total], [reference(*given, targets).detach()], 1e-12)


@pytest.mark.parametrize("mode", [torch.bfloat16, torch.float16])
def test_under_autocast_gradients_are_closer_to_exact_ones_than_torchs(mode: torch.dtype) -> None:
    given, targets = inputs(600, 16, 40, torch.float32), targets_of(600, 40, 0.2)
    exact = gradients(reference, given, targets, factor=1024.0)
    with torch.autocast("cpu", mode):
        found = gradients(linear_cross_entropy_sum, given, targets, factor=1024.0, rows=50)
        usual = gradients(reference, given, targets, factor=1024.0)
    for own, other, right in zip(found, usual, exact, strict=True):
        assert own.dtype == other.dtype == torch.float32
        assert torch.isfinite(own).all()
        assert (own - right).norm() <= 1.5 * (other - right).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_low_precision_get_gradients_summed_in_float32(dtype: torch.dtype) -> None:
    given, targets = inputs(2000, 8, 12, dtype), targets_of(2000, 12)
    found = gradients(linear_cross_entropy_sum, given, targets, rows=4)
    doubles = [each.detach().double().requires_grad_() for each in given]
    for own, other, right in zip(
        found, gradients(reference, given, targets), gradients(reference, doubles, targets), strict=True
    ):
        assert own.dtype == other.dtype
        assert (own.double() - right).norm() <= 1.5 * (other.double() - right).norm() + 1e-7


def test_a_second_backward_pass_is_an_error() -> None:
    given, targets = inputs(9, 4, 6, torch.float64), targets_of(9, 6)
    total = linear_cross_entropy_sum(*given, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has one backward pass"):
        total.backward()


def test_a_gradient_of_the_gradient_is_an_error() -> None:
    given, targets = inputs(9, 4, 6, torch.float64), targets_of(9, 6)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.autograd.grad(linear_cross_entropy_sum(*given, targets), given[:1], create_graph=True)


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize(("rows", "width", "chunk"), [(1000, 2, LEAST_ROWS), (1000, 600, 600)])
def test_no_tensor_has_more_rows_of_logits_than_a_chunk(rows: int, width: int, chunk: int) -> None:
    classes = 1000
    given, targets = inputs(rows, width, classes, torch.float32), targets_of(rows, classes)
    with _Largest() as seen:
        linear_cross_entropy_sum(*given, targets).backward()
    assert seen.elements == max(chunk * classes, width * classes, rows * width)
