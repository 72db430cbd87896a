from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.trackers.tracker import PackageTracker, Tracker, flat, numbers_and_texts


class Package(PackageTracker):
    name = "package"
    package = "trainer_kit"

    def __init__(self, project: str | None = None, running: Any = None, fails: bool = False, **options: Any) -> None:
        super().__init__(project, **options)
        self.running, self.fails = running, fails
        self.calls: list[str] = []

    def find_run(self) -> Any:
        return self.running

    def begin_run(self) -> Any:
        if self.fails:
            raise ConnectionError("no server")
        self.calls.append(f"begin {self.run_id}")
        return types.SimpleNamespace(id=self.run_id or "new")

    def read_id(self) -> str | None:
        return str(self.tracker.id)

    def end_run(self) -> None:
        self.calls.append("end")


def test_a_run_begins_and_is_continued() -> None:
    tracker = Package()
    tracker.start()
    assert (tracker.run_id, tracker.tracker.id, tracker.client.__name__) == ("new", "new", "trainer_kit")
    tracker.finish()
    tracker.finish()
    tracker.run_id = "earlier"
    tracker.start()
    tracker.finish()
    assert tracker.run_id == "earlier"
    assert tracker.calls == ["begin None", "end", "begin earlier", "end"]


def test_a_run_of_the_program_is_used_and_left_open() -> None:
    running = types.SimpleNamespace(id="theirs")
    tracker = Package(running=running)
    tracker.run_id = "earlier"
    tracker.start()
    assert tracker.tracker is running
    assert tracker.run_id == "theirs"
    tracker.finish()
    assert tracker.calls == []


@pytest.mark.parametrize(
    ("run_id", "sentence"),
    [
        (None, "package cannot begin a run: ConnectionError: no server"),
        ("a1", "package cannot continue the run a1: ConnectionError: no server"),
    ],
)
def test_a_run_that_cannot_begin(run_id: str | None, sentence: str) -> None:
    tracker = Package(fails=True)
    tracker.run_id = run_id
    with pytest.raises(RuntimeError, match=sentence):
        tracker.start()
    tracker.finish()
    assert tracker.calls == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Package):
        name = "some_tracker"
        package = "some_tracker"

    (tmp_path / "some_tracker").mkdir()  # such as the folder of W&B's files
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not Missing.is_installed()
    with pytest.raises(ImportError, match=r"'some_tracker' needs a package that .* run `pip install some-tracker`"):
        Missing().start()
    (tmp_path / "some_tracker" / "__init__.py").touch()
    assert Missing.is_installed()


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Package):
        name = "broken_tracker"
        package = "broken_tracker"

    (tmp_path / "broken_tracker.py").write_text("import a_module_that_is_missing")
    monkeypatch.syspath_prepend(str(tmp_path))
    sentence = (
        r"'broken_tracker' needs the package .* failed \(ModuleNotFoundError: .*a_module_that_is_missing.*\); inst"
    )
    with pytest.raises(ImportError, match=sentence):
        Broken().start()


def test_a_tracker_needs_only_log() -> None:
    class Mine(Tracker):
        def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
            self.step = step

    tracker = Mine("project", key=1)
    tracker.start()
    tracker.store_init_configuration({})
    tracker.log({}, step=3)
    tracker.finish()
    assert (tracker.project, tracker.options, tracker.step, tracker.run_id) == ("project", {"key": 1}, 3, None)
    with pytest.raises(NotImplementedError, match="Tracker has no log"):
        Tracker().log({})


def test_values_are_flattened_and_sorted_by_kind() -> None:
    values = {"a": 1, "b": {"c": True, "d": {"e": "text"}}, "f": {}, "g": None}
    assert dict(flat(values)) == {"a": 1, "b/c": True, "b/d/e": "text", "f": {}, "g": None}
    assert numbers_and_texts(values) == ({"a": 1.0, "b/c": 1.0}, {"b/d/e": "text", "f": "{}", "g": "None"})


@pytest.mark.parametrize("name", ["run_name", "experiment_name"])
def test_accelerates_name_of_a_project(name: str) -> None:
    module, tracker = {"run_name": ("wandb", "WandBTracker"), "experiment_name": ("mlflow", "MLflowTracker")}[name]
    kind = getattr(importlib.import_module(f"trainer_kit.trackers.{module}"), tracker)
    with pytest.raises(TypeError, match=f"{tracker}.{name}=. is accelerate's name of the project; give project="):
        kind(**{name: "mine"})
