"""Origin of nonfinite values in a step: its passes run again with hooks on every module, on this process alone."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from trainer_kit.loss.batch import count
from trainer_kit.loss.loss import Loss
from trainer_kit.loss.replay import ReplayBatch, replay
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.module_modes import state_aside
from trainer_kit.utils.pytree import tensors

Kind = Literal["inf", "nan"]


class Work(NamedTuple):
    """A micro-batch of the step.

    Attributes:
        batch: Batch from the collator, on the host.
        seed: Seed of all generators before the forward pass.
        samples: Number of samples in the batch.
        counted: False for a dummy batch, which has weight zero.
    """

    batch: Any
    seed: int
    samples: int
    counted: bool = True

    def replayed(self) -> ReplayBatch:
        """Return the micro-batch with its counts."""
        counts = count(self.batch, self.samples)
        return ReplayBatch(self.batch, counts if self.counted else counts.as_nothing(), self.seed)


class NonFiniteOrigin(NamedTuple):
    """A module or operation whose result holds infinity or NaN that its inputs did not hold.

    Attributes:
        place: Name of the module, or line of code.
        kind: Kind of value in the result.
        from_inf: Whether the inputs held an infinity, which can produce NaN.
    """

    place: str
    kind: Kind
    from_inf: bool


class BadColumn(NamedTuple):
    """Column of a micro-batch that is not finite.

    Attributes:
        micro_batch: Index among the examined micro-batches.
        column: Name in the batch.
        kind: Kind of value in it.
        rows: Rows that hold the value.
    """

    micro_batch: int
    column: str
    kind: Kind
    rows: list[int]


@dataclasses.dataclass
class Diagnosis:
    """Findings about a step.

    Attributes:
        columns: Columns of the batches that are not finite.
        weights: Names of parameters and buffers that were not finite before the step.
        loss: Mean over the items of the micro-batches; None if the passes raised an error before it was computed.
        micro_batch: Index of the first micro-batch whose loss is not finite; None if there is none.
        module: Module in which the loss became nonfinite; None if unknown.
        parameter: First parameter, in backward order, whose gradient is not finite; None if there is none.
        norm: Norm of all gradients together; None if the backward pass did not complete.
        error: Error that the passes raised; None if there was none.
    """

    columns: list[BadColumn] = dataclasses.field(default_factory=list)
    weights: list[str] = dataclasses.field(default_factory=list)
    loss: float | None = None
    micro_batch: int | None = None
    module: NonFiniteOrigin | None = None
    parameter: str | None = None
    norm: float | None = None
    error: Exception | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the passes completed with finite results only."""
        figures = (self.loss, self.norm)
        return self.parameter is None and all(each is not None and math.isfinite(each) for each in figures)


def diagnose(loss: Loss, works: Sequence[Work], strategy: Strategy) -> Diagnosis:
    """Run the step's forward and backward passes again, without taking the step.

    Gradients are cleared afterwards; weights and buffers are restored. The function is not collective: it calls the
    model itself, not the strategy's wrapper.

    Args:
        loss: Loss of the run.
        works: This process's micro-batches of the step, in order.
        strategy: Strategy that provides device and precision.

    Returns:
        The findings, including an exception of the passes.
    """
    module = loss.module
    found = Diagnosis([bad for number, work in enumerate(works) for bad in _bad_columns(number, work.batch)])
    found.weights = [name for name, value in module.named_parameters() if kind_of(value)]
    found.weights += [
        name for name, value in module.named_buffers() if kind_of(value) == "nan"
    ]  # masks hold infinities
    alone = copy.copy(loss)
    alone.model = module
    module.zero_grad()
    births: list[NonFiniteOrigin] = []
    try:
        with state_aside(module), _uncompiled(), _modules_watched(module, births), _gradients_watched(module, found):
            found.loss = sum(_shares(alone, works, strategy, births, found))
            found.norm = _norm(module)
    except Exception as error:
        found.error = error
    finally:
        module.zero_grad()
    if found.loss is not None and not math.isfinite(found.loss):
        found.module = cause(births, found.loss)
    return found


