"""The values of `report_to`: files, and experiment trackers by name or as objects."""

from __future__ import annotations

from typing import Any

from trainer_kit.config.other_names import plain

REPORTERS = ("tensorboard", "jsonl", "html")
"""Files in `output_dir`."""

TRACKER_NAMES = ("wandb", "mlflow", "trackio", "comet_ml", "clearml", "dvclive", "swanlab", "aim")
"""Trackers that need no folder; `trainer_kit.trackers` has their classes."""

OTHER_TRACKERS = {
    "comet": "use 'comet_ml'",
    "neptune": "neptune is not available, since its service has been shut down; use another tracker",
}
"""Sentences about other names of trackers."""


def are_reporters(value: Any) -> bool:
    """Return whether each entry is a known name, or an object that takes records."""
    names = {*REPORTERS, *TRACKER_NAMES, "all", "none"}
    entries = [value] if isinstance(value, str) else value
    return all(plain(each) in names if isinstance(each, str) else callable(_log_of(each)) for each in entries)


def check_reporters(args: Any) -> None:
    """Check `report_to` and `report_artifacts` together with other arguments.

    Args:
        args: The `TrainingArguments`.

    Raises:
        ValueError: If they contradict each other.
    """
    chosen, artifacts = args.report_to, args.report_artifacts
    if not isinstance(chosen, str) and len(chosen) > 1 and any(each in ("all", "none") for each in chosen):
        raise ValueError(f"report_to={chosen!r} is not allowed; 'all' and 'none' must stand alone")
    reporters = chosen_reporters(chosen)
    if artifacts and all(each in REPORTERS for each in reporters):
        raise ValueError(f"report_artifacts={artifacts} needs a tracker that stores them; add one to report_to")
    if "report" in artifacts and "html" not in reporters:
        raise ValueError(f"report_artifacts={artifacts} needs a report; add 'html' and 'jsonl' to report_to")
    if {"best", "last"} & {*artifacts} and args.save_strategy == "no":
        raise ValueError(f"report_artifacts={artifacts} needs checkpoints; set save_strategy to another than 'no'")
    has_metric = args.metric_for_best_model is not None or args.load_best_model_at_end or args.save_strategy == "best"
    if "best" in artifacts and not has_metric:
        raise ValueError(f"report_artifacts={artifacts} needs a metric for the best one; set metric_for_best_model")


def chosen_reporters(report_to: str | list[Any]) -> list[Any]:
    """Return the entries of `report_to` once each, with "all" and "none" replaced by what they stand for."""
    entries = [plain(each) for each in ([report_to] if isinstance(report_to, str) else report_to)]
    files = [name for name in REPORTERS if name in entries or "all" in entries]
    trackers = [each for each in entries if each not in (*REPORTERS, "all", "none")]
    return [*files, *(each for number, each in enumerate(trackers) if each not in trackers[:number])]


def reporters_as_data(report_to: str | list[Any]) -> list[str]:
    """Return the names in `report_to`; an object is named if its class has a name there, and else left out."""
    chosen = chosen_reporters(report_to)
    names = [each if isinstance(each, str) else getattr(each, "name", None) for each in chosen]
    return [name for name in names if name in (*REPORTERS, *TRACKER_NAMES)]


def _log_of(entry: Any) -> Any:
    return None if isinstance(entry, type) else getattr(entry, "log", None)
