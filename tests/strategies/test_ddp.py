"""DDP on real gloo processes: the same numbers as one process with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.branches import Branches, own_rank, points, quiet
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from kit.token_training import train_tokens
from torch import nn

from trainer_kit import Callback, Run, SingleDevice, Strategy, Trainer
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.ddp import DDP, describe_ranks

WORLDS = [2, 3]


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


# A training under DDP


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
        strategy.setup()
        heartbeat = strategy.group.heartbeat
        assert heartbeat is not None
        assert not heartbeat.error  # else the main process waits for no part of a checkpoint
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


# Ranks that are lost or differ


def forward_without_the_first() -> None:
    """DistributedDataParallel arranges its buckets in the first forward pass, as the first process says."""
    strategy = DDP(device="cpu", heartbeat_timeout=1.0)
    strategy.setup()
    model = strategy.prepare(nn.Linear(2, 1))
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


@pytest.mark.parametrize(
    ("devices", "ranks", "text"),
    [
        (["cpu"], [0], "rank 0 on cpu"),
        (["cpu"] * 4, [3, 1, 0], "ranks 0-1, 3 on 3 x cpu"),
        (["H100 80GB a1", "H100 80GB b2", "A100 c3"], [0, 1, 2], "ranks 0-2 on 2 x H100 80GB, A100"),
    ],
)
def test_ranks_are_described(devices: list[str], ranks: list[int], text: str) -> None:
    assert describe_ranks([("node", device) for device in devices], ranks) == text
