"""The step at which a run broke off is run once more on the CPU, with the user's own script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.taken_over import Left, written_here

from trainer_kit import NonFiniteError
from trainer_kit.checkpoint import CheckpointError, verify
from trainer_kit.debugging.crash_dump import CrashDump
from trainer_kit.errors import DataError
from trainer_kit.launch.script import run_as_main
from trainer_kit.loop.step_metrics import StepSpan
from trainer_kit.tools.replay import replay

SCRIPT = """
import sys

import torch
from torch import nn
from trainer_kit import Callback, Trainer, TrainingArguments

kind = sys.argv[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 5 if kind == "wider" else 4)
        self.drop = nn.Dropout(0.5)
        self.head = Head()
        self.calls = 0

    def forward(self, x, graph=None):
        self.calls += 1
        if kind == "by step" and trainer.run.state.step == 3:
            raise KeyError(f"epoch {trainer.run.state.epoch}, {trainer.run.state.position} samples of it")
        if kind == "by itself" and self.calls == 6:
            raise KeyError("the sixth call")
        return self.head(self.drop(self.body(x)))


class Head(nn.Module):
    def forward(self, h):
        if kind == "raises" and h.mean() > 1.5:
            raise IndexError("off the end")
        if kind == "root":
            return (h - h.detach()).abs().sqrt().mean()
        if kind == "grows":
            return -h.exp().mean()
        return -h.square().mean()


class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if kind == "rotten" and index == 33:
            raise OSError("a rotten file")
        sample = torch.randn(3)
        if kind == "bad" and index == 33:
            sample[1] = float("nan")
        if kind == "twice" and sample[2] < -2:  # the sixth draw of sample 33
            sample[1] = float("nan")
        return {"x": sample, "graph": object()} if kind in ("objects", "twice") else {"x": sample}


def collate(samples):
    batch = {"x": torch.stack([sample["x"] for sample in samples])}
    if kind == "objects":
        batch["x"][0] = float("inf")
    if kind in ("objects", "twice"):
        batch["graph"] = samples[0]["graph"]
    return batch


class Raise(Callback):
    def on_step_end(self, run):
        if kind == "callback" and run.state.step == 3:
            raise LookupError("a callback's own")


torch.manual_seed(0)
args = TrainingArguments(
    sys.argv[2], per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=9, save_strategy="no",
    optim="sgd", learning_rate=10.0, max_grad_norm=0.0 if kind == "grows" else 1.0, use_cpu=True, report_to=(),
    disable_tqdm=True,
)
order = [33] * 64 if kind == "twice" else None
trainer = Trainer(Net(), args, Data(), data_collator=collate, callbacks=[Raise()], train_sampler=order)
if kind != "idle":
    try:
        trainer.train()
    except BaseException:
        if sys.argv[3:]:
            trainer.save_model("final-" + sys.argv[3])
        raise
"""

Lines = list[str]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script's path; it may be run in this process."""
    return written_here(SCRIPT, tmp_path, monkeypatch)


@pytest.fixture
def broken_off(script: str, tmp_path: Path) -> Callable[[str, type[Exception]], Path]:
    """Trains until an error of a type, and gives the folder that is left."""

    def train(kind: str, error: type[Exception]) -> Path:
        with pytest.raises(error):
            run_as_main([script, kind, str(tmp_path / "run")])
        (folder,) = (tmp_path / "run").glob("crash-*")
        return folder

    return train


def replayed(folder: Path, *words: str) -> tuple[bool, str]:
    lines: Lines = []
    with pytest.raises(Left) as caught:
        replay(folder, [*words, str(folder.parent)], lines.append, lines.append)
    return caught.value.args == (0,), "\n".join(lines)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), start=1) if text in line)


def postmortem_of_the_script() -> CrashDump:
    trainer = vars(sys.modules["__main__"])["trainer"]
    return CrashDump(trainer.run, trainer._probe.loss, trainer._loop.loader)


Broken = Callable[[str, type[Exception]], Path]


def test_a_bad_sample(script: str, broken_off: Broken) -> None:
    folder = broken_off("bad", NonFiniteError)
    reproduced, shown = replayed(folder, script, "bad")
    assert reproduced, shown
    assert "x of micro-batch 1 holds nan in rows [1]" in shown
    assert "(samples [33])" in shown
    assert "run again on the CPU with precision 'no' (the run: cpu), 2 micro-batches" in shown
    # The batch is that of the folder, not one that the script would make.
    assert replayed(folder, script, "fine")[0]


def test_a_sample_that_the_epoch_had_before(script: str, broken_off: Broken) -> None:
    folder = broken_off("twice", NonFiniteError)
    assert folder.name == "crash-2"
    reproduced, shown = replayed(folder, script, "twice")
    assert reproduced, shown
    assert "batch: read again from the script's own dataset" in shown
    assert "x of micro-batch 0 holds nan in rows [1]" in shown


def test_weights_that_overflow(script: str, broken_off: Broken) -> None:
    folder = broken_off("grows", NonFiniteError)
    reproduced, shown = replayed(folder, script, "grows")
    assert reproduced, shown
    assert "first bad module: head (Head): inf came up in it" in shown
    place = f"{script}:{line_of('h.exp()')}, in forward: return -h.exp().mean() (aten.exp.default): inf"
    assert f"first bad operation: {place}" in shown


