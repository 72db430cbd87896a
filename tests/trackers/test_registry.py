from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.reporters import REPORTERS, TRACKER_NAMES
from trainer_kit.trackers import TRACKERS, JsonLinesTracker, Tracker, registry


def test_arguments_name_every_tracker_that_needs_no_folder() -> None:
    assert {name for name, kind in TRACKERS.items() if not kind.requires_logging_directory} == {*TRACKER_NAMES}
    assert {*TRACKERS} - {*TRACKER_NAMES} <= {*REPORTERS}
    assert all(name == kind.name for name, kind in TRACKERS.items())


def test_installed_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"tensorboard", "jsonl"} <= {*registry.installed_trackers()}
    for kind in TRACKERS.values():
        monkeypatch.setattr(kind, "package", "trainer_kit_without", raising=False)
    monkeypatch.setattr(JsonLinesTracker, "package", None)
    assert registry.installed_trackers() == ["jsonl"]
    with pytest.raises(ImportError, match="the tracker 'wandb' needs a package that is not installed"):
        registry.check_name("wandb", "report_to")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("wand", "log_with='wand' is not known; use 'tensorboard', 'jsonl', 'wandb', .*, or an object with log"),
        (
            "neptune",
            "log_with='neptune' is not allowed; neptune is not available, since its service",
        ),
        ("comet", "log_with='comet' is not allowed; use 'comet_ml'$"),
        ("mine", "log_with='mine' is not known; use .* such as a subclass of trainer_kit.trackers.Tracker"),
    ],
)
def test_names_that_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        registry.check_name(name, "log_with")


@pytest.mark.parametrize("entry", [object(), Tracker, 3])
def test_objects_that_are_no_trackers(entry: Any) -> None:
    with pytest.raises(TypeError, match=r"report_to holds .*, which has no log\(values, step\)"):
        registry.make_tracker(entry, "report_to")


def test_trackers_by_name_and_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Tracker):
        pass

    tracker = Mine()
    monkeypatch.setattr(Tracker, "is_installed", classmethod(lambda kind: True))
    assert registry.make_tracker(tracker, "report_to") is tracker
    made = registry.make_tracker("mlflow", "report_to")
    assert (type(made), made.project) == (TRACKERS["mlflow"], None)
    assert registry.tracker_name(tracker) == "Mine"
    assert registry.tracker_name(object()) == "object"
