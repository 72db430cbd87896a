"""Causal language models of transformers whose loss is computed in chunks of tokens, without all logits in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from trainer_kit.loss.linear_cross_entropy import Change, linear_cross_entropy_sum
from trainer_kit.utils.transformers_models import is_transformers_model
from trainer_kit.utils.wrappers import model_class

_ARGUMENT = "chunked_cross_entropy=True"
_REMEDY = "set it to False"


class DeferredLogits:
    """Stands for the logits of a language model until its loss is computed.

    A model may scale it or apply tanh, as some do between their head and their loss. Any other use raises a TypeError
    or an AttributeError that names this class, so that no model gets another loss than its own.

    Args:
        hidden: Inputs of the head, of shape [batch, length, width].
        changes: Elementwise functions of the logits, in order.
    """

    def __init__(self, hidden: torch.Tensor, changes: tuple[Change, ...] = ()) -> None:
        self.hidden = hidden
        self.changes = changes

    def _then(self, change: Change) -> DeferredLogits:
        return DeferredLogits(self.hidden, (*self.changes, change))

    def __mul__(self, number: Any) -> DeferredLogits:
        return self._then(lambda logits: logits * number) if isinstance(number, (int, float)) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> DeferredLogits:
        return self._then(lambda logits: logits / number) if isinstance(number, (int, float)) else NotImplemented

    def float(self) -> DeferredLogits:
        return self._then(torch.Tensor.float)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh and not kwargs:
            return args[0]._then(torch.tanh)
        return NotImplemented


class ChunkedLanguageModel:
    """A causal language model whose loss can be computed in chunks of tokens.

    In `deferring`, the model's own forward pass runs with two changes. The head returns `DeferredLogits`, and the loss
    function computes the loss from them. All else in the forward pass, such as a router's auxiliary loss, stays. The
    model is unchanged outside of `deferring`.

    Args:
        module: A transformers model, or a module that contains one.

    Raises:
        ValueError: If there is no such model, or its head or its loss are of another kind; the message names the model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        found = next(filter(is_transformers_model, module.modules()), None)
        if found is None:
            raise ValueError(
                f"{_ARGUMENT} needs a causal language model of transformers, but the model is "
                f"{_named(module)}; {_REMEDY}"
            )
        self._model: Any = found
        self._head: Any = found.get_output_embeddings()  # type: ignore[operator]
        self._check()
        # Made once: torch.compile compiles again for each new function. It would break the graph for each chunk.
        loss = torch.compiler.disable(self._loss)
        self._patches = [(self._head, "forward", DeferredLogits), (self._model, "_loss_function", loss)]

    def _check(self) -> None:
        from transformers.loss import loss_utils  # slow to import, unless the model is of transformers

        model, head = self._model, self._head
        settable = getattr(type(model), "loss_function", None)
        if getattr(model, "loss_function", None) is not loss_utils.ForCausalLMLoss:
            raise ValueError(f"{_ARGUMENT} needs transformers' loss of causal language models, {self._lacks}")
        if getattr(settable, "fset", None) is None:
            raise ValueError(f"{_ARGUMENT} needs a newer transformers, whose models let their loss be set; {_REMEDY}")
        is_linear = isinstance(head, torch.nn.Linear) and type(head).forward is torch.nn.Linear.forward
        if not is_linear or "forward" in vars(head):
            raise ValueError(f"{_ARGUMENT} needs a torch.nn.Linear as output embedding, {self._lacks}")

    @property
    def _lacks(self) -> str:
        return f"which {_named(self._model)} does not have; {_REMEDY}"

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Enter the context in which a forward pass with labels computes its loss in chunks, and returns no logits.

        Raises:
            ValueError: If the model computes with its logits in an unsupported way.
        """
        before = [vars(owner).get(name) for owner, name, _ in self._patches]
        for owner, name, value in self._patches:
            vars(owner)[name] = value
        try:
            yield
        except (TypeError, AttributeError) as error:
            if DeferredLogits.__name__ not in str(error):
                raise
            raise ValueError(
                f"{_ARGUMENT} is not possible with {_named(self._model)}, which computes with its logits outside of "
                f"transformers' loss; {_REMEDY}"
            ) from error
        finally:
            for (owner, name, _), value in zip(self._patches, before, strict=True):
                if value is None:
                    del vars(owner)[name]
                else:
                    vars(owner)[name] = value

    def _loss(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the loss of transformers' `ForCausalLMLoss`, whose signature this is."""
        weight, bias = self._head.weight, self._head.bias
        if not isinstance(logits, DeferredLogits) or vocab_size != len(weight):
            raise ValueError(f"{_ARGUMENT} needs all logits from the output embedding, {self._lacks}")
        if hasattr(weight, "full_tensor"):
            raise ValueError(f"{_ARGUMENT} is not possible with an FSDP unit of the output embedding alone; {_REMEDY}")
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        targets = shift_labels.reshape(len(hidden)).to(hidden.device)
        total = linear_cross_entropy_sum(
            hidden, weight, bias, targets, ignore_index=ignore_index, changes=logits.changes
        )
        return total / ((targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def _named(module: torch.nn.Module) -> str:
    return model_class(module).__name__
