"""DDP on real gloo processes: the same numbers as one process with the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from torch import nn

from trainer_kit import Callback, Run, SingleDevice, Strategy, Trainer, TrainingArguments
from trainer_kit.callbacks import Freezing
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.ddp import DDP, Replica, describe_ranks

WORLDS = [2, 3]


class Tokens(nn.Module):
    """A token model in float64 whose loss is the mean over the labels that count, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)
        self.double()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.hidden(self.embedding(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def texts(length: int) -> list[dict[str, torch.Tensor]]:
    """Texts of many lengths; some count for nothing at all."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 11, (1 + 3 * index % 7,), generator=generator) for index in range(length)]
    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": torch.full_like(row, -100) if index % 4 == 2 else row.where(row > 1, -100),
        }
        for index, row in enumerate(rows)
    ]


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100))
    }


def summed(model: nn.Module, batch: Any) -> Any:
    logits = model(**batch)["logits"].flatten(0, 1)
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())


def summed_on_the_device(model: nn.Module, batch: Any) -> Any:
    total, _ = summed(model, batch)
    return total, (batch["labels"] != -100).sum()


class Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def on_pre_optimizer_step(self, run: Run) -> None:
        flat = [parameter.grad.flatten() for parameter in run.model.parameters() if parameter.grad is not None]
        self.seen.append(torch.cat(flat).numpy(force=True).copy())


def train_tokens(
    folder: str, samples: int, batch_size: int, accumulation: int, kind: str, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    losses = {"mean": None, "pair": summed, "pair on the device": summed_on_the_device}
    gradients = Gradients()
    args = TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=batch_size, use_cpu=True,
        gradient_accumulation_steps=accumulation, learning_rate=0.1, optim="sgd", report_to="none",
        disable_tqdm=True, log_level="error", save_strategy="no", logging_steps=1,
    )  # fmt: skip
    strategy = DDP(device="cpu", **options) if options else None
    trainer = Trainer(
        Tokens(), args, texts(samples), data_collator=padded, callbacks=[gradients], compute_loss=losses[kind],
        strategy=strategy,
    )  # fmt: skip
    output = trainer.train()
    state = trainer.run.state
    return {
        "gradients": gradients.seen, "loss": output.training_loss, "steps": state.step, "samples": state.samples,
        "tokens": state.tokens, "weights": nn.utils.parameters_to_vector(trainer.run.model.parameters()).detach(),
    }  # fmt: skip


# (samples, samples of a step over all processes per micro-batch, accumulation)
@pytest.mark.distributed
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["mean", "pair", "pair on the device"])
@pytest.mark.parametrize(("samples", "per_rank", "accumulation"), [(13, 1, 1), (13, 2, 2), (7, 2, 3), (5, 3, 1)])
def test_gradients_are_those_of_one_process(
    tmp_path: Path, world: int, kind: str, samples: int, per_rank: int, accumulation: int
) -> None:
    """The last window is short, and leaves a rank with nothing."""
    alone = train_tokens(str(tmp_path), samples, per_rank * world, accumulation, kind)
    for each in on_ranks(world, train_tokens, str(tmp_path), samples, per_rank, accumulation, kind):
        assert (each["steps"], each["samples"], each["tokens"]) == (alone["steps"], alone["samples"], alone["tokens"])
        assert len(each["gradients"]) == len(alone["gradients"]) > 0
        for ours, theirs in zip(each["gradients"], alone["gradients"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        assert each["loss"] == pytest.approx(alone["loss"], abs=1e-12)
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 1}], ids=str
)
def test_options_of_torchs_own_change_no_number(tmp_path: Path, options: dict[str, Any]) -> None:
    alone = train_tokens(str(tmp_path), 9, 4, 2, "mean")
    for each in on_ranks(2, train_tokens, str(tmp_path), 9, 2, 2, "mean", **options):
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-12)


@pytest.mark.distributed
def test_a_static_graph_changes_no_number(tmp_path: Path) -> None:
    alone = train_tokens(str(tmp_path), 8, 4, 1, "mean")
    for each in on_ranks(2, train_tokens, str(tmp_path), 8, 2, 1, "mean", static_graph=True):
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-12)


@pytest.mark.distributed
def test_compressed_gradients_are_sent_in_bfloat16(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_tokens, str(tmp_path), 8, 2, 1, "mean", gradient_compression="bf16")
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    alone = train_tokens(str(tmp_path), 8, 4, 1, "mean")
    difference = (first["weights"] - alone["weights"]).abs().max()
    assert 1e-6 < difference < 1e-2
    gradient = torch.from_numpy(first["gradients"][0])
    torch.testing.assert_close(gradient, gradient.bfloat16().double(), rtol=0, atol=0)


# The model under DDP


class Branches(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used = nn.Linear(4, 4).double()
        self.norm = nn.BatchNorm1d(4).double()
        self.spare = nn.Linear(4, 4).double()
        self.both = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.used(x))
        if self.both:
            hidden = hidden + self.spare(x)
        return (hidden - y).square().mean()


def points(length: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {name: torch.randn(4, generator=generator, dtype=torch.float64) for name in ("x", "y")} for _ in range(length)
    ]


def quiet(folder: str, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": folder, "max_steps": 6, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "log_level": "error", "save_strategy": "no", "learning_rate": 0.1, "optim": "sgd",
    }  # fmt: skip
    return TrainingArguments(**(values | changes))


def train_branches(folder: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    options = make()
    trainer = Trainer(Branches(seed=own_rank()), quiet(folder), points(), **options)
    trainer.run.model.both = options.get("strategy") is None  # type: ignore[assignment]
    trainer.train()
    return {name: value.clone() for name, value in trainer.run.model.state_dict().items()}


def own_rank() -> int:
    from trainer_kit.config import environment

    return environment.place().rank


def nothing() -> dict[str, Any]:
    return {}


@pytest.mark.smoke
@pytest.mark.distributed
def test_weights_and_buffers_are_the_main_ones_everywhere(tmp_path: Path) -> None:
    """Models that begin with other weights, and a batch norm that sees other samples."""
    first, second = on_ranks(2, train_branches, str(tmp_path), nothing)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)
    assert first["norm.num_batches_tracked"] == 6


def frozen() -> dict[str, Any]:
    return {"callbacks": [Freezing("used.*", until_step=2), Freezing("norm.*", from_step=3, until_step=5)]}


@pytest.mark.distributed
def test_freezing_and_unfreezing_keeps_gradients_exchanged(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_branches, str(tmp_path), frozen)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)


def with_spare() -> dict[str, Any]:
    return {"strategy": DDP(device="cpu")}


def with_spare_allowed() -> dict[str, Any]:
    return {"strategy": DDP(device="cpu", find_unused_parameters=True)}


@pytest.mark.distributed
def test_parameters_without_a_loss_are_named(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_branches, str(tmp_path), with_spare):
        assert isinstance(result, RankFailed)
        assert isinstance(result.error, ValueError)
        assert "spare.weight and spare.bias took no part in the loss" in str(result.error)
        assert "find_unused_parameters=True" in str(result.error)
    on_ranks(2, train_branches, str(tmp_path), with_spare_allowed)


def by_a_method(model: nn.Module, batch: Any) -> torch.Tensor:
    return model.used(batch["x"]).square().mean()  # type: ignore[operator,no-any-return]


def with_a_method() -> dict[str, Any]:
    return {"compute_loss": by_a_method}


@pytest.mark.distributed
def test_a_loss_that_goes_round_the_model_is_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_branches, str(tmp_path), with_a_method):
        assert isinstance(result, RankFailed)
        assert "call model(...), in compute_loss too" in str(result.error)


class Odd(Branches):
    """Buffers of many kinds, and a cache that is each process's own."""

    def __init__(self) -> None:
        super().__init__()
        rank = own_rank()
        self.register_buffer("small", torch.tensor([rank], dtype=torch.int16))
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("eight", torch.full((3,), float(rank)).to(torch.float8_e5m2))
        self.register_buffer("complex", torch.full((2,), complex(rank, 1)))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t() + rank)
        self.register_buffer("cache", torch.zeros(rank + 1), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.cache = torch.zeros(len(self.cache) + 1)
        self.small = self.small + 1  # replaced, not changed
        return super().forward(x, y)


def train_odd(folder: str) -> tuple[int, dict[str, Any]]:
    trainer = Trainer(Odd(), quiet(folder), points(), strategy=DDP(device="cpu", find_unused_parameters=True))
    trainer.train()
    state = {name: value.to(torch.complex64).tolist() for name, value in trainer.run.model.state_dict().items()}
    return len(trainer.run.model.cache), state  # type: ignore[arg-type]


@pytest.mark.distributed
def test_buffers_of_any_kind_are_the_main_ones_and_caches_are_left_alone(tmp_path: Path) -> None:
    (first_cache, first), (second_cache, second) = on_ranks(2, train_odd, str(tmp_path))
    assert first == second
    assert second["small"] == [6]
    assert second_cache == first_cache + 1


class Growing(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen = torch.zeros(len(self.seen) + 1)
        return super().forward(x, y)


def train_growing(folder: str) -> None:
    Trainer(
        Growing(), quiet(folder), points(), strategy=DDP(device="cpu", find_unused_parameters=True)
    ).train()  # fmt: skip


@pytest.mark.distributed
def test_a_kept_buffer_that_grows_is_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_growing, str(tmp_path)):
        assert "the buffer seen had the shape [1] and now has [2]" in str(result.error)


def train_with_a_strange_parameter(folder: str) -> None:
    model, weight = Branches(), nn.Parameter(torch.ones(1))
    model.both = True
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    Trainer(model, quiet(folder), points(), optimizer=optimizer).train()


@pytest.mark.distributed
def test_parameters_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_with_a_strange_parameter, str(tmp_path)):
        assert "the optimizer has 1 parameters that are not the model's" in str(result.error)


@pytest.mark.distributed
def test_a_static_graph_accumulates_too(tmp_path: Path) -> None:
    alone = train_tokens(str(tmp_path), 8, 4, 2, "mean")
    for each in on_ranks(2, train_tokens, str(tmp_path), 8, 2, 2, "mean", static_graph=True):
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-12)


