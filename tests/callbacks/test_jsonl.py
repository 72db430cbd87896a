from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer_kit
from trainer_kit.callbacks import JsonLines, read_log
from trainer_kit.run import Run
from trainer_kit.utils import run_log
from trainer_kit.utils.run_log import FORMAT


@pytest.fixture(autouse=True)
def _nobody_listens_on() -> Iterator[None]:
    """What listens for warnings goes when a run ends; the runs of most tests here do not."""
    logger, shown = logging.getLogger("trainer_kit"), warnings.showwarning
    handlers, level = [*logger.handlers], logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.handlers[:], warnings.showwarning = handlers, shown
    logger.setLevel(level)


def log(run: Run, callback: JsonLines, *steps: int) -> None:
    for step in steps:
        run.state.step = step
        callback.on_log(run, {"step": step, "loss": 1.0})


def path_of(run: Run) -> Path:
    return Path(run.args.output_dir) / "log.jsonl"


def test_every_event_is_a_line(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    log(run, callback, 5)
    callback.on_evaluate(run, {"eval_loss": 0.5})
    callback.on_save(run, Path("out/checkpoint-5"))
    callback.on_predict(run, {"test_loss": 0.25})
    callback.on_exception(run, ValueError("nothing left"))
    callback.on_train_end(run, None)
    records = [json.loads(line) for line in path_of(run).read_text().splitlines()]
    assert [record["event"] for record in records] == [
        "start",
        "log",
        "evaluate",
        "save",
        "predict",
        "exception",
        "end",
    ]
    assert records == read_log(path_of(run))
    assert all(record["time"] > 1.6e9 for record in records)
    assert [record["step"] for record in records] == [0, 5, 5, 5, 5, 5, 5]
    start, logged, evaluated, saved, predicted, raised, _ = records
    assert start["trainer_kit"] == trainer_kit.__version__
    assert start["format"] == FORMAT
    assert start["began"] == run.ledger.started
    assert start["arguments"]["learning_rate"] == run.args.learning_rate
    assert (start["parameters"], start["trainable"]) == (10, 10)
    environment = start["environment"]
    assert environment["PyTorch"] == torch.__version__
    assert (environment["processes"], environment["precision"]) == (1, "no")
    assert environment["host"]
    assert environment["device"]
    assert logged["loss"] == 1.0
    assert evaluated["eval_loss"] == 0.5
    assert predicted["test_loss"] == 0.25
    assert saved["directory"] == "checkpoint-5"
    assert (raised["type"], raised["message"]) == ("ValueError", "nothing left")


def test_numbers_that_json_has_not(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), JsonLines()
    values = {
        "loss": math.nan,
        "up": math.inf,
        "down": np.float32(-math.inf),
        "array": np.array([1.0, math.nan]),
        "tensor": torch.tensor(0.5),
        "count": np.int64(3),
        "ok": np.bool_(True),
        "where": Path("a"),
        "text": "naïve",
        "none": None,
    }
    callback.on_log(run, {"step": 0, **values})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    written = json.loads(path_of(run).read_text(), parse_constant=refuse)
    assert (written["loss"], written["up"], written["down"]) == ("nan", "inf", "-inf")
    (record,) = read_log(path_of(run))
    assert math.isnan(record["loss"])
    assert (record["up"], record["down"]) == (math.inf, -math.inf)
    assert record["array"][0] == 1.0
    assert math.isnan(record["array"][1])
    rest = {name: record[name] for name in ("tensor", "count", "ok", "where", "text", "none")}
    assert rest == {"tensor": 0.5, "count": 3, "ok": True, "where": "a", "text": "naïve", "none": None}


def test_a_restart_supersedes_what_came_after_its_step(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    log(run, callback, 2, 4, 6, 8)
    again = JsonLines()
    run.state.step = 4
    again.on_train_begin(run)
    log(run, again, 6, 8, 10)
    found = [(record["event"], record["step"]) for record in read_log(path_of(run))]
    assert found == [("start", 0), ("log", 2), ("log", 4), ("start", 4), ("log", 6), ("log", 8), ("log", 10)]


@pytest.mark.parametrize("left", [1, 20, -2])
def test_a_line_cut_by_a_kill_is_passed_over(make_run: Callable[..., Run], left: int) -> None:
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    log(run, callback, 2, 4)
    path = path_of(run)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:left])
    assert [record["step"] for record in read_log(path)] == [0, 2]
    run.state.step = 2
    JsonLines().on_train_begin(run)
    log(run, callback, 4)
    assert [(record["event"], record["step"]) for record in read_log(path)] == [
        ("start", 0),
        ("log", 2),
        ("start", 2),
        ("log", 4),
    ]


@pytest.mark.parametrize("damage", ["{", "[1]", '{"event": "log"}', '{"step": 1}'])
def test_damage_elsewhere_is_named(make_run: Callable[..., Run], damage: str) -> None:
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    log(run, callback, 2, 4)
    path = path_of(run)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], damage, lines[2]]) + "\n")
    with pytest.raises(ValueError, match=r"log\.jsonl: line 2 "):
        read_log(path)


