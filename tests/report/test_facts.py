from __future__ import annotations

from pathlib import Path

import pytest
from run_logs import RunLog, eventful, finished

from trainer_kit.report import facts
from trainer_kit.report.history import History
from trainer_kit.report.timeline import Timeline


def test_how_a_run_ended(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.train(100)
    assert facts.status(History(tmp_path)).word == "no end recorded"
    log.write("exception", type="ValueError", message="no <b>more</b>")
    assert facts.status(History(tmp_path)) == ("bad", "broke off", "ValueError: no <b>more</b>")
    log.start()
    log.train(150)
    assert facts.status(History(tmp_path)).kind == "open"
    log.end()
    assert facts.status(History(tmp_path)) == ("open", "stopped early", "At step 150 of 2,000.")
    log.start()
    log.train(2000)
    log.end()
    log.write("predict", test_loss=1.0)
    assert facts.status(History(tmp_path)) == ("good", "finished", "")


def test_key_figures(tmp_path: Path) -> None:
    history = History(eventful(tmp_path))
    figures = {each.name: each for each in facts.key_figures(history, Timeline(history))}
    assert figures["Steps"][1:] == ("2,000", "3 epochs")
    assert figures["Wall time"].note == "2 restarts, 4 min 30 s lost, 8 min 35 s down"
    assert figures["Training loss"].note == "in the last record; mean 4.02"
    assert figures["Best eval_loss"] == ("Best eval_loss", "3.369", "at step 2,000")
    assert figures["Throughput"].value.endswith(" tokens/s")
    assert figures["Peak memory"].value == "38.2 GiB"
    assert figures["Goodput"].note == "MFU 37 %"
    assert figures["Parameters"][1:] == ("124M", "all trained")


def test_the_best_is_the_greatest_where_that_is_better(tmp_path: Path) -> None:
    log = RunLog(tmp_path, metric_for_best_model="eval_accuracy", greater_is_better=True)
    log.start()
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, "nan"), (4, 0.625)):
        log.step = step
        log.evaluate(eval_accuracy=accuracy)
    figures = facts.key_figures(History(tmp_path), None)
    assert ("Best eval_accuracy", "0.75", "at step 2") in figures


def test_the_anatomy_is_that_of_the_record_with_most(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for step, gib in ((1, 1.0), (2, 3.0), (3, 2.0)):
        log.step = step
        log.write("log", **{"anatomy/weights_gib": 0.5, "anatomy/activations_gib": gib, "anatomy/gradients_gib": 0.0})
    history = History(tmp_path)
    assert facts.anatomy(history) == {"weights": 0.5, "activations": 3.0}
    table = facts.anatomy_table([history])
    assert table.body[-1] == ["together", "3.5 GiB", "100 %"]


def test_many_evaluations_are_thinned(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for log.step in range(1, 301):
        log.evaluate()
    table = facts.evaluations(History(tmp_path))
    assert table is not None
    assert (len(table.body), table.of) == (100, 300)
    assert (table.body[0][0], table.body[-1][0]) == ("1", "300")
    assert table.head == ["step", "eval_loss", "eval_accuracy", "eval_runtime"]


def test_a_warning_is_told_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for step, message in ((3, "slow"), (4, "slow"), (5, "odd")):
        log.step = step
        log.write("warning", message=message, source="UserWarning")
    assert facts.warnings(History(tmp_path)) == [("slow", "UserWarning", 2, 3), ("odd", "UserWarning", 1, 5)]


@pytest.mark.parametrize(("cut", "told"), [(b'{"event"', "Line 205 of log.jsonl was cut short"), (b"", None)])
def test_what_was_cut_is_told(tmp_path: Path, cut: bytes, told: str | None) -> None:
    folder = finished(tmp_path)
    with (folder / "log.jsonl").open("rb+") as file:
        lines = file.readlines()
        file.seek(0)
        file.writelines([*lines[:204], cut])
        file.truncate()
    notices = facts.notices(History(folder))
    assert [notice.partition(" when")[0] for notice in notices] == ([told] if told else [])


def test_arguments_that_were_changed_come_first(tmp_path: Path) -> None:
    log = RunLog(tmp_path, weight_decay=0.0, learning_rate=0.5)
    log.start()
    rows = facts.arguments(History(tmp_path))
    changed = {name: was_changed for name, _, was_changed in rows}
    assert changed["learning_rate"]
    assert not changed["weight_decay"]
    assert [was_changed for _, _, was_changed in rows] == sorted(changed.values(), reverse=True)


def test_arguments_that_differ(tmp_path: Path) -> None:
    for name, arguments in (("a", {"seed": 1}), ("b", {"seed": 2, "optim": "sgd"})):
        RunLog(tmp_path / name, output_dir="same", **arguments).start()
    found = facts.differing([History(tmp_path / "a"), History(tmp_path / "b")])
    assert found == [("seed", ["1", "2"]), ("optim", ["-", "sgd"])]


def test_a_log_of_an_accelerator(tmp_path: Path) -> None:
    """It has no start; its settings are anything."""
    log = RunLog(tmp_path)
    log.write("config", arguments={"lr": 0.5})
    log.write("log", loss=1.0)
    history = History(tmp_path)
    assert facts.arguments(history) == [("lr", "0.5", True)]
    assert [each.name for each in facts.key_figures(history, None)] == ["Steps", "Training loss"]
    assert facts.status(history).kind == "open"
