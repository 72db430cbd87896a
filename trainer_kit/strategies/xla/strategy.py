"""`XLA`: SPMD on TPUs and other PyTorch/XLA devices; one process drives all devices of a host."""

from __future__ import annotations

import contextlib
import importlib
import logging
import socket
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from trainer_kit.config import environment
from trainer_kit.config.checkpointing_options import CheckpointingOptions
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.strategies.activation_checkpointing import enable_own_checkpointing
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.xla.collectives import XLACollectives
from trainer_kit.strategies.xla.device_info import XLADeviceInfo
from trainer_kit.strategies.xla.mesh import Division, check_axes
from trainer_kit.strategies.xla.model import DOWNCAST, downcast_module, let_transformers_trace
from trainer_kit.strategies.xla.optimizer import computes_on_device, varying_rates
from trainer_kit.strategies.xla.session import XLASession
from trainer_kit.utils.pytree import map_tensors, move, tensors
from trainer_kit.utils.thread_pool import renew_thread_pool
from trainer_kit.utils.tied_parameters import names_by_parameter, tie_again
from trainer_kit.utils.units import format_count
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import without_wrappers

T = TypeVar("T")
logger = logging.getLogger("trainer_kit")

_HOST_TIMEOUT = 1800.0
_HOST_PATIENCE = 60.0


