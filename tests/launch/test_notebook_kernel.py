"""notebook_launcher in a real Jupyter kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "notebook.ipynb"
PRETEND = "import torch; torch.cuda.is_initialized = lambda: True"

pytestmark = pytest.mark.scenario


def execute(notebook: NotebookNode, folder: Path, fails: bool = False) -> list[str]:
    """Runs all cells; returns what each code cell shows, its errors as a reader sees them."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # see ipykernel
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables |= {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)}
    variables.pop("OMP_NUM_THREADS", None)
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", allow_errors=fails, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=variables)
    return ["".join(map(_shown, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def execute_cells(cells: Sequence[str], folder: Path) -> list[str]:
    return execute(new_notebook(cells=[new_code_cell(cell) for cell in cells]), folder, fails=True)


def _shown(output: NotebookNode) -> str:
    if output.output_type == "error":
        return "\n".join(output.traceback)
    text = output.text if output.output_type == "stream" else output.data["text/plain"]
    return str(text)


@pytest.mark.parametrize("starts_afresh", [False, True])
def test_the_example(starts_afresh: bool, tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    if starts_afresh:
        notebook.cells.insert(0, new_code_cell(PRETEND))
    *before, launched, last = execute(notebook, tmp_path)
    assert "Launching training on 2 CPUs." in launched
    assert ("CUDA is already in use" in launched) == starts_afresh
    assert "2 processes" in launched  # the Trainer's own word
    assert "Warning" not in "".join([*before, launched, last])
    [score] = [line for line in launched.splitlines() if line.startswith("accuracy on the new digits: ")]
    assert float(score.split()[-1].rstrip("%")) > 92
    read, truth = (line.partition(":")[2].split() for line in last.splitlines())
    assert sum(ours == theirs for ours, theirs in zip(read, truth, strict=True)) >= 6
    assert (tmp_path / "runs" / "notebook").is_dir()


FUNCTIONS = """
import os, signal, sys, threading, time
import torch
from trainer_kit.launch.notebook import notebook_launcher

model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(16384, 10))

def compute():
    torch.set_num_threads(2)
    for _ in range(2):
        model(torch.randn(16, 3, 32, 32)).sum().backward()
    (torch.randn(500, 500) @ torch.randn(500, 500)).sum()
    print("computed with", torch.get_num_threads(), "threads")

def fail():
    if os.environ["RANK"] == "1":
        raise ArithmeticError("only in this process")
    time.sleep(100)

def wait():
    print("waiting")
    open(f"waiting-{os.environ['RANK']}", "w").close()
    time.sleep(100)

def interrupt_when_waiting():  # as the server does it: the whole group of processes gets the signal
    while not all(map(os.path.exists, ("waiting-0", "waiting-1"))):
        time.sleep(0.05)
    os.killpg(os.getpgid(0), signal.SIGINT)
"""


def test_a_kernel_that_has_computed_can_be_forked(tmp_path: Path) -> None:
    cells = [FUNCTIONS, "compute()", "notebook_launcher(compute, num_processes=2)"]
    _, here, there = execute_cells(cells, tmp_path)
    assert here == "computed with 2 threads\n"
    assert "Launching training on 2 CPUs.\ncomputed with 2 threads\n" in there
    assert "CUDA" not in there


def test_what_the_first_process_displays_is_shown_once(tmp_path: Path) -> None:
    show = """
def show():
    from IPython.display import Markdown, display
    display(Markdown("**bold**"))
    print("a", "b")
"""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in (FUNCTIONS, show, "notebook_launcher(show, (), 2)")])
    execute(notebook, tmp_path)
    outputs = notebook.cells[-1].outputs
    displayed = [output.data["text/markdown"] for output in outputs if output.output_type == "display_data"]
    assert displayed == ["**bold**"]
    assert "".join(output.text for output in outputs if output.output_type == "stream").count("a b\n") == 1


@pytest.mark.parametrize("starts_afresh", [False, True])
def test_errors_and_interrupts(starts_afresh: bool, tmp_path: Path) -> None:
    cells = [
        FUNCTIONS,
        PRETEND if starts_afresh else "",
        "handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)",
        "notebook_launcher(fail, num_processes=2)",
        "notebook_launcher(fail, num_processes=0)",
        "threading.Thread(target=interrupt_when_waiting).start(); notebook_launcher(wait, num_processes=2)",
        "threading.Timer(0.5, os.killpg, (os.getpgid(0), signal.SIGINT)).start(); notebook_launcher(wait, (), 2)",
        "handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))",
    ]
    *_, failed, refused, interrupted, interrupted_at_start, alive = execute_cells(cells, tmp_path)
    assert "ProcessFailed: rank 1" in failed
    assert re.search(r"Cell In\[1\], line \d+, in fail\n    raise ArithmeticError", failed)
    assert "launch/" not in failed  # none of our frames
    assert refused == "ValueError: num_processes=0 is not allowed; it must be a whole number of at least 1, or None"
    assert "waiting\n" in interrupted
    assert "ProcessesLeft: the processes left after Ctrl-C" in interrupted
    assert "ProcessesLeft: the processes left after Ctrl-C" in interrupted_at_start
    assert "KeyboardInterrupt" not in interrupted_at_start
    assert alive == "True"
