"""What this process knows of its run: `PartialState`, `AcceleratorState` and `GradientState`, shared by all users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from trainer_kit.accelerator.process_operations import ProcessOperations
from trainer_kit.accelerator.utils.dataclasses import GradientAccumulationPlugin
from trainer_kit.accelerator.utils.enums import DistributedType
from trainer_kit.accelerator.wrappers import AccumulationState
from trainer_kit.config import environment
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.regroup import refuse_to_join
from trainer_kit.strategies.select import choose_strategy

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized", "share"]


class PartialState(ProcessOperations):
    """Facts of the run, without an Accelerator: processes, device, and execution on selected processes.

    All objects of a process share their attributes. The strategy is that of the latest Accelerator, or else one that
    the first of them chooses.

    Args:
        cpu: Whether to choose the CPU even where there is an accelerator.
        kwargs: Arguments of the process group, without effect: the launcher's variables and the device decide.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        self.__dict__.setdefault("debug", environment.debug())
        if "strategy" not in self.__dict__:
            refuse_to_join()
            self.strategy = choose_strategy(TrainingArguments(use_cpu=cpu or environment.use_cpu()))
            self.strategy.setup()

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of devices that the run is distributed over; can be set, which only what reads it here follows."""
        kind: DistributedType = self._shared_state.get("_kind") or super().distributed_type
        return kind

    @distributed_type.setter
    def distributed_type(self, kind: DistributedType) -> None:
        self._shared_state["_kind"] = kind

    @property
    def backend(self) -> str | None:
        """What the processes communicate with, such as "gloo"; None for a single process."""
        return self.strategy.collectives.backend

    @property
    def initialized(self) -> bool:
        """Whether there is a strategy."""
        return bool(self._shared_state)

    def __reduce__(self) -> tuple[type[PartialState], tuple[()]]:
        return type(self), ()

    def destroy_process_group(self, group: Any = None) -> None:
        """Do nothing: the process group ends with the process."""

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the strategy, so that the next object chooses again."""
        PartialState._shared_state.clear()


class AcceleratorState(PartialState):
    """`PartialState` with the precision of the latest Accelerator."""

    deepspeed_plugin = None
    deepspeed_plugins = None
    megatron_lm_plugin = None
    torch_tp_plugin = None
    parallelism_config = None
    device_mesh = None

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__(cpu)
        if mixed_precision is not None and mixed_precision != self.mixed_precision:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} differs from that of the Accelerator, {self.mixed_precision!r}; "
                "give it to Accelerator()"
            )

    @classmethod
    def of(cls, strategy: Strategy) -> AcceleratorState:
        """Return the state of an Accelerator, whose precision may not be that of the latest one."""
        state = cls.__new__(cls)
        state.__dict__ = PartialState._shared_state | {"strategy": strategy}
        return state

    @property
    def mixed_precision(self) -> str:
        """Precision of prepared models: "no", "fp16", "bf16" or "fp8"."""
        precision = self.strategy.precision
        return "no" if precision is None else precision.mode

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by torch's `fully_shard`."""
        return self.distributed_type == DistributedType.FSDP

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, mixed precision {self.mixed_precision})"


class GradientState:
    """Position of a loop within an optimizer step.

    Args:
        gradient_accumulation_plugin: Settings to use from now on; None: as they are.
        flow: Accumulation state of an Accelerator; None: the latest one's.
    """

    _latest: ClassVar[AccumulationState | None] = None

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        flow: AccumulationState | None = None,
    ) -> None:
        self._flow = flow or GradientState.flow_of_latest()
        if gradient_accumulation_plugin is not None:
            self._flow.settings = gradient_accumulation_plugin

    @staticmethod
    def flow_of_latest() -> AccumulationState:
        """Return the accumulation state of the latest Accelerator; without one, a state of no loop."""
        return GradientState._latest or AccumulationState(PartialState().strategy)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an optimizer step."""
        return self._flow.sync_gradients

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step on each process."""
        return self._flow.settings.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self._flow.settings.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch ends a step."""
        return self._flow.settings.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return self._flow.settings.to_kwargs()

    @property
    def dataloader_references(self) -> Sequence[Any]:
        """Prepared loaders that are being iterated, innermost last."""
        return tuple(self._flow.loaders)

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being iterated; None if there is none."""
        return self._flow.loaders[-1] if self._flow.loaders else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self._flow.loaders)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch."""
        return self.in_dataloader and self._flow.loaders[-1].gave_last

    @property
    def remainder(self) -> int:
        """Samples in the last batch of all processes without repeats.

        0 for a whole batch; -1 without a loader, if the number is unknown, or with `drop_last`.
        """
        return self._flow.loaders[-1].remainder if self._flow.loaders else -1

    @property
    def initialized(self) -> bool:
        """Whether an Accelerator exists."""
        return GradientState._latest is not None

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False: XLA sums gradients within the step's graph."""
        return False

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )

    @staticmethod
    def _reset_state() -> None:
        """Forget the latest Accelerator's position."""
        GradientState._latest = None


def is_initialized() -> bool:
    """Return whether an `Accelerator`, a `PartialState` or an `AcceleratorState` was made in this process."""
    return "strategy" in PartialState._shared_state


def share(strategy: Strategy, flow: AccumulationState) -> None:
    """Make the strategy and the position of an Accelerator those of this process's states."""
    refuse_to_join()
    shared = PartialState._shared_state
    shared.setdefault("debug", environment.debug())
    shared.pop("_kind", None)
    shared["strategy"] = strategy
    GradientState._latest = flow
