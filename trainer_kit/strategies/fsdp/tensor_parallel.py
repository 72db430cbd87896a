"""Tensor parallelism: single layers split over the axis "tensor", with torch's `parallelize_module`."""

from __future__ import annotations

import contextlib
import fnmatch
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer_kit.utils.tied_parameters import names_by_parameter
from trainer_kit.utils.wrappers import model_class

STYLES = ("colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce")
"""Styles of a plan, with transformers' names."""

_WHOLE = ("embedding_rowwise", "embedding_colwise", "replicate")
"""Styles of a model's own plan whose modules stay whole."""

_HEADS = ("num_attention_heads", "num_key_value_heads")


class Place(NamedTuple):
    """A module of a plan.

    Attributes:
        name: Name of the module in the model.
        style: One of `STYLES`.
    """

    name: str
    style: str


def check_plan(tensor_parallel: Any, size: int) -> None:
    """Check the argument `tensor_parallel` of `FSDP`.

    Args:
        tensor_parallel: "auto", styles by pattern of module names, or None.
        size: Number of processes on the axis "tensor".

    Raises:
        TypeError: If it is something else.
        ValueError: If there is a plan without the axis or the axis without a plan, or a style is not known.
    """
    if tensor_parallel is None:
        if size > 1:
            raise ValueError(
                f"mesh has {size} processes on the axis 'tensor', which needs a plan; use tensor_parallel='auto', or "
                "{'pattern of module names': 'colwise' or 'rowwise'}"
            )
        return
    if size == 1:
        raise ValueError(
            f"tensor_parallel={tensor_parallel!r} needs the axis 'tensor' in mesh, such as "
            "mesh={'tensor': 2, 'shard': 4}; add it, or use None"
        )
    if isinstance(tensor_parallel, Mapping):
        for pattern, style in tensor_parallel.items():
            if style not in STYLES:
                raise ValueError(
                    f"tensor_parallel: {pattern!r} has the style {style!r}, which is not known; use "
                    f"{', '.join(map(repr, STYLES))}"
                )
    elif tensor_parallel != "auto":
        raise TypeError(f"tensor_parallel={tensor_parallel!r} must be 'auto', None, or styles by module pattern")


