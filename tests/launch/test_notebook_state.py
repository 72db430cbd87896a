"""What is found out about a kernel; a real one runs in test_notebook_kernel."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_kit.launch import notebook_state


class OnGPU(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def notebook(monkeypatch: pytest.MonkeyPatch, cells: list[str], **names: Any) -> None:
    shell = SimpleNamespace(user_ns={"In": ["", *cells], **names})
    monkeypatch.setattr(notebook_state, "_shell", lambda: shell)


@pytest.mark.parametrize(
    "line",
    [
        "model = net.cuda()",
        "x = torch.zeros(3, device='cuda')",
        "x = torch.zeros(3, device='cuda:1')",
        "x = torch.zeros(3, device=device)",
        "x = x.to(device)",
        "x = x.to('cuda')",
        "print(torch.cuda.is_available())",
        "torch.cuda.set_device(0)",
        "accelerator = Accelerator()",
        "trainer = Trainer(model, args)",
        "model = load('gpt2', device_map='cuda')",
    ],
)
def test_the_line_that_uses_cuda(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = ["import torch", f"%matplotlib inline\ny = 1\n{line}\nz = 2", "w = v.cuda()"]
    notebook(monkeypatch, cells, device=torch.device("cuda", 0))
    assert notebook_state.user_of("cuda") == f"cell [2]: `{line}`"


@pytest.mark.parametrize(
    "cell",
    [
        "def train():\n    model.cuda()",
        "class Net:\n    def go(self):\n        return torch.ones(1, device='cuda')",
        "move = lambda x: x.cuda()",
        "print(torch.cuda.device_count(), torch.cuda.is_initialized())",
        "torch.cuda.manual_seed_all(0)",
        "device = torch.device('cuda')",
        "x = x.to(device)",
        "!nvidia-smi --cuda",
        "this is no Python .cuda()",
    ],
)
def test_what_does_not_use_cuda(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_state, "_TOUCH_AT_IMPORT", ())
    notebook(monkeypatch, [cell], device="cpu")
    assert notebook_state.user_of("cuda") == "no cell shows by what"


def test_a_long_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(monkeypatch, [f"model = make({'1, ' * 60}2).cuda()"])
    assert len(notebook_state.user_of("cuda")) < 100


def test_what_lies_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    model.weight = torch.nn.Parameter(torch.ones(1, 1).as_subclass(OnGPU), requires_grad=False)
    notebook(monkeypatch, [], model=model, x=torch.ones(1).as_subclass(OnGPU), y=torch.ones(1), _hidden=model)
    assert notebook_state.user_of("cuda") == "on the GPU: model and x"


def test_an_import_may_be_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(monkeypatch, ["import torch"])
    monkeypatch.setattr(notebook_state, "_TOUCH_AT_IMPORT", ("no_such_package", "ctypes", "torch"))
    assert notebook_state.user_of("cuda") == "perhaps by importing ctypes or torch"


@pytest.mark.parametrize(("answer", "in_use"), [(0, True), (3, False), (100, True)])
def test_the_driver_is_asked(answer: int, in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def driver(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(cuDeviceGetCount=lambda _: answer)

    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert notebook_state.cuda_in_use() is in_use
    assert asked == ["libcuda.so.1"]


def test_no_driver_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not notebook_state.cuda_in_use()


# XLA


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In place of torch_xla; its runtime runs if `running` is set."""
    module = types.ModuleType("torch_xla")
    told = SimpleNamespace(running=False, module=module)
    vars(module)["_XLAC"] = SimpleNamespace(_xla_runtime_is_initialized=lambda: told.running)
    monkeypatch.setitem(sys.modules, "torch_xla", module)
    return told


@pytest.mark.parametrize(
    "line",
    [
        "device = torch_xla.device()",
        "device = xm.xla_device()",
        "n = xr.world_size()",
        "n = count()",
        "x = torch.zeros(3, device='xla')",
        "x = x.to(device)",
        "accelerator = Accelerator()",
    ],
)
def test_the_line_that_uses_xla(line: str, torch_xla: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> None: ...

    count.__module__ = "torch_xla.runtime"
    names = {
        "torch_xla": torch_xla.module,
        "xm": types.ModuleType("torch_xla.core.xla_model"),
        "xr": types.ModuleType("torch_xla.runtime"),
        "count": count,
        "device": torch.device("xla", 0),
    }
    cells = ["import torch_xla\nxr.use_spmd()\nmodel.cuda()\nprint(xr.is_spmd())", line]
    notebook(monkeypatch, cells, **names)
    assert notebook_state.user_of("xla") == f"cell [2]: `{line}`"


def test_a_runtime_that_runs_is_found(torch_xla: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook_state.check_xla_is_free()
    torch_xla.running = True
    notebook(monkeypatch, ["import torch_xla", "n = torch_xla.device_count()"], torch_xla=torch_xla.module)
    sentence = (
        r"XLA is already in use in this kernel \(cell \[2\]: `n = .*`\), and .*; restart the kernel, make the model on"
    )
    with pytest.raises(RuntimeError, match=sentence):
        notebook_state.check_xla_is_free()
    monkeypatch.delitem(sys.modules, "torch_xla")
    notebook_state.check_xla_is_free()


@pytest.mark.usefixtures("torch_xla")
@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        ("", None),
        ("RuntimeError: 0 <= device_ready_queues_.size()", r"a backward\(\) has run in this kernel, .*xla#4174"),
        ("it ended with exit code 3", r"a forked process cannot compute by XLA here \(it ended with exit code 3\)"),
    ],
)
def test_a_copy_tries_xla(trouble: str, sentence: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(start_method: str, devices: list[str]) -> str:
        assert (start_method, devices, os.environ["PJRT_DEVICE"]) == ("fork", ["xla"], "CPU")
        return trouble

    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(notebook_state, "_trouble_of_child", tried)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(notebook_state, "cuda_in_use", lambda: True)  # which does not matter
    found = notebook_state.obstacle_to_fork(by_xla=True)
    assert found is None if sentence is None else re.fullmatch(rf".*{sentence}.*", str(found))
    assert os.environ["PJRT_DEVICE"] == "TPU"


def test_torch_xla_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # makes the import fail
    with pytest.raises(
        ImportError, match=r"XLA needs torch_xla .* of the same version as torch, .*pip install 'torch~=2.9.0'"
    ):
        notebook_state.obstacle_to_fork(by_xla=True)


def test_fork_only_where_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_state, "cuda_in_use", lambda: False)
    monkeypatch.setattr("sys.platform", "linux")
    assert notebook_state.obstacle_to_fork() is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert "darwin" in str(notebook_state.obstacle_to_fork())


def test_cells_have_their_names_in_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'File "/cells/12.py", line 3, in f\n  File "/elsewhere.py", line 4'
    assert notebook_state.readable(text) == text
    names = {"/cells/12.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setattr(notebook_state, "_shell", lambda: shell)
    assert notebook_state.readable(text) == 'Cell In[3], line 3, in f\n  File "/elsewhere.py", line 4'