class XLA(Strategy):
    """One SPMD program over a mesh of all XLA devices.

    XLA records computations and compiles them for each new batch shape; the loop runs one graph for each micro-batch.
    A batch has `per_device_train_batch_size` samples for each device, and each device computes its share.

    On several hosts (a TPU pod), each host runs the same script in one process. All hosts read whole batches and take
    the same steps. Each host sends its devices their share, and only host 0 writes. To the loop they are one process.

    Args:
        mesh: Devices by axis, for example {"data": 2, "fsdp": 4}, or a `torch_xla.distributed.spmd.Mesh`. Batches are
            sharded over its axes "data" and "fsdp". None: all devices on one axis.
        fsdp: Whether parameters and optimizer states are sharded over the axis "fsdp" too, to save memory
            (`torch_xla.experimental.spmd_fully_sharded_data_parallel`).
        downcast_bf16: Whether the model and its batches are cast from float32 to bfloat16 and from float64 to float32.
            Losses and metrics are reported in float32.
        precision: See `Strategy`.

    Raises:
        TypeError: If `mesh` is neither a mesh nor a mapping.
        ValueError: If the axes of the mesh are not allowed, or `fsdp` is set on several hosts.
    """

    static_shapes = True
    device = torch.device("xla")

    def __init__(
        self,
        *,
        mesh: Any = None,
        fsdp: bool = False,
        downcast_bf16: bool = False,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(precision)
        self.group = ProcessGroup(environment.place(), _HOST_TIMEOUT, _HOST_PATIENCE)
        self.device_info: XLADeviceInfo = XLADeviceInfo(self.device)
        self.collectives: XLACollectives = XLACollectives(self.group)
        self.session: XLASession = XLASession(self.collectives)
        self.mesh = mesh
        self.fsdp = fsdp
        self.downcast_bf16 = downcast_bf16
        check_axes(mesh, fsdp)
        if fsdp and not self.group.is_alone:
            raise ValueError(
                f"fsdp=True is for one host, but this run has {self.group.place.world_size}: a model that is divided "
                "over hosts cannot be saved yet; use fsdp=False"
            )
        self._moved: Any = WeakIdKeyDictionary()  # device parameters by host parameter
        self._followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._division: Division | None = None  # None with one device

    def setup(self) -> None:
        """Initialize the devices and join the process group.

        Raises:
            ImportError: If torch_xla is missing or does not match the version of torch.
            ValueError: If XLA finds no device, other processes were started for the same devices, or the mesh does not
                fit the devices.
        """
        environment.check_drives_machine_alone()
        renew_thread_pool()
        named = environment.pjrt_device()
        torch_xla = import_torch_xla()
        runtime = _module("torch_xla.runtime")
        try:
            count = self._count_devices(runtime)
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"XLA finds no device of PJRT_DEVICE={runtime.device_type()} ({str(error).splitlines()[0]}); set "
                "PJRT_DEVICE=TPU on a machine with a TPU, PJRT_DEVICE=CPU to try a script without one"
            ) from error
        if named is None and runtime.device_type() == "CPU":
            warn("no TPU was found: XLA computes on the CPU, slowly; PJRT_DEVICE=CPU says so")
        if count > 1 and not runtime.is_spmd():
            if torch_xla._XLAC._xla_get_spmd_config_is_locked():
                raise ValueError(
                    "XLA was used in this process before the Trainer, which comes too late then to divide work over "
                    f"{count} devices; leave model and data on the CPU, or call torch_xla.runtime.use_spmd() first"
                )
            runtime.use_spmd()
        self.device = torch_xla.device()
        if count > 1 or self.mesh is not None:
            division = Division(self.mesh, count, "fsdp" if self.fsdp else "data")
            self._division = division if count > 1 else None
            self.devices = division.parts
        self.device_info.device, self.collectives.division = self.device, self._division
        self.device_info.division = self._division if self.group.is_alone else None
        if self.channels_last:
            raise ValueError("channels_last=True is not possible with XLA, which lays out memory itself; remove it")
        super().setup()
        self.group.join(self.device, (socket.gethostname(), str(self.device)))
        # As torch.manual_seed seeds other devices.
        self.device_info.set_rng_state(self.collectives.broadcast(torch.initial_seed()))
        if self.precision is not None and self.precision.mode == "fp16":
            warn(
                "mixed_precision='fp16' on XLA: 'bf16' is recommended, which TPUs compute in and whose gradients need "
                "no scaling",
            )
        logger.info("%s (%s)", format_count(count, "XLA device"), runtime.device_type())

    def _count_devices(self, runtime: Any) -> int:
        """Return the number of devices of all hosts."""
        if runtime.world_size() > 1:
            raise ValueError(
                f"torch_xla.launch started {runtime.world_size()} replicas, each of which would train by itself; call "
                "the function without it: one process uses all devices"
            )
        hosts = self.group.place.world_size
        if runtime.device_type() == "TPU" and runtime.process_count() != hosts:
            raise ValueError(
                f"the TPU has {runtime.process_count()} hosts, but this process knows of {hosts}; "
                "start all with `trainer-kit launch --tpu --num-nodes … --node-rank … --master-addr …`"
            )
        return int(runtime.global_runtime_device_count())

    def seed(self, value: int) -> None:
        super().seed(value)
        self.device_info.set_rng_state(value)

    # Model and optimizer

    def defer_gradient_sync(self, is_deferred: bool) -> None:
        if is_deferred:
            raise ValueError(
                "auto_find_batch_size=True is not possible with XLA, whose devices run out of memory when they compile "
                "a whole step; set it to False and try a smaller per_device_train_batch_size"
            )

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        names = names_by_parameter(model)
        if self.downcast_bf16 and any(parameter.device.type != "xla" for parameter in model.parameters()):
            model = downcast_module(model)
        super().prepare(model)
        let_transformers_trace()
        tie_again(model, names.values())
        now = dict(model.named_parameters())
        for old, same in names.items():
            if old is not now[same[0]]:
                self._moved[old] = now[same[0]]
        if not self.fsdp or self._division is None:
            return model
        division = self._division
        fully_sharded = _module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
        wrapped: torch.nn.Module = fully_sharded.SpmdFullyShardedDataParallel(
            model, mesh=division.mesh, shard_output=lambda output, mesh: map_tensors(division.mark_samples, output)
        )
        model._backward_hooks.popitem()  # its barrier takes only tuples of tensors, and warns of other outputs
        return wrapped

    def enable_activation_checkpointing(
        self, model: torch.nn.Module, options: CheckpointingOptions | None = None
    ) -> None:
        if (options is not None and not options.are_default) or not enable_own_checkpointing(model):
            raise ValueError(
                "gradient_checkpointing needs a model that has gradient_checkpointing_enable() on XLA, and takes no "
                "options there; use gradient_checkpointing=True with a transformers model, or False"
            )
        # torch's own function ignores XLA's generator, and the compiler would remove the recomputation.
        recompute = _module("torch_xla.utils.checkpoint").checkpoint
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):  # of transformers
                module._gradient_checkpointing_func = recompute

    def compile(self, model: torch.nn.Module, options: CompileOptions) -> None:
        logger.warning("torch_compile has no effect on XLA, which compiles everything by itself")

    def release_models(self) -> None:
        self._moved.clear()

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return getattr(model, "_orig_module", model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if isinstance(optimizer, torch.optim.Adafactor):
            warn(
                "Adafactor reads the norm of each parameter in every step, for which XLA has to wait; "
                "optim='adamw_torch' and 'sgd' do not",
            )
        for group in optimizer.param_groups:
            group["params"] = self.prepared_parameters(group["params"])
        for parameter in [each for each in optimizer.state if each in self._moved]:
            optimizer.state[self._moved[parameter]] = optimizer.state.pop(parameter)
        self._place_state(optimizer)
        if optimizer not in self._followed:
            self._followed.add(optimizer)
            optimizer.register_load_state_dict_post_hook(self._place_state)
        return optimizer

    def prepared_parameters(self, parameters: Iterable[Any]) -> list[torch.Tensor]:
        return [self._moved.get(parameter, parameter) for parameter in parameters]

    def _place_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move an optimizer's state to where a step expects it, sharded like its parameter."""
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or (name == "step" and not computes_on_device(optimizer)):
                    continue
                state[name] = value = value.to(self.device)
                if self.fsdp and self._division is not None and value.shape == parameter.shape and value.ndim:
                    self._division.mark_longest(value)
        self.device_info.mark_step()

    # Step

    def prepare_loader(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator that sends each batch to the devices while the previous one is in use."""
        waiting: Any = None
        for item in batches:
            item.batch = self._sent(item.batch)
            if waiting is not None:
                yield waiting
            waiting = item
        if waiting is not None:
            yield waiting

    def to_device(self, batch: Any) -> Any:
        self.shapes.record(batch)
        return self._sent(batch)

    def _sent(self, batch: Any) -> Any:
        """Return the batch on the devices; objects with their own `to` (graphs) are replicated, in their own dtypes."""
        waiting: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        for tensor in tensors(batch):
            if tensor.device.type != "xla":
                sharding = self._division.along_samples(tensor) if self._division is not None else None
                waiting.setdefault(id(sharding), (sharding, []))[1].append(tensor)
        if not waiting:
            return move(batch, self.device)
        xla_model = _module("torch_xla.core.xla_model")
        moved: dict[int, torch.Tensor] = {}
        for sharding, group in waiting.values():
            sent = xla_model.send_cpu_data_to_device([self._cast(each) for each in group], self.device, sharding)
            moved |= {id(tensor): there for tensor, there in zip(group, sent, strict=True)}
        return move(map_tensors(lambda tensor: moved.get(id(tensor), tensor), batch), self.device)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(DOWNCAST.get(tensor.dtype, tensor.dtype)) if self.downcast_bf16 else tensor

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        yield
        self.device_info.mark_step()

    def _take_step(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor | float | None) -> None:
        with varying_rates(optimizer, self.device_info.traced_scalar):
            super()._take_step(optimizer, norm)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        try:
            super().backward(loss, **options)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise RuntimeError(
                "a backward() ran on the CPU in this process before XLA began, after which XLA computes no gradients "
                "in it (https://github.com/pytorch/xla/issues/4174); train on the CPU in another process"
            ) from error

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients before the step's graph runs, so that the graph does not keep them as outputs."""
        super().zero_grad(optimizer)
        self.device_info.mark_step()

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        # The parameters themselves: on XLA only object identity shows which are tied.
        return without_wrappers(self.unwrap(model)).state_dict(keep_vars=True)


def import_torch_xla() -> Any:
    """Import and return torch_xla.

    Raises:
        ImportError: If torch_xla is missing or does not match the version of torch.
    """
    handlers = [*logging.root.handlers]
    try:
        return _module("torch_xla")
    except ImportError as error:
        raise ImportError(
            f"XLA needs torch_xla ({error}), of the same version as torch, here {torch.__version__}; both go together "
            "with pip install 'torch~=2.9.0' 'torch-xla[tpu]~=2.9.0'"
        ) from error
    finally:
        logging.root.handlers[:] = handlers  # its import adds handlers to the root logger


def seed_devices(value: int) -> None:
    """Seed the devices' generator, which torch.manual_seed does not reach, if XLA is initialized in this process."""
    if _module("torch_xla")._XLAC._xla_runtime_is_initialized():
        _module("torch_xla").manual_seed(value)


def _module(name: str) -> Any:
    return importlib.import_module(name)
