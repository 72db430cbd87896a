"""`SameOutputs`: a check in the first passes that splitting layers over the axis "tensor" changes no output."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.fsdp.placement import gather
from trainer_kit.strategies.fsdp.tensor_parallel import Place
from trainer_kit.utils.module_modes import evaluating, state_aside
from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.rng import generators_kept

_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2
"""Differences that rounding explains, relative to what the split modules add, for float32 or better and for half."""

_ROUNDING, _HALF_ROUNDING = 1e-6, 8e-3
"""Differences that rounding explains, relative to the whole output."""


class _Region(NamedTuple):
    """A module in which split modules begin and end, so that its inputs and outputs are whole."""

    name: str
    module: nn.Module


def find_regions(model: nn.Module, places: Sequence[Place]) -> list[_Region]:
    """Return the smallest modules that hold "colwise" modules together with "rowwise" ones.

    Raises:
        ValueError: If there is no "rowwise" module for a "colwise" one, or none of these for a "rowwise" one.
    """
    styles = {place.name: place.style for place in places if place.style in ("colwise", "rowwise")}
    found: list[str] = []
    for name, style in styles.items():
        around = [name[:end] for end in range(len(name) - 1, -1, -1) if end == 0 or name[end] == "."]
        region = next((outer for outer in around if _is_region(model, outer, styles)), None)
        if region is None:
            other = "rowwise" if style == "colwise" else "colwise"
            raise ValueError(
                f"tensor_parallel: {name!r} is {style}, but no module is {other}, so the split does not end; name "
                f"the {other} module, or use 'colwise_gather_output'"
            )
        found.append(region)
    outermost = [name for name in dict.fromkeys(found) if not any(_is_inside(name, other) for other in found)]
    return [_Region(name, model.get_submodule(name)) for name in outermost]


def _is_region(model: nn.Module, outer: str, styles: Mapping[str, str]) -> bool:
    is_called = type(model.get_submodule(outer)).forward is not nn.Module.forward
    return is_called and len({style for name, style in styles.items() if _is_inside(name, outer)}) == 2


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


class SameOutputs:
    """A check that regions compute the same as with whole weights, in the first passes of training and of evaluation.

    The model's own code between two split modules sees parts of the features. Where it views them by the number of all
    heads, or normalizes over them, it would compute other numbers without an error.

    A region whose "rowwise" weights add nothing that stands out from rounding, such as one whose last weights begin as
    zeros, is compared again in the passes 2, 4, 8, ... until they do; so is one that was not called. Where only the
    modules in a region are called, and the region is not, the next module around it is compared.

    Args:
        model: The split and sharded model.
        places: Its split modules.
        without_hooks: Returns a context in which the model runs with whole weights.
        uncounted: Returns a context in which passes are not counted.
        collectives: The collectives of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[Place],
        without_hooks: Callable[[], contextlib.AbstractContextManager[None]],
        uncounted: Callable[[], contextlib.AbstractContextManager[None]],
        collectives: Collectives,
    ) -> None:
        regions = find_regions(model, places)
        self._is_paused = False
        self._is_first = bool(regions)  # until the first pass of a mode has been compared
        self._places = [place for place in places if place.style in ("colwise", "rowwise")]
        self._without_hooks = without_hooks
        self._uncounted = uncounted
        self._collectives = collectives
        self._due = dict.fromkeys((True, False), regions)
        self._passes = {True: 0, False: 0}
        if regions:
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Explain an error of shapes in the first forward passes."""
        try:
            yield
        except RuntimeError as error:
            if not self._is_first or isinstance(error, torch.OutOfMemoryError):
                raise
            first, *_ = str(error).splitlines()
            raise ValueError(
                f"the model's forward pass fails with tensor_parallel ({first}); between 'colwise' and 'rowwise' it "
                "must take sizes from the tensors, as in view(batch, length, -1, head_dim)"
            ) from error

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Enclose passes that are not compared."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        # A process that repeats a pass of another one is in evaluation mode, as all passes without gradients here.
        is_training = model.training and torch.is_grad_enabled()
        if self._is_paused or not self._due[is_training]:
            return
        self._passes[is_training] += 1
        if self._passes[is_training] & (self._passes[is_training] - 1):
            return  # not a power of 2
        self._is_first = self._passes[is_training] == 1
        mode = contextlib.nullcontext() if is_training else evaluating(model)
        with self.paused(), self._uncounted(), torch.no_grad(), mode:
            self._due[is_training] = self._check(model, args, kwargs, self._due[is_training])
        self._is_first = False

    def _check(self, model: nn.Module, args: Any, kwargs: Any, regions: Sequence[_Region]) -> list[_Region]:
        """Compare regions in a forward pass; return those to compare again. Collective.

        Raises:
            ValueError: If one differs. Raised on all processes.
        """
        own = self._compare(model, args, kwargs, regions)
        seen = [set[str]().union(*each) for each in zip(*self._collectives.gather_object(own), strict=True)]
        called, differing, compared, used = seen
        if first := next((region for region in regions if region.name in differing), None):
            raise ValueError(
                f"tensor_parallel: {first.name or 'the model'!r} computes other numbers if its modules are split; "
                "between 'colwise' and 'rowwise' it must treat each feature or each head by itself, so leave it out"
            )
        uncalled = [each for each in regions if each.name not in called and any(_is_inside(n, each.name) for n in used)]
        due = [each for each in regions if each.name not in compared and each not in uncalled]
        if uncalled:
            outer = dict.fromkeys(_outer_name(model, each.name) for each in uncalled)
            due += self._check(model, args, kwargs, [_Region(name, model.get_submodule(name)) for name in outer])
        return due

    def _compare(self, model: nn.Module, args: Any, kwargs: Any, regions: Sequence[_Region]) -> _Seen:
        seen = _Seen(set(), set(), set(), set())
        device = next(tensors([args, kwargs])).device
        with contextlib.ExitStack() as stack:
            for place in self._places:
                module = model.get_submodule(place.name)
                stack.callback(module.register_forward_pre_hook(_noting(place.name, seen.used)).remove)
            for region in regions:
                stack.enter_context(self._comparison(region, seen))
            for context in (generators_kept(device), state_aside(model), _WithoutDropout()):
                stack.enter_context(context)
            # Copied, since a cache in the arguments changes; the tensors are not.
            args, kwargs = copy.deepcopy((args, kwargs), {id(each): each for each in tensors([args, kwargs])})
            model(*args, **kwargs)
        return seen

    @contextlib.contextmanager
    def _comparison(self, region: _Region, seen: _Seen) -> Iterator[None]:
        """Enclose a forward pass in which the outputs of a region are compared."""
        rowwise = {place.name for place in self._places if place.style == "rowwise"}
        inside = {f"{region.name}." * bool(region.name) + name: name for name, _ in region.module.named_modules()}
        last = {f"{name}.weight" for whole, name in inside.items() if whole in rowwise}  # biases are not split
        calls: list[tuple[Any, int]] = []
        is_whole = False

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not is_whole:  # copied, since a cache in the arguments changes
                calls.append((copy.deepcopy((args, kwargs)), _random_state(args, kwargs)))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal is_whole
            if is_whole:
                return
            (args, kwargs), state = calls.pop()
            seen.called.add(region.name)
            is_random = _random_state(args, kwargs) != state
            weights = {
                name: gather(each) if isinstance(each, DTensor) else each for name, each in module.named_parameters()
            }
            without = {name: torch.zeros_like(each) if name in last else each for name, each in weights.items()}
            is_whole = True
            try:
                with self._without_hooks():
                    base = _run(module, without, *copy.deepcopy((args, kwargs)))
                    expected = _run(module, weights, args, kwargs)
            finally:
                is_whole = False
            if is_random:  # the random numbers of a part are not those of the whole
                seen.compared.add(region.name)
                return
            found = _compared(*([*tensors(each)] for each in (output, expected, base)))
            if found is False:
                seen.differing.add(region.name)
            elif found and all(bool(weights[name].any()) for name in last & weights.keys()):
                seen.compared.add(region.name)

        first = region.module.register_forward_pre_hook(enter, with_kwargs=True)
        second = region.module.register_forward_hook(leave, prepend=True)
        try:
            yield
        finally:
            first.remove()
            second.remove()


class _Seen(NamedTuple):
    """Names of regions that were called, that differ and that agree, and of split modules that were called."""

    called: set[str]
    differing: set[str]
    compared: set[str]
    used: set[str]


def _noting(name: str, names: set[str]) -> Callable[..., None]:
    return lambda module, inputs: names.add(name)


def _outer_name(model: nn.Module, name: str) -> str:
    """Return the name of the next module around one that has a forward pass of its own."""
    while name:
        name = name.rpartition(".")[0]
        if type(model.get_submodule(name)).forward is not nn.Module.forward:
            break
    return name


def _run(module: nn.Module, weights: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    with state_aside(module):
        return torch.func.functional_call(module, dict(weights), args, kwargs)


def _random_state(args: Any, kwargs: Any) -> int:
    """Return a number that changes where random numbers are drawn."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(each.device) for each in [*tensors([args, kwargs])][:1] if each.is_cuda]
    return hash(tuple(state.numpy().tobytes() for state in states))


