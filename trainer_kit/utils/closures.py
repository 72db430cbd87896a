"""Optimizers whose step needs more than the gradients: a closure, or the graph of the gradients."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch

_MISSING = ("closure is None", "not closure")
_GIVEN = ("closure is not None", "closure")


def needs_closure(kind: type[Any]) -> bool:
    """Return whether a class of optimizers refuses `step()`: its closure has no default, or its code asks for one.

    Optimizers such as SAM declare `step(closure=None)`, as torch's base class does, and raise without one.

    Args:
        kind: The class. Without its source code only the signature is known.
    """
    step: Any = kind.step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None:
        return False
    if closure.default is closure.empty:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):
        return False
    function = tree.body[0]
    return isinstance(function, ast.FunctionDef) and any(map(_fails_without, function.body))


def refuse_without_graph(optimizer: torch.optim.Optimizer, error: RuntimeError) -> None:
    """Say what to do if an optimizer's step failed since it differentiates the gradients, as AdaHessian's does.

    Raises:
        RuntimeError: If that is the error's cause.
    """
    if "does not require grad" in str(error):
        raise RuntimeError(
            f"the step of optimizer={type(optimizer).__name__} differentiates the gradients ({error}), whose graph the "
            "Trainer does not keep; write the loop with Accelerator, and call its backward(loss, create_graph=True)"
        ) from error


def _fails_without(statement: ast.stmt) -> bool:
    """Return whether a statement of the step raises if the closure is None."""
    match statement:
        case ast.Assert(test=test):
            return ast.unparse(test) in _GIVEN
        case ast.If(test=test, body=[ast.Raise(), *_]):
            return ast.unparse(test) in _MISSING
        case ast.With(body=body):
            return any(map(_fails_without, body))
        case ast.Expr(value=value) | ast.Assign(value=value) | ast.Return(value=value):
            return isinstance(value, ast.Call) and ast.unparse(value.func) == "closure"
    return False