class Signed(nn.Module):
    """A loss of labels that may be negative, whose gradient is not finite where they are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (-labels * self.weight.square()).log().mean()


def train_signed(folder: str) -> float:
    data = [{"x": torch.ones(1), "labels": torch.tensor(-1.0 - index)} for index in range(5)]
    return Trainer(Signed(), quiet(folder, max_steps=4, learning_rate=0.01), data).train().training_loss


@pytest.mark.distributed
def test_a_stand_in_keeps_labels_that_are_no_numbers_of_classes(tmp_path: Path) -> None:
    first, second = on_ranks(2, train_signed, str(tmp_path))
    assert first == second
    assert np.isfinite(first)


class Share(torch.utils.data.IterableDataset[Any]):
    """Divides itself by rank, as it must not: the ranks get other numbers of samples."""

    def __iter__(self) -> Any:
        return iter(points(8 * (1 + own_rank())))


def train_shares(folder: str) -> None:
    strategy = DDP(device="cpu", find_unused_parameters=True)
    Trainer(Branches(), quiet(folder, max_steps=20), Share(), strategy=strategy).train()


@pytest.mark.distributed
def test_a_stream_that_divides_itself_by_rank_is_refused(tmp_path: Path) -> None:
    for result in try_on_ranks(2, train_shares, str(tmp_path)):
        assert "train_dataset does not give all processes the same samples" in str(result.error)


class Broken(torch.utils.data.Dataset[Any]):
    read = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read += 1
        if own_rank() == 1 and self.read > 5:
            raise OSError("the file is gone")
        return points()[index]


def train_broken(folder: str) -> None:
    strategy = DDP(device="cpu", find_unused_parameters=True)
    Trainer(Branches(), quiet(folder), Broken(), strategy=strategy).train()


@pytest.mark.distributed
def test_data_that_one_rank_cannot_read_ends_all(tmp_path: Path) -> None:
    first, second = try_on_ranks(2, train_broken, str(tmp_path))
    assert "another process of this run could not read its data" in str(first.error)
    assert "the file is gone" in str(second.error)


def train_again(folder: str) -> list[str]:
    """An error, then a signal, both caught by the program, which goes on."""

    class Wrong(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 3:
                raise KeyError("mine")

    class Leave(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 3 and run.strategy.rank == 1:
                run.requests.exit_code = 143
                run.strategy.session.announce_preemption()

    ends = []
    for callbacks in ([Wrong()], [Leave()], []):
        strategy = DDP(device="cpu", find_unused_parameters=True)
        args = quiet(folder, eval_strategy="steps", eval_steps=2, save_strategy="no")
        trainer = Trainer(Branches(), args, points(), points(4), callbacks=callbacks, strategy=strategy)
        try:
            trainer.train()
        except (RuntimeError, SystemExit) as error:
            ends.append(f"{type(error).__name__} {trainer.run.state.step}")
        else:
            ends.append(f"ended {trainer.run.state.step}")
        ends.append("evaluated" if "eval_loss" in trainer.evaluate() else "")
    return ends


@pytest.mark.distributed
def test_a_program_that_catches_the_end_of_a_training_can_train_again(tmp_path: Path) -> None:
    expected = ["CallbackError 3", "evaluated", "SystemExit 3", "evaluated", "ended 6", "evaluated"]
    for ends in on_ranks(2, train_again, str(tmp_path)):
        assert ends == expected


def resume_as_only_the_main_process_asks(folder: str) -> int:
    strategy = DDP(device="cpu", find_unused_parameters=True)
    args = quiet(folder, save_strategy="steps", save_steps=3, max_steps=3)
    Trainer(Branches(), args, points(), strategy=strategy).train()
    args = quiet(folder, save_strategy="steps", save_steps=3)
    trainer = Trainer(Branches(), args, points(), strategy=strategy)
    steps: list[int] = []

    class First(Callback):
        def on_train_begin(self, run: Run) -> None:
            steps.append(run.state.step)

    trainer = Trainer(Branches(), args, points(), strategy=strategy, callbacks=[First()])
    trainer.train(resume_from_checkpoint=own_rank() == 0)
    return steps[0]


@pytest.mark.distributed
def test_the_main_process_says_where_to_resume(tmp_path: Path) -> None:
    assert on_ranks(2, resume_as_only_the_main_process_asks, str(tmp_path)) == [3, 3]


def save_untrained(folder: str) -> bool:
    Trainer(Branches(), quiet(folder), points()).save_model(f"{folder}/model")
    return (Path(folder) / "model" / "model.safetensors").is_file()


@pytest.mark.distributed
def test_a_model_can_be_saved_before_it_is_trained(tmp_path: Path) -> None:
    assert on_ranks(2, save_untrained, str(tmp_path)) == [True, True]


# Collectives


def collectives() -> dict[str, Any]:
    strategy = DDP(device="cpu")
    strategy.setup()
    rank = strategy.rank
    rows = torch.arange(rank * 3.0).reshape(rank, 3)
    return {
        "sum": strategy.collectives.all_reduce(torch.tensor([rank + 1.0])),
        "max": strategy.collectives.all_reduce(torch.tensor(rank), "max"),
        "numbers": list(strategy.collectives.all_reduce_ints([rank, 2**40])),
        "rows": strategy.gather(rows.to(torch.bfloat16)),
        "flags": strategy.gather(torch.tensor([rank == 1])),
        "scalars": strategy.gather(torch.tensor(rank)),
        "objects": strategy.collectives.gather_object({"rank": rank}),
        "main": strategy.collectives.broadcast([rank]),
        "on_main": strategy.collectives.on_main(lambda: rank + 10),
        "ranks": (
            strategy.is_main,
            strategy.collectives.is_local_main,
            strategy.collectives.local_rank,
            strategy.world_size,
        ),
    }


@pytest.mark.distributed
def test_collectives_on_three_ranks() -> None:
    results = on_ranks(3, collectives)
    for rank, result in enumerate(results):
        assert result["sum"].tolist() == [6.0]
        assert result["max"].item() == 2
        assert result["numbers"] == [3, 3 * 2**40]
        assert result["rows"].dtype == torch.bfloat16
        assert result["rows"].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
        assert result["flags"].tolist() == [False, True, False]
        assert result["scalars"].tolist() == [0, 1, 2]
        assert result["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert (result["main"], result["on_main"]) == ([0], 10)
        assert result["ranks"] == (rank == 0, rank == 0, rank, 3)


class Unportable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def failing_on_main(portable: bool) -> None:
    strategy = DDP(device="cpu")
    strategy.setup()

    def fail() -> None:
        raise ValueError("the disk is full") if portable else Unportable("the disk", "is full")

    strategy.collectives.on_main(fail)


@pytest.mark.distributed
@pytest.mark.parametrize("portable", [True, False])
def test_what_fails_on_the_main_process_fails_everywhere(portable: bool) -> None:
    first, second = try_on_ranks(2, failing_on_main, portable)
    assert "the disk" in str(first)
    assert "the disk" in str(second.error)
    assert isinstance(second.error, ValueError if portable else RuntimeError)


def forward_without_the_first() -> None:
    """DistributedDataParallel arranges its buckets in the second forward pass, as the first process says."""
    strategy = DDP(device="cpu", heartbeat_timeout=1.0)
    strategy.setup()
    model = strategy.prepare(nn.Linear(2, 1))
    strategy.backward(model(torch.ones(1, 2)).sum())
    if strategy.rank == 0:
        model.let_go()  # or the group's threads and the end of the module may wait for one another
        torch.distributed.destroy_process_group()
    else:
        model(torch.ones(1, 2))


@pytest.mark.distributed
def test_a_process_that_is_lost_in_a_forward_pass_is_told_as_lost() -> None:
    _, second = try_on_ranks(2, forward_without_the_first)
    assert isinstance(second, RankFailed)
    assert isinstance(second.error, LostProcessError)


def different(folder: str, what: str) -> None:
    rank = own_rank()
    changes = {"learning_rate": 0.1 * (rank + 1)} if what == "arguments" else {}
    args = quiet(f"{folder}-{rank}" if what == "folder" else folder, **changes)
    Trainer(Branches(), args, points(12 + rank if what == "data" else 12)).train()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("arguments", "learning_rate differs: 0.2 on rank 1, 0.1 on rank 0"),
        ("data", "the length of train_dataset differs: 13 on rank 1, 12 on rank 0"),
        ("folder", "output_dir differs"),
    ],
)
def test_what_differs_between_ranks_is_named(what: str, named: str, tmp_path: Path) -> None:
    for result in try_on_ranks(2, different, str(tmp_path), what):
        assert isinstance(result, RankFailed)
        assert named in str(result.error)


def other_models() -> None:
    strategy = DDP(device="cpu")
    strategy.setup()
    strategy.prepare(nn.Linear(4, 4 + strategy.rank))


@pytest.mark.distributed
def test_another_model_on_a_rank_is_named() -> None:
    for result in try_on_ranks(2, other_models):
        assert "parameter weight differs: '[5, 4] torch.float32' on rank 1, '[4, 4] torch.float32' on rank 0" in str(
            result.error
        )


# Alone


def test_ddp_with_one_process_is_a_single_device() -> None:
    strategy = DDP(device="cpu")
    strategy.setup()
    model = nn.Linear(2, 2)
    assert strategy.prepare(model) is model
    assert (strategy.world_size, strategy.is_main) == (1, True)
    assert strategy.collectives.all_reduce_ints([1, 2]) == [1, 2]
    assert isinstance(strategy, SingleDevice)


@pytest.mark.distributed
def test_sync_batch_norm_on_the_cpu_is_refused() -> None:
    (result, _) = try_on_ranks(2, prepared_with_sync_batch_norm)
    assert "sync_batch_norm=True needs NVIDIA GPUs" in str(result.error)


def prepared_with_sync_batch_norm() -> Strategy:
    strategy = DDP(device="cpu", sync_batch_norm=True)
    strategy.setup()
    strategy.prepare(nn.BatchNorm1d(2))
    return strategy


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gradient_compression": "fp8"}, "gradient_compression='fp8' is not known; use 'no' or 'bf16'"),
        ({"ddp_timeout": 0}, "ddp_timeout=0 must be a number of seconds above 0"),
        ({"heartbeat_timeout": -1}, "heartbeat_timeout=-1 must be"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        DDP(device="cpu", **options)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 2, "LOCAL_RANK": 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 processes on this machine are more than its 2 GPUs"):
        DDP()


def test_a_replica_shows_what_the_module_has() -> None:
    class Named(nn.Linear):
        config = "mine"

    replica = Replica(Named(2, 2), lambda module: module)  # type: ignore[arg-type,return-value]
    assert replica.config == "mine"
    assert [name for name, _ in replica.named_parameters()] == ["module.weight", "module.bias"]
    with pytest.raises(AttributeError, match="nowhere"):
        replica.nowhere  # noqa: B018


@pytest.mark.parametrize(
    ("devices", "ranks", "text"),
    [
        (["cpu"], [0], "rank 0 on cpu"),
        (["cpu"] * 4, [3, 1, 0], "ranks 0-1, 3 on 3 x cpu"),
        (["H100 80GB a1", "H100 80GB b2", "A100 c3"], [0, 1, 2], "ranks 0-2 on 2 x H100 80GB, A100"),
    ],
)
def test_ranks_aredescribe_ranks(devices: list[str], ranks: list[int], text: str) -> None:
    assert describe_ranks([("node", device) for device in devices], ranks) == text