class _WithoutDropout(TorchFunctionMode):
    """Calls of torch without dropout, whose masks for a part are not those for the whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


_DROPOUTS = (
    nn.functional.dropout, nn.functional.dropout1d, nn.functional.dropout2d, nn.functional.dropout3d,
    nn.functional.alpha_dropout, nn.functional.feature_alpha_dropout, torch.dropout,
)  # fmt: skip


def _compared(found: list[torch.Tensor], expected: list[torch.Tensor], base: list[torch.Tensor]) -> bool | None:
    """Return whether outputs are as expected; None if the difference could not stand out from rounding."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return False
    if len(base) != len(expected):
        base = expected
    results = [_is_close(*each) for each in zip(found, expected, base, strict=True) if each[0].is_floating_point()]
    return False if False in results else (True in results or None)


def _is_close(found: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> bool | None:
    is_half = found.dtype.itemsize < 4 or torch.is_autocast_enabled(found.device.type)
    tolerance, rounding = (_HALF_TOLERANCE, _HALF_ROUNDING) if is_half else (_TOLERANCE, _ROUNDING)
    difference, norm = _norm(found, expected), _norm(expected, torch.zeros_like(expected))
    added = _norm(expected, base) if base.shape == expected.shape else norm
    if not norm < float("inf"):
        return None
    if not 0 < added < float("inf"):
        return None if difference <= tolerance * norm else False
    if not difference <= tolerance * added + rounding * norm:
        return False
    return True if added > 2 * rounding * norm else None


def _norm(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(one.detach().double() - other.detach().double()))
