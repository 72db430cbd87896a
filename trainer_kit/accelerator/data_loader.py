"""Making of prepared loaders, for an `Accelerator` and without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.skip import SkippedLoader, skip_first_batches
from trainer_kit.accelerator.state import GradientState, PartialState
from trainer_kit.accelerator.wrappers import AccumulationState
from trainer_kit.data.sampling import mix
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.user_warnings import warn

__all__ = [
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "PreparedLoader",
    "SeedableRandomSampler",
    "SkippedLoader",
    "make_loader",
    "prepare_data_loader",
    "skip_first_batches",
    "with_seedable_sampler",
]

DataLoaderShard = DataLoaderDispatcher = PreparedLoader  # each process reads its own batches


class SeedableRandomSampler(RandomSampler):
    """A random order that depends on the seed and the epoch alone: accelerate's, to the same indices.

    Args:
        args: Arguments of torch's `RandomSampler`.
        data_seed: Seed; None: torch's initial seed.
        kwargs: Arguments by name.

    Attributes:
        epoch: Number of the pass.
        initial_seed: Seed of the first pass.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the pass."""
        self.epoch = epoch


def with_seedable_sampler(loader: DataLoader[Any], data_seed: int | None, strategy: Strategy) -> DataLoader[Any]:
    """Return a copy of a DataLoader that shuffles, with a `SeedableRandomSampler`; another one unchanged. Collective.

    Args:
        loader: The user's DataLoader.
        data_seed: Seed of the order; None: the main process's torch seed.
        strategy: Strategy of the run.
    """
    batches = loader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    if type(sampler) is not RandomSampler:
        return loader
    seedable = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=strategy.collectives.broadcast(torch.initial_seed()) if data_seed is None else data_seed,
    )
    new = copy.copy(loader)
    # A DataLoader refuses to set these attributes after its creation.
    new.__dict__["sampler"] = seedable
    if type(batches) is BatchSampler:
        new.__dict__["batch_sampler"] = BatchSampler(seedable, batches.batch_size, batches.drop_last)
    return new


def make_loader(
    loader: DataLoader[Any],
    flow: AccumulationState,
    *,
    number: int,
    split_batches: bool,
    device_placement: bool,
    even_batches: bool,
) -> PreparedLoader:
    """Return a loader that yields this process's share of the batches. Collective.

    Args:
        loader: The user's DataLoader.
        flow: Accumulation state of the loop.
        number: Number of loaders before this one, so that loaders of equal length get different orders.
        split_batches: See `DataLoaderConfiguration`.
        device_placement: Whether to move batches to the device.
        even_batches: See `DataLoaderConfiguration`.
    """
    sampler = getattr(loader.sampler, "generator", None) or loader.generator
    seed = torch.initial_seed() if sampler is None else sampler.initial_seed()
    seed = mix(flow.strategy.collectives.broadcast(seed), number)
    return PreparedLoader(loader, flow.strategy, flow, seed, split_batches, device_placement, even_batches)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
) -> PreparedLoader:
    """Return a loader that yields this process's share of the batches, without an Accelerator. Collective.

    Args:
        dataloader: The user's DataLoader.
        device: Must be that of the run, like the next two; None: it is.
        num_processes: See `device`.
        process_index: See `device`.
        split_batches: See `DataLoaderConfiguration`.
        put_on_device: Whether to move batches to the device.
        rng_types: Without effect: the order is the same on all processes.
        dispatch_batches: Without effect: each process reads its own batches.
        even_batches: See `DataLoaderConfiguration`.
        slice_fn_for_dispatch: Without effect.
        use_seedable_sampler: See `DataLoaderConfiguration`.
        data_seed: See `DataLoaderConfiguration`.
        non_blocking: Without effect.
        use_stateful_dataloader: Without effect: every prepared loader has `state_dict()`.

    Raises:
        ValueError: If `device`, `num_processes` or `process_index` differ from those of the run.
    """
    state = PartialState()
    for name, given, own in (
        ("num_processes", num_processes, state.num_processes),
        ("process_index", process_index, state.process_index),
    ):
        if given is not None and given != own:
            raise ValueError(f"{name}={given} differs from the run's, {own}; leave it out")
    if device is not None and torch.device(device).type != state.device.type:
        raise ValueError(f"device={str(device)!r} differs from the run's, {str(state.device)!r}; leave it out")
    if slice_fn_for_dispatch is not None:
        warn("prepare_data_loader: slice_fn_for_dispatch has no effect here: each process reads its own batches")
    return make_loader(
        with_seedable_sampler(dataloader, data_seed, state.strategy) if use_seedable_sampler else dataloader,
        GradientState.flow_of_latest(),
        number=0,
        split_batches=split_batches,
        device_placement=put_on_device,
        even_batches=even_batches,
    )
