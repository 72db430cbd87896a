"""`ShardedModel`: a model whose parameters are sharded by torch's `fully_shard`."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn import Parameter
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakIdKeyDictionary

from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.ddp_module import SharedBuffers
from trainer_kit.strategies.fsdp.building import check_complete, refill_buffers
from trainer_kit.strategies.fsdp.making import fixed_buffers
from trainer_kit.strategies.fsdp.placement import fill_from_main
from trainer_kit.strategies.fsdp.tensor_parallel import Place, SplitModules, on_whole_mesh
from trainer_kit.strategies.fsdp.units import Unit
from trainer_kit.strategies.fsdp.whole_parameters import WholeParameters
from trainer_kit.utils.pytree import map_tensors, tensors
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.tied_parameters import names_by_parameter, tie_again
from trainer_kit.utils.units import join_names

_REPLACES_PARTS = TorchVersion(torch.__version__) < "2.10"
"""Whether the first gathering replaces the parts of weights that do not divide evenly."""


class ShardedModel:
    """A model that is sharded in place, so that its names and methods stay; collective.

    Args:
        module: The user's module, on the host; on the meta device on processes that take the main one's values.
        units: Its units.
        device: Device of the shards.
        options: Arguments of `fully_shard`.
        collectives: Collectives of the processes.
        places: Modules to split over the axis "tensor", which `mesh` then has.
        mesh: The mesh with all axes.

    Attributes:
        module: The user's module.
        sharded: The sharded parameter for each that the module had before, and for each that its code sees now.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        units: Sequence[Unit],
        device: torch.device,
        options: dict[str, Any],
        collectives: Collectives,
        places: Sequence[Place] = (),
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.module = module
        self._collectives = collectives
        values = {name: value.detach() for name, value in _tensors(module).items()}
        originals, ties = dict(module.named_parameters()), names_by_parameter(module).values()
        for parameter in originals.values():
            if not parameter.is_contiguous():  # fully_shard takes no other
                parameter.data = parameter.data.contiguous()
        shards: DeviceMesh = options["mesh"]
        whole, self._split = shards, None
        if mesh is not None and "tensor" in (mesh.mesh_dim_names or ()):
            whole, self._split = mesh, SplitModules(module, places, mesh["tensor"])
        self._undivided = undivided = WholeParameters(
            module, whole, [shards.get_group(axis) for axis in range(shards.ndim)]
        )
        with undivided.aside(device):
            for unit in reversed(units):  # inner units come before those around them
                fully_shard(unit.module, **options)
            fully_shard(module, **options)
        if self._split is not None:
            on_whole_mesh(module, whole)
        self._units = [each for each in module.modules() if isinstance(each, FSDPModule)]
        for each in self._units:
            # The loss contract sums gradients. A divisor other than 1 would become a reduction that gloo lacks and
            # nccl gets wrong for bfloat16 (github.com/pytorch/pytorch/issues/190745).
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
            assert isinstance(each, torch.nn.Module)
            each.register_forward_hook(_without_views, prepend=True)
        if any(value.is_meta for value in _tensors(module).values()):
            module.to_empty(device=device)
            tie_again(module, ties)
        if _REPLACES_PARTS:
            for each in self._units:  # before anything holds the parts
                each.unshard()
                each.reshard()
        undivided.show_plain()
        now = dict(module.named_parameters())
        self.sharded = WeakIdKeyDictionary({parameter: now[name] for name, parameter in originals.items()})
        self.sharded.update(undivided.shown)
        self._named = now
        known = collectives.broadcast([name for name, value in values.items() if not value.is_meta])
        fill_from_main({name: _tensors(module)[name] for name in known}, values)
        self._undefined = _tensors(module).keys() - {*known}
        self._shared = SharedBuffers(module)
        module.register_forward_hook(self._reshard_after_evaluation)

    def complete(self, loaded: Collection[str], model_init: Callable[[], torch.nn.Module] | None) -> None:
        """Give values to tensors that had none on any process, see `Strategy.complete_model`. Collective."""
        here = _tensors(self.module)
        missing = [name for name in here if name in self._undefined and name not in loaded]
        self._undefined = set()
        if missing and model_init is not None:
            values: dict[str, torch.Tensor] = {}
            given = self._collectives.on_main(lambda: _take_initial_values(missing, here, model_init, values))
            fill_from_main({name: here[name] for name in given}, values)
            missing = [name for name in missing if name not in given]
        filled = refill_buffers(self.module, [name for name in missing if not isinstance(here[name], Parameter)])
        _check_filled([name for name in missing if name not in filled])
        check_complete(self.module)

    def buffers_to_share(self) -> list[torch.Tensor]:
        """Return the persistent buffers, see `SharedBuffers.current`."""
        return self._shared.current()

    def reshard(self) -> None:
        """Free the gathered weights, so that the module's parameters are the sharded ones."""
        for each in self._units:
            each.reshard()

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The sharded parameters that need a gradient, by name."""
        return {name: each for name, each in self._named.items() if each.requires_grad}

    def set_gradient_sync(self, is_due: bool) -> None:
        """Choose whether a backward pass reduces gradients over the processes."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_due)

    def gather_in_generate(self, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Gather the root unit in the model's `generate`, if it has one, which may use parts of the model directly.

        Args:
            context: Returns the context of a forward pass.
        """
        if not callable(getattr(self.module, "generate", None)):
            return
        register_fsdp_forward_method(self.module, "generate")
        gathered: Any = self.module.generate

        @functools.wraps(gathered)
        def generate(*args: Any, **kwargs: Any) -> Any:
            try:
                with context():
                    return gathered(*args, **kwargs)
            finally:
                self.reshard()

        self.module.generate = generate  # type: ignore[assignment]

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Enclose forward passes that neither gather nor free anything."""
        hooks = [(each, each._forward_pre_hooks, each._forward_hooks) for each in self._units]
        for each in self._units:
            owners = (each._get_fsdp_state(), self)
            each._forward_pre_hooks = _hooks_of_others(each._forward_pre_hooks, owners)
            each._forward_hooks = _hooks_of_others(each._forward_hooks, owners)
        try:
            split = contextlib.nullcontext() if self._split is None else self._split.without_hooks()
            with split, self._undivided.hidden():
                yield
        finally:
            for each, pre_hooks, post_hooks in hooks:
                each._forward_pre_hooks, each._forward_hooks = pre_hooks, post_hooks

    def _reshard_after_evaluation(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # fully_shard keeps the root unit gathered for a backward pass, which does not come here. The module's
        # parameters would then not be those of the optimizer.
        if not torch.is_grad_enabled():
            self.reshard()


def _hooks_of_others(hooks: Mapping[int, Any], owners: Sequence[Any]) -> OrderedDict[int, Any]:
    ids = {id(owner) for owner in owners}
    return OrderedDict(
        (number, hook) for number, hook in hooks.items() if id(getattr(hook, "__self__", None)) not in ids
    )


def _take_initial_values(
    missing: Sequence[str],
    here: Mapping[str, torch.Tensor],
    model_init: Callable[[], torch.nn.Module],
    values: dict[str, torch.Tensor],
) -> list[str]:
    """Add the values that `model_init` gives to tensors, and return their names; make the whole model if need be."""
    if not any(isinstance(here[name], Parameter) for name in missing):
        values |= fixed_buffers(model_init, missing)
    if len(values) < len(missing):
        with generators_kept(torch.device("cpu")):
            made = _tensors(model_init())
        values |= {name: made[name].detach() for name in missing if name in made and not made[name].is_meta}
    return [*values]


def _check_filled(missing: Sequence[str]) -> None:
    if missing:
        raise ValueError(
            f"no value for {join_names(map(repr, missing))}: the model is on the device 'meta', "
            "and no weights hold it; give the Trainer weights= that do, or model_init="
        )


def _without_views(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    """Copy outputs that are views: an in-place operation on one would drop the hook that gathers for backward."""
    if any(each.requires_grad and each._is_view() for each in tensors(output)):
        return map_tensors(lambda each: each.clone() if each.requires_grad and each._is_view() else each, output)
    return None


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, tied ones once."""
    return dict([*module.named_parameters(), *module.named_buffers()])
