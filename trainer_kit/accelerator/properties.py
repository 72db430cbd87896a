"""`AcceleratorProperties`: the settings of an Accelerator that accelerate's scripts ask for."""

from __future__ import annotations

from typing import Any

from trainer_kit.accelerator.process_facts import ProcessFacts
from trainer_kit.accelerator.utils.dataclasses import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)


class AcceleratorProperties(ProcessFacts):
    """The settings of an Accelerator as attributes, under accelerate's names.

    Attributes:
        dataloader_config: See `DataLoaderConfiguration`.
        handlers: Objects of `kwargs_handlers` by class.
    """

    dataloader_config: DataLoaderConfiguration
    handlers: dict[type, Any]
    has_lomo_optimizer: bool = False
    """Always False: LOMO is not available."""
    deepspeed_plugin: None = None
    """Always None: DeepSpeed is not available."""
    parallelism_config: None = None
    """Always None: give the strategy of the processes by `fsdp_plugin`."""
    torch_device_mesh: None = None
    """Always None: there is no mesh of accelerate's `parallelism_config`."""

    @property
    def even_batches(self) -> bool:
        """Value of `dataloader_config.even_batches`; can be set for loaders that are prepared later."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def dispatch_batches(self) -> bool | None:
        """Value of `dataloader_config.dispatch_batches`."""
        return self.dataloader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Value of `dataloader_config.use_seedable_sampler`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Value of `dataloader_config.use_stateful_dataloader`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Value of `dataloader_config.non_blocking`."""
        return self.dataloader_config.non_blocking

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The `DistributedDataParallelKwargs` among `kwargs_handlers`; None if there is none."""
        return self.handlers.get(DistributedDataParallelKwargs)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The `InitProcessGroupKwargs` among `kwargs_handlers`; None if there is none."""
        return self.handlers.get(InitProcessGroupKwargs)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The `GradScalerKwargs` among `kwargs_handlers`; None if there is none."""
        return self.handlers.get(GradScalerKwargs)

    @property
    def native_amp(self) -> bool:
        """Whether prepared models compute in float16 or bfloat16."""
        precision = self.strategy.precision
        return precision is not None and precision.mode in ("fp16", "bf16")

    @property
    def multi_device(self) -> bool:
        """Whether several processes have a device each that is not the CPU."""
        return self.num_processes > 1 and self.device.type not in ("cpu", "xla")

    @property
    def should_save_model(self) -> bool:
        """Whether this process is the one of its machine that saves a model."""
        return self.is_local_main_process

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model is sharded over the processes."""
        return self.strategy.sharding.is_active

    is_composable_parallelism_enabled = is_fsdp2
    """Same as `is_fsdp2`."""

    @property
    def fp8_backend(self) -> str:
        """Package that computes in fp8: "AO" for torchao; "NO" without `mixed_precision="fp8"`."""
        precision = self.strategy.precision
        return "AO" if precision is not None and precision.mode == "fp8" else "NO"
