"""Batches of tensordict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.data_training import rows, train, weights

pytest.importorskip("tensordict")

from tensordict import TensorDict

from trainer_kit import ReadyBatches
from trainer_kit.loss.batch import samples_in, split

pytestmark = [pytest.mark.ecosystem]


def batches(size: int = 4) -> list[Any]:
    whole = TensorDict({name: torch.stack([row[name] for row in rows()]) for name in ("x", "labels")}, batch_size=[22])
    return [*whole.split(size)]


def test_they_train_as_dicts_do(tmp_path: Path) -> None:
    dicts = [dict(batch.items()) for batch in batches()]
    one, _ = train(tmp_path / "a", ReadyBatches(batches()))
    other, _ = train(tmp_path / "b", ReadyBatches(dicts))
    assert weights(one) == weights(other)
    assert one.run.state.samples == 44


def test_samples_are_stacked_as_dicts_are(tmp_path: Path) -> None:
    samples = TensorDict(
        {name: torch.stack([row[name] for row in rows()]) for name in ("x", "labels")}, batch_size=[22]
    )
    one, _ = train(tmp_path / "a", samples)
    other, _ = train(tmp_path / "b", rows())
    assert weights(one) == weights(other)


def test_they_split_by_their_batch_size() -> None:
    batch = batches(5)[0]
    assert samples_in(batch) == 5
    parts = split(batch, [(0, 3), (3, 5)])
    assert [len(part["x"]) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
