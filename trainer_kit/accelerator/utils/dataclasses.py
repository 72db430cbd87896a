"""Configuration objects of an `Accelerator`, with all fields that accelerate's have."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar

import torch

from trainer_kit.accelerator.profiling import make_profiler
from trainer_kit.accelerator.utils.enums import (
    BaseEnum,
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
)
from trainer_kit.config import environment
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BaseEnum",
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TorchDynamoPlugin",
]


@dataclasses.dataclass
class KwargsHandler:
    """Base class of configuration objects. Fields without effect are named in one warning if they are given."""

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        given = [name for name in self._WITHOUT_EFFECT if name in self.to_kwargs()]
        if given:
            warn(f"{type(self).__name__}: {join_names(given, most=None)} without effect; see 'Coming from' in the docs")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all fields by name."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        fields = dataclasses.fields(self)
        defaults = {each.name: each.default for each in fields if each.default is not dataclasses.MISSING} | {
            each.name: each.default_factory() for each in fields if each.default_factory is not dataclasses.MISSING
        }
        return {name: value for name, value in self.__dict__.items() if name in defaults and defaults[name] != value}


@dataclasses.dataclass
class ProjectConfiguration(KwargsHandler):
    """Folders and checkpoint retention of a run.

    Args:
        project_dir: Folder of the run; `save_state` without a folder writes to `project_dir/checkpoints/checkpoint_N`.
        logging_dir: Folder of the trackers' files; None for `project_dir`.
        automatic_checkpoint_naming: Whether `save_state` uses such folders even if it is given a folder.
        total_limit: Number of these checkpoints to keep; None keeps all.
        iteration: Number of the first one, unless the folder already holds some.
        save_on_each_node: Without effect: machines without a shared disk are detected.

    Raises:
        ValueError: If `total_limit` is below 1 or `iteration` is negative.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("save_on_each_node",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit={self.total_limit} keeps no checkpoint; use None to keep all, or at least 1")
        if self.iteration < 0:
            raise ValueError(f"iteration={self.iteration} is negative; checkpoints are numbered from 0")

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the folder of the run, and that of the trackers' files if it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclasses.dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation.

    Args:
        num_steps: Batches per optimizer step on each process; None: 1.
        adjust_scheduler: Without effect: learning rates are those of accelerate under either value.
        sync_with_dataloader: Whether a loader's last batch ends a step, even if fewer batches were accumulated.
        sync_each_batch: Whether to all-reduce the gradients of each batch; takes time, and saves memory where gradients
            are sharded.

    Raises:
        ValueError: If `num_steps` is below 1.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("adjust_scheduler",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_steps = 1 if self.num_steps is None else self.num_steps
        if self.num_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={self.num_steps} must be at least 1")


@dataclasses.dataclass
class DataLoaderConfiguration(KwargsHandler):
    """Settings of prepared loaders.

    Args:
        split_batches: Whether a loader's batch size is that of all processes together, instead of each process's.
        dispatch_batches: Without effect: each process reads its own batches.
        even_batches: Whether samples are repeated so that all processes have the same number of batches. If False, the
            last batches of some processes are smaller or missing; see `Accelerator.join_uneven_inputs`.
        use_seedable_sampler: Whether shuffled loaders use the order of accelerate's `SeedableRandomSampler`. Every
            order is reproducible, see `PreparedLoader`.
        data_seed: Seed of that order; None: torch's initial seed.
        non_blocking: Without effect: copies from page-locked memory never block.
        use_stateful_dataloader: Without effect: every prepared loader has `state_dict()`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.dispatch_batches:
            warn("DataLoaderConfiguration: dispatch_batches=True has no effect here: each process reads its batches")
        if self.data_seed is not None and not self.use_seedable_sampler:
            warn("DataLoaderConfiguration: data_seed has no effect without use_seedable_sampler=True")


@dataclasses.dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of torch's DistributedDataParallel, see `trainer_kit.DDP`; without effect in a single process.

    `dim` and `check_reduction` have no effect. Buffers are always broadcast, after each step. `comm_hook`,
    `comm_wrapper` and `comm_state_option` (of PowerSGD's state) choose torch's communication hooks.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = dataclasses.field(default_factory=dict)

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("dim", "broadcast_buffers", "check_reduction")

    def __post_init__(self) -> None:
        super().__post_init__()
        none, given = DDPCommunicationHookType.NO, self.to_kwargs()
        if "comm_wrapper" in given and self.comm_hook == none:
            warn("DistributedDataParallelKwargs: comm_wrapper has no effect without comm_hook")
        if "comm_state_option" in given and self.comm_hook != DDPCommunicationHookType.POWER_SGD:
            warn("DistributedDataParallelKwargs: comm_state_option has no effect without comm_hook='power_sgd'")

    def options(self) -> dict[str, Any]:
        """Return the arguments of `DDP`."""
        names = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
        options = {name: getattr(self, name) for name in names}
        hook, wrapper = DDPCommunicationHookType(self.comm_hook), DDPCommunicationHookType(self.comm_wrapper)
        if hook != DDPCommunicationHookType.NO:
            options["comm_hook"] = (hook.value, wrapper.value, self.comm_state_option)
        return options


@dataclasses.dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of the process group.

    Args:
        backend: Without effect: the device decides between gloo and nccl.
        init_method: Without effect: the launcher's variables decide.
        timeout: How long a process waits in a collective; None: 30 minutes.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("init_method",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend not in (None, "nccl", "gloo"):
            raise ValueError(f"backend={self.backend!r} is not available; leave it out: the device decides")
        if self.backend == "gloo" and torch.cuda.is_available():
            warn("InitProcessGroupKwargs: backend='gloo' has no effect on GPUs, which use nccl")

    def options(self) -> dict[str, Any]:
        """Return the arguments of `DDP`."""
        return {} if self.timeout is None else {"ddp_timeout": self.timeout.total_seconds()}


@dataclasses.dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of torch's `GradScaler`, which fp16 uses."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclasses.dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`, for `Accelerator.autocast` and prepared models."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclasses.dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of torchao's fp8 layers, which have no effect here: `mixed_precision="fp8"` decides."""

    config: Any = None
    module_filter_func: Callable[..., Any] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        "config", "module_filter_func", "pad_inner_dim", "enable_fsdp_float8_all_gather",
    )  # fmt: skip


@dataclasses.dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of torch's profiler, for `Accelerator.profile`.

    Args:
        activities: Names of what is recorded, such as ["cpu", "cuda"]; None: all that there is.
        schedule_option: Arguments of `torch.profiler.schedule`; None: every step is recorded.
        on_trace_ready: Called with the profiler when a cycle of the schedule ends.
        record_shapes: See `torch.profiler.profile`, like the next four.
        profile_memory: See there.
        with_stack: See there.
        with_flops: See there.
        with_modules: See there.
        output_trace_dir: Folder for `profile_RANK.json`, a trace for chrome://tracing; None: none is written.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """Return a profiler with these settings.

        Raises:
            ValueError: If an activity is not known.
        """
        fields = {name: value for name, value in vars(self).items() if name != "output_trace_dir"}
        return make_profiler(schedule=fields.pop("schedule_option"), **fields)


@dataclasses.dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile` for prepared models.

    Args:
        backend: A `DynamoBackend` or its name; "NO" compiles nothing; None: the launcher's choice, else "NO".
        mode: See `torch.compile`.
        fullgraph: See `torch.compile`.
        dynamic: See `torch.compile`.
        options: Without effect.
        disable: Whether nothing is compiled.
        use_regional_compilation: Whether only the blocks that the model repeats are compiled.
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("options",)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = str(self.backend or environment.dynamo_backend()).upper()
        if name not in DynamoBackend:
            raise ValueError(f"the compiler {name!r} is not known; use one of {join_names(DynamoBackend.list(), None)}")
        self.backend = DynamoBackend(name)

    def compile_options(self) -> CompileOptions | None:
        """Return the options of the compilation; None if nothing is compiled."""
        if self.disable or self.backend == DynamoBackend.NO:
            return None
        return CompileOptions(
            mode=self.mode,  # type: ignore[arg-type]  # checked there
            backend=str(self.backend).lower(),
            dynamic=self.dynamic,
            fullgraph=bool(self.fullgraph),
            regional=bool(self.use_regional_compilation),
        )


@dataclasses.dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Options of a model that is sharded over the processes, see `trainer_kit.FSDP`.

    Args:
        fsdp_version: Only 2, torch's `fully_shard`; None: 2.
        sharding_strategy: "FULL_SHARD", or "SHARD_GRAD_OP" for `reshard_after_forward=False`; None: full.
        reshard_after_forward: See `trainer_kit.FSDP`; None: True.
        cpu_offload: See `trainer_kit.FSDP(offload=)`; None: False.
        activation_checkpointing: Whether activations are recomputed in the backward pass.
        transformer_cls_names_to_wrap: Class names of the modules that are gathered as one; None: the blocks that the
            model repeats.

    The other fields have no effect: "Coming from" in the docs says what decides instead.

    Raises:
        ValueError: If `fsdp_version` is not 2, or `sharding_strategy` is not known.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: bool | None = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    _WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        "backward_prefetch", "mixed_precision_policy", "auto_wrap_policy", "ignored_modules", "state_dict_type",
        "state_dict_config", "optim_state_dict_config", "limit_all_gathers", "use_orig_params", "param_init_fn",
        "sync_module_states", "forward_prefetch", "activation_checkpointing_offload", "cpu_ram_efficient_loading",
        "min_num_params",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp_version not in (None, 2):
            raise ValueError(f"fsdp_version={self.fsdp_version!r} is not available; use 2, torch's fully_shard")
        name = getattr(self.sharding_strategy, "name", self.sharding_strategy)
        if name not in (None, "FULL_SHARD", "SHARD_GRAD_OP"):
            raise ValueError(f"sharding_strategy={name!r} is not available; use 'FULL_SHARD' or 'SHARD_GRAD_OP'")
        if self.reshard_after_forward is None:
            self.reshard_after_forward = name != "SHARD_GRAD_OP"

    def options(self) -> dict[str, Any]:
        """Return the arguments of `FSDP`."""
        offload = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "offload": bool(offload),
            "units": self.transformer_cls_names_to_wrap,
        }


HANDLERS = (
    AORecipeKwargs, AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs,
    ProfileKwargs,
)  # fmt: skip
"""Classes of objects that `kwargs_handlers` takes, one of each."""


def handlers_by_class(handlers: Iterable[Any]) -> dict[type, Any]:
    """Return the objects of `kwargs_handlers` by class.

    Raises:
        TypeError: If a handler is of another type.
        ValueError: If two are of one type.
    """
    found: dict[type, Any] = {}
    for handler in handlers:
        kind = next((each for each in HANDLERS if isinstance(handler, each)), None)
        if kind is None:
            names = join_names([each.__name__ for each in HANDLERS], most=None)
            raise TypeError(f"kwargs_handlers holds a {type(handler).__name__}; it takes {names}")
        if kind in found:
            raise ValueError(f"kwargs_handlers holds two {kind.__name__}; give one")
        found[kind] = handler
    return found
