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
from trainer_kit.utils.pytree import tensors


class WholeParameters:
    """The parameters of a model that each process holds whole, such as the temperature of a contrastive loss.

    The model's parameter is a DTensor that is replicated, as optimizers need it, since they take no others together
    with it. The model's code sees a plain parameter of the same memory in its place. Its gradients are summed over the
    processes at the end of each backward pass, those of all such parameters at once.

    Args:
        model: The model, not sharded yet.
        mesh: The mesh with all axes.
        groups: The groups over which gradients are summed, one after the other.

    Attributes:
        shown: The model's parameter for each plain one.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, groups: Sequence[dist.ProcessGroup]) -> None:
        self.shown: dict[nn.Parameter, nn.Parameter] = {}
        self._model, self._mesh, self._groups = model, mesh, groups
        self._places = [
            (owner, name, parameter)
            for owner in model.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and stays_whole(parameter)
        ]
        self._trained: dict[nn.Parameter, bool] = {}  # by plain parameter, as of the last forward pass
        self._task = -1  # the last backward pass whose end sums gradients
        self._is_hidden = False

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
        """Let the model's code see plain parameters, once the model's have their memory."""
        plain: dict[nn.Parameter, nn.Parameter] = {}
        for owner, name, _ in self._places:
            parameter = owner._parameters[name]
            assert parameter is not None, "aside() comes first"
            if parameter not in plain:
                plain[parameter] = self._make_plain(parameter)
            vars(owner)[name] = plain[parameter]  # hides the parameter
        self.shown = {value: parameter for parameter, value in plain.items()}
        if self._places:
            self._model.register_forward_pre_hook(self._follow, prepend=True)
            self._model.register_forward_hook(self._await_backward)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Enclose forward passes with other tensors in the parameters' places."""
        shown = [(owner, name, vars(owner).pop(name)) for owner, name, _ in self._places if name in vars(owner)]
        before, self._is_hidden = self._is_hidden, True
        try:
            yield
        finally:
            self._is_hidden = before
            for owner, name, plain in shown:
                vars(owner)[name] = plain

    def _make_plain(self, parameter: nn.Parameter) -> nn.Parameter:
        local = _local(parameter)
        if not (local.is_floating_point() or local.is_complex()):
            return nn.Parameter(local, requires_grad=False)
        plain = nn.Parameter(local)
        plain.register_post_accumulate_grad_hook(self._sum_at_the_end)
        self._trained[plain] = parameter.requires_grad
        plain.requires_grad_(parameter.requires_grad)
        return plain

    def _await_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Let each backward pass sum, also one that reaches none of the parameters on this process."""
        if torch.is_grad_enabled() and not self._is_hidden:
            for each in tensors(output):
                if each.requires_grad:
                    each.register_hook(self._sum_at_the_end)

    def _sum_at_the_end(self, reached: torch.Tensor) -> None:
        """Queue the sum for the end of the backward pass that has reached a tensor, once."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._sum_gradients)

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Add the sum of the processes' gradients to those of the model's parameters. Collective."""
        pairs = [(plain, parameter) for plain, parameter in self.shown.items() if plain.requires_grad]
        for dtype in dict.fromkeys(plain.dtype for plain, _ in pairs):
            same = [pair for pair in pairs if pair[0].dtype == dtype]
            # All take part, so that the sizes are those of the other processes.
            summed = torch.cat(
                [(torch.zeros_like(each) if each.grad is None else each.grad).view(-1) for each, _ in same]
            )
            for group in self._groups:
                dist.all_reduce(summed, group=group)
            for (plain, parameter), part in zip(same, summed.split([each.numel() for each, _ in same]), strict=True):
                if plain.grad is not None:
                    plain.grad = None
                    self._add(parameter, part.clone().view(plain.shape))

    def _add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = self._replicated(gradient)
        else:
            _local(parameter.grad).add_(gradient)
        for hook in [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]:
            hook(parameter)

    def _follow(self, module: nn.Module, inputs: Any) -> None:
        """Take over what has been changed since the last pass: whether a parameter is trained."""
        if self._is_hidden:
            return
        is_recomputed = torch._C._current_graph_task_id() != -1
        for plain, parameter in self.shown.items():
            if not is_recomputed:
                plain.grad = None  # of a backward pass that has failed
            if not plain.is_set_to(_local(parameter)):
                name = next((name for name, each in module.named_parameters() if each is parameter), "a parameter")
                raise ValueError(f"{name!r} was given other data; change it in place: {name}.data.copy_(value)")
            if (before := self._trained.get(plain)) is not None and (
                parameter.requires_grad != before or plain.requires_grad != before
            ):
                self._trained[plain] = not before
                plain.requires_grad_(not before)
                parameter.requires_grad_(not before)

    def _replicated(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
