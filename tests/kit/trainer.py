"""Arguments of small trainings."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trainer_kit import TrainingArguments

UNUSED = str(Path(tempfile.gettempdir()) / "trainer_kit-unused")
"""Output folder of trainers that only evaluate, which leave it empty."""


def arguments(tmp_path: Path, **changes: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"), "max_steps": 4, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "log_level": "warning", "save_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**(defaults | changes))
