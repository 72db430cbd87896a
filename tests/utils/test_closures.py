from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer
from trainer_kit.optim import check_optimizer
from trainer_kit.utils.closures import needs_closure


class Asserting(torch.optim.SGD):
    """SAM as its authors write it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        return closure()


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("give a closure")
        return closure()


class Calling(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            return closure()


class Optional(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Asserting, Raising, Calling])
def test_a_step_that_fails_without_a_closure_is_refused(kind: Any) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match=f"optimizer is a {kind.__name__}, whose step runs the model by a closure"):
        check_optimizer(kind(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop, Optional])
def test_a_closure_may_be_left_out(kind: Any) -> None:
    assert not needs_closure(kind)


class Hessian(torch.optim.SGD):
    """Differentiates the gradients, as AdaHessian does."""

    def step(self, closure: Any = None) -> Any:
        weights = [each for group in self.param_groups for each in group["params"]]
        torch.autograd.grad([each.grad for each in weights], weights, [torch.ones_like(each) for each in weights])


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no memory")


def test_a_step_that_differentiates_the_gradients_says_what_to_use(tmp_path: Path) -> None:
    model = Linear()
    optimizer = Hessian(model.parameters(), lr=0.1)
    sentence = r"optimizer=Hessian differentiates the gradients .* Accelerator, .* backward\(loss, create_graph=True\)"
    with pytest.raises(RuntimeError, match=sentence):
        Trainer(model, arguments(tmp_path), points(), optimizer=optimizer).train()
    with pytest.raises(RuntimeError, match=r"^no memory$"):
        Trainer(model, arguments(tmp_path), points(), optimizer=Failing(model.parameters(), lr=0.1)).train()


def test_no_optimizer_of_torch_but_lbfgs_needs_one() -> None:
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    assert [kind.__name__ for kind in kinds if needs_closure(kind)] == ["LBFGS"]


def test_without_source_code_the_signature_decides() -> None:
    names: dict[str, Any] = {}
    exec("class Unseen:\n    def step(self, closure=None):\n        assert closure\n", names)
    assert not needs_closure(names["Unseen"])
