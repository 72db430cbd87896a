"""Lightning: the page "Coming from Lightning" names what exists, and its script trains as ours does."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path

import pytest
from kit.name_tables import Names, example, named, problems, public, version

from trainer_kit import TrainingArguments
from trainer_kit.config.lightning_names import LIGHTNING_NAMES

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
"""The warnings are Lightning's own."""


def names() -> Names:
    import lightning
    from lightning.pytorch import callbacks

    scopes = (callbacks, lightning, lightning.LightningModule, lightning.LightningDataModule, lightning.Callback)
    return Names({"trainer": lightning.Trainer}, scopes, (lightning.Trainer,))


def test_each_name_exists() -> None:
    assert problems("lightning", names()) == []
    assert importlib.metadata.version("lightning").startswith(f"{version('lightning').split()[1]}.")


def test_what_is_public_is_on_the_page() -> None:
    import lightning
    from lightning.pytorch import callbacks

    hooks = {name for name in dir(lightning.Callback) if name.startswith("on_")}
    assert (public(callbacks) | hooks) - named("lightning") == set()


def test_each_setting_is_known() -> None:
    import lightning

    known = LIGHTNING_NAMES.keys() | TrainingArguments.__annotations__.keys()
    assert inspect.signature(lightning.Trainer).parameters.keys() - known == set()


def test_the_script_trains_the_same(tmp_path: Path) -> None:
    before = example("lightning_before")(str(tmp_path / "before"), shuffle=False)
    after = example("lightning_after")(str(tmp_path / "after"), shuffle=False)
    for name in ("eval_loss", "eval_accuracy"):
        assert after[name] == pytest.approx(before[name], rel=1e-4)
