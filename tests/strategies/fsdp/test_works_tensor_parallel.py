"""Training with layers split over processes: resuming, models without values, precisions, optimizers, dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.architectures import llama, qwen3
from kit.block_training import Blocks, make_trainer, whole_weights
from kit.ranks import on_ranks
from kit.split_training import Gated, train_tower
from kit.token_training import whole
from scenarios.task import StopAt
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_kit import FSDP, Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import Throughput

SPLIT = {"tensor": 2}
BOTH = {"shard": 2, "tensor": 2}


@pytest.mark.distributed
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("mesh", [SPLIT, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
def test_dropout_draws_the_same_numbers_on_a_tensor_group(tmp_path: Path, optim: str, mesh: dict[str, int]) -> None:
    """With one reader there are also the numbers of one process."""
    alone = train_tower(str(tmp_path), 4, None, optim=optim, dropout=0.5)
    processes = math.prod(mesh.values())
    first, *others = on_ranks(processes, train_tower, str(tmp_path), 8 // processes, mesh, optim=optim, dropout=0.5)
    for other in others:
        torch.testing.assert_close(other["weights"], first["weights"], rtol=0, atol=0)
    if processes == 2:
        torch.testing.assert_close(first["weights"], alone["weights"], rtol=0, atol=1e-12)


def resume(folder: str, mesh: dict[str, int], stops: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    samples = [{"input_ids": torch.arange(4) + index, "labels": torch.arange(4) + index} for index in range(24)]
    args = TrainingArguments(
        output_dir=folder, max_steps=4, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        log_level="error", per_device_train_batch_size=2, learning_rate=1e-2,
    )  # fmt: skip
    model = qwen3(num_key_value_heads=2, attention_dropout=0.5)
    strategy = FSDP(device="cpu", mesh=mesh, tensor_parallel="auto")
    trainer = Trainer(model, args, samples, strategy=strategy, callbacks=[StopAt(2)] if stops else [])
    trainer.train(resume_from_checkpoint=True)
    return [whole(each).detach().clone() for each in trainer.run.model.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [SPLIT, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, mesh: dict[str, int]) -> None:
    processes = math.prod(mesh.values())
    straight = on_ranks(processes, resume, str(tmp_path / "straight"), mesh, False)[0]
    on_ranks(processes, resume, str(tmp_path / "stopped"), mesh, True)
    for resumed in on_ranks(processes, resume, str(tmp_path / "stopped"), mesh, False):
        assert all(torch.equal(*pair) for pair in zip(resumed, straight, strict=True))


class Parts(Callback):
    """Elements of the weights on this process when training begins."""

    elements = 0

    def on_train_begin(self, run: Run) -> None:
        self.elements = sum(
            (each.to_local() if isinstance(each, DTensor) else each).numel() for each in run.model.parameters()
        )


def begin(folder: str, weights: str | None, mesh: dict[str, int] | None) -> tuple[dict[str, torch.Tensor], int]:
    samples = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 4
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, log_level="error",
        max_steps=1, learning_rate=0.0,
    )  # fmt: skip
    parts = Parts()
    trainer = Trainer(
        args=args, train_dataset=samples, weights=weights, callbacks=[parts],
        model_init=lambda: llama(num_key_value_heads=2, attention_bias=True),
        strategy=mesh and FSDP(device="cpu", mesh=mesh, tensor_parallel="auto"),
    )  # fmt: skip
    trainer.train()
    named = [*trainer.run.model.named_parameters(), *trainer.run.model.named_buffers()]
    return {name: whole(each).detach().clone() for name, each in named}, parts.elements


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [SPLIT, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("has_weights", [False, True])
def test_models_without_values_receive_them(tmp_path: Path, mesh: dict[str, int], has_weights: bool) -> None:
    torch.manual_seed(5)
    folder = str(tmp_path / "saved") if has_weights else None
    saved = llama(num_key_value_heads=2, attention_bias=True)
    saved.save_pretrained(tmp_path / "saved", max_shard_size="5KB")
    expected, elements = begin(str(tmp_path), folder, None)
    assert not has_weights or torch.equal(expected["lm_head.weight"], saved.lm_head.weight)
    processes = math.prod(mesh.values())
    for found, own in on_ranks(processes, begin, str(tmp_path), folder, mesh):
        assert own < 0.7 * elements
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def train_bf16(folder: str, mesh: dict[str, int] | None) -> tuple[float, set[torch.dtype]]:
    torch.manual_seed(0)
    samples = [{"input_ids": torch.arange(8) + index % 3, "labels": torch.arange(8) + index % 3} for index in range(8)]
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", save_strategy="no",
        max_steps=4, per_device_train_batch_size=4, mixed_precision="bf16", learning_rate=1e-2,
        lr_scheduler_type="constant", gradient_checkpointing=True,
    )  # fmt: skip
    strategy = mesh and FSDP(device="cpu", mesh=mesh, tensor_parallel="auto")
    trainer = Trainer(qwen3(num_key_value_heads=2), args, samples, strategy=strategy)
    output = trainer.train()
    states = [value for state in trainer.run.optimizer.state.values() for value in state.values()]
    return output.training_loss, {each.dtype for each in [*trainer.run.model.parameters(), *states]}


@pytest.mark.distributed
def test_bf16_with_recomputed_activations_is_close_to_one_process(tmp_path: Path) -> None:
    expected, dtypes = train_bf16(str(tmp_path), None)
    for loss, found in on_ranks(2, train_bf16, str(tmp_path), SPLIT):
        assert loss == pytest.approx(expected, rel=1e-2)
        assert found == dtypes == {torch.float32}


def step_by(name: str, options: dict[str, Any], splits: bool) -> np.ndarray:
    torch.manual_seed(0)
    model, tokens = llama(num_key_value_heads=2), torch.arange(8)[None]
    strategy = FSDP(device="cpu", mesh=SPLIT, tensor_parallel="auto") if splits else None
    if strategy is not None:
        strategy.setup()
        strategy.prepare(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # a loop of one's own
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([whole(each).flatten() for each in model.parameters()]).numpy(force=True)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("SGD", {"momentum": 0.9})]
)
def test_optimizers_and_clipping_of_torch_take_split_parameters(name: str, options: dict[str, Any]) -> None:
    expected = step_by(name, options, False)
    for found in on_ranks(2, step_by, name, options, True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Texts, of which the last ones leave a reader without any."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter({"input_ids": torch.arange(4) + index, "labels": torch.arange(4) + index} for index in range(13))


def use(folder: str, mesh: dict[str, int] | None) -> dict[str, Any]:
    """Numbers and texts of a model that was trained on a stream, with a step that is not finite."""
    torch.manual_seed(0)
    readers = 1 if mesh is None else math.prod(mesh.values()) // 2
    records = Records()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = model(**batch).loss
        return value * (float("inf") if trainer.run.state.step == 1 else 1.0)

    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", save_strategy="no",
        max_steps=5, per_device_train_batch_size=4 // readers, per_device_eval_batch_size=2, learning_rate=0.1,
        optim="sgd", nonfinite="skip", logging_steps=1,
    )  # fmt: skip
    strategy = mesh and FSDP(device="cpu", mesh=mesh, tensor_parallel="auto")
    trainer = Trainer(
        llama(num_key_value_heads=2, attention_dropout=0.0), args, Stream(), [*Stream()], callbacks=[records],
        compute_loss=loss, strategy=strategy, compute_metrics=lambda given: {"seen": len(given.label_ids)},
    )  # fmt: skip
    trainer.train()
    model: Any = trainer.run.model
    evaluated = trainer.evaluate()
    text = model.generate(torch.arange(3)[None], max_new_tokens=4, do_sample=False)
    trainer.save_model(f"{folder}/model")
    names = ("loss", "grad_norm", "epoch")
    return {
        "records": [[record.get(name) for name in names] for record in records.seen],
        "evaluated": (evaluated["eval_loss"], evaluated["eval_seen"]), "text": text.tolist(),
        "samples": trainer.run.state.samples, "predicted": trainer.predict([*Stream()]).predictions,
        "weights": {name: whole(each).detach().clone() for name, each in model.state_dict().items()},
    }  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [SPLIT, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
def test_streams_steps_that_are_not_finite_generation_and_saved_models(tmp_path: Path, mesh: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    alone = use(str(tmp_path / "alone"), None)
    for ours in on_ranks(math.prod(mesh.values()), use, str(tmp_path / "split"), mesh):
        for record, other in zip(ours["records"], alone["records"], strict=True):
            assert record == pytest.approx(other, abs=1e-6, nan_ok=True)
        assert ours["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-6)
        assert (ours["text"], ours["samples"]) == (alone["text"], alone["samples"])
        np.testing.assert_allclose(ours["predicted"], alone["predicted"], rtol=0, atol=1e-5)
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=0, atol=1e-6)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "split" / "model").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in ours["weights"].items())


class Records(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.seen.append(record)


def count_flops(folder: str, mesh: dict[str, int] | None) -> tuple[float, ...]:
    torch.manual_seed(0)
    readers = 1 if mesh is None else math.prod(mesh.values()) // 2
    samples = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", save_strategy="no",
        num_train_epochs=1, per_device_train_batch_size=4 // readers,
    )  # fmt: skip
    throughput = Throughput()
    strategy = mesh and FSDP(device="cpu", mesh=mesh, tensor_parallel="auto")
    trainer = Trainer(llama(num_key_value_heads=2), args, samples, callbacks=[throughput], strategy=strategy)
    trainer.train()
    flops = throughput._operations.so_far(trainer.run)
    found = throughput._flops(trainer.run, flops.model, flops.hardware)
    assert found is not None
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [SPLIT, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
def test_operations_are_those_of_the_whole_model_once_a_reader(tmp_path: Path, mesh: dict[str, int]) -> None:
    expected = count_flops(str(tmp_path), None)
    assert expected[0] > 0
    for found in on_ranks(math.prod(mesh.values()), count_flops, str(tmp_path), mesh):
        assert found == pytest.approx(expected)


class Direct(Blocks):
    """Has the layers that are split itself, next to blocks that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 12).double(), nn.Linear(12, 4).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(x + self.narrow(torch.tanh(self.wide(x))), labels)


