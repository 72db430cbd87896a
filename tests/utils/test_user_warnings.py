from __future__ import annotations

import ast
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import trainer_kit
from trainer_kit import Trainer, TrainingArguments
from trainer_kit.utils.user_warnings import warn

PACKAGE = Path(trainer_kit.__file__).parent


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).mean()}


@pytest.mark.slow
def test_all_warnings_of_the_package_go_this_way() -> None:
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "callbacks").glob("*.py")])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("warnings.warn", "warnings.warn_explicit")
    ]
    assert {call.partition(":")[0] for call in calls} == {"utils/user_warnings.py"}, calls


def test_a_warning_names_the_users_line(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, lr_scheduler_type="constant",
                             warmup_steps=3, eval_strategy="epoch", report_to=[])  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(Net(2, 1), args, [{"x": torch.ones(2), "z": torch.ones(1)}] * 4)
        trainer.train()
    assert {warning.filename for warning in caught} == {__file__}
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    shown = [(lines[warning.lineno - 1].split("(")[0].strip(), str(warning.message)) for warning in caught]
    assert [line for line, _ in shown] == ["trainer = Trainer", "trainer.train", "trainer.train"]
    assert "has no effect without eval_dataset" in shown[0][1]


def test_where_no_line_is_the_users_none_is_shown() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn, args=("odd",))
        thread.start()
        thread.join()
    (warning,) = caught
    shown = warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno)
    assert shown == "trainer_kit:0: UserWarning: odd\n"


def test_a_script_that_is_run_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from trainer_kit.utils.user_warnings import warn\ndef f():\n    warn('odd')  # my own line\nf()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.stderr == f"{script}:3: UserWarning: odd\n  warn('odd')  # my own line\n"