def test_one_write_a_line(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads along, or a kill at any moment, meets whole lines."""
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    written = []

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            written.append(bytes(data))
            return super().write(data)

    def spy(path: Path, mode: str, buffering: int = -1) -> Any:
        assert buffering == 0
        return Raw(path, mode)

    monkeypatch.setattr(run_log, "open", spy, raising=False)
    log(run, callback, 1, 2)
    assert [json.loads(line)["step"] for line in written] == [1, 2]
    assert all(line.endswith(b"}\n") for line in written)


def test_a_path_of_ones_own(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    JsonLines(tmp_path / "deep" / "mine.jsonl").on_train_begin(run)
    assert read_log(tmp_path / "deep" / "mine.jsonl")[0]["event"] == "start"


def test_other_processes_write_nothing(make_run: Callable[..., Run]) -> None:
    run = make_run(rank=1)
    JsonLines().on_train_begin(run)
    assert not path_of(run).exists()


def test_no_file() -> None:
    with pytest.raises(FileNotFoundError):
        read_log("nowhere.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_once(make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="trainer_kit")
    run, callback = make_run(), JsonLines("/dev/full")
    log(run, callback, 1, 2, 3)
    assert caplog.text.count("/dev/full could not be written to: No space left on device") == 1


def test_a_line_that_found_half_its_room_is_taken_back(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="trainer_kit")
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    log(run, callback, 1)

    class Half(io.FileIO):
        def write(self, line: Any) -> int:
            return super().write(line[:10]) or 0

    monkeypatch.setattr(run_log, "open", lambda path, mode, buffering: Half(path, "a+"), raising=False)
    log(run, callback, 2)
    monkeypatch.undo()
    log(run, callback, 3)
    assert [record["step"] for record in read_log(path_of(run))] == [0, 1, 3]
    assert "No space left on device" in caplog.text


def test_going_back_leaves_out_later_records(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    log(run, callback, 1, 2, 3)
    run.state.step = 1
    callback.on_rollback(run, Path("checkpoint-1"))
    log(run, callback, 2)
    assert [(record["event"], record["step"]) for record in read_log(path_of(run))] == [
        ("start", 0), ("log", 1), ("rollback", 1), ("log", 2),
    ]  # fmt: skip


def warned(run: Run) -> list[tuple[str, str, int]]:
    records = [record for record in read_log(path_of(run)) if record["event"] == "warning"]
    return [(record["source"], record["message"], record["step"]) for record in records]


def test_warnings_are_written_down_while_the_run_lasts(make_run: Callable[..., Run]) -> None:
    run, callback, logger = make_run(), JsonLines(), logging.getLogger("trainer_kit")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before, handlers = warnings.showwarning, [*logger.handlers]
        warnings.warn("too early", stacklevel=1)
        callback.on_train_begin(run)
        warnings.warn("odd", stacklevel=1)
        run.state.step = 3
        logger.warning("%d left", 3)
        logger.error("gone")
        logger.info("no matter")
        warnings.warn("x" * 3000, RuntimeWarning, stacklevel=1)
        callback.on_exit(run)
        warnings.warn("too late", stacklevel=1)
        logger.warning("too late")
        assert warnings.showwarning is before
        assert logger.handlers == handlers
    expected = [("UserWarning", "odd", 0), ("trainer_kit", "3 left", 3), ("trainer_kit", "gone", 3)]
    assert warned(run) == [*expected, ("RuntimeWarning", "x" * 2000, 3)]
    assert [str(each.message)[:9] for each in shown] == ["too early", "odd", "x" * 9, "too late"]


def test_a_run_that_breaks_off_listens_no_more(make_run: Callable[..., Run]) -> None:
    run, callback, before = make_run(), JsonLines(), warnings.showwarning
    callback.on_train_begin(run)
    assert warnings.showwarning is not before
    callback.on_exception(run, ValueError())
    assert warnings.showwarning is before


def test_a_thousand_warnings_are_enough(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    for number in range(1100):
        logging.getLogger("trainer_kit").warning("number %d", number)
    assert len(warned(run)) == 1000


def test_what_wraps_our_listener_still_warns(make_run: Callable[..., Run]) -> None:
    """Whoever put something over it goes on calling it after the run."""
    run, callback = make_run(), JsonLines()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        callback.on_train_begin(run)
        ours = warnings.showwarning
        warnings.showwarning = lambda *arguments, **more: ours(*arguments, **more)
        callback.on_exit(run)
        warnings.warn("later", stacklevel=1)
    assert [str(each.message) for each in shown] == ["later"]
    assert warned(run) == []


def test_a_warning_that_cannot_be_told_fails_nothing(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    run, callback = make_run(), JsonLines()
    callback.on_train_begin(run)
    logging.getLogger("trainer_kit").warning("%d left", "three")
    logging.getLogger("trainer_kit").warning("and on")
    assert [message for _, message, _ in warned(run)] == ["and on"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_no_warning_without_end(make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="trainer_kit")
    run, callback = make_run(), JsonLines("/dev/full")
    callback.on_train_begin(run)
    logging.getLogger("trainer_kit").warning("something else")
    callback.on_exit(run)
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full could not be written to: No space left on device; training continues",
        "something else",
    ]
