"""Arguments from jsonargparse's parsers."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit import TrainingArguments

jsonargparse = pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.ecosystem

LINE = ["--args.learning_rate=3e-4", "--args.eval_strategy=steps", "--args.warmup_steps=0.1"]


def test_class_arguments(tmp_path: Path) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(TrainingArguments, "args")
    parser.add_argument("--config", action="config")
    (tmp_path / "run.yaml").write_text("args:\n  seed: 7\n  learning_rate: 1e-3\n  report_to: [jsonl]\n")
    config = parser.parse_args([f"--config={tmp_path / 'run.yaml'}", *LINE[:3]])
    args = parser.instantiate(config).args
    assert args == TrainingArguments(
        learning_rate=3e-4, eval_strategy="steps", warmup_ratio=0.1, seed=7, report_to=["jsonl"]
    )


def test_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    def main(args: TrainingArguments, width: int = 8) -> tuple[TrainingArguments, int]:
        return args, width

    found = jsonargparse.CLI(main, args=[*LINE[:2], "--width=16"])
    assert found == (TrainingArguments(learning_rate=3e-4, eval_strategy="steps"), 16)
    with pytest.raises(SystemExit):
        jsonargparse.CLI(main, args=["--args.learning_rate=high"])
    assert "learning_rate" in capsys.readouterr().err
