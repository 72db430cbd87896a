"""`DDP`: data parallelism on one machine, with torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import multiprocessing.util
import socket
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from trainer_kit.config import environment
from trainer_kit.strategies import comm_hooks
from trainer_kit.strategies.ddp_buckets import FixedBuckets, sending_buffers
from trainer_kit.strategies.ddp_module import Replica, may_train, model_facts, take_from_main
from trainer_kit.strategies.grad_exchange import GradientExchange
from trainer_kit.strategies.grad_norms import GradientNorms
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.process_collectives import ProcessCollectives
from trainer_kit.strategies.process_group import Membership, ProcessGroup, check_own_gpus, default_patience
from trainer_kit.strategies.process_session import ProcessSession
from trainer_kit.strategies.regroup import Regroupable
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.utils.foreach import copy_all
from trainer_kit.utils.units import pluralize

_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
# `prepare` broadcasts weights, and each step the buffers, but in `join_uneven`. The oldest torch lacks some names.
_SENDS_BY_ITSELF: dict[str, Any] = {
    name: False
    for name in ("init_sync", "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers")
    if name in _PARAMETERS
}
logger = logging.getLogger("trainer_kit")

_UNCALLED = (
    "the loss was computed without calling the model itself, so that processes would not exchange its gradients; call "
    "model(...) with gradients before backward, not a method of it or its parts"
)


class DDP(SingleDevice, Regroupable):
    """Data parallelism over the processes of one machine; with one process, the same as `SingleDevice`.

    The backward pass sums gradients over all processes. The main process broadcasts the weights at the start, and the
    buffers (a batch norm's statistics) after each step. The backend is gloo on CPUs and nccl on NVIDIA GPUs.

    Args:
        find_unused_parameters: Whether each backward pass searches for parameters that the loss does not use, which
            costs time.
        static_graph: Whether each step runs the same graph, see torch's DistributedDataParallel.
        bucket_cap_mb: Size of a gradient bucket in MiB; None: torch's default. The buckets are the same in every step.
        gradient_as_bucket_view: Whether gradients are views of the buckets, which saves one copy of all gradients.
        ddp_timeout: Seconds after which a collective fails because a process has not joined it.
        gradient_compression: "bf16" sends gradients in bfloat16; "no" sends them in their own dtype.
        comm_hook: Communication hook of torch, as three values: "fp16", "bf16" or "power_sgd"; the dtype of what
            PowerSGD sends ("fp16", "bf16", or "no" for the gradients' own); and arguments of torch's `PowerSGDState`.
            None: no hook.
        sync_batch_norm: Whether batch norms compute statistics over all processes (NVIDIA GPUs only).
        heartbeat_timeout: Seconds after which a process that does not answer counts as lost; None: 30, or 12 where the
            launcher continues without lost machines.
        device: Device of this process; None: one GPU for each process if there are GPUs, else the CPU.
        precision: See `Strategy`.

    Raises:
        ValueError: If a launcher's variables are invalid, if there are more processes than GPUs, or if the processes
            run on several machines (see `MultiNode`).
    """

    spans_machines = False
    session_type: type[ProcessSession] = ProcessSession

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: int | None = None,
        gradient_as_bucket_view: bool = True,
        ddp_timeout: float = 1800.0,
        gradient_compression: Literal["no", "bf16"] = "no",
        comm_hook: tuple[str, str, Mapping[str, Any]] | None = None,
        sync_batch_norm: bool = False,
        heartbeat_timeout: float | None = None,
        device: str | torch.device | None = None,
        precision: Precision | None = None,
    ) -> None:
        place = environment.place()
        if place.has_several_machines and not self.spans_machines:
            raise ValueError(
                f"DDP is for one machine, but this run has {place.world_size} processes of which "
                f"{place.local_world_size} are here; use strategy='auto' or MultiNode(...)"
            )
        if gradient_compression not in ("no", "bf16"):
            raise ValueError(f"gradient_compression={gradient_compression!r} is not known; use 'no' or 'bf16'")
        if comm_hook is not None and gradient_compression != "no":
            raise ValueError("comm_hook and gradient_compression both change how gradients are sent; give one of them")
        if comm_hook is not None:
            comm_hooks.check(*comm_hook[:2])
        if heartbeat_timeout is None:
            heartbeat_timeout = default_patience()
        for name, seconds in (("ddp_timeout", ddp_timeout), ("heartbeat_timeout", heartbeat_timeout)):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0")
        if device is None and place.world_size > 1:
            device = _own_gpu(place) if torch.cuda.is_available() else "cpu"
        super().__init__(device, precision)
        self.group = ProcessGroup(place, ddp_timeout, heartbeat_timeout)
        self.device_info.host_processes = place.local_world_size
        self.collectives: ProcessCollectives = ProcessCollectives(self.group)
        self.session = self.session_type(self.collectives)
        self.sync_batch_norm = sync_batch_norm
        self.gradient_compression = gradient_compression
        self.comm_hook = comm_hook
        self._is_uneven = False
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters and not static_graph,  # a static graph finds them anyway
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._later = False
        self._is_in_step = False  # whether the step that has begun has not changed the weights
        self._kept: list[torch.Tensor] = []  # the buffers as they were when the step began
        self._replicas: list[Any] = []  # a Replica of each prepared model
        self._trained: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()

    # Start and end of a run

    def setup(self) -> None:
        """Join the process group; one that the program has already created is used.

        Raises:
            ValueError: If the rendezvous fails: no process answers, a port is in use, or processes are missing.
        """
        super().setup()
        joins = self.group.join(self.device, self._location())
        if joins or self.world_size != self.group.place.world_size:
            self.collectives.take_place()
        if joins or self.group.is_newcomer:
            # At the end of a child of multiprocessing too, which forgets what was registered before it was forked.
            multiprocessing.util.Finalize(None, shut_down, exitpriority=10)
        if joins:
            places = self.collectives.gather_object(self._location())
            check_own_gpus(places)  # also in a group that the program created
            self._report(places)

    def _report(self, places: list[tuple[str, str]]) -> None:
        """Log the machine and the device of each process. Collective."""
        if self.is_main:
            hosts: dict[str, list[int]] = {}  # several only in a group that the program created
            for rank, (host, _) in enumerate(places):
                hosts.setdefault(host, []).append(rank)
            lines = [f"{host}: {describe_ranks(places, ranks)}" for host, ranks in hosts.items()]
            logger.info("%d processes on %s", self.world_size, "; ".join(lines))

    def _location(self) -> tuple[str, str]:
        """Return the host name and the device of this process, with the UUID of a GPU."""
        host, device = socket.gethostname(), str(self.device)
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            device = f"{properties.name} {getattr(properties, 'uuid', self.device)}"
        return host, device

    def teardown(self, error: BaseException | None = None) -> None:
        for replica in self._replicas:
            if isinstance(replica, Replica) and replica.exchange is not None:
                replica.exchange.close()
        super().teardown(error)

    # Loss of other processes

    @property
    def regroupable(self) -> Regroupable | None:
        # NCCL's collectives do not fail when a peer is lost: those processes start again.
        # One that trains alone, and has replicas, has lost all others or will join some.
        is_own = self.group.is_own or (self.group.is_alone and bool(self._replicas))
        is_possible = environment.regroup_folder() is not None and is_own and self.device.type == "cpu"
        return self if is_possible else None

    def facts(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        facts = {f"parameter {place} of group {number}": str(list(parameter.shape))
                 for number, group in enumerate(optimizer.param_groups)
                 for place, parameter in enumerate(group["params"])}  # fmt: skip
        model_now = {name: text.replace(", frozen", "") for name, text in model_facts(model).items()}  # it is healed
        return model_now | {"strategy": type(self).__name__, "optimizer": type(optimizer).__name__} | facts

    def expect_regroup(self, is_expected: bool) -> None:
        self.group.goes_on = is_expected

    def leave_group(self) -> None:
        if not self.group.is_alone:
            self.group.break_off()
        synchronized = [reference for replica in self._replicas if (reference := replica.reference()) is not None]
        for replica in self._replicas:
            replica.let_go()
            if replica.exchange is not None:
                replica.exchange.close()
        if any(reference() is not None for reference in synchronized):
            gc.collect()  # the old hooks would send gradients too
        self.group.leave()

    def join_group(self) -> None:
        place = environment.place()
        self.group.join_again(place, self.device, self._location())
        self.collectives.take_place()
        for replica in self._replicas:
            replica.let_go()  # a newcomer has one without exchange
            replica.exchange = self._exchange(replica.module) if self._later and not self.group.is_alone else None
        if not self.group.is_alone:
            self._report(self.collectives.gather_object(self._location()))

    def keep_buffers(self) -> None:
        if not self.group.goes_on:
            return
        buffers, self._is_in_step = self._shared_buffers(), True
        if [each.shape for each in buffers] != [each.shape for each in self._kept]:
            self._kept = [each.clone() for each in buffers]
        elif buffers:
            copy_all(self._kept, buffers)

    def restore_buffers(self) -> None:
        if self._is_in_step:
            copy_all(self._shared_buffers(), self._kept)
        self._is_in_step = False

    def _shared_buffers(self) -> list[torch.Tensor]:
        return [buffer.detach() for replica in self._replicas for buffer in replica.buffers_to_share()]

    def share_model(self, model: torch.nn.Module, source: int) -> None:
        if self.group.is_alone:
            return
        with self.group.watched():
            for replica in self._replicas:
                if replica.module is model:
                    take_from_main([*model.parameters(), *replica.buffers_to_share()], source)

    # Model and step

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.world_size == 1 and not self.group.is_newcomer:
            return super().prepare(model)
        if self.sync_batch_norm:
            if self.device.type != "cuda":
                raise ValueError(
                    f"sync_batch_norm=True needs NVIDIA GPUs (torch.nn.SyncBatchNorm), but this is {self.device}"
                )
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = super().prepare(model)
        replica = Replica(model, self._wrap, self.group.watched, self._exchange(model) if self._later else None)
        self.collectives.check_same_on_all_ranks(replica.facts())
        if not self.group.is_alone:
            with self.group.watched():
                take_from_main([*model.parameters(), *replica.buffers_to_share()])
        self._replicas = [each for each in self._replicas if each.module is not model] + [replica]
        return replica

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Check that all processes have the same parameters in the same order: the state is saved by position."""
        prepared = super().prepare_optimizer(optimizer)
        if not self.group.is_alone:
            self.collectives.check_same_on_all_ranks(self._optimizer_facts(prepared))
        return prepared

    def _optimizer_facts(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the numeric options and the parameters' shapes of the optimizer's groups, in order."""
        names = {
            parameter: name if len(self._replicas) == 1 else f"{name} (of model {number})"
            for number, replica in enumerate(self._replicas)
            for name, parameter in replica.module.named_parameters()
        }
        facts = dict[str, Any]()
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):  # without groups: refused later
            owner = f"of the optimizer's group {number}"
            facts |= {f"{name} {owner}": value for name, value in group.items() if isinstance(value, (int, float))}
            for place, parameter in enumerate(group["params"]):
                name = names.get(parameter, f"number {place} (of no prepared model)")
                facts[f"parameter {name} {owner}"] = str(list(parameter.shape))
        return facts

    def release_models(self) -> None:
        self._replicas = []
        self._trained.clear()

    def _wrap(self, module: torch.nn.Module) -> FixedBuckets | None:
        if self.group.is_alone:  # after a loss of all others
            return None
        devices = [self.device] if self.device.type == "cuda" else None
        wrapped = FixedBuckets(module, device_ids=devices, **self.options, **_SENDS_BY_ITSELF)
        if self.gradient_compression == "bf16":
            comm_hooks.register(wrapped, "bf16")
        elif self.comm_hook is not None:
            comm_hooks.register(wrapped, *self.comm_hook)
        return wrapped

    def _exchange(self, module: torch.nn.Module) -> GradientExchange:
        return GradientExchange(module, self.options["bucket_cap_mb"], self.gradient_compression == "bf16")

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if isinstance(model, Replica) else model

    def to_device(self, batch: Any) -> Any:
        if self.group.heartbeat is not None:
            self.group.heartbeat.calls += 1
        return super().to_device(batch)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        # torch's static graph does not support no_sync: each micro-batch sends its gradients, with the same sum.
        if isinstance(model, Replica) and not self.options["static_graph"]:
            return model.no_sync()
        return super().no_sync(model)

    def trigger_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        return model.trigger_sync() if isinstance(model, Replica) else super().trigger_sync(model)

    @contextlib.contextmanager
    def join_uneven(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        joined = [each for model in models if isinstance(model, Replica) if (each := model.joinable()) is not None]
        self._is_uneven = True  # the main process may have no batches left
        try:
            with self.group.watched(), sending_buffers(joined), Join([*joined]):
                yield
        finally:
            self._is_uneven = False

    def defer_gradient_sync(self, is_deferred: bool) -> None:
        if is_deferred and self.sync_batch_norm:
            raise ValueError(
                "auto_find_batch_size=True is not possible with sync_batch_norm=True: where one process runs out of "
                "memory the others would wait for its batch statistics; set one of them to False"
            )
        self._later = is_deferred

    def sync_gradients(self, model: torch.nn.Module) -> None:
        if isinstance(model, Replica) and model.exchange is not None:
            with self.group.watched():
                model.exchange.finish(self.collectives.all_reduce_ints)

    def abandon_gradient_sync(self, model: torch.nn.Module) -> None:
        if isinstance(model, Replica) and model.exchange is not None:
            with self.group.watched():
                model.exchange.abandon()

    def discard_gradient_sync(self, model: torch.nn.Module) -> None:
        if isinstance(model, Replica) and model.exchange is not None:
            with self.group.watched():
                model.exchange.discard()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        is_uncalled = bool(self._replicas) and not any(replica.called for replica in self._replicas)
        if is_uncalled and may_train(loss, self._replicas):
            raise ValueError(_UNCALLED)
        with self.group.watched():
            # DistributedDataParallel averages gradients over the processes; this strategy sums them.
            super().backward(loss if self.world_size == 1 else loss * self.world_size, **options)
            # A loss may call the model in its backward pass, and a loop of the user's own train other models.
            if is_uncalled and not self.shapes.by_hand and not any(replica.called for replica in self._replicas):
                raise ValueError(_UNCALLED)
            for replica in self._replicas:
                if replica.exchange is not None:
                    replica.exchange.send_rest()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        max_value: float | None = None,
        nonfinite: str = "ignore",
    ) -> GradientNorms | None:
        if self.group.heartbeat is None:
            norms = super().step(optimizer, max_norm, max_value, nonfinite)
            self._is_in_step = False
            return norms
        self._check_step(optimizer)
        # Only the buffers of this optimizer's models: another model's graph may still need its own (GANs).
        buffers = [buffer for replica in self._trained[optimizer] for buffer in replica.buffers_to_share()]
        if buffers and not self._is_uneven:
            with self.group.watched():  # before the weights change: after a loss the step can be taken again
                take_from_main(buffers)
        norms = super().step(optimizer, max_norm, max_value, nonfinite)
        self._is_in_step = False
        self.group.heartbeat.steps += 1
        return norms

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse parameters whose gradients would not be exchanged."""
        if optimizer in self._trained:
            return
        known = {id(parameter): replica for replica in self._replicas for parameter in replica.module.parameters()}
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strangers = [parameter for parameter in own if id(parameter) not in known]
        if self._replicas and strangers:
            raise ValueError(
                f"the optimizer has {len(strangers)} parameters that are not the model's, so that processes would not "
                "exchange their gradients; make what they belong to (a loss with weights) a part of the model"
            )
        trained = {id(known[id(parameter)]) for parameter in own if id(parameter) in known}
        self._trained[optimizer] = [replica for replica in self._replicas if id(replica) in trained]


def shut_down() -> None:
    """Leave the process group cleanly; runs automatically when the process ends."""
    # The group's threads need Python to free a collective's tensors, and abort the process if Python is finalizing.
    # Destroying the group without references waits for them.
    for replica in list(Replica.alive):
        replica.let_go()
    Membership.leave()


def _own_gpu(place: environment.Place) -> torch.device:
    """Return the GPU of this process; if the launcher exposes only its own, that is number 0."""
    count = torch.cuda.device_count()
    if place.local_rank >= count > 1:
        raise ValueError(
            f"{place.local_world_size} processes on this machine are more than its {count} GPUs; start at most "
            f"{count}, or train on the CPU (use_cpu=True, launch --cpu)"
        )
    return torch.device("cuda", min(place.local_rank, count - 1))


def describe_ranks(places: list[tuple[str, str]], ranks: list[int]) -> str:
    """Describe ranks and devices as "ranks 0-7 on 8 x NVIDIA H100", without the UUIDs of GPUs."""
    devices = Counter(places[rank][1].rpartition(" ")[0] or places[rank][1] for rank in ranks)
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    on = ", ".join(f"{count} x {device}" if count > 1 else device for device, count in devices.items())
    return f"{pluralize('rank', len(ranks))} {numbers} on {on}"
