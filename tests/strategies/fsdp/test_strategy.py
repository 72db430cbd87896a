"""FSDP on real gloo processes: the same numbers as one process with the same global batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.ranks import RankFailed, on_ranks, try_on_ranks
from kit.resized import Remembering
from kit.token_training import train_tokens, whole
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.strategies.precision import Precision

HALVES = {"units": ["hidden"]}


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["mean", "pair", "pair on the device"])
@pytest.mark.parametrize(("samples", "per_rank", "accumulation"), [(13, 1, 1), (7, 2, 3)])
def test_gradients_are_those_of_one_process(
    tmp_path: Path, world: int, kind: str, samples: int, per_rank: int, accumulation: int
) -> None:
    """The last window is short, and leaves a rank with nothing."""
    alone = train_tokens(str(tmp_path), samples, per_rank * world, accumulation, kind)
    for each in on_ranks(
        world, train_tokens, str(tmp_path), samples, per_rank, accumulation, kind, strategy="fsdp", **HALVES
    ):
        assert (each["steps"], each["samples"], each["tokens"]) == (alone["steps"], alone["samples"], alone["tokens"])
        assert len(each["gradients"]) == len(alone["gradients"]) > 0
        for ours, theirs in zip(each["gradients"], alone["gradients"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        assert each["loss"] == pytest.approx(alone["loss"], abs=1e-12)
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"reduce_each_batch": False}, {"offload": True}, {"units": ["*"]}],
    ids=str,
)
def test_options_change_no_number(tmp_path: Path, options: dict[str, Any]) -> None:
    alone = train_tokens(str(tmp_path), 9, 4, 2, "mean")
    for each in on_ranks(2, train_tokens, str(tmp_path), 9, 2, 2, "mean", strategy="fsdp", **HALVES | options):
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.slow
def test_copies_of_a_sharded_model_change_no_number(tmp_path: Path) -> None:
    alone = train_tokens(str(tmp_path), 13, 4, 2, "mean")
    mesh = {"replicate": 2, "shard": 2}
    for each in on_ranks(4, train_tokens, str(tmp_path), 13, 1, 2, "mean", strategy="fsdp", mesh=mesh, **HALVES):
        torch.testing.assert_close(each["weights"], alone["weights"], rtol=0, atol=1e-12)


class Regression(nn.Module):
    """A batch norm, a frozen layer, and a parameter in a memory format that fully_shard does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.convolution(x)).mean((2, 3))
        return {"loss": (self.blocks(self.frozen(hidden)).sum(-1) - y).square().mean()}


def train_regression(folder: str, strategy: str, **arguments: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(2, 5, 5, generator=generator).double(), "y": torch.tensor(float(index)).double()}
        for index in range(10)
    ]
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, strategy=strategy, report_to="none", disable_tqdm=True, log_level="error",
        save_strategy="no", max_grad_norm=1.0, **arguments,
    )  # fmt: skip
    trainer = Trainer(Regression(), args, data, data[:3])
    trainer.train()
    metrics = trainer.evaluate()
    assert all(isinstance(each, DTensor) for each in trainer.run.model.parameters()) == (strategy == "fsdp")
    weights = {name: whole(each).detach().clone() for name, each in trainer.run.model.state_dict().items()}
    return {"weights": weights, "eval_loss": metrics["eval_loss"], "norm": trainer.run.last_norms.total.item()}


@pytest.mark.distributed
def test_buffers_frozen_weights_and_memory_formats_are_those_of_ddp(tmp_path: Path) -> None:
    """A batch norm's statistics are the main process's, as under DDP; 3 samples to evaluate give ranks 2 and 1."""
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 1, "num_train_epochs": 2}
    ours, _ = on_ranks(2, train_regression, str(tmp_path), "fsdp", **options)
    theirs, _ = on_ranks(2, train_regression, str(tmp_path), "ddp", **options)
    assert ours["norm"] == pytest.approx(theirs["norm"], abs=1e-12)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-12)
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, rtol=0, atol=1e-12)


def evaluate_few(folder: str, samples: int) -> float:
    torch.manual_seed(0)
    data = [{"x": torch.randn(2, 5, 5).double(), "y": torch.tensor(float(index)).double()} for index in range(samples)]
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", per_device_eval_batch_size=1,
                             disable_tqdm=True, log_level="error")  # fmt: skip
    return Trainer(Regression(), args, eval_dataset=data, strategy=FSDP(device="cpu")).evaluate()["eval_loss"]


@pytest.mark.distributed
@pytest.mark.parametrize("samples", [1, 5])
def test_ranks_evaluate_different_numbers_of_batches(tmp_path: Path, samples: int) -> None:
    """With one sample, a rank has no batch at all."""
    alone = evaluate_few(str(tmp_path), samples)
    assert on_ranks(2, evaluate_few, str(tmp_path), samples) == pytest.approx([alone] * 2, abs=1e-12)


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.register_buffer("scale", torch.arange(3.0), persistent=False)
        self.shift = nn.Parameter(torch.FloatTensor(3).normal_())  # on the host in any case

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.blocks(x) * self.scale + self.shift).square().mean()}


def made_by_init(folder: str, init: Callable[[], nn.Module] = Meta) -> dict[str, torch.Tensor]:
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
                             log_level="error", max_steps=1, learning_rate=0.0)  # fmt: skip
    trainer = Trainer(args=args, train_dataset=[{"x": torch.ones(3)}] * 4, model_init=init, strategy=FSDP(device="cpu"))
    trainer.train()
    return {name: whole(each).detach().clone() for name, each in [
        *trainer.run.model.named_parameters(), *trainer.run.model.named_buffers()
    ]}  # fmt: skip


