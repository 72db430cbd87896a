"""Streaming metrics and the mean loss, merged over processes at the end of an evaluation."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from trainer_kit.loss.batch import has_columns
from trainer_kit.loss.means import LoggedValue, Sums, add_sums, read_sums, sum_values
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import keys, map_tensors, tensors
from trainer_kit.utils.wrappers import without_wrappers_and_adapters

_FOLD = 64
"""Batches after which losses are read from the device, so that memory stays constant."""


class Metric(Protocol):
    """A streaming metric (torchmetrics' protocol), whose memory does not grow with the dataset.

    Every process updates its own copy. With several processes, a metric that is not from torchmetrics also needs
    `merge_state(others)` (torcheval's protocol), which merges the states of an iterable of metrics of its kind.
    """

    def update(self, predictions: Any, labels: Any, /) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


class MeanLoss:
    """The mean loss over the items of all batches, summed in float64 on the host."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.total = 0.0
        self.items = 0.0
        self.waiting: list[tuple[torch.Tensor, Any, bool]] = []
        self.any = False
        self._reads_freely = strategy.device_info.reads_without_sync

    def add(self, value: torch.Tensor, count: Any, items: Any) -> None:
        """Add the loss of a batch: a mean over `items`, or, unless `count` is None, a sum over `count` items."""
        self.any = True
        number, is_mean = (items, True) if count is None else (count, False)
        is_known = self._reads_freely and type(value) is torch.Tensor and not isinstance(number, torch.Tensor)
        if is_known and not self.waiting:  # else the order of the sum would change
            self._sum(value.item(), number, is_mean)
            return
        value = value.detach()
        value = value.float() if value.dtype.itemsize < 4 else value
        self.waiting.append((value, number, is_mean))
        if len(self.waiting) >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        values = self.strategy.collectives.read_scalars([value for value, _, _ in self.waiting])
        on_device = iter(
            self.strategy.collectives.read_scalars(
                [count for _, count, _ in self.waiting if isinstance(count, torch.Tensor)]
            )
        )
        for value, (_, count, is_mean) in zip(values, self.waiting, strict=True):
            self._sum(value, next(on_device) if isinstance(count, torch.Tensor) else count, is_mean)
        self.waiting = []

    def _sum(self, value: float, count: float, is_mean: bool) -> None:
        if count := float(count):
            self.total += value * count if is_mean else value
            self.items += count

    def sums(self) -> tuple[float, float] | None:
        """Return the sum of the losses and the number of items; None if no batch had a loss."""
        if self.waiting:
            self._fold()
        return (self.total, self.items) if self.any else None


class LoggedMeans:
    """What the passes of an evaluation log, summed in float64 on the host."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._sums: dict[str, tuple[float, float]] = {}
        self._waiting: list[Sums] = []

    def add(self, values: Sequence[LoggedValue], items: Any) -> None:
        """Add the values of a pass over a batch with `items` items."""
        if not values:
            return
        self._waiting.append(sum_values(values, items, self._strategy.device_info.traced_scalar))
        if len(self._waiting) >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        for sums in read_sums(self._waiting, self._strategy):
            add_sums(self._sums, sums)
        self._waiting = []

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum over items and the number of items by name."""
        self._fold()
        return self._sums


def joined_mean(sums: list[tuple[float, float] | None]) -> float | None:
    """Return the mean loss from all processes' sums; None if no process had a loss, NaN if no item counted."""
    known = [each for each in sums if each is not None]
    items = sum(count for _, count in known)
    if not items:
        return float("nan") if known else None
    return sum(total for total, _ in known) / items


def metrics_by_name(metrics: Any) -> dict[str, Metric]:
    """Return streaming metrics as a dict by name; the default name is the lower-case class name.

    Raises:
        TypeError: If one of them lacks `update`, `compute` or `reset`, or is a class.
        ValueError: If two unnamed metrics have the same class.
    """
    if metrics is None:
        return {}
    if hasattr(metrics, "update") and hasattr(metrics, "compute"):
        metrics = [metrics]
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    else:
        metrics = list(metrics)
        named = {type(each).__name__.lower(): each for each in metrics}
        if len(named) < len(metrics):
            raise ValueError(
                f"metrics holds several of one class ({', '.join(named)}); give a dict with a name for each"
            )
    for name, metric in named.items():
        if isinstance(metric, type):
            raise TypeError(f"metrics[{name!r}] is the class {metric.__name__}; give an object of it")
        missing = [method for method in ("update", "compute", "reset") if not hasattr(metric, method)]
        if missing:
            raise TypeError(f"metrics[{name!r}] is a {type(metric).__name__} without {', '.join(missing)}")
    return named


def begin_metrics(metrics: Mapping[str, Metric], strategy: Strategy) -> None:
    """Reset the metrics for an evaluation, and move them to the device.

    Raises:
        TypeError: If there are several processes and a metric cannot be merged over them.
    """
    for name, metric in metrics.items():
        metric.reset()
        if strategy.world_size > 1 and not _is_of_torchmetrics(metric):
            _check_joinable(name, metric, strategy.world_size)
        if hasattr(metric, "to"):
            # With static shapes, metrics are computed on the host.
            metric.to(torch.device("cpu") if strategy.static_shapes else strategy.device)


def _check_joinable(name: str, metric: Metric, processes: int) -> None:
    if not hasattr(metric, "merge_state"):
        raise TypeError(
            f"metrics[{name!r}] is a {type(metric).__name__} without merge_state(others), so that what {processes} "
            "processes count cannot be joined; add it, or use compute_metrics"
        )
    try:
        pickle.dumps(metric)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"metrics[{name!r}] is a {type(metric).__name__} that cannot be sent to the main process, where metrics "
            f"are joined ({error}); make it picklable, or use compute_metrics"
        ) from error


def gather_metrics(metrics: Mapping[str, Metric], strategy: Strategy, updated: bool) -> list[dict[str, Any]]:
    """Gather the metrics' states on the main process. Collective.

    All states are sent together. torchmetrics' own synchronization gathers each state separately: it hangs if list
    states differ in length between processes, and fails if a process saw no sample.

    Args:
        metrics: The metrics, with the same names on all processes.
        strategy: The strategy of the run.
        updated: Whether this process's metrics have seen a sample; always true on the main process.

    Returns:
        On the main process, the states of each other reader by name, for `joined_result`; elsewhere an empty list.
    """
    share = {name: _share(metric) for name, metric in metrics.items()} if updated and not strategy.is_main else None
    shares = strategy.collectives.once_a_reader(strategy.collectives.gather_to_main(share))
    return [each for each in shares if each is not None]


def joined_result(metric: Metric, others: list[Any]) -> Any:
    """Return `metric.compute()` over this process's state and the states that others sent."""
    if not _is_of_torchmetrics(metric):
        if others:
            metric = copy.deepcopy(metric)  # not every metric's reset undoes a merge
            metric.merge_state(others)  # type: ignore[attr-defined]
        return metric.compute()
    with contextlib.ExitStack() as stack:
        for part in _parts(metric):
            stack.enter_context(_by_itself(part))
        if others:
            for holder, *states in zip(_holders(metric), *others, strict=True):
                stack.enter_context(_with_states(holder, states))
        return metric.compute()


def scores_by_name(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all metrics by name, those of a metric that returns a dict by their own names.

    Where several metrics have a name, it begins with that of the metric: "f1_raw".

    Args:
        results: What each metric computed, by its name.
    """
    named = [
        (owner, key, value)
        for owner, result in results.items()
        for key, value in (result.items() if isinstance(result, Mapping) else [(owner, result)])
    ]
    times = Counter(key for _, key, _ in named)
    return {(key if times[key] == 1 or key == owner else f"{owner}_{key}"): value for owner, key, value in named}


def _share(metric: Metric) -> Any:
    """Return the state to send to the main process."""
    if _is_of_torchmetrics(metric):
        return [map_tensors(torch.Tensor.cpu, holder.metric_state) for holder in _holders(metric)]
    if hasattr(metric, "to"):
        metric.to(torch.device("cpu"))
    return metric


def _is_of_torchmetrics(metric: Metric) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _parts(metric: Any) -> list[Any]:
    """Return the metrics that a torchmetrics metric consists of (collection, wrapper, sum), including itself."""
    torchmetrics = sys.modules["torchmetrics"]
    return [module for module in metric.modules() if isinstance(module, torchmetrics.Metric)]


def _holders(metric: Any) -> list[Any]:
    """Return one metric per set of states; a wrapper may share the states of its metric."""
    for module in metric.modules():
        if isinstance(module, sys.modules["torchmetrics"].MetricCollection):
            module.values()  # only then do metrics have the states that a collection updates once for several
    return list({id(part._reductions): part for part in _parts(metric)}.values())


@contextlib.contextmanager
def _by_itself(part: Any) -> Iterator[None]:
    """Disable torchmetrics' own synchronization, which would wait for the other processes."""
    available, part.distributed_available_fn = part.distributed_available_fn, _no
    try:
        yield
    finally:
        part.distributed_available_fn = available


def _no() -> bool:
    return False


@contextlib.contextmanager
def _with_states(holder: Any, others: list[dict[str, Any]]) -> Iterator[None]:
    """Set a metric's states to those merged over all processes; restore its own on exit, for a later reset."""
    kept = holder.metric_state
    for name, own in kept.items():
        to_own = partial(torch.Tensor.to, device=_device_of(own, holder.device))
        states = [own, *(map_tensors(to_own, other[name]) for other in others)]
        setattr(holder, name, _reduced(states, holder._reductions[name]))
    try:
        yield
    finally:
        for name, own in kept.items():
            setattr(holder, name, own)


def _device_of(state: Any, default: torch.device) -> torch.device:
    """Return the device of a state: a metric may keep its lists on the host (`compute_on_cpu`)."""
    first = next(tensors(state), None)
    return default if first is None else first.device


def _reduced(states: list[Any], reduction: Any) -> Any:
    """Merge the states of several processes as torchmetrics does: chain lists, stack tensors.

    A list that torchmetrics would concatenate stays one, as with a single process.
    """
    joined: Any
    if isinstance(states[0], list):
        joined = [item for state in states for item in state]
        is_kept = reduction is None or reduction is sys.modules["torchmetrics"].utilities.data.dim_zero_cat
        return joined if is_kept or not joined else reduction(joined)
    joined = torch.stack(states)
    return joined if reduction is None else reduction(joined)


def main_input(module: torch.nn.Module, batch: Any) -> Any:
    """Return the main input of a batch on the host: the column that the model names, else the first one."""
    if isinstance(batch, Mapping):
        name = getattr(module, "main_input_name", "input_ids")
        return batch[name] if name in batch else batch[keys(batch)[0]]
    return batch[0] if has_columns(batch) else batch


def predictions_in(output: Any) -> Any:
    """Return the predictions in a model's output: its `logits`, else all tensors except the loss.

    Lists, tuples and mappings of tensors in a dict count where it has no other tensors: they may be hidden states.

    Raises:
        ValueError: If the output has no predictions.
    """
    if isinstance(output, Mapping):
        if "logits" in keys(output):
            return output["logits"]
        values = [value for name, value in output.items() if name != "loss"]
        rest = [value for value in values if isinstance(value, torch.Tensor) and value.ndim]
        rest = rest or [value for value in values if _is_batched(value)]
    elif isinstance(output, list) and output and all(isinstance(each, Mapping) for each in output):
        return output  # one for each sample, as of detection models
    elif isinstance(output, (tuple, list)):
        names = getattr(output, "_fields", range(len(output)))
        rest = [value for name, value in zip(names, output, strict=True) if value is not None and name != "loss"]
        rest = [value for value in rest if getattr(value, "ndim", True)]  # no scalars, such as the loss
    elif isinstance(output, torch.Tensor):
        rest = [output] if output.ndim else []
    else:
        rest = [output.logits] if hasattr(output, "logits") else []
    if not any(True for _ in tensors(rest)):
        raise ValueError(
            "the model's output holds no predictions for the metrics; return them with the loss, as 'logits' or in "
            "a tuple (loss, predictions), or return (loss, outputs) from compute_loss"
        )
    return rest[0] if len(rest) == 1 else tuple(rest)


def outputs_in(output: Any, ignored: Sequence[str]) -> Any:
    """Return all outputs of a transformers model except the loss, as transformers' Trainer does.

    Args:
        output: The model's output.
        ignored: Names of outputs to leave out, see `ignored_outputs`.

    Returns:
        The outputs in their order, a tuple if there are several; None if there are none, or for another model.
    """
    generic = sys.modules.get("transformers.utils.generic")  # imported already if the model is one
    if generic is None or not isinstance(output, generic.ModelOutput):
        return None
    rest = [value for name, value in output.items() if name != "loss" and name not in ignored]
    rest = [value for value in rest if any(True for _ in tensors(value))]
    return tuple(rest) if len(rest) > 1 else next(iter(rest), None)


def ignored_outputs(module: torch.nn.Module) -> Sequence[str]:
    """Return the names of the outputs that a transformers model's configuration leaves out of predictions."""
    config = getattr(without_wrappers_and_adapters(module), "config", None)
    names: Sequence[str] | None = getattr(config, "keys_to_ignore_at_inference", ("past_key_values",))
    return names or ()


def _is_batched(value: Any) -> bool:
    """Return whether a value is a nested list, tuple or mapping of tensors that may have an entry for each sample."""
    dimensions = [each.ndim for each in tensors(value)]
    return bool(dimensions) and all(dimensions)


@contextlib.contextmanager
def captured_outputs(model: torch.nn.Module | None) -> Iterator[list[Any]]:
    """Collect the outputs of the model's calls, so that `compute_loss` need not return them."""
    outputs: list[Any] = []
    if model is None:
        yield outputs
        return
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def joined_predictions(calls: list[Any], rows: int) -> Any:
    """Concatenate the predictions of all calls of the model in `compute_loss` into those of the batch.

    Args:
        calls: The model's predictions in each call, in the order of the calls.
        rows: Rows of the batch's labels.

    Raises:
        ValueError: If the rows of several calls do not add up to the batch's rows.
    """
    if len(calls) == 1:
        return calls[0]
    shapes = {tuple(each.shape[1:] for each in tensors(call)) for call in calls}
    sizes = [{len(each) if each.ndim else 0 for each in tensors(call)} for call in calls]
    if len(shapes) > 1 or any(len(each) != 1 for each in sizes) or sum(each.pop() for each in sizes) != rows:
        raise ValueError(
            f"compute_loss called the model {len(calls)} times on a batch of {rows} rows, and the outputs are not the "
            "parts of one prediction; return what the metrics are to see: (loss, outputs) or (loss_sum, count, outputs)"
        )
    joined = iter([torch.cat(column) for column in zip(*(tensors(call) for call in calls), strict=True)])
    return map_tensors(lambda _: next(joined), calls[0])


def update_metric(name: str, metric: Any, predictions: Any, labels: Any) -> None:
    """Update a metric with the predictions and labels of a batch.

    Raises:
        ValueError: If it takes none of these types.
    """
    try:
        metric.update(predictions, labels)
    except (TypeError, AttributeError) as error:
        if isinstance(predictions, torch.Tensor) and isinstance(labels, torch.Tensor):
            raise
        kinds = [
            f"{what} that are a {type(each).__name__}"
            for what, each in (("predictions", predictions), ("labels", labels))
        ]
        raise ValueError(
            f"metrics[{name!r}] got {' and '.join(kinds)}, and raised {type(error).__name__}: {error}; choose a tensor "
            "of the predictions by preprocess_logits_for_metrics=lambda predictions, labels: predictions[0], or use "
            "compute_metrics"
        ) from error
