"""A step that does not log never waits for the device.

On a CPU nothing waits, so the same is shown in three ways: on the meta device, whose tensors hold nothing that could be
read; on the CPU, by the operators (and methods of tensors) that would wait on a GPU, counted from the moment a step's
batches are fetched to its end; and on a GPU, where CUDA itself raises on each of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from kit.far_info import FarInfo
from kit.sync_debug import SyncDebug
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_kit import Callback, Run, SingleDevice, Trainer, TrainingArguments

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.equal, aten.masked_select, aten._unique2,
    aten.allclose, aten.index, aten.repeat_interleave,
}  # fmt: skip
METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def points(length: int = 64) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(4), "labels": torch.tensor(index % 3)} for index in range(length)]


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def texts(length: int = 64) -> list[dict[str, torch.Tensor]]:
    rows = [torch.randint(0, 11, (6,)) for _ in range(length)]
    return [{"input_ids": row, "labels": row.where(row > 3, -100)} for row in rows]


def pair(model: nn.Module, batch: Any) -> Any:
    """The count is known on the device alone."""
    logits = model(**batch)["logits"]
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), (batch["labels"] != -100).sum()


class Waits(TorchDispatchMode):
    """Counts what would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._patches = pytest.MonkeyPatch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITING and not self._is_indexed_by_numbers(func, args):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    def _is_indexed_by_numbers(self, func: Any, args: Any) -> bool:
        """Indexing waits only where a mask says how many there are."""
        return func.overloadpacket is aten.index and all(
            place is None or place.dtype not in (torch.bool, torch.uint8) for place in args[1]
        )

    def __enter__(self) -> Waits:
        for name in METHODS:
            self._patches.setattr(torch.Tensor, name, self._watched(getattr(torch.Tensor, name), name))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.undo()

    def _watched(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(tensor: torch.Tensor, *args: Any) -> Any:
            self.seen.append(name)
            return method(tensor, *args)

        return watched


class GlobalBatch(Callback):
    """Watches every step from the second on; the first looks at how the model counts its labels."""

    priority = -1000

    def __init__(self, waits: Any) -> None:
        self.waits = waits
        self.steps = 0

    def on_step_begin(self, run: Run) -> None:
        if run.state.step > 0:
            self.waits.__enter__()


class WindowEnd(Callback):
    """The last to hear of a step's end."""

    priority = 1000

    def __init__(self, window: GlobalBatch) -> None:
        self.window = window

    def on_step_end(self, run: Run) -> None:
        if run.state.step > 1:
            self.window.waits.__exit__(None, None, None)
            self.window.steps += 1


class LikeAnAccelerator(SingleDevice):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.device_info = FarInfo(self.device)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 12, "logging_steps": 100, "save_steps": 100, "log_level": "error",
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_grad_norm": 1.0, "weight_decay": 0.1,
    }  # fmt: skip
    return TrainingArguments(**(values | changes))


