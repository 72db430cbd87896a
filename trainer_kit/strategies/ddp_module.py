"""`Replica`: one process's copy of a model that is trained on several."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_PIECE = 64 * 2**20
"""Bytes that are sent at once."""


class Replica(torch.nn.Module):
    """What the loop calls: the user's module, whose gradients are summed over all processes in the backward pass.

    DistributedDataParallel sees the parameters that need a gradient when it is made. It is made at the first forward
    pass, and anew when others are frozen or unfrozen. Without gradients, in an evaluation, the module is called by
    itself, and no process waits for another.

    Args:
        module: On the device, with the same weights on all processes.
        wrap: Makes the DistributedDataParallel.
        watched: Makes the context of a forward pass, in which that may wait for the other processes.
        later: Whether gradients are exchanged by `exchange`, not in the backward pass.

    Attributes:
        alive: All there are.
    """

    alive: ClassVar[weakref.WeakSet[Replica]] = weakref.WeakSet()

    def __init__(
        self,
        module: torch.nn.Module,
        wrap: Callable[[torch.nn.Module], DistributedDataParallel],
        watched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        later: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.called = False
        self.later = later
        self._wrap = wrap
        self._watched = watched
        self._named = list(module.named_parameters())
        self._shared = _kept_buffers(module)
        self._trained: list[bool] = []
        # In a tuple, or it would be a submodule and the parameters would be there twice.
        self._synchronized: tuple[DistributedDataParallel | None] = (None,)
        self.alive.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.called = self.called or torch.is_grad_enabled()
        module = self._synchronized_module() if torch.is_grad_enabled() else None
        if module is None:
            return self.module(*args, **kwargs)
        try:
            with self._watched():
                return module(*args, **kwargs)
        except RuntimeError as error:
            if (sentence := self._without_gradient(error)) is None:
                raise
            raise ValueError(sentence) from error

    def __getattr__(self, name: str) -> Any:
        """What the user's module has (its `config`) can be read here too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a backward pass whose gradients stay on this process."""
        module = self._synchronized_module()
        return contextlib.nullcontext() if module is None else module.no_sync()

    def facts(self) -> dict[str, str]:
        """Parameters and buffers by name, in order, with all that must be the same on all processes."""
        names: dict[torch.Tensor, list[str]] = {}
        facts = dict[str, str]()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
            facts[f"parameter {name}"] = _described(parameter)
        for tied in names.values():
            for name in tied if len(tied) > 1 else ():
                facts[f"parameter {name}"] += f", tied: {', '.join(sorted(tied))}"
        return facts | {f"buffer {name}": _described(getattr(owner, last)) for name, owner, last, _ in self._shared}

    def buffers_to_share(self) -> list[torch.Tensor]:
        """The buffers that a checkpoint keeps (a batch norm's statistics); caches are each process's own.

        Raises:
            ValueError: If one has another shape than in the beginning.
        """
        buffers = []
        for name, owner, last, shape in self._shared:
            buffer = getattr(owner, last)
            if buffer.shape != shape:
                raise ValueError(
                    f"the buffer {name} had the shape {list(shape)} and now has {list(buffer.shape)}, so that "
                    "processes cannot share it; register it with persistent=False if it is a cache"
                )
            buffers.append(buffer)
        return buffers

    def exchange(self, all_reduce_ints: Callable[[Sequence[int]], Sequence[int]], compress: bool) -> None:
        """Makes the gradients their mean over all processes, as DistributedDataParallel does.

        Args:
            all_reduce_ints: Sums whole numbers over all processes.
            compress: Send them in bfloat16.
        """
        trained = [parameter for _, parameter in self._named if parameter.requires_grad]
        are_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in trained)
        *having, sparse = all_reduce_ints([*(parameter.grad is not None for parameter in trained), are_sparse])
        if sparse:
            raise ValueError("sparse gradients cannot be exchanged with auto_find_batch_size=True; set it to False")
        gradients = []
        for parameter, processes in zip(trained, having, strict=True):
            if processes and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for piece in _pieces(gradients):
            packed = torch.cat([gradient.reshape(-1) for gradient in piece]).div_(dist.get_world_size())
            sent = packed.bfloat16() if compress else packed
            dist.all_reduce(sent)
            for gradient, values in zip(piece, sent.split([each.numel() for each in piece]), strict=True):
                gradient.copy_(values.view(gradient.shape))

    def let_go(self) -> None:
        """Gives up the DistributedDataParallel, which keeps the process group."""
        self._trained, self._synchronized = [], (None,)

    def _synchronized_module(self) -> DistributedDataParallel | None:
        """None where no parameter needs a gradient, or these are exchanged later."""
        if self.later:
            return None
        trained = [parameter.requires_grad for _, parameter in self._named]
        if trained != self._trained:
            self._trained = trained
            self._synchronized = (None,)  # first of all: two of them would both send
            self._synchronized = (self._wrap(self.module) if any(trained) else None,)
        return self._synchronized[0]

    def _without_gradient(self, error: RuntimeError) -> str | None:
        """What torch's "Expected to have finished reduction" means; None for another error."""
        if "Expected to have finished reduction in the prior iteration" not in str(error):
            return None
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        trained = [name for name, parameter in self._named if parameter.requires_grad]
        names = [trained[int(number)] for number in found[1].split()] if found else ["some parameters"]
        return (
            f"{', '.join(names)} took no part in the loss of the step before; freeze what is not used, or set "
            "strategy=DDP(find_unused_parameters=True) (for an Accelerator: kwargs_handlers="
            "[DistributedDataParallelKwargs(find_unused_parameters=True)])"
        )


def _described(tensor: torch.Tensor) -> str:
    """Shape, dtype, order in memory (by which gradients are sent), and whether it is frozen."""
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    frozen = ", frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
    return f"{list(tensor.shape)} {tensor.dtype}{strides}{frozen}"


def _kept_buffers(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str, torch.Size]]:
    """Name, owner, name in the owner, and shape of each buffer that `state_dict` has."""
    kept, found = module.state_dict().keys(), []
    for name, buffer in module.named_buffers():
        if name in kept and buffer.numel():
            path, _, last = name.rpartition(".")
            found.append((name, module.get_submodule(path), last, buffer.shape))
    return found


def take_from_main(tensors: Sequence[torch.Tensor]) -> None:
    """Gives all processes the main process's values; shapes and dtypes are the same on all.

    Many small tensors are sent as one, and as bytes, since not every backend knows every dtype.
    """
    for piece in _pieces(tensors):
        packed = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in piece])
        dist.broadcast(packed, 0)
        if dist.get_rank() == 0:
            continue
        sizes = [tensor.numel() * tensor.element_size() for tensor in piece]
        with torch.no_grad():
            for tensor, values in zip(piece, packed.split(sizes), strict=True):
                # Cloned, since a view as another dtype needs an even start.
                tensor.copy_(values.clone().view(tensor.dtype).reshape(tensor.shape))


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if piece and size + tensor.numel() * tensor.element_size() > _PIECE:
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if piece:
        yield piece
