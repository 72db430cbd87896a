"""Accelerator on several processes, compared with one."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks, try_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from trainer_kit.accelerator import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    set_seed,
)
from trainer_kit.accelerator.data_loader import prepare_data_loader

pytestmark = pytest.mark.scenario


class Numbers(Dataset[Any]):
    """Sample i is (i, a random target that follows from i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.tensor(index), torch.randn(5, dtype=torch.float64, generator=generator)


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def loss_of(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    return (model(values) ** 2).mean()


def numbers(tensors: Iterable[Any]) -> list[float]:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()


def train(batch_size: int, accumulation: int, length: int, epochs: int = 2, **options: Any) -> dict[str, Any]:
    """Trains a small model; what came of it and what the first step's gradients were."""
    set_seed(4)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, step_scheduler_with_optimizer="once", **options
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = DataLoader(Numbers(length), batch_size=batch_size, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    gradients, norms, order, losses = [], [], [], []
    for _ in range(epochs):
        for indices, values in loader:
            order.append(indices.tolist())
            with accelerator.accumulate(model):
                loss = loss_of(model, values)
                accelerator.backward(loss)
                if not accelerator.sync_gradients:  # each process has its own so far
                    first = accelerator.gather(next(model.parameters()).grad.flatten()[:1])
                    assert len(set(first.tolist())) == accelerator.num_processes
                if accelerator.sync_gradients:
                    gradients.append(numbers(p.grad for p in model.parameters()))
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss, "mean")))
    return {
        "gradients": gradients,
        "norms": [float(norm) for norm in norms if norm is not None],
        "weights": numbers(accelerator.unwrap_model(model).parameters()),
        "order": order,
        "losses": losses,
        "length": len(loader),
        "rate": scheduler.get_last_lr()[0],
        "types": (accelerator.distributed_type, accelerator.num_processes, accelerator.process_index),
    }


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (2, 3), (3, 2)])
def test_gradients_are_those_of_one_process_with_the_same_global_batch(world_size: int, accumulation: int) -> None:
    length = 4 * world_size * 6
    alone = train(4 * world_size, accumulation, length)
    together = on_ranks(world_size, train, 4, accumulation, length)
    for rank, one in enumerate(together):
        assert one["types"] == (DistributedType.MULTI_CPU, world_size, rank)
        assert len(one["gradients"]) == len(alone["gradients"])
        for ours, theirs in zip(one["gradients"], alone["gradients"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
        assert one["weights"] == pytest.approx(alone["weights"], rel=1e-6, abs=1e-9)
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        assert one["length"] == alone["length"]
        assert one["rate"] == alone["rate"]  # once per optimizer step, whatever the number of processes
    for step, dealt in enumerate(zip(*(one["order"] for one in together), strict=True)):
        assert list(itertools.chain(*dealt)) == alone["order"][step]


def unseeded() -> list[int]:
    set_seed(torch.initial_seed() % 1000, device_specific=True)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(12), batch_size=2, shuffle=True))
    return [index for indices, _ in loader for index in accelerator.gather(indices).tolist()]


def test_processes_with_other_seeds_see_one_order() -> None:
    main, other = on_ranks(2, unseeded)
    assert main == other != list(range(12))
    assert sorted(main) == list(range(12))


def seedable() -> list[int]:
    """The order of all processes, which have seeds of their own."""
    set_seed(4, device_specific=True)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2, shuffle=True))
    return [index for batch in loader for index in accelerator.gather(batch).tolist()]


def test_a_seedable_sampler_has_one_order_on_all_processes() -> None:
    first, second = on_ranks(2, seedable)
    assert first == second
    assert sorted(first) == [*range(8)]


def across_accelerators() -> list[Any]:
    """What `gather_for_metrics` gives of loaders that another Accelerator, or none, has prepared."""
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    of_first = first.prepare(DataLoader(range(7), batch_size=2))
    alone = prepare_data_loader(DataLoader(range(7), batch_size=2))
    found = [_gathered(second, of_first), _gathered(first, alone), _gathered(second, second.prepare(alone))]
    assert second.prepare(alone) is alone
    return [*found, len(second._prepared.loaders)]


