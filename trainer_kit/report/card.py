"""The model card of a run: a README.md with the metadata that the Hugging Face Hub reads."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

from trainer_kit.report import facts, wording
from trainer_kit.report.history import RunHistory, is_finite
from trainer_kit.report.markdown import curves, escaped, section
from trainer_kit.report.panels import Table
from trainer_kit.report.timeline import Timeline
from trainer_kit.utils.units import format_number

EMISSIONS = "emissions.csv"
"""File in the folder of a run to which codecarbon appends its measures."""

_TAG = "trainer_kit"
_PRIVATE = ("output_dir", "logging_dir", "host", "process")
_SPEEDS = ("_runtime", "_samples_per_second", "_steps_per_second")


def model_card(run_dir: str | os.PathLike[str], step: int | None = None, **metadata: Any) -> str:
    """Return the text of a model card: results, figures, curves, arguments and versions of a run.

    It names neither folders nor the host. The log says which library loads the model, and its base model. With
    `emissions.csv` of codecarbon in the folder of the run, it states the emissions. With `pipeline_tag` and `datasets`
    in the metadata, the metrics are in the `model-index` too, which the Hub shows.

    Args:
        run_dir: The `output_dir` of a run that wrote `log.jsonl`, or that file.
        step: Step of the model, whose evaluation counts; None: the best step if the run loaded the best model at its
            end, else the last.
        **metadata: Fields of `huggingface_hub.ModelCardData`, such as `license="mit"` or `datasets=["imdb"]`.

    Raises:
        FileNotFoundError: If the run has no log.
        ValueError: If the log is empty, damaged or of a newer version.
    """
    history = RunHistory(run_dir)
    step = _step_of_the_model(history) if step is None else step
    metrics = _metrics(history, step)
    metadata = {"library_name": "trainer_kit"} | dict(history.beginning.get("model_card", {})) | metadata
    name = str(metadata.pop("model_name", None) or history.name)
    timeline = Timeline(history) if Timeline.exists(history) else None
    figures = [[each.name, each.value, each.note] for each in facts.key_figures(history, timeline)]
    changed = [[name, value] for name, value, is_changed in facts.arguments(history) if is_changed]
    emissions = _emissions(history.path.parent)
    parts = [
        _front_matter(name, metrics, emissions, metadata),
        f"# {escaped(name)}",
        f"Trained with [trainer_kit](https://pypi.org/project/trainer_kit/){_based_on(metadata)}. "
        f"The weights are those of step {step:,}.",
        _listed("Data", ["", "Size", "Name"], _data(history)),
        _listed("Evaluation", ["Metric", "Value"], [[key, format_number(value)] for key, value in metrics.items()]),
        _listed("Training", ["", "Value", ""], figures),
        *curves([history]),
        _listed("Arguments that are not the default", ["", "Value"], changed),
        _listed("Emissions", ["", "Value"], [[key, str(value)] for key, value in emissions.items()]),
        _listed("Environment", ["", "Value"], [[key, value] for key, value in facts.environment(history)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _step_of_the_model(history: RunHistory) -> int:
    is_best = bool(history.arguments.get("load_best_model_at_end"))
    return history.best.step if is_best and history.best is not None else history.step


def _metrics(history: RunHistory, step: int) -> dict[str, float]:
    """Return the metrics of the training's evaluation at a step, or else the newest; empty without one there."""
    records = [record for record in (*history.evaluations, *history.judged) if record["step"] == step]
    found = records[-1].items() if records else ()
    return {
        name: value
        for name, value in found
        if name not in ("event", "time", "step", "epoch") and is_finite(value) and not name.endswith(_SPEEDS)
    }


def _data(history: RunHistory) -> list[list[str]]:
    """Return the role, size and name of each dataset."""
    rows = []
    for role, known in dict(history.beginning.get("data", {})).items():
        units = [unit for unit in ("samples", "batches") if isinstance(known.get(unit), int)]
        split = [f"split {known['split']}"] if "split" in known else []
        size = f"{known[units[0]]:,} {units[0]}" if units else "not known"
        names = [known["name"]] if "name" in known else []
        rows.append([wording.capitalized(role), size, ", ".join([*names, *split])])
    return rows


def _based_on(metadata: dict[str, Any]) -> str:
    base = metadata.get("base_model")
    return f" from [{escaped(base)}](https://huggingface.co/{base})" if isinstance(base, str) else ""


def _listed(title: str, head: list[str], rows: list[list[str]]) -> str:
    rows = [row for row in rows if row[0] not in _PRIVATE]
    return section(title, Table(head, rows, len(rows))) if rows else ""


def _front_matter(name: str, metrics: dict[str, float], emissions: dict[str, Any], metadata: dict[str, Any]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    fields = dict(metadata)
    tags = fields.get("tags") or ()
    fields["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), _TAG, "generated_from_trainer"]))
    if emissions:
        fields["co2_eq_emissions"] = {"emissions": emissions["grams of CO2eq"], "source": "codecarbon"}
    task, dataset = fields.get("pipeline_tag"), fields.get("datasets")
    if fields.get("eval_results"):  # those that the user gives are the ones to show
        fields["model_name"] = name
    elif task and dataset and metrics:
        dataset = dataset if isinstance(dataset, str) else dataset[0]
        fields["model_name"] = name
        fields["eval_results"] = [
            EvalResult(
                task_type=task,
                dataset_type=dataset,
                dataset_name=dataset,
                metric_type=metric.removeprefix("eval_"),
                metric_value=value,
            )
            for metric, value in metrics.items()
        ]
    return f"---\n{ModelCardData(**fields).to_yaml()}\n---"


def _emissions(folder: Path) -> dict[str, Any]:
    """Return the sum of the emissions and of the energy that codecarbon wrote; empty without its file."""
    path = folder / EMISSIONS
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    sums = {column: math.fsum(float(row[column]) for row in rows) for column in ("emissions", "energy_consumed")}
    return {
        "grams of CO2eq": float(f"{1000 * sums['emissions']:.4g}"),  # codecarbon counts kilograms
        "kWh of energy": float(f"{sums['energy_consumed']:.4g}"),
    }
