"""The examples for TPUs, run as a user would run them, on XLA's CPU client."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kit.on_xla import QUICK, try_on_xla
from nbclient import NotebookClient

pytestmark = pytest.mark.xla

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    def run() -> dict[str, Any]:
        sys.path.insert(0, str(ROOT / "examples"))
        import tpu

        tpu.language_model.CONTEXT = 16  # faster; what is compiled is as much
        figures: dict[str, Any] = tpu.main(["--short", "--output-dir", str(tmp_path)])
        return figures

    ended = try_on_xla(2, run, timeout=280)
    assert not ended.error, ended.error
    digits, language_model = ended.value["digits"], ended.value["language_model"]
    assert digits["test_accuracy"] > 0.9
    assert language_model["losses"][-1] < language_model["losses"][0] - 0.3
    for figures in (digits, language_model):
        assert figures["devices"] == 2
        assert figures["graphs"] <= 6  # steps 1 and 2, the last batch of an epoch, evaluation, a look at the loss, test
        assert f"{figures['graphs']} graphs for 2 devices were compiled in " in ended.output
    assert ended.output.count("Batches came in ") == 2


def test_the_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "tpu_notebook.ipynb", as_version=4)
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # see ipykernel
    variables |= {"PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FLAGS": QUICK}
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=variables)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    installed, *_, launched, last = ["".join(output.text for output in cell.outputs) for cell in cells]
    assert installed == ""  # all is there
    assert "Launching training on 2 CPU devices.\n" in launched
    # Steps 1 and 2, looks at the loss in evaluation and in training, evaluation.
    assert "\n5 graphs for 2 devices were compiled in " in launched
    assert "Warning" not in launched
    [score] = [line for line in launched.splitlines() if line.startswith("accuracy after ")]
    assert score.startswith("accuracy after 376 steps: ")
    assert float(score.split()[-1].rstrip("%")) > 96
    read, truth = (line.partition(":")[2].split() for line in last.splitlines())
    assert sum(ours == theirs for ours, theirs in zip(read, truth, strict=True)) >= 10  # by the trained weights