def _gathered(accelerator: Accelerator, loader: Any) -> list[int]:
    return sorted(index for batch in loader for index in accelerator.gather_for_metrics(batch).tolist())


def test_repeats_are_left_out_whoever_prepared_the_loader() -> None:
    assert on_ranks(2, across_accelerators) == [[[*range(7)]] * 3 + [1]] * 2


def test_split_batches() -> None:
    alone = train(6, 1, 12)
    together = on_ranks(2, train, 6, 1, 12, split_batches=True)
    assert [a + b for a, b in zip(together[0]["order"], together[1]["order"], strict=True)] == alone["order"]
    assert together[1]["weights"] == pytest.approx(alone["weights"], rel=1e-6, abs=1e-9)


def evaluated(length: int, batch_size: int, **options: Any) -> dict[str, Any]:
    """Everything that gather and gather_for_metrics give in one pass."""
    kind = options.pop("kind", "plain")
    accelerator = Accelerator(cpu=True, split_batches=options.pop("split_batches", False))
    if kind == "stream":
        given: DataLoader[Any] = DataLoader(Stream(length), batch_size=batch_size, **options)
    elif kind == "batch_sampler":
        given = DataLoader(Numbers(length), batch_sampler=OddBatches(length))
    elif kind == "single samples":
        given = DataLoader(Numbers(length), batch_size=None)
    else:
        given = DataLoader(Numbers(length), batch_size=batch_size, **options)
    loader = accelerator.prepare(given)
    tensors, objects, plain, scalars, sizes, lasts = [], [], [], [], [], []
    for batch in loader:
        indices = batch if isinstance(batch, torch.Tensor) else batch[0]
        indices = indices.reshape(-1)
        sizes.append(len(indices))
        tree = {"indices": indices, "more": (indices[:, None] * torch.ones(1, 2), [indices % 2 == 0])}
        whole = accelerator.gather_for_metrics(tree)
        assert whole["more"][0].shape == (len(whole["indices"]), 2)
        assert whole["more"][1][0].tolist() == [index % 2 == 0 for index in whole["indices"].tolist()]
        tensors += whole["indices"].tolist()
        objects += accelerator.gather_for_metrics([f"sample {index}" for index in indices.tolist()])
        rows = accelerator.gather_for_metrics(torch.stack([indices, -indices], 1).numpy())
        assert [each.tolist() for each in rows] == [[index, -index] for index in whole["indices"].tolist()]
        pairs = accelerator.gather_for_metrics(torch.stack([indices, indices], 1).flatten())  # two rows a sample
        assert pairs.tolist() == [index for index in whole["indices"].tolist() for _ in range(2)]
        plain += accelerator.gather(indices).tolist()
        scalars.append(len(accelerator.gather_for_metrics(indices.sum())))
        lasts.append(loader.gave_last)
    after = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    return {
        "tensors": tensors, "objects": objects, "plain": plain, "scalars": scalars, "after": after,
        "length": len(loader) if kind == "plain" else None, "sizes": sizes, "epoch": loader.epoch, "lasts": lasts,
    }  # fmt: skip


