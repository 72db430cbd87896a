"""Parameters that are not divided: those without dimensions or elements, which `fully_shard` refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trainer_kit.strategies.fsdp.units import stays_whole


class WholeParameters:
    """The parameters of a model that each process holds whole, such as the temperature of a contrastive loss.

    The model's parameter is a DTensor that is replicated, as optimizers need it, since they take no others together
    with it. The model's code sees a plain tensor of the same memory in its place, whose gradients are summed over the
    processes after each backward pass.

    Args:
        model: The model, not sharded yet.
        mesh: The mesh with all axes.
        groups: The groups over which gradients are summed, one after the other.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, groups: Sequence[dist.ProcessGroup]) -> None:
        self._model, self._mesh, self._groups = model, mesh, groups
        self._places = [
            (owner, name, parameter)
            for owner in model.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and stays_whole(parameter)
        ]
        self._plain: dict[nn.Parameter, torch.Tensor] = {}  # by parameter

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Enclose the calls of `fully_shard`, which see none of them; afterwards they are replicated on the device."""
        for owner, name, _ in self._places:
            if device.type != self._mesh.device_type:
                raise ValueError(
                    f"{name!r} has no dimensions or no elements, so FSDP(offload=True) cannot move it; make it of "
                    "shape [1]"
                )
            owner._parameters[name] = None  # keeps its place in the order
        yield
        replicated: dict[nn.Parameter, nn.Parameter] = {}
        for owner, name, parameter in self._places:
            if parameter not in replicated:
                local = parameter.detach() if parameter.is_meta else parameter.detach().to(device)
                replicated[parameter] = nn.Parameter(self._replicated(local), requires_grad=parameter.requires_grad)
            owner._parameters[name] = replicated[parameter]

    def show_plain(self) -> None:
        """Let the model's code see plain tensors, once the parameters have their memory."""
        for owner, name, _ in self._places:
            parameter = owner._parameters[name]
            assert parameter is not None, "aside() comes first"
            if parameter not in self._plain:
                self._plain[parameter] = self._make_plain(parameter)
            vars(owner)[name] = self._plain[parameter]  # hides the parameter
        if self._places:
            self._model.register_forward_pre_hook(self._check, prepend=True)

    def _make_plain(self, parameter: nn.Parameter) -> torch.Tensor:
        plain = _local(parameter)
        if not (plain.is_floating_point() or plain.is_complex()):
            return plain

        def sum_gradient(plain: torch.Tensor) -> None:
            gradient, plain.grad = plain.grad, None
            assert gradient is not None
            for group in self._groups:
                dist.all_reduce(gradient, group=group)
            if parameter.grad is None:
                parameter.grad = self._replicated(gradient)
            else:
                _local(parameter.grad).add_(gradient)

        plain.requires_grad_().register_post_accumulate_grad_hook(sum_gradient)
        return plain.requires_grad_(parameter.requires_grad)

    def _check(self, module: nn.Module, inputs: Any) -> None:
        for parameter, plain in self._plain.items():
            if not plain.is_set_to(_local(parameter)):
                name = next(name for name, each in module.named_parameters() if each is parameter)
                raise ValueError(f"{name!r} was given other data; change it in place: {name}.data.copy_(value)")
            if plain.requires_grad != parameter.requires_grad:
                plain.requires_grad_(parameter.requires_grad)

    def _replicated(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
