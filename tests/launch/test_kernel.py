"""What is found out about a kernel; a real one runs in test_notebook_kernel."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_kit.launch import kernel


class OnGPU(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def notebook(monkeypatch: pytest.MonkeyPatch, cells: list[str], **names: Any) -> None:
    shell = SimpleNamespace(user_ns={"In": ["", *cells], **names})
    monkeypatch.setattr(kernel, "_shell", lambda: shell)


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
    assert kernel.cuda_user() == f"cell [2]: `{line}`"


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
    monkeypatch.setattr(kernel, "_TOUCH_AT_IMPORT", ())
    notebook(monkeypatch, [cell], device="cpu")
    assert kernel.cuda_user() == "no cell shows by what"


def test_a_long_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(monkeypatch, [f"model = make({'1, ' * 60}2).cuda()"])
    assert len(kernel.cuda_user()) < 100


def test_what_lies_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    model.weight = torch.nn.Parameter(torch.ones(1, 1).as_subclass(OnGPU), requires_grad=False)
    notebook(monkeypatch, [], model=model, x=torch.ones(1).as_subclass(OnGPU), y=torch.ones(1), _hidden=model)
    assert kernel.cuda_user() == "on the GPU: model, x"


def test_an_import_may_be_it(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(monkeypatch, ["import torch"])
    monkeypatch.setattr(kernel, "_TOUCH_AT_IMPORT", ("no_such_package", "ctypes", "torch"))
    assert kernel.cuda_user() == "perhaps by importing ctypes or torch"


@pytest.mark.parametrize(("answer", "in_use"), [(0, True), (3, False), (100, True)])
def test_the_driver_is_asked(answer: int, in_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def driver(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(cuDeviceGetCount=lambda _: answer)

    monkeypatch.setattr(ctypes, "CDLL", driver)
    assert kernel.cuda_in_use() is in_use
    assert asked == ["libcuda.so.1"]


def test_no_driver_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not kernel.cuda_in_use()


def test_fork_only_where_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "cuda_in_use", lambda: False)
    monkeypatch.setattr("sys.platform", "linux")
    assert kernel.obstacle_to_fork() is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert "darwin" in str(kernel.obstacle_to_fork())


def test_cells_have_their_names_in_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'File "/cells/12.py", line 3, in f\n  File "/elsewhere.py", line 4'
    assert kernel.readable(text) == text
    names = {"/cells/12.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setattr(kernel, "_shell", lambda: shell)
    assert kernel.readable(text) == 'Cell In[3], line 3, in f\n  File "/elsewhere.py", line 4'