class OddBatches:
    """Batches of 1, 2, 3, … samples, without a batch size or a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in itertools.count(1):
            if start < self.length:
                yield list(range(start, min(start + size, self.length)))
            start += size
            if start >= self.length:
                return


@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_for_metrics_gives_each_sample_once(world_size: int) -> None:
    for length in (1, 2, 5, 12, 13, 17, 18):
        for result in on_ranks(world_size, evaluated, length, 3):
            assert result["tensors"] == list(range(length))
            assert result["objects"] == [f"sample {index}" for index in range(length)]
            assert result["sizes"] == [3] * result["length"]  # all processes have as many batches, and full ones
            assert len(result["plain"]) == 3 * world_size * result["length"]
            repeated = result["plain"][length:]
            assert repeated == [index % length for index in range(len(repeated))]
            assert result["after"] == list(range(world_size))  # no loader is being read
            assert result["epoch"] == 1
            assert result["lasts"] == [False] * (result["length"] - 1) + [True]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"kind": "stream"},
        {"kind": "stream", "num_workers": 1},
        {"kind": "batch_sampler"},
        {"kind": "single samples"},
    ],
    ids=str,
)
def test_gather_for_metrics_with_other_loaders(options: dict[str, Any]) -> None:
    for length in (7, 8):
        for result in on_ranks(2, evaluated, length, 3, **options):
            assert result["tensors"] == list(range(length))
            assert result["objects"] == [f"sample {index}" for index in range(length)]


class Noise(Numbers):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.rand(1)


def augmented(workers: int) -> list[Any]:
    set_seed(2)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Noise(12), batch_size=3, shuffle=True, num_workers=workers))
    batches = [[accelerator.gather(column).tolist() for column in batch] for batch in loader]
    return [pair for batch in batches for pair in zip(*batch, strict=True)]


def test_what_is_random_in_reading_does_not_depend_on_the_number_of_processes() -> None:
    alone = augmented(0)
    assert len({noise[0] for _, noise in alone}) == 12
    for workers in (0, 1):
        assert on_ranks(2, augmented, workers) == [alone, alone]


def test_drop_last_leaves_out_a_round_that_is_not_full() -> None:
    for result in on_ranks(2, evaluated, 17, 4, drop_last=True):
        assert result["tensors"] == list(range(16))
        assert result["length"] == 2
    for result in on_ranks(2, evaluated, 23, 4, drop_last=True):
        assert result["tensors"] == list(range(16))
        assert result["length"] == 2
        assert result["lasts"] == [False, True]


def test_split_batches_repeats_only_at_the_end() -> None:
    for result in on_ranks(2, evaluated, 9, 4, split_batches=True):
        assert result["tensors"] == list(range(9))
        assert result["sizes"] == [2, 2, 2]
        assert result["length"] == 3


def distributed_sampler() -> None:
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    Accelerator(cpu=True).prepare(DataLoader(Numbers(8), sampler=sampler))


def odd_split() -> None:
    Accelerator(cpu=True, split_batches=True).prepare(DataLoader(Numbers(8), batch_size=3))


def split_stream() -> None:
    Accelerator(cpu=True, split_batches=True).prepare(DataLoader(Stream(8), batch_size=2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (distributed_sampler, "a DataLoader has a DistributedSampler"),
        (odd_split, "split_batches=True cannot split batches of 3 over 2 processes"),
        (split_stream, "split_batches=True cannot split an iterable dataset over 2 processes"),
    ],
)
def test_loaders_that_cannot_be_dealt_out(function: Any, message: str) -> None:
    for failed in try_on_ranks(2, function):
        assert isinstance(failed.error, ValueError)
        assert message in str(failed.error)


def warned_of(length: int) -> tuple[int, list[str]]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(3), batch_size=4))
    for _ in loader:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gathered = accelerator.gather_for_metrics(torch.arange(length))
    return len(gathered), [str(each.message) for each in caught]


def test_rows_that_cannot_be_told_are_kept_with_a_warning() -> None:
    main, other = on_ranks(2, warned_of, 7)
    assert main[0] == other[0] == 7  # of the other process every sample is a repeat
    assert "got 7 rows for a batch of 4 samples, of which 1 are repeats" in main[1][0]
    assert not other[1]


def talk(folder: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank, log = accelerator.process_index, Path(folder) / "log"
    with accelerator.main_process_first():
        if rank == 0:
            time.sleep(0.2)
        with open(log, "a") as file:
            file.write(f"{rank}")
    accelerator.wait_for_everyone()
    first = log.read_text()[0]
    triggers = [accelerator.check_trigger()]
    if rank == 1:
        accelerator.set_trigger()
    triggers += [accelerator.check_trigger(), accelerator.check_trigger()]
    padded = accelerator.pad_across_processes(
        {"a": torch.ones(2, rank + 1), "b": torch.tensor(3)}, dim=1, pad_index=-1, pad_first=True
    )
    return {
        "first": first,
        "triggers": triggers,
        "padded": padded["a"].tolist(),
        "untouched": padded["b"].tolist(),
        "scalars": accelerator.gather(torch.tensor(float(rank))).tolist(),
        "uneven": accelerator.gather(torch.full((rank + 1,), rank)).tolist(),
        "sum": accelerator.reduce(torch.tensor([1.0, rank]), "sum", scale=2.0).tolist(),
        "mean": accelerator.reduce([torch.tensor(float(rank))], "mean")[0].tolist(),
        "none": accelerator.reduce(torch.tensor(float(rank)), "none").tolist(),
        "only": [
            accelerator.on_main_process(lambda: "main")(),
            accelerator.on_last_process(lambda: "last")(),
            accelerator.on_process(process_index=1)(lambda: "one")(),
            accelerator.on_local_process(lambda: "zero", local_process_index=0)(),
        ],
    }


def talk_in_another_order() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    values = {"loss": torch.tensor([1.0]), "hits": torch.tensor([10.0, 20.0]), 3: [torch.tensor(100.0)]}
    if accelerator.process_index == 1:
        values = dict(reversed(values.items()))
    reduced = accelerator.reduce({"nested": values})["nested"]
    gathered = accelerator.gather(values)
    padded = accelerator.pad_across_processes(values)
    return {"reduced": reduced, "gathered": gathered, "padded": padded, "order": [*values] == [*reduced]}


def test_dicts_may_have_another_order_on_another_process() -> None:
    for result in on_ranks(2, talk_in_another_order):
        assert result["reduced"]["loss"].tolist() == [2.0]
        assert result["reduced"]["hits"].tolist() == [20.0, 40.0]
        assert result["reduced"][3][0].item() == 200.0
        assert result["gathered"]["loss"].tolist() == [1.0, 1.0]
        assert result["gathered"]["hits"].tolist() == [10.0, 20.0] * 2
        assert result["gathered"][3][0].tolist() == [100.0, 100.0]
        assert result["padded"]["hits"].tolist() == [10.0, 20.0]
        assert result["order"]


def test_what_the_processes_do_together(tmp_path: Path) -> None:
    main, other = on_ranks(2, talk, str(tmp_path))
    for result in (main, other):
        assert result["first"] == "0"
        assert result["triggers"] == [False, True, False]
        assert result["scalars"] == [0.0, 1.0]
        assert result["uneven"] == [0, 1, 1]
        assert result["sum"] == [4.0, 2.0]
        assert result["mean"] == 0.5
        assert result["untouched"] == 3
    assert (main["none"], other["none"]) == (0.0, 1.0)
    assert main["padded"] == [[-1.0, 1.0]] * 2
    assert other["padded"] == [[1.0, 1.0]] * 2
    assert main["only"] == ["main", None, None, "zero"]
    assert other["only"] == [None, "last", "one", None]


class Unused(nn.Module):
    """A layer of which takes part in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.used(values)