def find_places(model: nn.Module, tensor_parallel: str | Mapping[str, str], size: int) -> list[Place]:
    """Find the modules that a plan splits.

    Args:
        model: Model, also on the meta device; its weights are tied.
        tensor_parallel: "auto" for the model's own plan, or styles by pattern (`fnmatch`) of module names. The last
            pattern that matches a module counts.
        size: Number of processes that a module is split over.

    Returns:
        The modules in the order of the model.

    Raises:
        ValueError: If the model has no plan, or one that matches no module; if a style is not supported; if a pattern
            of one's own matches no module; or if a module cannot be split into `size` equal parts.
    """
    is_own = isinstance(tensor_parallel, Mapping)
    plan = tensor_parallel if isinstance(tensor_parallel, Mapping) else _plan_of(model)
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        matched = [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        if is_own and not matched:
            raise ValueError(
                f"tensor_parallel: {pattern!r} matches no module of {model_class(model).__name__}; use patterns of the "
                "names in model.named_modules()"
            )
        styles |= dict.fromkeys(matched, style)
    if not is_own:
        tied = _tied_modules(model)
        styles = {name: style for name, style in styles.items() if name not in tied}
    places = [Place(name, styles[name]) for name, _ in model.named_modules() if name in styles]
    if not places:
        raise ValueError(
            f"tensor_parallel='auto', but the plan of {model_class(model).__name__} matches none of its modules, as in "
            "a model with adapters; use {'pattern of module names': 'colwise' or 'rowwise'}, or the axis 'shard' alone"
        )
    _check_heads(model, places, size)
    for place in places:
        _check_module(model, place, size)
    return places


def _plan_of(model: nn.Module) -> dict[str, str]:
    plan = getattr(model, "_tp_plan", None)  # transformers completes it by the plans of the model's parts
    name = model_class(model).__name__
    if not plan:
        raise ValueError(
            f"tensor_parallel='auto', but {name} has no plan (base_model_tp_plan) of its own; use "
            "{'pattern of module names': 'colwise' or 'rowwise'}"
        )
    for pattern, style in plan.items():
        if style not in (*STYLES, *_WHOLE):
            raise ValueError(
                f"tensor_parallel='auto', but the plan of {name} has the style {style!r} for {pattern!r}, which is not "
                "supported; give a plan of 'colwise' and 'rowwise' modules without it"
            )
    return {pattern: style for pattern, style in plan.items() if style not in _WHOLE}


def _tied_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules with a tied parameter of their own."""
    groups = names_by_parameter(model).values()
    return {name.rpartition(".")[0] for names in groups if len(names) > 1 for name in names}


def _check_heads(model: nn.Module, places: list[Place], size: int) -> None:
    """Refuse to cut a head of a transformers model's attention."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not any(_in_attention(place.name) for place in places):
        return
    for field in _HEADS:
        heads = getattr(config.get_text_config(), field, None)
        if isinstance(heads, int) and heads % size:
            raise ValueError(
                f"mesh has {size} processes on the axis 'tensor', but {field}={heads} of {model_class(model).__name__} "
                "must be divisible by it, or a head would be cut; use a divisor"
            )


def _in_attention(name: str) -> bool:
    return any("att" in part.lower() for part in name.split(".")[:-1])


def _check_module(model: nn.Module, place: Place, size: int) -> None:
    module, name = model.get_submodule(place.name), f"tensor_parallel: {place.name!r}"
    if place.style == "replicated_with_grad_allreduce":
        return
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{name} is a {type(module).__name__}; only nn.Linear can be {place.style}, so leave it out")
    if place.name in _tied_modules(model):
        raise ValueError(f"{name} has a tied weight, which cannot be split; leave it out, so that it stays whole")
    field = "in_features" if place.style == "rowwise" else "out_features"
    if (features := getattr(module, field)) % size:
        raise ValueError(
            f"{name} has {field}={features}, which {size} processes on the axis 'tensor' cannot divide equally; leave "
            "it out of a tensor_parallel= that names the modules, or use a divisor"
        )


class SplitModules:
    """The modules of a model that are split in place over the axis "tensor"; not collective.

    Args:
        model: The model, not sharded yet.
        places: The modules of the plan.
        mesh: The mesh of the axis "tensor".
    """

    def __init__(self, model: nn.Module, places: Sequence[Place], mesh: DeviceMesh) -> None:
        self._hooks: list[tuple[nn.Module, set[int]]] = []
        for module, style in ((model.get_submodule(place.name), place.style) for place in places):
            parts = [*module.modules()]
            before = [_hook_ids(each) for each in parts]
            if style == "replicated_with_grad_allreduce":
                for each in parts:
                    _sum_gradients(each, mesh.get_group())
            else:
                # None: no values are sent here, but after sharding.
                parallelize_module(module, mesh, _parallel_style(style), src_data_rank=None)
                module.register_forward_hook(_wait)
            self._hooks += [(each, _hook_ids(each) - known) for each, known in zip(parts, before, strict=True)]

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Enclose forward passes with whole tensors in place of the weights."""
        kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module, _ in self._hooks]
        for module, added in self._hooks:
            module._forward_pre_hooks = _others(module._forward_pre_hooks, added)
            module._forward_hooks = _others(module._forward_hooks, added)
        try:
            yield
        finally:
            for module, pre_hooks, hooks in reversed(kept):
                module._forward_pre_hooks, module._forward_hooks = pre_hooks, hooks


def on_whole_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each sharded parameter that is not split a tensor on the whole mesh, replicated on its last axis.

    Optimizers and collectives then see parameters of one mesh. fully_shard takes the new ones at the first forward
    pass, as after `load_state_dict(assign=True)`.

    Args:
        model: Model after `fully_shard`.
        mesh: The mesh with all axes, "tensor" last.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == mesh.ndim:
                continue
            if parameter not in replaced:
                whole = DTensor.from_local(
                    parameter.to_local().detach(), mesh, (*parameter.placements, Replicate()), run_check=False,
                    shape=parameter.shape, stride=parameter.stride(),
                )  # fmt: skip
                replaced[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = replaced[parameter]


class _SummedGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a module's own parameters over a group, where each process has a part of the input."""
    entered: list[dict[str, Any]] = []  # attributes to restore, for each call of the module

    def enter(module: nn.Module, inputs: Any) -> None:
        # An attribute of the object hides the parameter during the forward pass.
        before: dict[str, Any] = {}
        entered.append(before)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
                before[name] = vars(module).get(name)
                vars(module)[name] = _SummedGradient.apply(getattr(module, name), group)  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        for name, value in (entered.pop() if entered else {}).items():
            if value is None:
                del vars(module)[name]
            else:
                vars(module)[name] = value

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _parallel_style(name: str) -> ParallelStyle:
    if name == "rowwise":
        return RowwiseParallel()
    return ColwiseParallel(output_layouts=Replicate()) if name == "colwise_gather_output" else ColwiseParallel()


class _Waited(torch.autograd.Function):
    """The identity on the result of a collective, as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> torch.Tensor:
        waited: torch.Tensor = tensor.wait()
        return waited

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _wait(module: nn.Module, inputs: Any, output: Any) -> Any:
    return _Waited.apply(output) if isinstance(output, AsyncCollectiveTensor) else output  # type: ignore[no-untyped-call]


def _hook_ids(module: nn.Module) -> set[int]:
    return {*module._forward_pre_hooks, *module._forward_hooks}


def _others(hooks: Mapping[int, Any], added: set[int]) -> OrderedDict[int, Any]:
    return OrderedDict((number, hook) for number, hook in hooks.items() if number not in added)