def train_direct(folder: str, batch_size: int, mesh: dict[str, int] | None) -> dict[str, torch.Tensor]:
    plan = {"wide": "colwise", "narrow": "rowwise"}
    given = {"strategy": FSDP(device="cpu", mesh=mesh, tensor_parallel=plan)} if mesh else {}
    torch.manual_seed(0)
    trainer = make_trainer(folder, "auto", model=Direct(), given=given, per_device_train_batch_size=batch_size)
    trainer.train()
    return whole_weights(trainer.run.model)


@pytest.mark.distributed
def test_the_model_itself_has_the_split_layers(tmp_path: Path) -> None:
    expected = train_direct(str(tmp_path), 4, None)
    for weights in on_ranks(4, train_direct, str(tmp_path), 2, BOTH):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [SPLIT, pytest.param(BOTH, marks=pytest.mark.slow)], ids=str)
def test_a_gate_without_dimensions_between_split_layers(tmp_path: Path, mesh: dict[str, int]) -> None:
    style = "replicated_with_grad_allreduce"
    plan = {"blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise", "blocks.*.gate": style}
    alone = train_tower(str(tmp_path), 4, None, Gated)
    processes = math.prod(mesh.values())
    for found in on_ranks(processes, train_tower, str(tmp_path), 8 // processes, mesh, Gated, plan):
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=1e-12)
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-12)