def refusals_of_uncalled_models() -> list[str]:
    """Losses of a prepared model's parts, in plain and behind a checkpoint, and of a model that is not prepared."""
    accelerator, found = Accelerator(cpu=True), []
    model, stranger = make_model(), make_model()
    values = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    accelerator.prepare(model)
    for loss in (
        model[0](values).sum(),
        checkpoint(model[0], values, use_reentrant=True).sum(),
        stranger(values).sum(),
    ):
        try:
            accelerator.backward(loss)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    accelerator.strategy.shapes.by_hand = False  # as in a Trainer, where any such loss is refused
    try:
        accelerator.backward(stranger(values).sum())
    except ValueError as error:
        found.append(str(error))
    return found


def test_a_loss_without_a_call_of_the_model_is_refused() -> None:
    for found in on_ranks(2, refusals_of_uncalled_models):
        assert ["without calling the model itself" in each for each in found] == [True, True, False, True]


def with_unused(find: bool) -> tuple[Any, float]:
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=find, bucket_cap_mb=1),
        InitProcessGroupKwargs(timeout=timedelta(seconds=77)),
    ]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model, optimizer = accelerator.prepare(module := Unused(), torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.strategy.options, accelerator.strategy.group.timeout


def test_arguments_of_ddp() -> None:
    for options, timeout in on_ranks(2, with_unused, True):
        assert options["find_unused_parameters"] is True
        assert options["bucket_cap_mb"] == 1
        assert timeout == 77.0
    for failed in try_on_ranks(2, with_unused, False):
        assert "took no part in the loss" in str(failed.error)


def resumable(folder: str, save_at: int, resumes: bool, style: str) -> dict[str, Any]:
    """Three epochs with all that is random, saved after batch `save_at`, or gone on with from there."""
    set_seed(5, device_specific=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1)).double()
    set_seed(7, device_specific=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Numbers(31), batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    count, first = 0, 0
    if resumes:
        accelerator.load_state(folder)
        count, first = save_at, loader.epoch
    for epoch in range(first, 3):
        batches: Any = loader
        if resumes and style == "skip" and epoch == first:
            batches = accelerator.skip_first_batches(loader, save_at - first * len(loader))
        for _, values in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, values))
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            if count == save_at and not resumes:
                accelerator.save_state(folder)
    return {"weights": numbers(accelerator.unwrap_model(model).state_dict().values()), "count": count}


