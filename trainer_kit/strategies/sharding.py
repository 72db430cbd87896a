"""`Sharding`: which part of a tensor lies on this process. The base class is for tensors that lie whole on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from trainer_kit.strategies.grad_norms import GradientNorms, gradient_norms, gradient_values
from trainer_kit.utils.box import Part

T = TypeVar("T")
ToHost = Callable[[torch.Tensor], torch.Tensor]


class Sharding:
    """Division of the tensors of a model and its optimizer over the processes.

    Attributes:
        is_active: Whether a process may hold a part of a tensor; a forward pass, a backward pass and a save are
            collectives then.
    """

    is_active: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits in the context of `collecting` for other processes."""
        return False

    def count_shards(self, processes: int) -> int:
        """Return over how many processes a run with `processes` of them shards its model; 1: it does not."""
        return 1

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Return whether processes hold different parts of a tensor."""
        return False

    def placement(self, tensor: torch.Tensor) -> Part | None:
        """Return the part of a model's or an optimizer's tensor that this process holds; None if it holds all of it."""
        return None

    def own_parts(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this process's parts of tensors, which share their memory; a tensor itself if it is not sharded."""
        return list(tensors)

    def place_like(self, value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return `value`, whole or sharded, sharded like `tensor`, which has the same shape; not collective."""
        return value

    def whole_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors with each sharded one gathered. Collective."""
        return dict(tensors)

    def gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this process's parts of the parameters' gradients, which may be changed in place."""
        return self.own_parts(gradient_values(parameters))

    def gradient_norms(self, parameters: list[torch.Tensor], grads: list[torch.Tensor]) -> GradientNorms:
        """Return the norms of the parameters' gradients. Collective if sharding is active.

        Args:
            parameters: Parameters with gradients.
            grads: What `gradients` returned for them.
        """
        return gradient_norms(parameters, grads)

    def collecting(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        owners: Sequence[int],
        to_host: ToHost,
    ) -> contextlib.AbstractContextManager[ToHost]:
        """Return the context in which owners use whole tensors, in any thread. Collective if sharding is active.

        The call allocates the memory, and the context needs hardly more. Tensors arrive while they are used. At the
        end, a process still sends the parts that others have not used yet.

        Args:
            tensors: Sharded tensors, the same ones in the same order on all processes; their values may have changed.
            parts: This process's part of each.
            owners: Rank of each tensor's owner.
            to_host: Returns a full copy of a tensor on the host.

        Returns:
            A context whose value is `to_host`, also for the sharded tensors that this process owns, each once. It
            raises OSError if another process has left.

        Raises:
            RuntimeError: If there is no memory.
        """
        return contextlib.nullcontext(to_host)

    def collect_on_main(self, state: T) -> T:
        """Return nested dicts, lists and tuples with sharded tensors whole and on the host, on the main process.

        Collective if sharding is active; on the other processes the tensors stay as they are.
        """
        return state
