"""The loss contract: the loss of a step is the mean over all its items, independent of how batches are cut.

Items are the labels that are not -100 if labels are integers (tokens, pixels, classes), else samples. The CTC models of
transformers have samples as items: their loss is a mean over samples, each divided by the number of its labels.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.loss.batch import IGNORED, has_columns, is_whole, labels_of, rows_of, shape_of, with_labels
from trainer_kit.loss.deferred_logits import ChunkedLanguageModel
from trainer_kit.loss.dtype_errors import explain_dtypes
from trainer_kit.loss.label_smoothing import smoothed_loss
from trainer_kit.loss.means import PassLog
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.utils.module_modes import evaluating, state_aside
from trainer_kit.utils.pytree import keys, tensors
from trainer_kit.utils.wrappers import model_class, without_wrappers_and_adapters

ComputeLoss = Callable[[torch.nn.Module, Any], Any]


class Loss:
    """The loss of a run: computed by the model or the user's `compute_loss`.

    Args:
        model: The model as prepared by the strategy.
        module: The user's own module, for names and signatures.
        compute_loss: `compute_loss(model, batch)` returns the mean over the batch's items, a scalar tensor, or
            `(loss_sum, count)`. Outputs may follow: `(mean, outputs)` or `(loss_sum, count, outputs)`. In place of the
            mean or the sum, a dict with "loss" and its parts. None: the loss that the model returns.
        chunked: Whether the model computes its loss in chunks of tokens, see `ChunkedLanguageModel`.
        label_smoothing: Smoothing of the labels of the model's own loss, see `smoothed_loss`.

    Raises:
        ValueError: If `chunked`, and the model's loss cannot be computed in chunks; or if labels are to be smoothed,
            and the loss is `compute_loss` or computed in chunks.

    Attributes:
        outputs: The outputs that `compute_loss` returned in the last call without gradient; None if it returned none.
        shifts: Whether the model leaves out the first label of each row; None if not known yet.
        returns_sum_and_count: Whether `compute_loss` returns `(loss_sum, count)`; None if not known yet.
        log: The values that the last call logged, by `log_mean` and as parts of the loss.
        counts_samples: Whether the items are samples, whatever the labels: of a CTC model's own loss.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        module: torch.nn.Module,
        compute_loss: ComputeLoss | None,
        chunked: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        if label_smoothing and (chunked or compute_loss is not None):
            other = "chunked_cross_entropy=True" if chunked else "compute_loss="
            raise ValueError(
                f"label_smoothing_factor={label_smoothing} smooths the labels of the model's own loss; set it to 0.0, "
                f"or leave out {other}"
            )
        if chunked and compute_loss is not None:
            raise ValueError(
                "chunked_cross_entropy=True computes the model's own loss; set it to False, or leave out compute_loss="
            )
        self._ctc = _ctc_model(module) if compute_loss is None else None
        self.counts_samples = self._ctc is not None
        if label_smoothing and self.counts_samples:
            raise ValueError(
                f"label_smoothing_factor={label_smoothing} is not possible with the CTC loss of "
                f"{model_class(module).__name__}; set it to 0.0"
            )
        self.model = model
        self.module = module
        self.compute_loss = compute_loss
        self.outputs: Any = None
        self.log = PassLog()
        self.shifts: bool | None = None
        self.label_smoothing = label_smoothing
        self.returns_sum_and_count: bool | None = None if compute_loss is not None else False
        self._compute = compute_loss or call
        self._chunked = ChunkedLanguageModel(module) if chunked else None

    @classmethod
    def by_arguments(
        cls, model: torch.nn.Module, module: torch.nn.Module, compute_loss: ComputeLoss | None, args: TrainingArguments
    ) -> Loss:
        """Return the loss with the options of a run's arguments."""
        return cls(model, module, compute_loss, args.chunked_cross_entropy, args.label_smoothing_factor)

    def __call__(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss of one batch.

        Returns:
            `(mean, None)`, or `(loss_sum, count)` if `compute_loss` returns that.

        Raises:
            ValueError: If no loss is returned, if the loss requires no gradient while gradients are enabled, if dtypes
                do not match, or (on CPU) if a label is outside the classes.
        """
        try:
            with self.log:
                if self._chunked is None:
                    result = self._compute(self.model, batch)
                else:
                    with self._chunked.deferring():
                        result = self._compute(self.model, batch)
        except IndexError as error:
            if (sentence := _outside_the_classes(error)) is None:
                raise
            raise ValueError(sentence) from error
        except (RuntimeError, ValueError) as error:
            labels = labels_of(batch)
            columns = {name: each.dtype for name, each in _named_tensors(batch) if each is not labels}
            sentence = explain_dtypes(error, columns, None if labels is None else labels.dtype, self.module)
            if sentence is None:
                raise
            raise ValueError(sentence) from error
        if self.compute_loss is None:
            loss = self.loss_of(result, batch)
            if loss is None:
                raise ValueError(self._without_loss(batch, result))
            self.log.add_parts(result)
            return self._trainable(loss), None
        parts = list(result) if isinstance(result, tuple) else [result]
        outputs = parts.pop() if 2 <= len(parts) <= 3 and self._is_output(parts[-1], batch, len(parts) == 3) else None
        if isinstance(outputs, torch.Tensor) and not outputs.ndim:
            outputs = outputs.reshape(1)
        self.outputs = None if torch.is_grad_enabled() else outputs
        self.returns_sum_and_count = len(parts) == 2
        self.log.add_parts(parts[0], is_sum=self.returns_sum_and_count)
        parts[0] = found_loss(parts[0]) if isinstance(parts[0], Mapping) else parts[0]
        if not (1 <= len(parts) <= 2 and _is_scalar(parts[0]) and _is_number(parts[-1])):
            raise ValueError(
                f"compute_loss returned {_described(result)}; it must return the mean loss as a scalar tensor, or "
                "(loss_sum, count), a scalar tensor and a number; outputs for metrics may follow, and a dict with "
                "'loss' may stand for the tensor"
            )
        return self._trainable(parts[0]), parts[1] if self.returns_sum_and_count else None

    def _is_output(self, last: Any, batch: Any, follows_count: bool) -> bool:
        """Return whether the last value that `compute_loss` returned is the model's output, and not a count.

        The output for a batch of one sample may have no dimension either, as `logits.squeeze()` has none.
        """
        if not isinstance(last, torch.Tensor) or last.ndim:
            return hasattr(last, "logits") or next(tensors(last), None) is not None
        if rows_of(batch) != 1:
            return False
        if follows_count:
            return True
        if self.returns_sum_and_count is not None:
            return not self.returns_sum_and_count
        if torch.is_grad_enabled() or not last.is_floating_point():
            return last.requires_grad
        if float(last).is_integer():  # as a count of tokens is
            return False
        raise ValueError(
            "compute_loss returned two scalars for a batch of one sample, and the second may be a count or the model's "
            "output; return a count as a number, or an output with one row for each sample"
        )

    def _trainable(self, loss: torch.Tensor) -> torch.Tensor:
        if loss.requires_grad or not torch.is_grad_enabled():
            return loss
        raise ValueError(
            f"the loss depends on no parameter of this {model_class(self.module).__name__} that requires a gradient; "
            "unfreeze some, and compute the loss from the model's output without detach() or no_grad()"
        )

    def items(self, counts: Any) -> Any:
        """Return the number of items for this model in a batch or global batch: an int or a scalar tensor."""
        if self.counts_samples:
            return counts.samples
        return counts.shifted if self.shifts else counts.labels

    def agree(self, collectives: Collectives) -> bool | None:
        """Take what the first rank has found that knows an answer, so that all ranks agree; return `shifts`."""
        self.take_answers(collectives.gather_object(self.answers))
        return self.shifts

    @property
    def answers(self) -> tuple[bool | None, bool | None]:
        """What this rank has found, see `shifts` and `returns_sum_and_count`."""
        return self.shifts, self.returns_sum_and_count

    def take_answers(self, found: Iterable[tuple[bool | None, bool | None]]) -> None:
        """Take the first known of the ranks' `answers`."""
        self.shifts, self.returns_sum_and_count = (
            next((answer for answer in answers if answer is not None), None) for answers in zip(*found, strict=True)
        )

    def eval_loss(self, batch: Any, context: Callable[[], Any]) -> torch.Tensor:
        """Return the loss of a batch in evaluation mode, without label smoothing, gradient or change of the model."""
        smoothing, self.label_smoothing = self.label_smoothing, 0.0
        try:
            with state_aside(self.module), evaluating(self.model), torch.no_grad(), context():
                return self(batch)[0]
        finally:
            self.label_smoothing = smoothing

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor | None:
        """Return the loss in a model's output for a batch, with smoothed labels if asked for; None without a loss.

        Raises:
            ValueError: If the model is a CTC model whose loss is a sum.
        """
        own = found_loss(output)
        if own is not None and self.counts_samples:
            _check_ctc_reduction(self._ctc)
        if own is None or not self.label_smoothing:
            return own
        return smoothed_loss(output, labels_of(batch), self.label_smoothing, bool(self.shifts))

    def with_valid_labels(self, batch: Any, items: Any, context: Callable[[], Any]) -> Any:
        """Replace the labels of a batch without items by valid ones, since its mean loss would be 0/0.

        The batch then runs with weight zero, so that all ranks take part in the step. A `compute_loss` that returns
        (loss_sum, count) gets the batch unchanged, and so does a loss whose items are samples.

        Args:
            batch: The batch on the device.
            items: Its number of items: 0, or a scalar tensor that may be 0 and is not read.
            context: Makes the context of a forward pass.

        Returns:
            The batch, with valid labels if it has no items.
        """
        labels = labels_of(batch)
        if labels is None or not is_whole(labels) or self.counts_samples:
            return batch
        if self.returns_sum_and_count is None:
            self.eval_loss(copy.copy(batch), context)  # compute_loss may pop its labels
        if self.returns_sum_and_count:
            return batch
        valid = labels.clamp(min=0)
        return with_labels(batch, valid if isinstance(items, int) else torch.where(items == 0, valid, labels))

    def output(self, batch: Any) -> Any:
        """Return the model's output for a batch, without the columns that only `compute_loss` reads.

        Raises:
            ValueError: If there is a `compute_loss`, and the model cannot be called with what is left.
        """
        if self.compute_loss is not None and isinstance(batch, Mapping):
            known = columns_of(self.module)
            batch = {key: value for key, value in batch.items() if known is None or key in known}
        try:
            with self.log:
                output = call(self.model, batch)
        except TypeError as error:
            if self.compute_loss is None:
                raise
            raise ValueError(
                f"no labels were found in the batch, {shape_of(batch)}, so {model_class(self.module).__name__} was "
                f"called without compute_loss: {error}; name the columns that are labels in label_names=[...]"
            ) from error
        self.log.add_parts(output)
        return output

    def _without_loss(self, batch: Any, output: Any) -> str:
        columns = ""
        if isinstance(batch, Mapping):
            named = "" if "labels" in keys(batch) else "; transformers' models want a column named 'labels'"
            columns = f" (the batch has {', '.join(map(str, keys(batch)))}{named})"
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        came = _described(output) if loss is None else f"a loss that is {_described(loss)}"
        return (
            f"{model_class(self.module).__name__} returned no loss but {came}{columns}; return a scalar, a dict with "
            "'loss', an object or named tuple with .loss or a tuple that begins with it, or give compute_loss="
        )


def columns_of(module: torch.nn.Module, even_with_keywords: bool = False) -> list[str] | None:
    """Return the parameter names of a module's `forward`; None if it takes any keyword.

    Args:
        module: The module.
        even_with_keywords: Whether to return the names of a `forward` that takes any keyword too.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    if not even_with_keywords and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def label_columns_of(module: torch.nn.Module) -> list[str]:
    """Return the parameters of a module's `forward` with "label" in their names, which transformers takes as labels."""
    try:
        names = columns_of(without_wrappers_and_adapters(module), even_with_keywords=True) or ()
    except ValueError:  # a traced module has no signature
        return []
    return [name for name in names if "label" in name]


def takes_column(module: torch.nn.Module, name: str) -> bool:
    """Return whether a module's `forward` takes a column of this name."""
    columns = columns_of(module)
    return columns is None or name in columns


def call(model: torch.nn.Module, batch: Any) -> Any:
    """Call `model(**batch)` for a dict, `model(*batch)` for a tuple or list, else `model(batch)`.

    A `PackedSequence`, which is a tuple, is one argument.
    """
    if type(batch) is dict or isinstance(batch, Mapping):  # the first is far quicker
        return model(**batch)
    if has_columns(batch):
        return model(*batch)
    return model(batch)


def found_loss(output: Any) -> torch.Tensor | None:
    """Return the loss in a model's output: a scalar, `loss`, or else the first element; None without a scalar tensor.

    The loss of a dict that holds nothing but losses, such as those of detection models, is their sum. What is called
    `loss` may be of shape [1], as models for torch's DataParallel return it.
    """
    is_named = True
    if type(output) is dict or isinstance(output, Mapping):
        loss = output["loss"] if "loss" in output else _summed(output)
    elif isinstance(output, (tuple, list)) and "loss" not in getattr(output, "_fields", ()):
        loss, is_named = output[0] if output else None, False
    else:
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        is_named = loss is not output
    if not isinstance(loss, torch.Tensor):
        return None
    if loss.ndim:
        return loss[0] if is_named and loss.shape == (1,) else None
    return loss


def _summed(losses: Mapping[Any, Any]) -> torch.Tensor | None:
    """Return the sum of a dict's entries if all are scalars with "loss" in their names."""
    named = [losses[name] for name in keys(losses) if "loss" in str(name)]
    is_all = bool(named) and len(named) == len(keys(losses)) and all(map(_is_scalar, named))
    return torch.stack(named).sum() if is_all else None


def weighed(mean: torch.Tensor, items: Any, total: Any) -> torch.Tensor:
    """Return a micro-batch's share of the step's loss: its mean over `items`, times `items / total`."""
    if not isinstance(items, int):
        exact = _exact(mean)
        share: torch.Tensor = torch.where(items > 0, mean, 0.0) * (items.to(exact) / total.clamp(min=1).to(exact))
        return share
    if items == 0:  # the mean over no items may be NaN
        return (mean * 0.0).nan_to_num(0.0)
    return mean if items == total else mean * (items / total)  # multiplying by 1 costs a kernel each way


def scale_gradients(grads: list[torch.Tensor], loss: torch.Tensor, divisor: int, count: Any) -> torch.Tensor:
    """Rescale a loss and its gradients from a sum divided by `divisor` to the mean over `count`.

    A `compute_loss` that returns (loss_sum, count) gives the count only after the forward pass.

    Args:
        grads: The gradients, scaled in place.
        loss: The loss sum divided by `divisor`, a scalar.
        divisor: Number by which the sum was divided.
        count: Items of the step, a number or a scalar tensor; 0 gives a loss of 0.

    Returns:
        The step's mean loss.
    """
    factor: Any
    if isinstance(count, torch.Tensor):
        count = count.to(loss.device, _exact(loss))
        factor = torch.where(count == 0, 0.0, divisor / count)
    else:
        factor = divisor / count if count else 0.0
    if grads:
        torch._foreach_mul_(grads, factor)
    mean: torch.Tensor = loss * factor
    return mean


def _ctc_model(module: torch.nn.Module) -> Any:
    """Return the CTC model of transformers in a module, or one of a class derived from it; None for another model."""
    inner = without_wrappers_and_adapters(module)
    is_ctc = any(kind.__name__.endswith("ForCTC") for kind in type(inner).__mro__)
    return inner if is_ctc and hasattr(getattr(inner, "config", None), "ctc_loss_reduction") else None


def _check_ctc_reduction(model: Any) -> None:
    if (reduction := model.config.ctc_loss_reduction) != "mean":
        raise ValueError(
            f"config.ctc_loss_reduction={reduction!r} of {type(model).__name__} is a loss that grows with the batch; "
            'set model.config.ctc_loss_reduction = "mean", or give compute_loss='
        )


def _outside_the_classes(error: IndexError) -> str | None:
    """Explain torch's "Target 7 is out of bounds" with the number of classes; None for another IndexError."""
    target = re.search(r"Target (-?\d+) is out of bounds", str(error))
    if target is None:
        return None
    classes = "the model's classes"
    trace = error.__traceback__
    while trace is not None:
        scores = trace.tb_frame.f_locals.get("input")
        if trace.tb_frame.f_code.co_name in ("cross_entropy", "nll_loss") and isinstance(scores, torch.Tensor):
            classes = f"the model's {scores.shape[min(1, scores.ndim - 1)]} classes"
        trace = trace.tb_next
    return f"the labels hold {target[1]}, outside {classes}; labels count from 0, {IGNORED} is left out"


def _exact(loss: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to divide counts; torch would divide integers in float32."""
    return torch.promote_types(loss.dtype, torch.float32)


def _named_tensors(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    columns = batch.items() if isinstance(batch, Mapping) else [("the input", batch)]
    return ((str(name), tensor) for name, value in columns for tensor in tensors(value))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _is_number(value: Any) -> bool:
    return _is_scalar(value) or isinstance(value, Real)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, keys(value))) or 'nothing'}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return repr(value) if value is None or isinstance(value, Real) else f"a {type(value).__name__}"
