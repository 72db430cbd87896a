"""`Replica`: one process's copy of a model in data-parallel training."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from trainer_kit.strategies.ddp_buckets import FixedBuckets
from trainer_kit.strategies.grad_exchange import GradientExchange
from trainer_kit.utils.foreach import copy_all
from trainer_kit.utils.tied_parameters import names_by_parameter, parameters_by_all_names
from trainer_kit.utils.units import join_names
from trainer_kit.utils.vectors import as_bytes

T = TypeVar("T")

PIECE_BYTES = 64 * 2**20
"""Bytes that one collective sends at most."""


class Replica(torch.nn.Module):
    """The module that the loop calls; its backward pass sums gradients over all processes.

    DistributedDataParallel registers the parameters that need a gradient when it is created. The replica creates it at
    the first forward pass, and again when parameters are frozen or unfrozen. Without gradients, as in an evaluation,
    the replica calls the user's module directly, and no process waits for another.

    Args:
        module: The user's module, on the device, with the same weights on all processes.
        wrap: Returns the DistributedDataParallel of a module; None if there are no other processes.
        watched: Returns the context of a forward pass, which may wait for other processes.
        exchange: Sums the gradients in place of DistributedDataParallel, so that a pass may be aborted; None: not.

    Attributes:
        alive: All replicas of this process.
    """

    alive: ClassVar[weakref.WeakSet[Replica]] = weakref.WeakSet()

    def __init__(
        self,
        module: torch.nn.Module,
        wrap: Callable[[torch.nn.Module], FixedBuckets | None],
        watched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        exchange: GradientExchange | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.called = False
        self.exchange = exchange
        self._method: Callable[..., Any] | None = None
        self._is_accumulating = False
        self._wrap = wrap
        self._watched = watched
        self._named = list(module.named_parameters())
        self._shared = SharedBuffers(module)
        self._trained: list[bool] = []
        # In a tuple: as a submodule it would register the parameters twice.
        self._synchronized: tuple[FixedBuckets | None] = (None,)
        self.alive.add(self)

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode, which an evaluation changes in it alone."""
        module = vars(self).get("_modules", {}).get("module")
        return module is None or module.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing: `train` sets the mode of the user's module too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.called = self.called or torch.is_grad_enabled()
        module = self._synchronized_module() if torch.is_grad_enabled() else None
        if self.exchange is not None and torch.is_grad_enabled() and not self._is_accumulating:
            self.exchange.begin()
        if module is None:
            return (self._method or self.module)(*args, **kwargs)
        module.method = self._method
        try:
            with self._watched():
                return module(*args, **kwargs)
        except RuntimeError as error:
            if (sentence := self._without_gradient(error, module.reduced)) is None:
                raise
            raise ValueError(sentence) from error

    def __reduce__(self) -> tuple[Callable[[torch.nn.Module], torch.nn.Module], tuple[torch.nn.Module]]:
        """Copy and pickle the user's module only: a copy takes part in no run."""
        return _itself, (self.module,)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's module, such as its `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
        # A LightningModule computes its loss there, and calls itself.
        is_step = name == "training_step" and inspect.ismethod(value)
        return functools.partial(self._call_instead, value) if is_step else value

    def _call_instead(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's module in place of the module, so that its gradients are exchanged."""
        self._method = method
        try:
            return self(*args, **kwargs)
        finally:
            self._method = None

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a backward pass that does not exchange gradients."""
        if self.exchange is not None:
            return self._accumulating()
        module = self._synchronized_module()
        return contextlib.nullcontext() if module is None else module.no_sync()

    @contextlib.contextmanager
    def trigger_sync(self) -> Iterator[None]:
        """Enter the context of a backward pass that exchanges gradients after a forward pass in `no_sync`."""
        module = self._synchronized_module()
        if module is None:
            yield
            return
        before = module.require_backward_grad_sync
        module.require_backward_grad_sync = True
        module.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            module.require_backward_grad_sync = before

    def joinable(self) -> FixedBuckets | None:
        """Return what takes part in the exchange of gradients for a process that has no batches left."""
        return self._synchronized_module()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def facts(self) -> dict[str, str]:
        """Return descriptions of parameters and buffers by name, which must agree on all processes."""
        return model_facts(self.module)

    def buffers_to_share(self) -> list[torch.Tensor]:
        """Return the persistent buffers, see `SharedBuffers.current`."""
        return self._shared.current()

    def reference(self) -> weakref.ref[FixedBuckets] | None:
        """Return a weak reference to the DistributedDataParallel; None if there is none."""
        return None if self._synchronized[0] is None else weakref.ref(self._synchronized[0])

    def let_go(self) -> None:
        """Drop the DistributedDataParallel, which holds a reference to the process group."""
        self._trained, self._synchronized = [], (None,)

    def _synchronized_module(self) -> FixedBuckets | None:
        """Return the DistributedDataParallel; None if no parameter needs a gradient, or `exchange` is in use."""
        if self.exchange is not None:
            return None
        trained = [parameter.requires_grad for _, parameter in self._named]
        if trained != self._trained:
            self._trained = trained
            self._synchronized = (None,)  # freed first: two of them would both send gradients
            self._synchronized = (self._wrap(self.module) if any(trained) else None,)
        return self._synchronized[0]

    def _without_gradient(self, error: RuntimeError, reduced: list[torch.nn.Parameter]) -> str | None:
        """Explain torch's error "Expected to have finished reduction"; return None for any other error."""
        if "Expected to have finished reduction in the prior iteration" not in str(error):
            return None
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        unused = {reduced[int(number)] for number in found[1].split()} if found else set()
        names = [name for name, parameter in self._named if parameter in unused] or ["some parameters"]
        return (
            f"{join_names(names, most=None)} took no part in the loss of the step before; freeze what is not used, or "
            "set strategy=DDP(find_unused_parameters=True) (for an Accelerator: kwargs_handlers="
            "[DistributedDataParallelKwargs(find_unused_parameters=True)])"
        )


def _itself(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _described(tensor: torch.Tensor) -> str:
    """Describe shape, dtype, strides (gradients are sent in memory order) and whether the tensor is frozen."""
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    frozen = ", frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
    return f"{list(tensor.shape)} {tensor.dtype}{strides}{frozen}"


_STATISTICS_OF_KERAS = ("/moving_mean", "/moving_variance")


class SharedBuffers:
    """The persistent buffers of a module, such as a batch norm's statistics, which all processes share.

    The statistics of keras' batch norms are among them, although they are parameters.

    Args:
        module: The user's module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        kept = module.state_dict().keys()
        self.names: list[str] = []
        self._places: list[tuple[torch.nn.Module, str, torch.Size]] = []  # owner, name in the owner, shape
        statistics = [each for each in module.named_parameters() if each[0].endswith(_STATISTICS_OF_KERAS)]
        for name, buffer in (*module.named_buffers(), *statistics):
            if name in kept and buffer.numel():
                path, _, last = name.rpartition(".")
                self.names.append(name)
                self._places.append((module.get_submodule(path), last, buffer.shape))

    def current(self) -> list[torch.Tensor]:
        """Return the buffers as they are now.

        Raises:
            ValueError: If the shape of a buffer has changed.
        """
        buffers = []
        for name, (owner, last, shape) in zip(self.names, self._places, strict=True):
            buffer = getattr(owner, last)
            if buffer.shape != shape:
                raise ValueError(
                    f"the buffer {name} had the shape {list(shape)} and now has {list(buffer.shape)}, so that "
                    "processes cannot share it; register it with persistent=False if it is a cache"
                )
            buffers.append(buffer)
        return buffers


def may_train(loss: torch.Tensor, replicas: Iterable[Replica]) -> bool:
    """Return whether a loss may depend on a parameter of a prepared model: a checkpoint hides its parameters."""
    known = {id(parameter) for replica in replicas for parameter in replica.module.parameters()}
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in known or "CheckpointFunction" in node.name():
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def model_facts(module: torch.nn.Module) -> dict[str, str]:
    """Return descriptions of parameters and buffers by name, which must agree on all processes."""
    facts = {f"parameter {name}": _described(each) for name, each in parameters_by_all_names(module)}
    for tied in names_by_parameter(module).values():
        for name in tied if len(tied) > 1 else ():
            facts[f"parameter {name}"] += f", tied: {', '.join(sorted(tied))}"
    buffers = SharedBuffers(module)
    described = map(_described, buffers.current())
    return facts | {f"buffer {name}": text for name, text in zip(buffers.names, described, strict=True)}


def take_from_main(tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Broadcast the main process's values in place; shapes and dtypes must agree on all processes.

    Small tensors are packed together, as bytes, since not every backend supports every dtype.

    Args:
        tensors: The tensors.
        source: Rank of the process to take them from, if it is not the main one.
    """
    is_source = dist.get_rank() == source
    by_size = sorted(tensors, key=torch.Tensor.element_size, reverse=True)  # so that all of them start aligned
    for piece in pieces(by_size, tensor_bytes):
        sizes = [tensor_bytes(tensor) for tensor in piece]
        if is_source:
            packed = torch.cat([*map(as_bytes, piece)])
        else:
            packed = torch.empty(sum(sizes), dtype=torch.uint8, device=piece[0].device)
        dist.broadcast(packed, source)
        if not is_source:
            values = zip(piece, packed.split(sizes), strict=True)
            with torch.no_grad():
                copy_all(piece, [received.view(tensor.dtype).view(tensor.shape) for tensor, received in values])


def pieces(items: Iterable[T], nbytes: Callable[[T], int], limit: int = PIECE_BYTES) -> Iterator[list[T]]:
    """Divide items into lists of at most `limit` bytes, in order; a larger item has a list alone, an empty one none."""
    piece: list[T] = []
    size = 0
    for item in items:
        if not nbytes(item):
            continue
        if piece and size + nbytes(item) > limit:
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += nbytes(item)
    if piece:
        yield piece


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()
