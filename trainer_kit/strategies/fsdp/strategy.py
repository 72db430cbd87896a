"""`FSDP`: weights, gradients and optimizer state sharded over processes, with torch's `fully_shard`."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils.weak import WeakIdKeyDictionary

from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.ddp_module import model_facts
from trainer_kit.strategies.fsdp.even_passes import EvenPasses
from trainer_kit.strategies.fsdp.joint_passes import JointPasses
from trainer_kit.strategies.fsdp.making import make_on_meta
from trainer_kit.strategies.fsdp.optimizers import shard_optimizer
from trainer_kit.strategies.fsdp.placement import fill
from trainer_kit.strategies.fsdp.same_gradients import SameGradients
from trainer_kit.strategies.fsdp.same_outputs import SameOutputs
from trainer_kit.strategies.fsdp.same_passes import SamePasses
from trainer_kit.strategies.fsdp.sharded_model import ShardedModel
from trainer_kit.strategies.fsdp.sharding import MeshSharding
from trainer_kit.strategies.fsdp.tensor_parallel import Place, check_plan, find_places
from trainer_kit.strategies.fsdp.units import check_units, describe_single_unit, find_units
from trainer_kit.strategies.grad_norms import GradientNorms
from trainer_kit.strategies.multinode import MultiNode
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.regroup import Regroupable
from trainer_kit.utils.own_loading import EXTRA_STATE
from trainer_kit.utils.packed_layers import keep_unpacked
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import without_wrappers

logger = logging.getLogger(__name__)

_AXES = ("replicate", "shard", "tensor")

_OLDEST_OF_TENSOR_AXIS = "2.13"
"""Oldest torch that is right with "tensor" and another axis: 2.9 orders the parts of weights wrongly, 2.10 fails, and
2.12 still counts operations wrongly."""


class FSDP(MultiNode):
    """Fully sharded data parallelism over the processes of one or several machines.

    Each process holds a part of weights, gradients and optimizer state. The parts of a unit (a block of a transformer)
    are gathered before its forward and its backward pass, and freed afterwards. With one process, this is the same as
    `SingleDevice`. Checkpoints are those of all other strategies.

    Args:
        mesh: Number of processes by axis; their product is the number of processes. "shard": processes that hold the
            parts of one copy of the model. "replicate": copies of the model. "tensor": consecutive processes that
            compute the parts of single layers, on the same batches. None: all processes on "shard".
        tensor_parallel: Modules that are split over the axis "tensor": "auto" for the plan that a transformers model
            has of its own, or "colwise" or "rowwise" by pattern (`fnmatch`) of module names. None without that axis.
        units: Patterns (`fnmatch`) of the names or class names of modules that are gathered as one; None: the blocks
            that the model repeats.
        reshard_after_forward: Whether gathered weights are freed after the forward pass and gathered again for the
            backward pass. False needs memory for the whole model's weights, and communicates less.
        reduce_each_batch: Whether gradients are reduced after each micro-batch. False reduces them once a step; each
            process then holds the gradients of the whole model.
        offload: Whether shards, gradients and optimizer state lie in host memory.
        ddp_timeout: Seconds after which a collective fails because a process has not joined it.
        heartbeat_timeout: Seconds after which a process that does not answer counts as lost; None: see `DDP`.
        device: Device of this process; None: one GPU for each process if there are GPUs, else the CPU.
        precision: See `Strategy`. With "bf16", weights are gathered in bfloat16 and gradients reduced in float32.

    Raises:
        TypeError: If `mesh` is no mapping of axes to numbers.
        ValueError: If a launcher's variables or the axes of the mesh are invalid, or there are more processes than
            GPUs.
    """

    def __init__(
        self,
        *,
        mesh: Mapping[str, int] | None = None,
        tensor_parallel: Literal["auto"] | Mapping[str, str] | None = None,
        units: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        reduce_each_batch: bool = True,
        offload: bool = False,
        ddp_timeout: float = 1800.0,
        heartbeat_timeout: float | None = None,
        device: str | torch.device | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            ddp_timeout=ddp_timeout, heartbeat_timeout=heartbeat_timeout, device=device, precision=precision
        )
        self.mesh = _checked_mesh(mesh, self.world_size)
        check_plan(tensor_parallel, self.mesh.get("tensor", 1))
        self.tensor_parallel = tensor_parallel
        self.collectives.reader_size = self.mesh.get("tensor", 1)
        self.units = units
        self.reshard_after_forward = reshard_after_forward
        self.reduce_each_batch = reduce_each_batch
        self.offload = offload
        self.sharding: MeshSharding = MeshSharding(self.group, self.mesh)
        self._device_mesh: DeviceMesh | None = None
        self._sharded: Any = WeakIdKeyDictionary()  # sharded parameters by those before `prepare`
        self._passes = EvenPasses(self.collectives, self.autocast)
        self._joint = JointPasses(self.group)
        self._has_warned_of_noise = False
        self._needs_values: str | None = None  # why a model was not made on the device "meta"
        self._same = SamePasses(self.collectives)
        self._same_gradients: SameGradients | None = None  # these two with the axis "tensor"
        self._same_outputs: SameOutputs | None = None

    @property
    def regroupable(self) -> Regroupable | None:
        return None  # the others do not have this process's part

    def setup(self) -> None:
        super().setup()
        assert self.precision is not None
        if self.precision.mode == "fp16" and not self.group.is_alone:
            raise ValueError(
                "mixed_precision='fp16' is not possible with FSDP, whose processes would have to agree on overflows; "
                "use 'bf16'"
            )
        if self.precision.mode == "fp8" and not self.group.is_alone:
            raise ValueError("mixed_precision='fp8' is not possible with FSDP, which gathers in 'bf16'; use that")
        if self.channels_last and not self.group.is_alone:
            raise ValueError("channels_last=True is not possible with FSDP, whose parts of weights are row-major")
        if self._device_mesh is None and not self.group.is_alone:
            names = tuple(self.mesh)
            self._device_mesh = init_device_mesh(self.device.type, tuple(self.mesh.values()), mesh_dim_names=names)
            # A slow disk holds up others in a save; the heartbeat notices lost processes.
            self.sharding.save_group = dist.new_group(timeout=datetime.timedelta(days=7), backend="gloo")

    def _report(self, places: list[tuple[str, str]]) -> None:
        if self.group.place.has_several_machines:
            super()._report(places)
        else:
            DDP._report(self, places)

    # Model and optimizer

    def make_model(self, model_init: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """Return a new model on the device "meta", or with values if `model_init` needs those of its parameters."""
        if self.group.is_alone:
            return model_init()
        try:
            return make_on_meta(model_init)
        except Exception as error:
            self._needs_values = f"{type(error).__name__}: {error}"
        return model_init()

    def complete_model(
        self, model: torch.nn.Module, loaded: Collection[str], model_init: Callable[[], torch.nn.Module] | None
    ) -> None:
        """Give values to tensors that were on the meta device on all processes.

        Buffers that no file holds are computed by the model's own code. The rest comes from a model that the main
        process makes whole, in host memory.
        """
        for sharded in (each for each in self._replicas if each.module is model):
            with self.group.watched():
                sharded.complete(loaded, model_init)

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.world_size == 1:
            logger.info("FSDP has one process: nothing is sharded; for more, `trainer-kit launch --num-processes N`")
            return super().prepare(model)
        if any(each.module is model for each in self._replicas):
            return model
        assert self._device_mesh is not None, "setup() comes first"
        keep_unpacked(model)
        units = find_units(model, self.units)
        check_units(model, units)
        places = self._places(model)
        self.collectives.check_same_on_all_ranks(model_facts(model))
        self._warn_of_whole_models()
        if not units and self.is_main:
            warn(describe_single_unit(model))
        device = torch.device("cpu") if self.offload else self.device
        sharded = ShardedModel(model, units, device, self._shard_options(), self.collectives, places, self._device_mesh)
        self._sharded.update(sharded.sharded)
        if places:
            self._same_outputs = SameOutputs(
                model, places, sharded.without_hooks, self._passes.uncounted, self.collectives
            )
            self._same_gradients = SameGradients(self.collectives, self._device_mesh["tensor"].get_group())
        sharded.gather_in_generate(self._generating)
        self._passes.watch(model)
        if not self.shapes.by_hand:  # else all passes are outside of the Trainer's
            self._joint.watch(model)
        for unit in units:
            unit.module.register_forward_pre_hook(self._record(unit.name), prepend=True)
        self._replicas.append(sharded)
        return model

    def _warn_of_whole_models(self) -> None:
        reason, self._needs_values = self._needs_values, None
        reasons = self.collectives.gather_object(reason)
        if self.is_main and (failed := [rank for rank, each in enumerate(reasons) if each is not None]):
            who = join_names(map(self.collectives.describe_rank, failed))
            warn(
                f"model_init() failed on the device 'meta' ({reasons[failed[0]]}), so that {who} made the whole model "
                "in host memory; let it not read values of parameters"
            )

    def _places(self, model: torch.nn.Module) -> list[Place]:
        if self.tensor_parallel is None or "tensor" not in self.mesh:
            return []
        return find_places(model, self.tensor_parallel, self.mesh["tensor"])

    def _record(self, name: str) -> Callable[..., None]:
        return lambda module, inputs: self._same.record_unit(name)

    def _shard_options(self) -> dict[str, Any]:
        assert self.precision is not None
        assert self._device_mesh is not None
        # Activations keep their dtype, which autocast chooses.
        policy = MixedPrecisionPolicy(self.precision.dtype, torch.float32, cast_forward_inputs=False)
        return {
            "mesh": self._device_mesh[tuple(name for name in self.mesh if name != "tensor")],
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy() if self.precision.dtype is None else policy,
            "offload_policy": CPUOffloadPolicy(self.device.type == "cuda") if self.offload else OffloadPolicy(),
        }

    def compile(self, model: torch.nn.Module, options: CompileOptions) -> None:
        if options.fullgraph and not self.group.is_alone:
            raise ValueError(
                "torch_compile has fullgraph=True, which is not possible with FSDP, whose gathers divide the graph; "
                "use fullgraph=False"
            )
        super().compile(model, options)
        if not self.group.is_alone:
            self._passes.keep_from_compiler()
            self._joint.keep_from_compiler()

    def release_models(self) -> None:
        super().release_models()
        self._sharded.clear()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Give an optimizer that was made before `prepare` the sharded parameters.

        Raises:
            ValueError: If the optimizer has taken steps already, or cannot step on sharded parameters.
        """
        if self.group.is_alone:
            return super().prepare_optimizer(optimizer)
        shard_optimizer(optimizer, self._sharded)
        return super().prepare_optimizer(optimizer)

    def prepared_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [self._sharded.get(parameter, parameter) for parameter in parameters]

    # A step

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        self._joint.meet()
        with self.autocast():
            yield

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        explained = contextlib.nullcontext() if self._same_outputs is None else self._same_outputs.explained()
        with self.group.watched(), explained, self._joint.expected(), super().autocast():
            try:
                yield
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise ValueError(
                    "the loss uses weights outside of the model's forward pass, where they are sharded; call "
                    "model(...), in compute_loss too, not a method of it or its parts"
                ) from error

    @contextlib.contextmanager
    def uneven_passes(self) -> Iterator[None]:
        if not self.sharding.is_active:
            yield
            return
        with self._passes.evened(), self._joint.expected():
            yield
        self._same.check()

    @contextlib.contextmanager
    def own_passes(self, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._replicas:
                if each.module is model:
                    stack.enter_context(each.without_hooks())
            if self._same_outputs is not None:
                stack.enter_context(self._same_outputs.paused())
            stack.enter_context(self._joint.expected())
            self._same.is_recording = False
            try:
                yield
            finally:
                self._same.is_recording = True

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        sharded = [each for each in self._replicas if each.module is model and not self.reduce_each_batch]
        for each in sharded:
            each.set_gradient_sync(False)
        try:
            yield
        finally:
            for each in sharded:
                each.set_gradient_sync(True)

    def defer_gradient_sync(self, is_deferred: bool) -> None:
        if is_deferred and not self.group.is_alone:
            raise ValueError(
                "auto_find_batch_size=True is not possible with FSDP: where one process runs out of memory in a pass, "
                "the others would wait for it; find a size with trainer-kit estimate, and set it to False"
            )

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        if isinstance(loss, DTensor):
            raise ValueError(
                "the loss was computed from sharded weights without calling the model; call model(...), in "
                "compute_loss too, not a method of it or its parts"
            )
        if self._same_gradients is not None:
            self._same_gradients.record_loss(loss)
        with self.group.watched():
            Strategy.backward(self, loss, **options)
        if self.sharding.is_active:
            self._same.record_gradients(self._trained_by_name())

    def _trained_by_name(self) -> dict[str, torch.Tensor]:
        named = ((number, *each) for number, model in enumerate(self._replicas) for each in model.trained.items())
        return {name if number == 0 else f"{name} (of model {number})": each for number, name, each in named}

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        super()._check_step(optimizer)
        self._same.check()
        if self._same_gradients is not None:
            with self.group.watched():
                self._same_gradients.check(self._trained_by_name())

    def step(self, optimizer: torch.optim.Optimizer, *limits: Any, **options: Any) -> GradientNorms | None:
        is_watched = self.sharding.is_active and self.device.type == "cpu" and not self._has_warned_of_noise
        state = torch.get_rng_state() if is_watched else None
        norms = super().step(optimizer, *limits, **options)
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            self._has_warned_of_noise = True
            warn(
                f"optimizer={type(optimizer).__name__} draws random numbers in its step; with FSDP on a CPU all parts "
                "of a parameter get the same ones, so use strategy=DDP() if they are noise of the weights"
            )
        return norms

    # States

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        self._reshard()
        # The parameters themselves: only object identity shows which are tied.
        return without_wrappers(model).state_dict(keep_vars=True)

    def load_model_state(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        self._reshard()
        model = without_wrappers(model)
        own = model.state_dict(keep_vars=True)
        tensors = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
        tensors = [name for name in tensors if name in own and not name.endswith(EXTRA_STATE)]
        for name in tensors:
            if own[name].shape != state[name].shape:
                raise ValueError(
                    f"{name!r} is of shape {list(state[name].shape)} in the files and {list(own[name].shape)} in the "
                    "model, whose module loads it by code of its own, which strategy='fsdp' does not call; give it "
                    "that shape when the model is made, or train on one device"
                )
            fill(own[name], state[name])
        if values := {name: value for name, value in state.items() if name in own and name not in tensors}:
            model.load_state_dict(values, strict=False)

    def parameter_names(self, model: torch.nn.Module) -> dict[torch.Tensor, str]:
        self._reshard()
        return super().parameter_names(model)

    def _reshard(self) -> None:
        for each in self._replicas:
            each.reshard()


def _checked_mesh(mesh: Mapping[str, int] | None, processes: int) -> dict[str, int]:
    """Return the sizes of the axes, outer ones first."""
    if mesh is None:
        return {"shard": processes}
    if not isinstance(mesh, Mapping) or not all(type(size) is int for size in mesh.values()):
        raise TypeError(
            f"mesh={mesh!r} must give a number of processes for each axis, such as {{'shard': {processes}}}"
        )
    unknown = [name for name in mesh if name not in _AXES]
    if unknown or not {"shard", "tensor"} & mesh.keys():
        raise ValueError(f"mesh={dict(mesh)!r} must have the axis 'shard' or 'tensor', and may have 'replicate'")
    if math.prod(mesh.values()) != processes or min(mesh.values()) < 1:
        raise ValueError(
            f"mesh={dict(mesh)!r} is for {math.prod(mesh.values())} processes, but this run has {processes}; the "
            "product of its sizes must be the number of processes"
        )
    whole = {name: mesh.get(name, 1) for name in _AXES if name in mesh or name == "shard"}
    has_both = whole.get("tensor", 1) > 1 and processes > whole["tensor"]
    if has_both and TorchVersion(torch.__version__) < _OLDEST_OF_TENSOR_AXIS:
        raise ValueError(
            f"mesh={dict(mesh)!r} has the axis 'tensor' and another one, with which torch {torch.__version__} fails or "
            f"gives wrong numbers; use torch {_OLDEST_OF_TENSOR_AXIS} or newer"
        )
    return whole
