"""The built reference has everything that is public, and the check notices what is missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from site_builder.completeness import everything, missing

import trainer_kit
from trainer_kit import callbacks, errors, memory
from trainer_kit.callback import HOOKS
from trainer_kit.cli.main import COMMANDS


@pytest.mark.slow
def test_everything_public_is_looked_for() -> None:
    names = {thing.anchor.rpartition(".")[2] for thing in everything()}
    assert {*trainer_kit.__all__} - {"__version__", "callbacks"} <= names
    assert {*callbacks.__all__, *memory.__all__, *trainer_kit.accelerator.__all__} - {"__version__"} <= names
    assert {
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
    } <= names
    assert {*HOOKS, *COMMANDS} <= names
    assert {"train", "save_state", "per_device_train_batch_size", "num_processes", "WORLD_SIZE"} <= names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_built_reference_has_everything(site: Path) -> None:
    assert missing(site) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_function_returns_is_one_paragraph(site: Path) -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in (site / "en" / "reference").glob("*.html")}
    lists = {
        name: re.findall(r">(?:Returns|Yields):</span></p>\s*<ul>(.*?)</ul>", text, re.DOTALL)
        for name, text in pages.items()
    }
    assert lists["trainer.html"]
    assert [name for name, found in lists.items() for each in found if each.count("<li") != 1] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "anchor"),
    [
        ("trainer", "trainer_kit.Trainer.train"),
        ("callbacks", "trainer_kit.Callback.on_step_end"),
        ("arguments", "arguments.learning_rate"),
        ("command-line", "checkpoints-prune.keep_best"),
        ("exceptions", "trainer_kit.errors.SaveError"),
        ("environment", "TRAINER_KIT_FSDP"),
    ],
)
def test_what_is_missing_is_named(page: str, anchor: str, site: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(site / "en" / "reference", tmp_path / "en" / "reference")
    text = (copy / f"{page}.html").read_text()
    without = re.sub(rf'id="?{re.escape(anchor)}"?(?=[ >])', "", text)
    assert without != text
    (copy / f"{page}.html").write_text(without)
    assert f"{anchor} is public, but reference/{page} does not have it" in missing(tmp_path)
