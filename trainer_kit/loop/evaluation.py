"""Evaluation and prediction: each sample exactly once, the exact mean loss, streaming or collected metrics."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer_kit.data.padding import Padding, pad_rows, trim_rows
from trainer_kit.data.sampling import mix
from trainer_kit.data.stream_evaluation import StreamEvaluation, different_samples
from trainer_kit.errors import DoesNotFitError, EvaluationInterrupted
from trainer_kit.loop.batch_metrics import BatchMetrics
from trainer_kit.loop.collected import Collected
from trainer_kit.loop.generation import TextGenerator
from trainer_kit.loop.lookahead import EvalBatch, Lookahead, one_behind
from trainer_kit.loop.metrics import (
    LoggedMeans,
    MeanLoss,
    Metric,
    begin_metrics,
    captured_outputs,
    gather_metrics,
    ignored_outputs,
    joined_mean,
    joined_predictions,
    joined_result,
    main_input,
    outputs_in,
    predictions_in,
    scores_by_name,
    update_metric,
)
from trainer_kit.loop.prediction import EvalPrediction, PredictionOutput
from trainer_kit.loss.batch import IGNORED, Counts, labels_of, missing_label, samples_of, shape_of, targets_of
from trainer_kit.loss.loss import label_columns_of
from trainer_kit.loss.means import means_of, without_metrics
from trainer_kit.loss.probe import LossProbe
from trainer_kit.run import Run
from trainer_kit.strategies.base import clear_frames
from trainer_kit.utils.module_modes import evaluating
from trainer_kit.utils.pytree import map_tensors
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.user_warnings import warn

Batches = Iterable[tuple[Any, Counts, bool]]


class _Tally(NamedTuple):
    """One reader's totals of an evaluation, gathered on all processes.

    Attributes:
        samples: Number of samples.
        steps: Number of batches.
        loss: Sum of the losses and number of items; None if no batch had a loss.
        answers: What the batches showed of the loss, see `Loss.answers`.
        interrupted: Whether the process stopped early.
        means: Sums and numbers of items of what the passes logged, by name.
        lacks: The device's out-of-memory message; None without one.
        fingerprint: Digest of what all processes have to read alike; 0 without one.
    """

    samples: int
    steps: int
    loss: tuple[float, float] | None
    answers: tuple[bool | None, bool | None]
    interrupted: bool
    means: dict[str, tuple[float, float]]
    lacks: str | None = None
    fingerprint: int = 0


class _Wanted(NamedTuple):
    """What an evaluation needs of its passes.

    Attributes:
        loss: Whether it needs the loss of batches without labels too.
        predictions: Whether it needs predictions.
        outputs: Whether it needs all outputs of a transformers model.
    """

    loss: bool
    predictions: bool
    outputs: bool


class _Outcome(NamedTuple):
    """The result of a forward pass.

    Attributes:
        predictions: The predictions; None if they are not needed.
        outputs: All outputs of a transformers model, to be collected; None: the predictions.
        labels: The labels, on the host if shapes are static; None without labels.
        inputs: The model's main input; None if it is not needed.
        loss: The mean loss of the batch; None without one.
        rows: Samples in the batch, including padding.
        samples: Samples in the batch, without padding; 0 for a dummy batch.
    """

    predictions: Any
    outputs: Any
    labels: Any
    inputs: Any
    loss: torch.Tensor | None
    rows: int
    samples: int


class _Totals(NamedTuple):
    """What the passes of one process add up to.

    Attributes:
        loss: The mean loss.
        logged: What the passes log.
        captured: The outputs of the model's calls in the current pass.
    """

    loss: MeanLoss
    logged: LoggedMeans
    captured: list[Any]


class Evaluator:
    """Evaluate a model on a dataset's batches.

    Every process evaluates its own batches at its own pace. The results are merged at the end.

    Args:
        run: The run; its strategy and model are prepared.
        inspection: The probe of the run's loss.
        metrics: Streaming metrics by name.
        compute_metrics: Takes an `EvalPrediction` of the whole dataset, or of one batch (see `BatchMetrics`), and
            returns a dict of numbers; called on the main process only. None: none are computed.
        preprocess_logits: `preprocess_logits(logits, labels)` returns what metrics and predictions hold in place of
            the model's outputs, which are all of those of a transformers model. None: the outputs.
        generation: Arguments of `generate` that take precedence over those of the run; None: none do.
    """

    def __init__(
        self,
        run: Run,
        inspection: LossProbe,
        metrics: Mapping[str, Metric],
        compute_metrics: Callable[..., Mapping[str, Any]] | None,
        preprocess_logits: Callable[[Any, Any], Any] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        self.run = run
        self.inspection = inspection
        self.loss = inspection.loss
        self._communicates = False  # whether the user's code has called collectives in a pass
        self.metrics = metrics
        self.compute_metrics = compute_metrics
        self._batch_metrics = None
        if compute_metrics is not None and run.args.batch_eval_metrics:
            self._batch_metrics = BatchMetrics(compute_metrics)
        self.preprocess_logits = preprocess_logits
        self.generate = TextGenerator(run, generation or {}) if run.args.predict_with_generate else None
        self._label_columns = label_columns_of(self.loss.module) if self.loss.compute_loss is None else []
        self._ignored_outputs = ignored_outputs(self.loss.module)

    def __call__(self, batches: Batches, prefix: str, keep: bool = False) -> PredictionOutput:
        """Evaluate the batches of a dataset. Collective.

        - `PREFIX_loss` (as the loss): Mean over all items of the dataset.
        - `PREFIX_NAME` (as logged): A metric, a part of the loss, or a mean that `log_mean` logged.
        - `PREFIX_runtime` (s): Duration.
        - `PREFIX_samples_per_second` (samples/s): Samples of all processes by the duration.
        - `PREFIX_steps_per_second` (batches/s): Batches of one process by the duration.

        Args:
            batches: This process's batches on the host, with their counts, and whether each is a dummy batch, see
                `EvalBatch`. Batches are dealt out in turn: the k-th one here is number k * readers + reader of the
                dataset.
            prefix: Prefix of each metric's name: "eval" gives "eval_loss".
            keep: Whether to return predictions and labels. Host memory then grows with the dataset on every process;
                with `compute_metrics` alone it grows on the main process.

        Returns:
            Predictions and labels (None unless `keep`), and the metrics; the same on all processes.

        Raises:
            TypeError: If metrics cannot be merged over the processes.
            ValueError: If the dataset is empty.
            EvaluationInterrupted: If a signal asks the run to exit; raised on all processes.
            DoesNotFitError: If any process runs out of memory with `args.auto_find_batch_size`; raised on all
                processes.
        """
        with self._batch_metrics or contextlib.nullcontext():
            return self._evaluate(batches, prefix, keep)

    def _evaluate(self, batches: Batches, prefix: str, keep: bool) -> PredictionOutput:
        begin = time.perf_counter()
        strategy = self.run.strategy
        begin_metrics(self.metrics, strategy)
        collected = self._make_collected(keep) if keep or self.compute_metrics else None
        try:
            own = self._run(batches, collected, keep)
        except Exception as error:
            lacks = strategy.device_info.oom_message(error) if self.run.args.auto_find_batch_size else None
            if lacks is None:
                raise
            clear_frames(error)
            own = _Tally(0, 0, None, self.loss.answers, interrupted=False, means={}, lacks=lacks)
        tallies = self._agreed(own)
        if collected is not None:
            collected.gather(strategy, everywhere=keep)
        scored = not keep or (collected is not None and collected.has_labels)
        others = gather_metrics(self.metrics, strategy, own.samples > 0) if scored and self.metrics else []

        def figures() -> dict[str, Any]:
            mean = joined_mean([tally.loss for tally in tallies])
            found = {} if mean is None else {"loss": mean}
            if scored:
                found |= self._scores(collected, others)
            seconds = time.perf_counter() - begin
            found |= {
                "runtime": seconds,
                "samples_per_second": sum(tally.samples for tally in tallies) / seconds,
                "steps_per_second": max(tally.steps for tally in tallies) / seconds,
            }
            own = {_prefixed(prefix, name): _number(value) for name, value in found.items()}
            return own | self._logged(prefix, means_of([tally.means for tally in tallies]), own)

        metrics = strategy.collectives.on_main(figures)
        kept = collected.prediction() if keep and collected is not None else EvalPrediction(None, None)
        return PredictionOutput(kept.predictions, kept.label_ids, metrics)

    def _make_collected(self, keep: bool) -> Collected:
        run, consume = self.run, None
        begins_once = not run.args.auto_find_batch_size
        if self._batch_metrics is not None and run.strategy.world_size == 1 and begins_once and not keep:
            consume = self._batch_metrics.add
        pad_id = None if self.generate is None else self.generate.pad_id
        return Collected(IGNORED if pad_id is None else pad_id, run.args.eval_do_concat_batches, consume)

    def _run(self, batches: Batches, collected: Collected | None, keep: bool) -> _Tally:
        """Evaluate this process's batches."""
        run, strategy = self.run, self.run.strategy
        samples, steps, interrupted = 0, 0, False
        # Capture at the user's own module: compute_loss may call it instead of its argument.
        needs_outputs = collected is not None or self.preprocess_logits is not None
        needs_loss = not keep or run.args.label_names == []
        wanted = _Wanted(needs_loss, bool(self.metrics) or collected is not None, needs_outputs)
        captures = wanted.predictions and self.loss.compute_loss is not None and self.generate is None
        with contextlib.ExitStack() as stack:
            captured = stack.enter_context(captured_outputs(run.model if captures else None))
            totals = _Totals(MeanLoss(strategy), LoggedMeans(strategy), captured)
            for context in (evaluating(run.model), torch.no_grad(), strategy.uneven_passes()):
                stack.enter_context(context)
            padding = Padding(self.inspection, strategy, run.args.eval_batch_size * strategy.devices)
            on_host = itertools.starmap(EvalBatch, batches)
            ahead = Lookahead(on_host if strategy.static_shapes else strategy.prepare_loader(on_host))
            check_others = strategy.session.watch()
            passes = (item for item in ahead if self._communicates or not item.is_dummy)
            outcomes = map(partial(self._forward, padding, totals, wanted), itertools.count(), passes)
            for outcome in one_behind(outcomes) if strategy.static_shapes else outcomes:
                if not (strategy.static_shapes or strategy.device_info.reads_without_sync):
                    self._fetch_during_pass(ahead)
                if outcome.samples:
                    self._take(outcome, collected)
                    samples += outcome.samples
                    steps += 1
                del outcome  # its predictions would stay on the device during the next forward pass
                check_others()
                interrupted = run.requests.exit_code is not None or strategy.session.is_preempted
                if interrupted:
                    break
        fingerprint = batches.fingerprint if isinstance(batches, StreamEvaluation) else 0
        logged = totals.logged.sums()
        return _Tally(
            samples, steps, totals.loss.sums(), self.loss.answers, interrupted, logged, fingerprint=fingerprint
        )

    def _forward(
        self,
        padding: Padding,
        totals: _Totals,
        wanted: _Wanted,
        number: int,
        item: EvalBatch,
    ) -> _Outcome:
        """Run one forward pass without waiting for the device, and add the loss to `totals`."""
        args, strategy, host_batch, counts = self.run.args, self.run.strategy, item.batch, item.counts
        if item.is_dummy:
            totals = totals._replace(loss=MeanLoss(strategy), logged=LoggedMeans(strategy))
        with_loss = self._targets(host_batch) is not None or wanted.loss
        fills = padding.wants(host_batch, counts.samples, with_loss)
        batch = strategy.to_device(pad_rows(host_batch, padding.rows) if fills else host_batch)
        if with_loss:
            batch = padding.settled(batch, host_batch if fills else None)
            if self.loss.shifts is None:
                self.inspection.detect_label_shift(batch)
        # A model that draws random numbers in evaluation gives the same result after a restart and for any number of
        # workers or processes.
        of_all = number * strategy.collectives.readers + strategy.collectives.reader
        strategy.seed(mix(args.seed, -1, of_all))
        labelled = host_batch if strategy.static_shapes else batch
        labels = self._targets(labelled) if wanted.predictions else None  # before a compute_loss pops them
        begun = strategy.collectives.begun()
        both, value = self._predictions(batch, counts, totals, with_loss, wanted)
        # Passes of a sharded model are collectives, whose number is evened without the user's code.
        self._communicates |= strategy.collectives.begun() > begun and not strategy.sharding.is_active
        labels = self._targets(labelled) if labels is None and wanted.predictions else labels  # it may make some
        predictions, outputs = strategy.collectives.unshard(both) if wanted.predictions else (None, None)
        strategy.device_info.mark_step()
        needs_inputs = "inputs" in args.include_for_metrics and wanted.predictions
        inputs = main_input(self.loss.module, host_batch) if needs_inputs else None
        lacks_labels = with_loss and labels is None and wanted.predictions
        if lacks_labels and args.label_names:
            raise missing_label(args.label_names[0], batch)
        if lacks_labels and self.metrics:
            raise ValueError(
                f"metrics need labels, but the batch is {shape_of(batch)}; set label_names to those that are labels"
            )
        rows = samples_of(batch) if fills else counts.samples
        samples = 0 if item.is_dummy else counts.samples
        return _Outcome(predictions, outputs, labels, inputs, value, rows, samples)

    def _targets(self, batch: Any) -> Any:
        return targets_of(batch, self.run.args.label_names, self._label_columns)

    def _predictions(
        self, batch: Any, counts: Counts, totals: _Totals, with_loss: bool, wanted: _Wanted
    ) -> tuple[tuple[Any, Any], torch.Tensor | None]:
        """Return predictions and outputs (see `_Outcome`), and the mean loss; add it to `totals`."""
        loss, calls, generate = self.loss, [], self.generate if wanted.predictions else None
        value: torch.Tensor | None = None
        items, outputs = None, None
        labels = labels_of(batch) if wanted.predictions and loss.compute_loss is not None else None
        totals.captured.clear()  # of the calls of probes
        with self.run.strategy.autocast():
            if with_loss and (loss.compute_loss is not None or not wanted.predictions or generate is not None):
                value, items = loss(batch)
                calls, outputs, loss.outputs = totals.captured.copy(), loss.outputs, None
            elif generate is None:
                outputs = loss.output(batch)
                value = loss.loss_of(outputs, batch)
            if value is not None or outputs is not None:
                totals.logged.add(loss.log.values, loss.items(counts) if items is None else items)
            generated = None if generate is None else generate(batch, counts.samples)
        totals.captured.clear()
        if value is not None:
            totals.loss.add(value, items, loss.items(counts))
            value = value if items is None else value / items
        if not wanted.predictions or generated is not None:
            return (generated, None), value
        if outputs is not None or not calls:
            return self._selected(outputs, wanted), value
        rows = counts.samples if labels is None or not labels.ndim else len(labels)
        return (joined_predictions([predictions_in(output) for output in calls], rows), None), value

    def _selected(self, output: Any, wanted: _Wanted) -> tuple[Any, Any]:
        """Return the predictions and outputs of a model's output, see `_Outcome`."""
        outputs = outputs_in(output, self._ignored_outputs) if wanted.outputs else None
        if outputs is not None and (self.preprocess_logits is not None or not self.metrics):
            return outputs, None
        predictions = predictions_in(output)
        return predictions, None if outputs is predictions else outputs

    def _fetch_during_pass(self, ahead: Lookahead) -> None:
        """Fetch the next batch while the device works; metrics that draw random numbers draw the same ones."""
        draws = self.metrics or self._batch_metrics is not None
        with generators_kept(torch.device("cpu")) if draws else contextlib.nullcontext():
            ahead.fetch()

    def _take(self, outcome: _Outcome, collected: Collected | None) -> None:
        """Update the metrics, and collect predictions and labels."""
        if outcome.predictions is None:
            return
        predictions, outputs, labels, inputs, loss, rows, samples = outcome
        if self.run.strategy.static_shapes:  # on the device these would be compiled as computations of their own
            predictions, outputs = trim_rows(map_tensors(torch.Tensor.cpu, (predictions, outputs)), rows, samples)
        if self.preprocess_logits is not None:
            predictions = self.preprocess_logits(predictions, labels)
        for name, metric in self.metrics.items() if labels is not None else ():
            update_metric(name, metric, predictions, labels)
        if collected is not None:
            is_wanted = "loss" in self.run.args.include_for_metrics
            losses = loss.detach().expand(samples) if loss is not None and is_wanted else None
            collected.add(predictions if outputs is None else outputs, labels, inputs, losses, samples)

    def _agreed(self, own: _Tally) -> list[_Tally]:
        """Gather the totals of all readers on all processes, before anything larger."""
        collectives = self.run.strategy.collectives
        tallies = collectives.gather_object(own)
        if any(tally.interrupted for tally in tallies):
            raise EvaluationInterrupted
        for tally in tallies:
            if tally.lacks is not None:
                raise DoesNotFitError(tally.lacks)
        if not any(tally.samples for tally in tallies):
            raise ValueError("the dataset to evaluate is empty; give at least one sample")
        if len({tally.fingerprint for tally in tallies}) > 1 and self.run.strategy.is_main:
            warn(different_samples("the dataset to evaluate"))
        # A process whose batches did not show them takes the answers of another one.
        self.loss.take_answers(tally.answers for tally in tallies)
        return collectives.once_a_reader(tallies)

    def _logged(self, prefix: str, means: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return what the passes logged, with the prefix."""
        logged: dict[str, float] = {}
        for name, mean in means.items():
            called = {_prefixed(prefix, name)} if name in self.loss.log.called else ()
            logged |= without_metrics({_prefixed(prefix, name): mean}, {*metrics, *logged}, called)
        return logged

    def _scores(self, collected: Collected | None, others: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the values of all metrics, on the main process."""
        scores = scores_by_name(
            {name: joined_result(metric, [other[name] for other in others]) for name, metric in self.metrics.items()}
        )
        if self.compute_metrics is not None:
            assert collected is not None
            if self._batch_metrics is None:
                result = self.compute_metrics(collected.prediction())
            else:
                result = self._batch_metrics.result(collected.batches())
            if not isinstance(result, Mapping):
                raise TypeError(f"compute_metrics returned a {type(result).__name__}; return a dict of numbers")
            if others_named := [key for key in result if not isinstance(key, str)]:
                raise TypeError(f"compute_metrics returned a dict with the key {others_named[0]!r}; use names")
            if both := [key for key in result if key in scores]:
                warn(f"compute_metrics and metrics= both give {both[0]!r}, of which the first is kept; rename one")
            scores |= result
        return scores


def _prefixed(prefix: str, name: str) -> str:
    return name if not prefix or name.startswith(f"{prefix}_") else f"{prefix}_{name}"


def _number(value: Any) -> Any:
    """Convert scalars of torch and numpy to Python numbers, and move other tensors to the host."""
    if (
        isinstance(value, (torch.Tensor, np.generic, np.ndarray))
        and (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
    ):
        return value.item()
    return map_tensors(torch.Tensor.cpu, value)
