"""torchdata's StatefulDataLoader: killed and resumed bit for bit, over map-style and iterable datasets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.data_training import Rows, check_resume, rows, train, weights
from torch.utils.data import DataLoader

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class StatefulRows(Rows):
    """An iterable dataset with a state: the number of samples given in this pass."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __iter__(self) -> Any:
        for row in rows(self.length)[self.given :]:
            self.given += 1
            yield row
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


MAKE: dict[str, Any] = {
    "map": lambda: StatefulDataLoader(rows(), batch_size=4, shuffle=True),
    "map, seeded": lambda: StatefulDataLoader(
        rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "iterable": lambda: StatefulDataLoader(StatefulRows(), batch_size=4),
    "iterable, workers": lambda: StatefulDataLoader(StatefulRows(), batch_size=4, num_workers=1),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_resume_is_exact(tmp_path: Path, kind: str) -> None:
    check_resume(tmp_path, MAKE[kind], max_steps=9)


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from ecosystem_torchdata import MAKE\n"
        "from kit.data_training import train\n"
        "class Kill(__import__('trainer_kit').Callback):\n"
        "    def on_step_end(self, run):\n"
        "        if run.state.step == 5:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "train(sys.argv[1], MAKE['iterable'](), max_steps=9, async_save=False, given={'callbacks': [Kill()]})\n"
    )
    (tmp_path / "ecosystem_torchdata.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join([str(tmp_path), *sys.path])
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "killed")], env=os.environ | {"PYTHONPATH": path}, timeout=120
    )
    assert killed.returncode == -9
    whole, steps = train(tmp_path / "whole", MAKE["iterable"](), max_steps=9)
    rest, others = train(tmp_path / "killed", MAKE["iterable"](), "checkpoint-3", max_steps=9)
    assert others.samples == steps.samples[3:]
    assert weights(rest) == weights(whole)


def test_its_loader_gives_the_steps_of_a_plain_one(tmp_path: Path) -> None:
    _, one = train(tmp_path / "a", StatefulDataLoader(rows(), batch_size=4, shuffle=True))
    _, other = train(tmp_path / "b", DataLoader(rows(), batch_size=4, shuffle=True))
    assert one.samples == other.samples
    assert one.losses == other.losses
