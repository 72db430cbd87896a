"""Evaluation and prediction: each sample exactly once, the true mean loss, streaming or collected metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from trainer_kit.data.order import mix
from trainer_kit.loss import IGNORED, Counts, Loss, evaluating, found_loss, labels_of, shape_of
from trainer_kit.run import Run
from trainer_kit.trees import map_tensors, tensors

_FOLD = 64
"""Batches between two readings of the losses from the device, so that memory stays flat."""


class EvalPrediction(NamedTuple):
    """What `compute_metrics` is called with, as in transformers.

    Attributes:
        predictions: The model's outputs (logits) for all samples, an array or a tuple of arrays.
        label_ids: The labels of all samples; None where there are none.
    """

    predictions: Any
    label_ids: Any


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns.

    Attributes:
        predictions: As in `EvalPrediction`, in the dataset's order.
        label_ids: As in `EvalPrediction`.
        metrics: Loss (with labels), metrics and speed, each name with the prefix.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]


class Metric(Protocol):
    """A streaming metric (torchmetrics' protocol): its memory does not grow with the dataset."""

    def update(self, predictions: Any, labels: Any, /) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


def metrics_by_name(metrics: Any) -> dict[str, Metric]:
    """Streaming metrics as a dict; those without a name are called by their class.

    Raises:
        TypeError: If one of them lacks `update`, `compute` or `reset`.
        ValueError: If two without a name are of one class.
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
        missing = [method for method in ("update", "compute", "reset") if not hasattr(metric, method)]
        if missing:
            raise TypeError(f"metrics[{name!r}] is a {type(metric).__name__} without {', '.join(missing)}")
    return named


class EvaluationInterrupted(Exception):
    """The run was asked to leave (Ctrl-C, a preempted machine) before the evaluation ended."""


class Evaluator:
    """Runs a model over a dataset's batches.

    Args:
        run: Its strategy and model are prepared.
        loss: The loss contract of the run.
        metrics: Streaming metrics by name.
        compute_metrics: Gets an `EvalPrediction` of the whole dataset, returns a dict of numbers.
    """

    def __init__(
        self,
        run: Run,
        loss: Loss,
        metrics: Mapping[str, Metric],
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None,
    ) -> None:
        self.run = run
        self.loss = loss
        self.metrics = metrics
        self.compute_metrics = compute_metrics

    def __call__(self, batches: Iterable[tuple[Any, Counts]], prefix: str, keep: bool = False) -> PredictionOutput:
        """Evaluates.

        Args:
            batches: Batches on the host with their counts.
            prefix: Before each metric's name: "eval" gives "eval_loss".
            keep: Return predictions and labels (host memory grows with the dataset, as with `compute_metrics`).

        Returns:
            Predictions and labels (None unless kept), and the metrics.

        Raises:
            ValueError: If the dataset is empty.
            EvaluationInterrupted: If the run was asked to leave.
        """
        begin = time.perf_counter()
        mean = _Mean()
        collected = _Collected() if keep or self.compute_metrics else None
        samples = steps = 0
        for metric in self.metrics.values():
            metric.reset()
            if hasattr(metric, "to"):
                metric.to(self.run.strategy.device)
        with evaluating(self.run.model), torch.no_grad(), _captured(self.loss.model) as captured:
            for host_batch, counts in batches:
                batch = self.run.strategy.to_device(host_batch)
                with_loss = labels_of(batch) is not None or not keep
                if with_loss and self.loss.shifts is None:
                    self.loss.inspect(batch, self.run.strategy.autocast)
                # A model that draws in evaluation too gives the same after a restart and with any number of workers.
                self.run.strategy.seed(mix(self.run.args.seed, -1, samples))
                self._batch(batch, counts, mean, collected, captured, with_loss)
                samples += counts.samples
                steps += 1
                if self.run.requests.exit_code is not None:
                    raise EvaluationInterrupted
        if samples == 0:
            raise ValueError("the dataset to evaluate is empty; give at least one sample")
        predictions, labels = collected.arrays() if collected else (None, None)
        scored = labels is not None or not keep
        figures = self._figures(mean, predictions, labels, scored)
        seconds = time.perf_counter() - begin
        figures |= {
            "runtime": seconds,
            "samples_per_second": samples / seconds,
            "steps_per_second": steps / seconds,
        }
        return PredictionOutput(
            predictions if keep else None,
            labels if keep else None,
            {_prefixed(prefix, name): value for name, value in figures.items()},
        )

    def _batch(
        self,
        batch: Any,
        counts: Counts,
        mean: _Mean,
        collected: _Collected | None,
        captured: list[Any],
        with_loss: bool,
    ) -> None:
        loss, labels = self.loss, labels_of(batch)
        value: torch.Tensor | None
        with self.run.strategy.autocast():
            if loss.compute_loss is not None and with_loss:
                value, items = loss(batch)
                output = captured[-1] if captured else None
            else:
                output = loss.output(batch)
                value, items = found_loss(output), None
        captured.clear()
        if value is None and not self.metrics and collected is None:
            loss(batch)  # says what is missing
        if value is not None:
            mean.add(value, items, loss.items(counts))
        if self.metrics or collected is not None:
            predictions = _predictions(output)
            for metric in self.metrics.values() if with_loss else ():
                if labels is None:
                    raise ValueError(f"metrics need labels, but the batch is {shape_of(batch)}; call theirs 'labels'")
                metric.update(predictions, labels)
            if collected is not None:
                collected.add(predictions, labels)

    def _figures(self, mean: _Mean, predictions: Any, labels: Any, scored: bool) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        if (value := mean.value()) is not None:
            figures["loss"] = value
        if not scored:
            return figures
        for name, metric in self.metrics.items():
            result = metric.compute()
            figures |= result if isinstance(result, Mapping) else {name: result}
        if self.compute_metrics is not None:
            result = self.compute_metrics(EvalPrediction(predictions, labels))
            if not isinstance(result, Mapping):
                raise TypeError(f"compute_metrics returned a {type(result).__name__}; return a dict of numbers")
            figures |= result
        return {name: _number(value) for name, value in figures.items()}


def _prefixed(prefix: str, name: str) -> str:
    return name if not prefix or name.startswith(f"{prefix}_") else f"{prefix}_{name}"


class _Mean:
    """The mean over items, summed in float64 on the host."""

    def __init__(self) -> None:
        self.total = 0.0
        self.items = 0.0
        self.waiting: list[tuple[torch.Tensor, Any, bool]] = []
        self.any = False

    def add(self, value: torch.Tensor, count: Any, items: Any) -> None:
        """`value` is a mean over `items`, or with a `count` the sum over so many."""
        self.any = True
        self.waiting.append((value.detach(), items if count is None else count, count is None))
        if len(self.waiting) >= _FOLD:
            self._fold()

    def _fold(self) -> None:
        values = torch.stack([value.float() if value.dtype.itemsize < 4 else value for value, _, _ in self.waiting])
        for value, (_, count, is_mean) in zip(values.tolist(), self.waiting, strict=True):
            count = float(count)
            if count:
                self.total += value * count if is_mean else value
                self.items += count
        self.waiting = []

    def value(self) -> float | None:
        """None where no batch had a loss; NaN where no item counted."""
        if not self.any:
            return None
        if self.waiting:
            self._fold()
        return self.total / self.items if self.items else float("nan")


class _Collected:
    """Outputs and labels of all batches, on the host."""

    def __init__(self) -> None:
        self.predictions: list[Any] = []
        self.labels: list[Any] = []

    def add(self, predictions: Any, labels: torch.Tensor | None) -> None:
        self.predictions.append(map_tensors(_to_array, predictions))
        if labels is not None:
            self.labels.append(_to_array(labels))

    def arrays(self) -> tuple[Any, Any]:
        return _joined(self.predictions), _joined(self.labels) if self.labels else None


@contextlib.contextmanager
def _captured(model: torch.nn.Module) -> Iterator[list[Any]]:
    """The outputs of the model's calls, so that `compute_loss` need not return them."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _predictions(output: Any) -> Any:
    """What a model predicts: its `logits`; else all its tensors but the loss (a single one by itself)."""
    if isinstance(output, Mapping):
        if "logits" in output:
            return output["logits"]
        rest = [value for name, value in output.items() if name != "loss" and _is_batched(value)]
    elif isinstance(output, (tuple, list)):
        rest = [value for place, value in enumerate(output) if place > 0 or found_loss(output) is None]
        rest = [value for value in rest if value is not None and getattr(value, "ndim", True)]
    elif isinstance(output, torch.Tensor):
        rest = [output] if output.ndim else []
    else:
        rest = [output.logits] if hasattr(output, "logits") else []
    if not any(True for _ in tensors(rest)):
        raise ValueError(
            "the model's output holds no predictions for the metrics; return them beside the loss, as 'logits' or in "
            "a tuple (loss, predictions)"
        )
    return rest[0] if len(rest) == 1 else tuple(rest)


def _is_batched(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.cpu().numpy()


def _joined(parts: list[Any]) -> Any:
    """The batches' arrays as one; those that differ in further dimensions are filled up with -100."""
    if isinstance(parts[0], (tuple, list)):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    if not isinstance(parts[0], np.ndarray):
        return parts
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        longest = np.max(list(shapes), axis=0)
        parts = [
            np.pad(
                part,
                [(0, 0), *((0, int(full - own)) for full, own in zip(longest, part.shape[1:], strict=True))],
                constant_values=IGNORED,
            )
            for part in parts
        ]
    return np.concatenate(parts)


def _number(value: Any) -> Any:
    """Scalars of torch and numpy as Python numbers; anything else as it is."""
    if (
        isinstance(value, (torch.Tensor, np.generic, np.ndarray))
        and (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
    ):
        return value.item()
    return value
