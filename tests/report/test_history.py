from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from run_logs import RunLog, eventful

from trainer_kit.report.history import RunHistory
from trainer_kit.utils.run_log import read_log


def test_columns_hold_what_the_records_hold(tmp_path: Path) -> None:
    folder = eventful(tmp_path / "run")
    history, records = RunHistory(folder), read_log(folder / "log.jsonl")
    regular = [record for record in records if record["event"] == "log" and "train_runtime" not in record]
    for name in history.names:
        there = [record for record in regular if name in record]
        steps, values = history.curve(name)
        assert steps.tolist() == [record["step"] for record in there]
        assert values.tolist() == [record[name] for record in there]
    assert [event.record for event in history.story] == [record for record in records if record not in regular]
    assert history.evaluations == [record for record in records if record["event"] == "evaluate"]
    assert history.summary == next(record for record in records if "train_runtime" in record)
    assert history.step == 2000
    assert (~history.kept).sum() == 13 + 18  # of the steps 610 to 730 and 1,210 to 1,380


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    for loss in ("nan", "inf", None, [1], "a name", 2**2000, True, 0.5):
        log.step += 1
        log.write("log", loss=loss)
    log.step += 1
    log.write("log", other=1.0)
    steps, values = RunHistory(tmp_path).curve("loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(values, [math.nan, math.inf, *[math.nan] * 4, 1.0, 0.5])


def test_steps_rise_whoever_wrote_them(tmp_path: Path) -> None:
    lines = [{"event": "log", "step": step, "time": 1.7e9, "loss": step / 2} for step in (3, 1, 2)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    steps, values = RunHistory(tmp_path).curve("loss")
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [0.5, 1.0, 1.5])


def test_a_start_ends_with_its_last_word(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.start()
    log.log()
    log.write("exception", type="OSError", message="no")
    broke_off = log.time
    log.start(down=50)
    log.end()
    ended = log.time
    log.time += 500
    log.write("predict", test_loss=1.0)
    assert RunHistory(tmp_path).ends == [broke_off, ended]


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no log\.jsonl; give the output_dir of a run that had 'jsonl'"):
        RunHistory(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give"):
        RunHistory(tmp_path / "nowhere")
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match=r"log\.jsonl holds no records; give"):
        RunHistory(tmp_path)
