"""The tutorial for TPUs prints and plots on XLA's CPU client what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.xla


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    from site_builder.recording import changes, run

    assert changes("tpu", run("tpu", tmp_path)) == []
