"""The failures of peers that the comparison shows are still there, and trainer_kit does not have them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from kit.releases import is_pinned

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from site_builder.comparison import differences
from site_builder.includes import recorded_file
from site_builder.recording import Step, output_of, pages, steps
from site_builder.sources import ROOT

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        sys.version_info < (3, 11) or not (is_pinned("transformers") and is_pinned("accelerate")),
        reason="other releases than those recorded",
    ),
]

PAGE = pages()["comparison"].read_text(encoding="utf-8")
MISSING = tuple(f"{peer} " for peer in ("lightning", "keras") if importlib.util.find_spec(peer) is None)
OURS, LOOP = "trainer_kit, ", "trainer_kit's Accelerator, "


@pytest.mark.parametrize("step", steps(PAGE), ids=lambda step: step.name)
def test_a_script_prints_what_the_page_shows(step: Step, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if step.name != "killed_save":  # which kills at once
        request.getfixturevalue("preloaded_python")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    printed = output_of(step, tmp_path)
    recorded = recorded_file("comparison", f"{step.name}.txt").read_text(encoding="utf-8")
    recorded = "".join(line for line in recorded.splitlines(keepends=True) if not line.startswith(MISSING))
    assert differences(recorded, printed) == []
    lines = printed.splitlines()
    assert all(line.startswith(f"{OURS}right: ") for line in lines if line.startswith(OURS))
    assert any(": " in line and line.partition(": ")[0].endswith(", wrong") for line in lines)
    assert any(line.startswith((OURS, LOOP)) for line in lines)


def test_each_script_is_on_the_page() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks" / "peers_failures").glob("*.py")} - {"contenders"}
    assert [step.commands for step in steps(PAGE)] == [
        f"python benchmarks/peers_failures/{step.name}.py\n" for step in steps(PAGE)
    ]
    assert {step.name for step in steps(PAGE)} == scripts


def test_the_versions_are_those_of_the_outputs() -> None:
    outputs = "".join(path.read_text(encoding="utf-8") for path in recorded_file("comparison", "").iterdir())
    versions = set(re.findall(r"^(?:transformers|accelerate|lightning|keras) [\d.]+(?=,)", outputs, re.MULTILINE))
    assert len(versions) == 4
    assert all(version in " ".join(PAGE.split()) for version in versions)


def test_the_numbers_of_integrations_are_right() -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import HPSearchBackend

    from trainer_kit.trackers.registry import TRACKERS

    words = " ".join(PAGE.split())
    assert f"transformers reports to {len(INTEGRATION_TO_CALLBACK)} trackers" in words
    assert f"trainer_kit to {len(TRACKERS)}." in words
    assert len([*HPSearchBackend]) == 3
    for device in ("XPU", "NPU", "MLU", "MUSA", "HPU", "NEURON"):
        assert f"MULTI_{device}" in accelerate.DistributedType.__members__
