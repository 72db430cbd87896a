"""`Neftune`: noise on the embeddings of training batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class Neftune(Callback):
    """Add uniform noise to the input embeddings in training, as NEFTune does (<https://arxiv.org/abs/2310.05914>).

    The noise of sequences of length L, with embeddings of width D, lies within alpha / sqrt(L * D). It depends on the
    seed and the samples' place in the training, so that a resume repeats it. Evaluations have none. The model must
    have `get_input_embeddings`, as transformers' models do.

    Args:
        alpha: Scale of the noise.

    Raises:
        ValueError: If `alpha` is not above 0, or the model has no input embeddings.
    """

    def __init__(self, alpha: float) -> None:
        if not 0 < alpha < math.inf:
            raise ValueError(f"Neftune(alpha={alpha!r}) must be a finite number above 0")
        self.alpha = alpha
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def on_init_end(self, run: Run) -> None:
        _embeddings(run.model)

    def on_train_begin(self, run: Run) -> None:
        self._remove()
        self._handle = _embeddings(run.model).register_forward_hook(self._add_noise)

    def on_exit(self, run: Run) -> None:
        self._remove()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._remove()

    def _add_noise(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        bound = self.alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-bound, bound)

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _embeddings(model: Any) -> torch.nn.Module:
    try:
        found = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # torch's modules, and models without one
        found = None
    if not isinstance(found, torch.nn.Module):
        raise ValueError(
            f"neftune_noise_alpha needs a model whose get_input_embeddings() returns its embedding, but "
            f"{type(model).__name__} has none; set it to None, or give the model that method"
        )
    return found
