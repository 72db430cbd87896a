"""notebook_launcher and `trainer-kit launch --tpu` on real XLA devices."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from kit.on_xla import on_xla
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.notebook import notebook_launcher

pytestmark = pytest.mark.xla

ROOT = Path(__file__).parent.parent.parent
MIB = 2**20


def said_by(call: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, str]:
    """What it returns, and what it says."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        value = call(*args, **options)
    return value, said.getvalue()


def is_running() -> bool:
    import torch_xla

    return bool(torch_xla._XLAC._xla_runtime_is_initialized())


def gradient(model: torch.nn.Module) -> tuple[int, list[float]]:
    """Number of devices, and a gradient that was computed on one of them."""
    import torch_xla
    import torch_xla.runtime as xr

    moved = model.to(torch_xla.device())
    moved(torch.ones(1, 2).to("xla")).sum().backward()
    weight = next(moved.parameters())
    assert weight.grad is not None
    return xr.global_runtime_device_count(), weight.grad.flatten().tolist()


def train(model: torch.nn.Module, folder: str) -> tuple[str, int, int]:
    args = TrainingArguments(
        output_dir=folder, max_steps=3, per_device_train_batch_size=2, report_to="none", disable_tqdm=True
    )
    samples = [{"x": torch.randn(2), "y": torch.zeros(1)} for _ in range(40)]

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])

    trainer = Trainer(model, args, samples, compute_loss=loss)
    trainer.train()
    return trainer.run.strategy.device.type, trainer.run.strategy.devices, trainer.run.state.samples


def test_one_forked_process_drives_all_devices(tmp_path: Path) -> None:
    def kernel() -> list[Any]:
        model = torch.nn.Linear(2, 1)
        before = model.weight.tolist()
        several = said_by(notebook_launcher, train, (model, str(tmp_path)))
        one = said_by(notebook_launcher, gradient, (model,), num_processes=1)
        again = said_by(notebook_launcher, gradient, (model,), num_processes=4)
        return [several, one, again, is_running(), model.weight.tolist() == before, os.environ["CPU_NUM_DEVICES"]]

    several, one, again, is_in_use, is_as_before, devices = on_xla(4, kernel)
    assert several == (("xla", 4, 24), "Launching training on 4 CPU devices.\n")
    assert one == ((1, [1.0, 1.0]), "Launching training on one CPU device.\n")
    assert again == ((4, [1.0, 1.0]), "Launching training on 4 CPU devices.\n")
    assert not is_in_use
    assert is_as_before
    assert devices == "4"


def test_a_number_of_devices_that_cannot_be() -> None:
    def kernel() -> str:
        with pytest.raises(ValueError, match=r"num_processes=8 is not allowed; .* has 4: .*CPU_NUM_DEVICES") as caught:
            notebook_launcher(gradient, (torch.nn.Linear(2, 1),), num_processes=8)
        return str(caught.value)

    assert "\n" not in on_xla(4, kernel)


def test_the_model_is_shared_until_it_is_written() -> None:
    def memory(model: torch.nn.Module) -> list[float]:
        """MiB of this process's own, before and after each element is written."""
        own = [psutil.Process().memory_full_info().uss / MIB]
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return [*own, psutil.Process().memory_full_info().uss / MIB]

    def kernel() -> Any:
        return notebook_launcher(memory, (torch.nn.Linear(8192, 8192, bias=False),))

    before, after = on_xla(1, kernel)
    assert before < 200 < after - before  # the model has 256 MiB


def test_a_runtime_in_use_is_found_before_the_start() -> None:
    def kernel() -> None:
        import torch_xla

        torch_xla.device()
        with pytest.raises(
            RuntimeError, match=r"XLA is already in use in this kernel .*; restart the kernel, make the"
        ):
            notebook_launcher(os._exit, (1,))

    on_xla(1, kernel)


def test_a_fresh_process_after_a_backward_on_the_cpu() -> None:
    def kernel() -> tuple[Any, str]:
        model = torch.nn.Linear(2, 1)
        model(torch.ones(1, 2)).sum().backward()
        return said_by(notebook_launcher, gradient, (model,))

    value, said = on_xla(1, kernel)
    assert "a backward() has run in this kernel" in said
    assert "(pytorch/xla#4174); the processes start afresh, and gradient() is sent to them.\n" in said
    assert value == (1, [1.0, 1.0])


def test_a_child_process_is_tried_first() -> None:
    def kernel() -> tuple[Any, str]:
        os.environ["TRAINER_KIT_DEBUG"] = "1"
        return said_by(notebook_launcher, gradient, (torch.nn.Linear(2, 1),))

    (devices, _), said = on_xla(2, kernel)
    assert devices == 2
    assert said == "A child process (fork) can use the CPU by XLA.\nLaunching training on 2 CPU devices.\n"


def test_a_crash_may_be_for_memory() -> None:
    def kernel() -> str:
        with pytest.raises(ProcessFailed) as caught:
            notebook_launcher(signal.raise_signal, (signal.SIGSEGV,))
        return str(caught.value)

    message = on_xla(1, kernel)
    assert "was killed by SIGSEGV; if the memory of its host ran out, make the model once in the notebook" in message


# As it is used

TRAIN = """
import torch
from trainer_kit import Trainer, TrainingArguments, notebook_launcher

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])

def train(model):
    args = TrainingArguments(max_steps=2, per_device_train_batch_size=2, report_to="none", disable_tqdm=True)
    samples = [{"x": torch.randn(2), "y": torch.zeros(1)} for _ in range(40)]
    trainer = Trainer(model, args, samples, compute_loss=loss)
    trainer.train()
    print("trained on", trainer.run.strategy.devices, trainer.run.strategy.device.type)

model = torch.nn.Linear(2, 1)
"""


def test_in_a_kernel(tmp_path: Path) -> None:
    cells = [
        TRAIN,
        "notebook_launcher(train, (model,))",
        "import torch_xla\nx = torch.ones(2).to(torch_xla.device())",
        "notebook_launcher(train, (model,))",
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment(tmp_path, devices=2))
    _, trained, _, refused = [shown(cell) for cell in notebook.cells]
    assert "Launching training on 2 CPU devices.\n" in trained
    assert "trained on 2 xla\n" in trained
    cell = "cell [3]: `x = torch.ones(2).to(torch_xla.device())`; on the device: x"
    assert refused.startswith(f"RuntimeError: XLA is already in use in this kernel ({cell}), and ")
    assert "\n" not in refused


def shown(cell: NotebookNode) -> str:
    return "".join("\n".join(each.traceback) if each.output_type == "error" else each.text for each in cell.outputs)


def environment(folder: Path, devices: int) -> dict[str, str]:
    """Of a process that is no part of these tests."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # see ipykernel
    return variables | {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": str(folder),
    }


def command(*words: str, folder: Path, devices: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer_kit", *words],
        cwd=folder, env=environment(folder, devices), capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_a_launched_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{TRAIN}\ntrain(model)\n")
    done = command("launch", "--tpu", str(script), folder=tmp_path, devices=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained on 2 xla"


def test_the_self_test(tmp_path: Path) -> None:
    done = command("test", "--tpu", folder=tmp_path, devices=2)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others, last = done.stdout.splitlines()
    assert first == "collectives  ok (1 process on xla, 2 devices)"
    assert [line.split()[1] for line in others] == ["ok"] * 3
    assert last == "all is well"
