"""The page of the format names what a written checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path

from kit.trainer_states import trainer_state
from site_builder.checkpoint_format import checkpoint_format

from trainer_kit.checkpoint import take_snapshot, write_checkpoint


def test_each_field_of_a_checkpoint_is_listed(tmp_path: Path) -> None:
    states = {"trainer": trainer_state(1, [["checkpoint-1", 1, None]], "demo", (None, None))}
    folder = write_checkpoint(tmp_path, take_snapshot(1, {}, states, arguments={}))
    manifest = json.loads((folder / "manifest.json").read_text())
    state = json.loads((folder / "state" / "trainer.json").read_text())
    named = {*manifest, *next(iter(manifest["files"].values())), *state, *state["counters"]}
    assert {"step", "checksum", "run_id", "epoch"} <= named
    page = checkpoint_format()
    assert [name for name in named if f"`{name}`" not in page] == []
