"""The examples for TPUs, run as a user would run them, on XLA's CPU client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from on_xla import try_on_xla

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent


def test_tpu(tmp_path: Path) -> None:
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