def cause(births: Sequence[NonFiniteOrigin], loss: float) -> NonFiniteOrigin | None:
    """Return the origin of a nonfinite loss: NaN without infinite inputs, or else the first infinity.

    Args:
        births: Origins in order of execution.
        loss: The nonfinite loss.

    Returns:
        The origin; None if there is none.
    """
    first: dict[str, NonFiniteOrigin] = {}
    for birth in births:
        first.setdefault(birth.kind, birth)
    infinity, nan = first.get("inf"), first.get("nan")
    if math.isnan(loss) and nan is not None and not nan.from_inf:
        return nan
    return infinity or nan


def kind_of(tree: Any) -> Kind | None:
    """Return the kind of nonfinite value in a tree's or an object's tensors.

    Args:
        tree: Tensors in nested dicts, lists and tuples, or an object with tensors as attributes.

    Returns:
        "nan" if there is any, else "inf"; None if all values are finite.
    """
    found: Kind | None = None
    plain = isinstance(tree, (torch.Tensor, Mapping, list, tuple)) or not hasattr(tree, "__dict__")
    for tensor in tensors(tree if plain else vars(tree)):
        values = tensor.detach()
        values = values.coalesce().values() if values.is_sparse else values
        if not (values.is_floating_point() or values.is_complex()) or bool(torch.isfinite(values).all()):
            continue
        if bool(torch.isnan(values).any()):
            return "nan"
        found = "inf"
    return found


def _shares(
    loss: Loss, works: Sequence[Work], strategy: Strategy, births: list[NonFiniteOrigin], found: Diagnosis
) -> Iterator[float]:
    """Run the passes of each micro-batch; yield their shares of the step's loss."""
    before = 0
    for number, share in enumerate(replay(loss, [work.replayed() for work in works], strategy)):
        figure = float(share.detach())
        if math.isfinite(figure):
            del births[before:]  # the nonfinite values had no effect, such as those of a mask
        elif found.micro_batch is None:
            found.micro_batch = number
        share.backward()
        before = len(births)
        yield figure


@contextlib.contextmanager
def _modules_watched(module: torch.nn.Module, births: list[NonFiniteOrigin]) -> Iterator[None]:
    """Record, in order of execution, the modules with nonfinite results from finite inputs."""
    names = {each: name for name, each in module.named_modules()}

    def look(each: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        kind = kind_of(output)
        if kind is None:
            return
        given = kind_of([*inputs, *keywords.values()])
        if given == kind or given == "nan":
            return
        place = f"{names[each]} ({type(each).__name__})" if names[each] else f"the model itself ({type(each).__name__})"
        births.append(NonFiniteOrigin(place, kind, from_inf=given == "inf"))

    hooks = [each.register_forward_hook(look, with_kwargs=True) for each in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _gradients_watched(module: torch.nn.Module, found: Diagnosis) -> Iterator[None]:
    """Find the first parameter whose gradient is not finite, in backward order."""

    def watched(name: str, parameter: torch.nn.Parameter) -> Any:
        def look(gradient: torch.Tensor) -> None:
            if found.parameter is None and kind_of(gradient):
                found.parameter = name

        return parameter.register_hook(look)

    hooks = [watched(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Disable torch.compile, since hooks see nothing in compiled code; skip its import where it is not loaded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _norm(module: torch.nn.Module) -> float:
    norms = [torch.linalg.vector_norm(each.grad) for each in module.parameters() if each.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))) if norms else 0.0


def _bad_columns(number: int, batch: Any) -> Iterator[BadColumn]:
    if isinstance(batch, Mapping):
        columns: Iterator[tuple[Any, Any]] = iter(batch.items())
    else:
        columns = enumerate(batch) if isinstance(batch, (list, tuple)) else iter([("batch", batch)])
    for name, value in columns:
        kind = kind_of(value)
        if kind is None:
            continue
        rows = {row for tensor in tensors(value) if tensor.ndim for row, each in enumerate(tensor) if kind_of(each)}
        yield BadColumn(number, str(name), kind, sorted(rows))
