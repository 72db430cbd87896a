from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.run_logs import RunLog, eventful, finished

from trainer_kit.report import facts
from trainer_kit.report.history import RunHistory
from trainer_kit.report.timeline import Timeline


def test_how_a_run_ended(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.train(100)
    assert facts.status(RunHistory(tmp_path)).word == "no end recorded"
    log.write("exception", type="ValueError", message="no <b>more</b>")
    error = ("bad", "ended by an error", "At step 100 of 2,000: ValueError: no <b>more</b>")
    assert facts.status(RunHistory(tmp_path)) == error
    log.start()
    log.train(150)
    assert facts.status(RunHistory(tmp_path)).kind == "open"
    log.write("end", ending="stopped")
    stopped = ("open", "stopped early", "At step 150 of 2,000: a callback asked for it.")
    assert facts.status(RunHistory(tmp_path)) == stopped
    log.start()
    log.write("end", ending="stopped", reason="eval_loss has not improved on 0.5 in 3 evaluations")
    assert facts.status(RunHistory(tmp_path)).sentence == (
        "At step 150 of 2,000: eval_loss has not improved on 0.5 in 3 evaluations."
    )
    log.start()
    log.write("end", ending="signal", exit_code=143, reason="SIGTERM")
    assert facts.status(RunHistory(tmp_path))[1:] == (
        "ended by a signal",
        "SIGTERM at step 150 of 2,000; train(resume_from_checkpoint=True) resumes it.",
    )
    log.start()
    log.train(2000)
    log.end()
    log.write("predict", test_loss=1.0)
    assert facts.status(RunHistory(tmp_path)) == ("good", "finished", "All steps were taken.")


def test_a_run_without_an_end_is_lost_where_its_process_is_gone(tmp_path: Path) -> None:
    here = {"host": socket.gethostname()}
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    for process, word in ((os.getpid(), "still running"), (gone.pid, "lost"), (None, "no end recorded")):
        log = RunLog(tmp_path)
        log.time = time.time()
        log.start(environment={**here, "process": process})
        log.train(100)
        assert facts.status(RunHistory(tmp_path)).word == word
    log = RunLog(tmp_path)
    log.time = 1e9  # before this process began: it has the number of another
    log.start(environment={**here, "process": os.getpid()})
    assert facts.status(RunHistory(tmp_path)).word == "lost"
    log.start(environment={"host": "another", "process": os.getpid()})
    assert facts.status(RunHistory(tmp_path)).word == "no end recorded"


def test_key_figures(tmp_path: Path) -> None:
    history = RunHistory(eventful(tmp_path))
    figures = {each.name: each for each in facts.key_figures(history, Timeline(history))}
    assert figures["Steps"][1:] == ("2,000", "3 epochs")
    assert figures["Wall time"].note == "2 restarts, 4 min 30 s lost, 8 min 35 s down"
    assert figures["Training loss"].note == "in the last record; mean 4.02"
    assert figures["Best eval_loss"] == ("Best eval_loss", "3.369", "at step 2,000")
    assert figures["Throughput"].value.endswith(" tokens/s")
    assert figures["Peak memory"].value == "38.25 GiB"
    assert figures["Goodput"].note == "MFU 37 %"
    assert figures["Parameters"][1:] == ("124M", "all trained")


def test_the_best_is_the_greatest_where_that_is_better(tmp_path: Path) -> None:
    log = RunLog(tmp_path, metric_for_best_model="eval_accuracy", greater_is_better=True)
    log.start()
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, "nan"), (4, 0.625)):
        log.step = step
        log.evaluate(eval_accuracy=accuracy)
    figures = facts.key_figures(RunHistory(tmp_path), None)
    assert ("Best eval_accuracy", "0.75", "at step 2") in figures


def test_the_anatomy_is_that_of_the_record_with_most(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for step, gib in ((1, 1.0), (2, 3.0), (3, 2.0)):
        log.step = step
        log.write("log", **{"anatomy/weights_gib": 0.5, "anatomy/activations_gib": gib, "anatomy/gradients_gib": 0.0})
    history = RunHistory(tmp_path)
    assert facts.anatomy(history) == {"weights": 0.5, "activations": 3.0}
    table = facts.anatomy_table([history])
    assert table.body[-1] == ["together", "3.5 GiB", "100 %"]


def test_many_evaluations_are_thinned(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for log.step in range(1, 301):
        log.evaluate(**({"eval_loss": 0.5} if log.step == 78 else {}))
    table = facts.evaluations(RunHistory(tmp_path))
    assert table is not None
    assert (len(table.body), table.of) == (101, 300)
    assert [row[0] for row in table.body if "best" in row[0]] == ["78 (best)"]
    assert (table.body[0][0], table.body[-1][0]) == ("1", "300")
    assert table.head == ["step", "eval_loss", "eval_accuracy", "eval_runtime"]


def test_a_warning_is_told_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for step, message in ((3, "slow"), (4, "slow"), (5, "odd")):
        log.step = step
        log.write("warning", message=message, source="UserWarning")
    assert facts.warnings(RunHistory(tmp_path)) == [("slow", "UserWarning", 2, 3), ("odd", "UserWarning", 1, 5)]


@pytest.mark.parametrize(("cut", "told"), [(b'{"event"', "Line 205 of log.jsonl was cut short"), (b"", None)])
def test_what_was_cut_is_told(tmp_path: Path, cut: bytes, told: str | None) -> None:
    folder = finished(tmp_path)
    with (folder / "log.jsonl").open("rb+") as file:
        lines = file.readlines()
        file.seek(0)
        file.writelines([*lines[:204], cut])
        file.truncate()
    notices = facts.notices(RunHistory(folder))
    assert [notice.partition(" when")[0] for notice in notices] == ([told] if told else [])


def test_arguments_that_were_changed_come_first(tmp_path: Path) -> None:
    log = RunLog(tmp_path, weight_decay=0.0, learning_rate=0.5)
    log.start()
    rows = facts.arguments(RunHistory(tmp_path))
    changed = {name: was_changed for name, _, was_changed in rows}
    assert changed["learning_rate"]
    assert not changed["weight_decay"]
    assert [was_changed for _, _, was_changed in rows] == sorted(changed.values(), reverse=True)


def test_arguments_that_differ(tmp_path: Path) -> None:
    for name, arguments in (("a", {"seed": 1}), ("b", {"seed": 2, "optim": "sgd"})):
        RunLog(tmp_path / name, output_dir="same", **arguments).start()
    found = facts.differing([RunHistory(tmp_path / "a"), RunHistory(tmp_path / "b")])
    assert found == [("seed", ["1", "2"]), ("optim", ["-", "sgd"])]


def test_a_log_of_an_accelerator(tmp_path: Path) -> None:
    """It has no start; its settings are anything."""
    log = RunLog(tmp_path)
    log.write("config", arguments={"lr": 0.5})
    log.write("log", loss=1.0)
    history = RunHistory(tmp_path)
    assert facts.arguments(history) == [("lr", "0.5", True)]
    assert [each.name for each in facts.key_figures(history, None)] == ["Steps", "Training loss"]
    assert facts.status(history).kind == "open"