@pytest.mark.distributed
def test_a_model_made_by_model_init_has_the_weights_of_one_process(tmp_path: Path) -> None:
    alone = made_by_init(str(tmp_path))
    for each in on_ranks(2, made_by_init, str(tmp_path)):
        assert each.keys() == alone.keys()
        assert all(torch.equal(each[name], alone[name]) for name in alone)


def refused(folder: str, case: str) -> None:
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
                             log_level="error", max_steps=1, auto_find_batch_size=case == "finder",
                             mixed_precision="fp16" if case == "fp16" else "no", channels_last=case == "channels",
                             optim="muon" if case == "muon" else "adamw_torch")  # fmt: skip
    model = Meta()
    optimizers: dict[str, Any] = {
        "Adafactor": lambda: torch.optim.Adafactor(model.parameters()), "Muon": lambda: torch.optim.Muon(
            [each for each in model.parameters() if each.ndim == 2]
        ),
    }  # fmt: skip
    losses = {"outside": lambda model, batch: (batch["x"] @ model.blocks[0].weight).sum()}
    optimizer = optimizers[case]() if case in optimizers else None
    data = [{"x": torch.ones(3)}] * 4
    precision = Precision("fp8", emulate_fp8=True) if case == "fp8" else None
    strategy = FSDP(device="cpu", precision=precision)
    Trainer(model, args, data, compute_loss=losses.get(case), optimizer=optimizer, strategy=strategy).train()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("Adafactor", "Adafactor computes with whole matrices"),
        ("Muon", "Muon computes with whole matrices"),
        ("muon", "Muon computes with whole matrices"),
        ("channels", "channels_last=True is not possible with FSDP"),
        ("fp8", "mixed_precision='fp8' is not possible with FSDP"),
        ("fp16", "mixed_precision='fp16' is not possible with FSDP"),
        ("finder", "auto_find_batch_size=True is not possible with FSDP"),
        ("outside", "outside of the model's forward pass"),
    ],
)
def test_refusals(tmp_path: Path, case: str, text: str) -> None:
    if case == "fp8":
        pytest.importorskip("torchao.float8", reason="needs torchao", exc_type=ImportError)
    for each in try_on_ranks(2, refused, str(tmp_path), case):
        assert isinstance(each, RankFailed)
        assert isinstance(each.error, ValueError)
        assert text in str(each.error)


def backward_without_a_call() -> str:
    strategy, model = FSDP(device="cpu"), Meta()
    strategy.precision = Precision()
    strategy.setup()
    loss = strategy.prepare(model).blocks[0].weight.sum()
    strategy.collectives.barrier()
    with pytest.raises(ValueError, match="without calling the model") as refusal:
        strategy.backward(loss)
    strategy.teardown()
    return str(refusal.value)


@pytest.mark.distributed
def test_a_loss_of_sharded_weights_is_refused() -> None:
    assert len(set(on_ranks(2, backward_without_a_call))) == 1


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({"shard": 3}, "is for 3 processes, but this run has 1"),
        ({"replicate": 1}, "must have the axis 'shard'"),
        ({"shard": 1, "pipeline": 1}, "may have 'replicate'"),
        ({"shard": 0}, "is for 0 processes"),
    ],
)
def test_meshes_that_do_not_fit(mesh: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FSDP(mesh=mesh)
    with pytest.raises(TypeError, match="must give a number of processes"):
        FSDP(mesh=[2, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [{"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}], ids=str)
def test_a_release_of_torch_that_cannot_split_on_two_axes_is_refused(
    mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.__version__", "2.12.0+cpu")
    assert FSDP(device="cpu", mesh={"replicate": 2, "shard": 2}).mesh == {"replicate": 2, "shard": 2}
    with pytest.raises(ValueError, match=r"torch 2\.12\.0\+cpu fails or gives wrong numbers; use torch 2\.13 or newer"):
        FSDP(device="cpu", mesh=mesh, tensor_parallel="auto")


def test_one_process_is_said_to_shard_nothing(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FSDP(device="cpu")
    strategy.setup()
    with caplog.at_level("INFO", logger="trainer_kit"):
        strategy.prepare(torch.nn.Linear(1, 1))
    assert "FSDP has one process: nothing is sharded; for more," in caplog.text


class Dropped(Meta):
    """Reads values where it is made: of numbers, which the device "meta" lacks, or of its own weights."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        numbers = torch.linspace(0, 1, 3) if reads == "numbers" else self.blocks[0].weight[0]
        self.rates = [number.item() for number in numbers]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x * self.rates[1])


def made_of_values(folder: str, reads: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tensors = made_by_init(folder, functools.partial(Dropped, reads))
    return tensors, [str(each.message) for each in seen if "model_init" in str(each.message)]


@pytest.mark.distributed
@pytest.mark.parametrize("reads", ["numbers", "weights"])
def test_a_model_init_that_reads_values(tmp_path: Path, reads: str) -> None:
    alone, _ = made_of_values(str(tmp_path), reads)
    (first, said), (second, _) = on_ranks(2, made_of_values, str(tmp_path), reads)
    for each in (first, second):
        assert all(torch.equal(each[name], alone[name]) for name in alone)
    assert len(said) == (reads == "weights")
    if said:
        assert "so that rank 0 and rank 1 made the whole model in host memory" in said[0]


def test_a_tensor_that_its_module_would_resize_is_refused() -> None:
    strategy = FSDP(device="cpu")
    with pytest.raises(ValueError, match=r"'bank\.kept' is of shape \[5, 2\] in the files and \[0, 2\] in the model"):
        strategy.load_model_state(Remembering(), {"bank.kept": torch.ones(5, 2)})