def test_weights_that_lie_with_another_process(script: str, broken_off: Broken, tmp_path: Path) -> None:
    folder = broken_off("grows", NonFiniteError)
    postmortem = postmortem_of_the_script()
    postmortem.run.strategy.collectives.rank = 1
    step = int(folder.name.removeprefix("crash-"))
    own = postmortem.write(NonFiniteError("the loss is inf", StepSpan(step, 0, 4 * step - 4, 4 * step), held=True))
    assert own == tmp_path / "run" / f"{folder.name}-rank-1"
    reproduced, shown = replayed(own, script, "grows")
    assert reproduced, shown
    assert f"weights: those of {folder}" in shown


def test_weights_that_are_spoiled_are_not_taken(script: str, broken_off: Broken) -> None:
    folder = broken_off("grows", NonFiniteError)
    step = int(folder.name.removeprefix("crash-"))
    error = NonFiniteError("the loss is inf", StepSpan(step, 0, 4 * step - 4, 4 * step), held=False)
    assert postmortem_of_the_script().write(error) == folder
    reproduced, shown = replayed(folder, script, "grows")
    assert not reproduced
    assert "weights: as the script made them" in shown
    assert "not reproduced: the weights are not those from before the step" in shown


def test_a_gradient_that_is_not_finite(script: str, broken_off: Broken) -> None:
    reproduced, shown = replayed(broken_off("root", NonFiniteError), script, "root")
    assert reproduced, shown
    assert "loss: 0.0, norm of the gradients: nan" in shown
    assert "first bad parameter on the way back: body.bias" in shown
    assert "anomaly detection: Function 'AbsBackward0' returned nan values" in shown
    assert f"the gradient of: {script}:{line_of('.abs().sqrt()')}, in forward" in shown


def test_an_exception_that_the_weights_and_the_seed_bring_about(script: str, broken_off: Broken) -> None:
    folder = broken_off("raises", IndexError)
    assert folder.name != "crash-1"
    reproduced, shown = replayed(folder, script, "raises")
    assert reproduced, shown
    assert 'raise IndexError("off the end")' in shown
    assert "/torch/nn/modules/" not in shown


def test_an_exception_that_does_not_come_again(script: str, broken_off: Broken) -> None:
    reproduced, shown = replayed(broken_off("by itself", KeyError), script, "by itself")
    assert not reproduced
    assert "not reproduced: the CPU now may compute otherwise than cpu did then" in shown


def test_an_exception_that_depends_on_the_step(script: str, broken_off: Broken) -> None:
    folder = broken_off("by step", KeyError)
    reproduced, shown = replayed(folder, script, "by step")
    assert folder.name == "crash-4"
    assert reproduced, shown
    assert "KeyError: 'epoch 0, 12 samples of it'" in shown.split("run again on the CPU")[1]


def test_a_sample_that_cannot_be_read(script: str, broken_off: Broken) -> None:
    reproduced, shown = replayed(broken_off("rotten", DataError), script, "rotten")
    assert reproduced, shown
    assert "read again from the script's own dataset" in shown
    assert "a rotten file" in shown


def test_a_batch_of_objects_is_made_again(script: str, broken_off: Broken) -> None:
    reproduced, shown = replayed(broken_off("objects", NonFiniteError), script, "objects")
    assert reproduced, shown
    assert "read again from the script's own dataset" in shown


def test_an_error_between_two_steps(script: str, broken_off: Broken) -> None:
    reproduced, shown = replayed(broken_off("callback", RuntimeError), script, "callback")
    assert not reproduced
    assert shown.startswith("step 3: CallbackError: ")
    assert "holds no batch to run again: batch: no step was being taken" in shown


def test_another_model_and_scripts_that_do_not_train(
    script: str, broken_off: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = broken_off("bad", NonFiniteError)
    reproduced, shown = replayed(folder, script, "wider")
    assert not reproduced
    assert "holds the weights of another model than this Net" in shown
    with pytest.raises(ValueError, match=r"train.py never called Trainer\.train"):
        replayed(folder, script, "idle")
    with pytest.raises(ValueError, match=r"train.py raised before it called Trainer\.train: IndexError"):
        replay(folder, [script], print, print)
    assert "kind = sys.argv[1]" in capsys.readouterr().err


def test_folders_that_are_none_of_a_crash(script: str, broken_off: Broken, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        replayed(tmp_path / "crash-9", script, "bad")
    folder = broken_off("bad", NonFiniteError)
    batch = folder / "state" / "batch.safetensors"
    batch.write_bytes(batch.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"batch\.safetensors is damaged"):
        replayed(folder, script, "bad")


def test_a_checkpoint_is_no_crash(script: str, broken_off: Broken, tmp_path: Path) -> None:
    run_as_main([script, "fine", str(tmp_path / "whole")])
    trainer = vars(sys.modules["__main__"])["trainer"]
    trainer.args.save_strategy = "epoch"
    trainer.train()
    checkpoint = next((tmp_path / "whole").glob("checkpoint-*"))
    verify(checkpoint)
    with pytest.raises(ValueError, match=r"is no folder that a broken-off run left"):
        replayed(checkpoint, script, "fine")


@pytest.mark.scenario
def test_the_command(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    trained = run("train.py", "grows", "run")
    assert trained.returncode == 1
    command = trained.stderr.rpartition("trainer-kit replay ")[2].splitlines()[0].split()
    assert command[1:] == ["train.py", "grows", "run"]
    done = run("-m", "trainer_kit", "replay", *command, "bad")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "reproduced: the step is not finite on the CPU either"
    assert not (tmp_path / "final-bad").exists()  # what the script saves when its training fails
    fine = run("-m", "trainer_kit", "replay", command[0], "train.py", "wider", "run")
    assert fine.returncode == 1
    assert fine.stderr.startswith("trainer-kit replay: run/crash-") or "another model" in fine.stderr
