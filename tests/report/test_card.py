from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import EvalResult
from kit.datasets import points
from kit.models import Linear
from kit.run_logs import eventful, finished
from kit.trainer import arguments

from trainer_kit import Callback, Run, Trainer
from trainer_kit.report.card import model_card
from trainer_kit.report.history import RunHistory


def parts(card: str) -> tuple[dict[str, Any], str]:
    nothing, front, text = card.split("---\n", 2)
    assert nothing == ""
    return yaml.safe_load(front), text


def test_the_best_model_with_its_metrics(tmp_path: Path) -> None:
    folder = eventful(tmp_path / "run")
    front, text = parts(
        model_card(folder, license="mit", tags=["mine"], pipeline_tag="text-generation", datasets=["d"])
    )
    assert front["tags"] == ["mine", "trainer_kit", "generated_from_trainer"]
    assert front["library_name"] == "trainer_kit"
    (entry,) = front["model-index"]
    assert entry["name"] == "run"
    assert {each["type"] for each in entry["results"][0]["metrics"]} == {"loss", "accuracy"}
    for title in ("Evaluation", "Training", "Curves", "Arguments that are not the default", "Environment"):
        assert f"\n### {title}\n" in text
    assert "The weights are those of step" in text


def test_a_step_without_an_evaluation_has_no_metrics(tmp_path: Path) -> None:
    front, text = parts(model_card(eventful(tmp_path / "run"), step=3, pipeline_tag="text-generation", datasets="d"))
    assert "model-index" not in front
    assert "### Evaluation\n" not in text
    assert "those of step 3." in text


class Score(Callback):
    """Gives each evaluation of the training a score that falls."""

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        metrics["score"] = -run.state.step


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_best_model_by_a_number_of_a_callback_before_a_later_evaluation(tmp_path: Path, has_ended: bool) -> None:
    """An evaluation of other data by the trained model, and one before the first step, are not of the training."""
    args = arguments(
        tmp_path, report_to="jsonl", eval_strategy="steps", eval_steps=1, eval_on_start=True, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    trainer = Trainer(Linear(), args, points(), points(4), callbacks=[Score()])
    trainer.train()
    trainer.evaluate([(torch.ones(4), torch.tensor(2))], metric_key_prefix="hard")
    log = tmp_path / "run" / "log.jsonl"
    if not has_ended:  # as while it runs
        log.write_text("".join(line for line in log.read_text().splitlines(True) if '"best_step"' not in line))
    best = RunHistory(log).best
    assert best is not None
    assert (best.step, best.value) == (1, -1)
    text = model_card(log)
    assert "those of step 1." in text
    assert "| score | -1 |" in text
    evaluation = model_card(log, step=4).partition("### Evaluation")[2].partition("###")[0]
    assert ("hard" in evaluation) == (not has_ended)


def test_it_names_neither_folders_nor_the_host(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", output_dir=str(tmp_path / "run"), logging_dir="/home/me/secret")
    text = model_card(folder)
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert "| host |" not in text


def test_the_base_model_is_linked(tmp_path: Path) -> None:
    front, text = parts(model_card(finished(tmp_path / "run"), base_model="google/bert", model_name="mine"))
    assert front["base_model"] == "google/bert"
    assert "# mine\n" in text
    assert "from [google/bert](https://huggingface.co/google/bert)" in text


def test_what_the_log_says_of_model_and_data(tmp_path: Path) -> None:
    data = {"training": {"samples": 25000, "name": "imdb", "split": "train"}, "evaluation: b": {"batches": 9}, "c": {}}
    about = {"library_name": "peft", "base_model": "google/bert"}
    folder = eventful(tmp_path / "run")
    log = folder / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line | {"data": data, "model_card": about} if line["event"] == "start" else line for line in lines]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    front, text = parts(model_card(folder))
    assert (front["library_name"], front["base_model"]) == ("peft", "google/bert")
    assert "from [google/bert](https://huggingface.co/google/bert)" in text
    assert "| Training | 25,000 samples | imdb, split train |" in text
    assert "| Evaluation: b | 9 batches |  |" in text
    assert "| C | not known |  |" in text
    assert parts(model_card(folder, library_name="mine"))[0]["library_name"] == "mine"


def test_metadata_of_the_user(tmp_path: Path) -> None:
    result = EvalResult("t", "d", "n", "f1", 0.5)
    given = {"tags": "mine", "pipeline_tag": "text-generation", "datasets": "d", "eval_results": [result]}
    front, _ = parts(model_card(eventful(tmp_path / "run"), **given))
    assert front["tags"] == ["mine", "trainer_kit", "generated_from_trainer"]
    assert [each["type"] for each in front["model-index"][0]["results"][0]["metrics"]] == ["f1"]


def test_emissions_of_all_starts_are_summed(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    (folder / "emissions.csv").write_text("run_id,emissions,energy_consumed\na,0.0125,0.25\nb,0.0005,0.01\n")
    front, text = parts(model_card(folder))
    assert front["co2_eq_emissions"] == {"emissions": 13.0, "source": "codecarbon"}
    assert "| grams of CO2eq | 13.0 |" in text
    assert "| kWh of energy | 0.26 |" in text


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no log\.jsonl"):
        model_card(tmp_path)
