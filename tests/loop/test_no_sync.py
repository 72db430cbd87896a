"""A step that does not log never waits for the device.

On a CPU nothing waits, so the same is shown in two ways: on the meta device, whose tensors hold nothing that could be
read; and on a GPU, a simulated one where there is no real one, which raises on each wait or counts them.
"""

from __future__ import annotations

import threading
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fake_cuda import Gpus, Wait
from kit.sync_debug import SyncDebug
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_kit import Accelerator, Callback, Run, SingleDevice, Trainer, TrainingArguments
from trainer_kit.callbacks import PeerCopies


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


class Window(Callback):
    """Watches all from the beginning of the second step to the end of the last one, step by step.

    The first step looks at how the model counts its labels, and at the space on the disk.
    """

    priority = 1000  # the last to hear of a step's end

    def __init__(self, waits: Any) -> None:
        self.waits = waits
        self.steps = 0

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 1:
            self.waits.__enter__()

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 1:
            return
        self.waits.__exit__(None, None, None)
        self.steps += 1
        if run.state.step < run.total_steps:
            self.waits.__enter__()


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 12, "logging_steps": 100, "save_steps": 100, "log_level": "error",
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_grad_norm": 1.0, "weight_decay": 0.1,
        "report_to": "none", "disable_tqdm": True,
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


class Waits:
    """What a simulated GPU makes this thread wait for, in the contexts of all steps."""

    def __init__(self, gpus: Gpus) -> None:
        self.seen: list[Wait] = []
        self._gpus = gpus
        self._begin: int | None = None

    def __enter__(self) -> None:
        self._begin = len(self._gpus.waits)

    def __exit__(self, *_: object) -> None:
        new = self._gpus.waits[self._begin :]
        self.seen += [wait for wait in new if wait.thread == threading.current_thread().name]


def waits_of(gpus: Gpus, folder: Path, **changes: Any) -> list[Wait]:
    """Return the waits of 11 steps."""
    window = Window(Waits(gpus))
    Trainer(Classifier(), arguments(folder, **changes), points(), callbacks=[window]).train()
    assert window.steps == 11
    return window.waits.seen  # type: ignore[no-any-return]


NAMES = sorted(set(typing.get_args(typing.get_type_hints(TrainingArguments)["optim"])) - {"adamw_8bit"})
"""The optimizers by name, except those of packages that tests do not have."""


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("optim", NAMES)
def test_no_optimizer_waits(gpus: Gpus, tmp_path: Path, optim: str, mode: str) -> None:
    """With fp16, torch's gradient scaler asks before each step of an optimizer that is not fused."""
    asks = mode == "fp16" and optim not in ("adamw_torch", "sgd")
    seen = waits_of(gpus, tmp_path, optim=optim, mixed_precision=mode, nonfinite="ignore")
    assert [wait.what for wait in seen] == ["aten._local_scalar_dense"] * (11 if asks else 0), seen


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("follows", [False, True])
def test_no_hand_written_step_waits(gpus: Gpus, mode: str, follows: bool) -> None:
    """With fp16, a schedule asks in each step whether its optimizer has stepped."""
    accelerator = Accelerator(mixed_precision=mode, gradient_accumulation_steps=2)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(points(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if follows:
        schedule = accelerator.prepare(schedule)
    waits = Waits(gpus)
    for batch in loader:
        with waits, accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if follows:
                schedule.step()
            optimizer.zero_grad()
    asks = mode == "fp16" and follows
    assert len(waits.seen) == (8 if asks else 0), waits.seen
    assert not accelerator.optimizer_step_was_skipped


def test_the_counter_sees_what_waits(gpus: Gpus, tmp_path: Path) -> None:
    class Reader(Callback):
        def on_step_end(self, run: Run) -> None:
            assert run.local_loss is not None
            if run.state.step == 3:
                run.local_loss.item()
            if run.state.step == 4:
                run.local_loss.tolist()
            if run.state.step == 5 and run.local_loss > 0:
                losses = run.local_loss.reshape(1)
                losses[losses > 0]

    window = Window(Waits(gpus))
    Trainer(Classifier(), arguments(tmp_path), points(), callbacks=[window, Reader()]).train()
    whats = ["aten._local_scalar_dense", "copy to the host", "aten._local_scalar_dense", "aten.index"]
    assert [wait.what for wait in window.waits.seen] == whats


def test_copies_to_memory_wait_in_their_steps_alone(gpus: Gpus, tmp_path: Path) -> None:
    """A copy follows steps 4 and 8; the waits of each step are those from the end of the one before."""

    class Steps(Callback):
        priority = 1000

        def __init__(self) -> None:
            self.waits: list[int] = []
            self._window = Waits(gpus)
            self._window.__enter__()

        def on_step_end(self, run: Run) -> None:
            self._window.__exit__()
            self.waits.append(len(self._window.seen) - sum(self.waits))
            self._window.__enter__()

    steps = Steps()
    callbacks = [steps, PeerCopies(4, tmp_path)]
    Trainer(Classifier(), arguments(tmp_path / "run"), points(), callbacks=callbacks).train()
    waiting = [step for step, waits in enumerate(steps.waits, start=1) if waits and step > 1]
    assert waiting == [5, 9]


def test_skipping_with_an_optimizer_that_is_not_fused_has_to_wait(gpus: Gpus, tmp_path: Path) -> None:
    """Known and documented: the host decides whether such an optimizer steps."""
    seen = waits_of(gpus, tmp_path, nonfinite="skip", optim="adafactor")
    assert [wait.what for wait in seen] == ["aten._local_scalar_dense"] * 11


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


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("changes", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("kind", ["classifier", "gpt2", "pair", "labels on the device"])
def test_cuda_sees_no_wait(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    if kind == "labels on the device" and changes.get("dataloader_num_workers"):
        pytest.skip("workers cannot use CUDA")
    model, dataset = (gpt2(), texts()) if kind == "gpt2" else (Classifier(), points())
    if kind == "labels on the device":
        dataset = [{name: value.cuda() for name, value in sample.items()} for sample in dataset]
    window = Window(SyncDebug())
    trainer = Trainer(
        model, arguments(tmp_path, **changes), dataset, callbacks=[window],
        compute_loss=pair if kind == "pair" else None, strategy=SingleDevice("cuda"),
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        window.waits.__exit__()
    assert window.steps == 11