CASES: dict[str, dict[str, Any]] = {
    "stop": {"nonfinite": "stop"},
    "skip, fused": {"nonfinite": "skip"},
    "ignore": {"nonfinite": "ignore"},
    "clipped by value": {"max_grad_value": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "bf16": {"mixed_precision": "bf16"},
    "workers": {"dataloader_num_workers": 2},
    "one batch a step": {"gradient_accumulation_steps": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("kind", ["classifier", "gpt2", "pair"])
def test_no_operator_of_a_step_waits(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model, dataset = (gpt2(), texts()) if kind == "gpt2" else (Classifier(), points())
    window = GlobalBatch(Waits())
    trainer = Trainer(
        model, arguments(tmp_path, use_cpu=True, **changes), dataset, callbacks=[window, WindowEnd(window)],
        compute_loss=pair if kind == "pair" else None, strategy=LikeAnAccelerator("cpu"),
    )  # fmt: skip
    trainer.train()
    assert window.steps == 11
    assert window.waits.seen == []


def test_the_counter_sees_what_waits(tmp_path: Path) -> None:
    class LoaderConfig(Callback):
        def on_step_end(self, run: Run) -> None:
            assert run.local_loss is not None
            if run.state.step == 3:
                run.local_loss.item()
            if run.state.step == 4:
                run.local_loss.tolist()
            if run.state.step == 5 and run.local_loss > 0:
                losses = run.local_loss.reshape(1)
                losses[losses > 0]

    window = GlobalBatch(Waits())
    args = arguments(tmp_path, use_cpu=True)
    Trainer(Classifier(), args, points(), callbacks=[window, LoaderConfig(), WindowEnd(window)]).train()
    assert {"item", "aten._local_scalar_dense.default", "tolist", "__bool__", "aten.index.Tensor"} <= set(
        window.waits.seen
    )


def test_skipping_with_an_optimizer_that_is_not_fused_has_to_wait(tmp_path: Path) -> None:
    """Known and documented: the host decides whether such an optimizer steps."""
    window = GlobalBatch(Waits())
    args = arguments(tmp_path, use_cpu=True, nonfinite="skip", optim="sgd")
    strategy = LikeAnAccelerator("cpu")
    Trainer(Classifier(), args, points(), callbacks=[window, WindowEnd(window)], strategy=strategy).train()
    assert window.waits.seen.count("item") == window.steps == 11


class MetaDevice(SingleDevice):
    """Tensors without content: reading one raises. Whole steps run on it, fetching included."""

    def __init__(self) -> None:
        super().__init__("meta")


class Steps(Callback):
    def __init__(self) -> None:
        self.taken = 0

    def on_step_end(self, run: Run) -> None:
        assert run.local_loss is not None
        assert run.local_loss.is_meta
        self.taken += 1


@pytest.mark.parametrize("nonfinite", ["stop", "ignore"])
@pytest.mark.parametrize("compute_loss", [None, pair])
@pytest.mark.parametrize("data", ["cpu", "meta"])
def test_no_step_reads_a_tensor_of_its_device(tmp_path: Path, nonfinite: str, compute_loss: Any, data: str) -> None:
    steps = Steps()
    args = arguments(tmp_path, nonfinite=nonfinite, lr_scheduler_type="cosine", save_strategy="no")
    dataset = [{name: value.to(data) for name, value in sample.items()} for sample in points()]
    trainer = Trainer(Classifier(), args, dataset, callbacks=[steps], strategy=MetaDevice(), compute_loss=compute_loss)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        trainer.train()
    assert steps.taken == 12  # only the end, which tells the mean loss, reads anything


def test_the_meta_device_shows_what_waits(tmp_path: Path) -> None:
    steps, args = Steps(), arguments(tmp_path, logging_steps=5, save_strategy="no")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        Trainer(Classifier(), args, points(), callbacks=[steps], strategy=MetaDevice()).train()
    assert steps.taken == 5


def test_cudas_debug_mode_is_not_left_on(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if len(modes) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(ArithmeticError), SyncDebug():
        raise ArithmeticError
    assert modes == ["error", "default"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("changes", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("kind", ["classifier", "gpt2", "pair", "labels on the device"])
def test_cuda_sees_no_wait(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    if kind == "labels on the device" and changes.get("dataloader_num_workers"):
        pytest.skip("workers cannot use CUDA")
    model, dataset = (gpt2(), texts()) if kind == "gpt2" else (Classifier(), points())
    if kind == "labels on the device":
        dataset = [{name: value.cuda() for name, value in sample.items()} for sample in dataset]
    window = GlobalBatch(SyncDebug())
    trainer = Trainer(
        model, arguments(tmp_path, **changes), dataset, callbacks=[window, WindowEnd(window)],
        compute_loss=pair if kind == "pair" else None, strategy=SingleDevice("cuda"),
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        window.waits.__exit__()
    assert window.steps == 11
