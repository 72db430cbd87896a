"""A step is run once more, and what first went wrong in it is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit import SingleDevice
from trainer_kit.debugging.nonfinite import BadColumn, Diagnosis, NonFiniteOrigin, Work, cause, diagnose, kind_of
from trainer_kit.loss.batch import samples_of
from trainer_kit.loss.loss import Loss

INF, NAN = float("inf"), float("nan")


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Net(nn.Module):
    """Overflows in `exp` where the weights of `first` are large; keeps statistics."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.exp = Exp()
        self.head = nn.Linear(4, 1)
        nn.init.constant_(self.first.weight, 1.0)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(self.first(x))
        return self.head(self.exp(self.first(x) * self.scale)).mean()


class Masked(nn.Module):
    """Adds infinities that do no harm, as attention does, unless a whole row is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Mask()
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mask(self.head(x)).softmax(-1) * x).mean()


class Mask(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > x.mean(), -INF)


class Root(nn.Module):
    """Its loss is finite at 0, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.scale).sqrt() + self.shift).sum()


def diagnosed(model: nn.Module, *batches: Any, compute_loss: Any = None) -> Diagnosis:
    strategy = SingleDevice("cpu")
    strategy.setup()
    return diagnose(
        Loss(model, model, compute_loss), [Work(batch, 3, samples_of(batch)) for batch in batches], strategy
    )


def batch(value: float = 0.1) -> dict[str, torch.Tensor]:
    return {"x": torch.full((2, 3), value)}


def test_a_step_that_is_fine() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = diagnosed(model, batch(), batch(0.2))
    assert found.is_finite
    assert found == Diagnosis(loss=found.loss, norm=found.norm)
    assert found.loss is not None
    assert found.norm is not None
    assert found.norm > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_loss_is_the_mean_over_all_samples() -> None:
    model, small = Net(), {"x": torch.full((1, 3), 0.3)}
    whole = diagnosed(model, {"x": torch.cat([batch()["x"], small["x"]])})
    parts = diagnosed(model.train(False), batch(), small)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_the_module_that_overflows() -> None:
    found = diagnosed(Net(scale=1e4), batch(), batch())
    assert found.module == NonFiniteOrigin("exp (Exp)", "inf", from_inf=False)
    assert not found.is_finite
    assert found.micro_batch == 0
    assert found.columns == found.weights == []
    assert found.parameter == "head.weight"


def test_the_model_itself_where_no_module_of_it_did() -> None:
    class Log(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * 0).log()

    module = diagnosed(Log(), batch()).module
    assert module is not None
    assert module.place == "the model itself (Log)"


def test_samples_that_are_not_finite() -> None:
    found = diagnosed(Net(), batch(), {"x": torch.tensor([[1.0, 2.0, 3.0], [1.0, INF, 3.0]])})
    assert found.columns == [BadColumn(1, "x", "inf", [1])]
    assert found.micro_batch == 1


def test_a_module_that_hands_an_infinity_on_is_not_blamed() -> None:
    class Hands(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(x).sum() + 0 * self.head.weight.sum()

    model = Hands()
    model.relu = nn.ReLU()
    found = diagnosed(model, {"x": torch.tensor([[1.0, INF]])})
    assert found.loss == INF
    assert found.module is None


def test_no_other_process_takes_part() -> None:
    def wrapped(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a collective")

    strategy, model = SingleDevice("cpu"), Net()
    strategy.setup()
    assert diagnose(Loss(wrapped, model, None), [Work(batch(), 3, 2)], strategy).is_finite  # type: ignore[arg-type]


def test_weights_that_are_not_finite() -> None:
    model = Net()
    model.head.weight.data[0, 1] = NAN
    model.norm.running_mean.fill_(NAN)
    model.register_buffer("mask", torch.full((2, 2), -INF))
    found = diagnosed(model, batch())
    assert found.weights == ["head.weight", "norm.running_mean"]
    assert found.module is not None
    assert found.module.place == "head (Linear)"


def test_infinities_of_a_mask_are_not_blamed() -> None:
    found = diagnosed(Masked(), batch(), {"x": torch.tensor([[1.0, NAN, 2.0]])})
    assert found.micro_batch == 1
    assert found.module is None  # the sample itself


def test_a_gradient_that_is_not_finite() -> None:
    found = diagnosed(Root(), batch(0.0))
    assert found.loss == 0.0
    assert found.module is None
    assert found.parameter == "scale"
    assert not found.is_finite


def test_a_stand_in_has_no_weight() -> None:
    strategy = SingleDevice("cpu")
    strategy.setup()
    model = Net()
    works = [Work(batch(), 3, 2), Work(batch(0.7), 3, 2, counted=False)]
    assert diagnose(Loss(model, model, None), works, strategy).loss == diagnosed(model, batch()).loss


def test_pairs_of_sum_and_count() -> None:
    def pair(model: nn.Module, batch: Any) -> Any:
        return model(**batch) * 2, 2

    model = Net()
    assert diagnosed(model, batch(), compute_loss=pair).loss == pytest.approx(diagnosed(model, batch()).loss)


def test_an_error_of_the_passes() -> None:
    found = diagnosed(Net(), {"x": torch.zeros(2, 7)})
    assert isinstance(found.error, RuntimeError)
    assert found.loss is None
    assert not found.is_finite


def test_a_compiled_model_is_looked_into() -> None:
    model = Net(scale=1e4)
    model.compile(backend="eager")
    with torch.no_grad():
        model(**batch())
    module = diagnosed(model, batch()).module
    assert module is not None
    assert module.place == "exp (Exp)"


@pytest.mark.parametrize(
    ("births", "loss", "place"),
    [
        ([], NAN, None),
        ([NonFiniteOrigin("a", "inf", False), NonFiniteOrigin("b", "nan", False)], NAN, "b"),
        ([NonFiniteOrigin("a", "inf", False), NonFiniteOrigin("b", "nan", True)], NAN, "a"),
        ([NonFiniteOrigin("b", "nan", True)], NAN, "b"),
        ([NonFiniteOrigin("a", "inf", False), NonFiniteOrigin("b", "nan", True)], INF, "a"),
    ],
)
def test_cause(births: list[NonFiniteOrigin], loss: float, place: str | None) -> None:
    found = cause(births, loss)
    assert (found.place if found else None) == place


def test_kind_of() -> None:
    class Output:
        def __init__(self) -> None:
            self.loss = torch.tensor(INF)

    assert kind_of({"a": [torch.tensor([1.0, INF]), torch.tensor(NAN)]}) == "nan"
    assert kind_of(Output()) == "inf"
    assert kind_of(torch.tensor([[0.0, INF]]).to_sparse()) == "inf"
    assert kind_of(torch.tensor([1])) is None
    assert kind_of("text") is None