@pytest.mark.parametrize(("save_at", "style"), [(2, "plain"), (4, "skip"), (6, "plain"), (12, "skip"), (14, "skip")])
def test_resuming_is_bitwise_equal(save_at: int, style: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    expected = on_ranks(2, resumable, folder, save_at, False, style)
    resumed = on_ranks(2, resumable, folder, save_at, True, style)
    assert resumed == expected
    assert expected[0]["weights"] == expected[1]["weights"]


@pytest.mark.parametrize(("save_at", "style"), [(3, "plain"), (11, "skip")])
def test_resuming_within_an_optimizer_step(save_at: int, style: str, tmp_path: Path) -> None:
    """The processes' gradients so far are kept as their sum, which rounds in another order (Adam enlarges that)."""
    folder = str(tmp_path / "state")
    expected = on_ranks(2, resumable, folder, save_at, False, style)
    for one, other in zip(on_ranks(2, resumable, folder, save_at, True, style), expected, strict=True):
        assert one["weights"] == pytest.approx(other["weights"], rel=1e-6, abs=1e-8)


def fewer(folder: str) -> list[int]:
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(24), batch_size=2, shuffle=True))
    accelerator.load_state(folder)
    return [index for indices, _ in loader for index in accelerator.gather(indices).tolist()]


def half_an_epoch(folder: str) -> list[int]:
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(24), batch_size=2, shuffle=True))
    seen = []
    for number, (indices, _) in enumerate(loader):
        seen += accelerator.gather(indices).tolist()
        if number == 2:
            accelerator.save_state(folder)
            break
    return seen


def test_another_number_of_processes_goes_on_with_the_samples_left(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    before = on_ranks(2, half_an_epoch, folder)[0]
    assert sorted(before + fewer(folder)) == list(range(24))
    assert sorted(before + on_ranks(3, fewer, folder)[2]) == list(range(24))


def save_where_nobody_can(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(make_model())
    accelerator.save_state(str(Path(folder) / "file" / "state"))


def load_damaged(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(make_model())
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (Path(folder) / "state" / "accelerator.json").write_text("{}")
    accelerator.load_state(folder)


class Hollow(torch.optim.SGD):
    def state_dict(self) -> Any:
        return []


def save_no_optimizer(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    accelerator.prepare(model, Hollow(model.parameters(), lr=0.1))
    accelerator.save_state(str(Path(folder) / "state"))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (save_where_nobody_can, OSError, "file"),
        (load_damaged, ValueError, "accelerator.json is truncated"),
        (save_no_optimizer, TypeError, "Hollow.state_dict() returned a list; return a dict"),
    ],
)
def test_an_error_of_the_main_process_reaches_all(function: Any, kind: type, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for failed in try_on_ranks(2, function, str(tmp_path / "state" if kind is ValueError else tmp_path), timeout=60):
        assert isinstance(failed.error, kind)
        assert message in str(failed.error)


def joined_with_another_type() -> list[str]:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([]):
            pass
    return [str(each.message) for each in caught]


def test_join_uneven_inputs_follows_the_state() -> None:
    for messages in on_ranks(2, joined_with_another_type):
        assert [message[:46] for message in messages] == ["join_uneven_inputs is only supported for multi"]
