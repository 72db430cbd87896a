"""`log_mean`: values that the passes of a model log, and their sums over items."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from numbers import Real
from typing import Any, NamedTuple

import torch

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.scalars import as_scalar, read_scalars

RESERVED = (
    "loss", "step", "epoch", "grad_norm", "learning_rate", "skipped_steps", "runtime", "samples_per_second",
    "steps_per_second",
)  # fmt: skip
"""Names of the numbers that a record or an evaluation has of its own."""


class LoggedValue(NamedTuple):
    """A value that a pass has logged.

    Attributes:
        name: Its name.
        value: What was logged: the mean over the items, or their sum if `is_sum`. It is not read before the pass ends,
            since an estimate runs passes without values.
        count: Number of items; None: those of the batch.
        is_sum: Whether `value` is a sum.
    """

    name: str
    value: Any
    count: Any
    is_sum: bool = False


Sums = dict[str, tuple[Any, Any]]
"""The sum over items and the number of items by name, each a number or a scalar tensor on a device."""

_LOGGED: ContextVar[list[LoggedValue] | None] = ContextVar("logged", default=None)


def log_mean(name: str, value: torch.Tensor | float, count: torch.Tensor | float | None = None) -> None:
    """Log a mean from the forward pass of a model or from `compute_loss`: a part of the loss, an accuracy, a statistic.

    A record holds the mean over the steps since the last record, like the loss. The value of a step is the mean over
    its items in all micro-batches, calls and processes. An evaluation holds the mean over the dataset, as `eval_NAME`.
    Values stay on the device until a record is due. A micro-batch without items logs nothing. Outside of the passes of
    a Trainer, and in threads that a pass starts, the call has no effect.

    Args:
        name: Name in the records.
        value: The mean over the items of this call; a number, or a tensor with one element.
        count: Number of items of this call; None: those of the batch, as for the loss.

    Raises:
        TypeError: If `value` or `count` is no real number.
        ValueError: If the name is one of a record's own, or `count` is negative.
    """
    _append_uncompiled(name, value, count)


def _append(name: str, value: Any, count: Any) -> None:
    if (logged := _LOGGED.get()) is None:
        return
    _check_name(name)
    logged.append(LoggedValue(name, _kept(value), _kept(count)))


_append_uncompiled: Callable[[str, Any, Any], None] = _append
"""`_append`, which compiled code calls as it is."""


class PassLog:
    """The values that are logged in the passes that it encloses.

    Attributes:
        values: The values of the last pass.
        called: The names that `log_mean` has got in all passes.
    """

    def __init__(self) -> None:
        self.values: list[LoggedValue] = []
        self.called: set[str] = set()

    def __enter__(self) -> None:
        global _append_uncompiled
        if _append_uncompiled is _append and "torch._dynamo" in sys.modules:  # importing the compiler takes seconds
            _append_uncompiled = torch.compiler.disable(_append)
        self.values = []
        self._token = _LOGGED.set(self.values)

    def __exit__(self, *error: object) -> None:
        _LOGGED.reset(self._token)
        if self.values:
            self.called.update(each.name for each in self.values)

    def add_parts(self, output: Any, is_sum: bool = False) -> None:
        """Add the scalars of a model's output, if it is a dict or an output of transformers.

        The loss is left out, and so are scalars whose names a record cannot hold: the model did not ask for them.

        Args:
            output: The output.
            is_sum: Whether they are sums over the batch's items.
        """
        if not (type(output) is dict or isinstance(output, Mapping)):  # the first is far quicker
            return
        for name, value in output.items():
            if type(value) is torch.Tensor and value.ndim:
                continue
            if name not in RESERVED and name and isinstance(name, str) and _is_scalar(value):
                self.values.append(LoggedValue(name, _kept(value), None, is_sum))


def sum_values(
    values: Sequence[LoggedValue], items: Any, trace: Callable[[Any], Any], needs_items: bool = False
) -> Sums:
    """Return the sums of a pass by name.

    Args:
        values: Values of the pass.
        items: Number of items of its loss, a number or a scalar tensor.
        trace: `DeviceInfo.traced_scalar`.
        needs_items: Whether a pass without items logs nothing, since its labels are not the dataset's.
    """
    sums: Sums = {}
    items = as_scalar("the number of items", items)
    if needs_items and not isinstance(items, torch.Tensor) and not items:
        return sums
    for name, logged, count, is_sum in values:
        value = _scalar(name, logged)
        counted = items if count is None else trace(_checked_count(name, count))
        if needs_items and isinstance(items, torch.Tensor):
            counted = torch.where(items > 0, counted, 0)
        total = value if is_sum else value * counted
        if isinstance(counted, torch.Tensor):  # the mean over no items may be NaN
            total = torch.where(counted > 0, total, 0.0)
        elif not counted:
            continue
        add_sums(sums, {name: (total, counted)})
    return sums


def add_sums(sums: Sums, others: Mapping[str, tuple[Any, Any]]) -> None:
    """Add sums by name to `sums`, in place."""
    for name, (total, count) in others.items():
        before = sums.get(name)
        sums[name] = (total, count) if before is None else (before[0] + total, before[1] + count)


def read_sums(waiting: Sequence[Sums], strategy: Strategy) -> list[dict[str, tuple[float, float]]]:
    """Return sums as numbers; waits for the device once for each dtype."""
    flat = {
        (place, name, part): number
        for place, sums in enumerate(waiting)
        for name, pair in sums.items()
        for part, number in enumerate(pair)
    }
    numbers = read_scalars(flat, strategy) if flat else {}
    return [
        {name: (float(numbers[place, name, 0]), float(numbers[place, name, 1])) for name in sums}
        for place, sums in enumerate(waiting)
    ]


def means_over_readers(waiting: Sequence[Sums], strategy: Strategy) -> list[dict[str, float]]:
    """Return the means of each element of `waiting` over all processes. Collective.

    Args:
        waiting: Sums of this process, as many as on each other process; the names may differ.
        strategy: Strategy of the run.
    """
    collectives = strategy.collectives
    if collectives.is_alone and not any(waiting):
        return [{}] * len(waiting)
    shares = [read_sums(waiting, strategy)]
    if not collectives.is_alone:
        if not any(collectives.all_reduce_ints([sum(map(len, waiting))])):
            return [{} for _ in waiting]
        shares = collectives.once_a_reader(collectives.gather_object(shares[0]))
    return [means_of(each) for each in zip(*shares, strict=True)]


def means_of(shares: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Return the means by name from the sums of several processes; names without an item are left out."""
    sums: Sums = {}
    for share in shares:
        add_sums(sums, share)
    return {name: total / count for name, (total, count) in sums.items() if count}


def without_metrics(means: Mapping[str, float], others: Collection[str], called: Collection[str]) -> dict[str, float]:
    """Return the means without those that a record or an evaluation has a metric for.

    A scalar of a model's output gives way to a metric of the same name.

    Args:
        means: The means by name.
        others: Names of the metrics.
        called: Names that `log_mean` has got.

    Raises:
        ValueError: If `log_mean` has got the name of a metric.
    """
    if clashes := sorted({*means} & {*others} & {*called}):
        raise ValueError(f"log_mean has got {clashes[0]!r}, which is also the name of a metric; log it by another name")
    return {name: mean for name, mean in means.items() if name not in others}


def _kept(value: Any) -> Any:
    """Return a copy, since the model may change the value in place before it is read."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _scalar(name: str, value: Any) -> Any:
    """Return a number, or a scalar tensor on a device of at least 32 bits; a tensor on the host becomes a number."""
    number = as_scalar(name, value)
    return _wide(number, torch.float32) if isinstance(number, torch.Tensor) else number


def _checked_count(name: str, count: Any) -> Any:
    number = as_scalar(f"count of {name}", count)
    if not isinstance(number, torch.Tensor) and not number >= 0:
        raise ValueError(f"log_mean({name!r}) got count={count}; give a number of at least 0")
    if isinstance(number, torch.Tensor):  # sums of smaller dtypes overflow or round
        return _wide(number, torch.int64)
    return number


def _wide(number: torch.Tensor, whole: torch.dtype) -> torch.Tensor:
    if not number.is_floating_point():
        return number.to(whole)
    return number.float() if number.dtype.itemsize < 4 else number


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"log_mean got the name {name!r}; give a text")
    if name in RESERVED:
        raise ValueError(f"{name!r} is a number that each record or evaluation has of its own; log it by another name")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)
