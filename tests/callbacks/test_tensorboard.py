from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.disks import fill, no_file_grows, small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

from trainer_kit.callbacks import TensorBoard
from trainer_kit.run import Run


def read(directory: Path | str) -> EventAccumulator:
    return EventAccumulator(str(directory)).Reload()


def scalars(directory: Path | str, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(directory).Scalars(tag)]


def log(run: Run, callback: TensorBoard, *steps: int) -> None:
    for step in steps:
        run.state.step = step
        callback.on_log(run, {"step": step, "epoch": 0.5, "loss": 1.0 / step, "note": "text"})


def test_scalars_by_tag(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), TensorBoard()
    callback.on_train_begin(run)
    log(run, callback, 1, 2, 4)
    callback.on_evaluate(run, {"eval_loss": 0.5, "eval_val_loss": 0.75, "mine": 3})
    callback.on_log(run, {"train_loss": 0.25})
    callback.on_train_end(run, None)
    callback.on_predict(run, {"test_loss": 0.125})
    directory = run.args.log_dir
    assert set(read(directory).Tags()["scalars"]) == {
        "train/loss",
        "train/epoch",
        "train/train_loss",
        "eval/loss",
        "eval/val_loss",
        "eval/mine",
        "test/loss",
    }
    assert scalars(directory, "train/loss") == [(1, 1.0), (2, 0.5), (4, 0.25)]
    assert scalars(directory, "eval/loss") == [(4, 0.5)]
    assert scalars(directory, "test/loss") == [(4, 0.125)]


def test_arguments_as_text(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(learning_rate=0.125), TensorBoard()
    callback.on_train_begin(run)
    callback.on_train_end(run, None)
    (event,) = read(run.args.log_dir).Tensors("arguments/text_summary")
    assert '"learning_rate": 0.125' in event.tensor_proto.string_val[0].decode()


def test_numbers_are_written_as_they_are(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), TensorBoard()
    callback.on_train_begin(run)
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        run.state.step = step
        callback.on_log(run, {"loss": value})
    callback.on_train_end(run, None)
    values = [value for _, value in scalars(run.args.log_dir, "train/loss")]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_a_resume_hides_the_steps_that_are_taken_again(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), TensorBoard()
    callback.on_train_begin(run)
    log(run, callback, 1, 2, 3, 4)
    callback.on_exception(run, ValueError())
    run.state.step = 2
    again = TensorBoard()
    again.on_train_begin(run)
    log(run, again, 4, 6)
    again.on_train_end(run, None)
    assert [step for step, _ in scalars(run.args.log_dir, "train/loss")] == [1, 2, 4, 6]


def test_a_save_brings_everything_to_the_disk(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run, callback = make_run(), TensorBoard(tmp_path / "mine")
    callback.on_train_begin(run)
    log(run, callback, 3)
    callback.on_save(run, Path())
    assert [step for step, _ in scalars(tmp_path / "mine", "train/loss")] == [3]
    callback.on_train_end(run, None)


def test_other_processes_write_nothing(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(rank=1), TensorBoard()
    callback.on_train_begin(run)
    log(run, callback, 1)
    callback.on_train_end(run, None)
    assert not run.args.log_dir.exists()


def test_going_back_hides_later_records(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), TensorBoard()
    callback.on_train_begin(run)
    log(run, callback, 1, 2, 3)
    run.state.step = 1
    callback.on_rollback(run, Path("checkpoint-1"))
    log(run, callback, 2)
    callback.on_train_end(run, None)
    assert [step for step, _ in scalars(run.args.log_dir, "train/loss")] == [1, 2]


def test_what_was_logged_is_there_at_once(make_run: Callable[..., Run]) -> None:
    """A kill in the next moment loses nothing."""
    run, callback = make_run(), TensorBoard()
    callback.on_train_begin(run)
    log(run, callback, 1, 2)
    assert scalars(run.args.log_dir, "train/loss") == [(1, 1.0), (2, 0.5)]
    callback.on_train_end(run, None)


def test_it_writes_again_after_a_spell_without_a_disk(
    make_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run, callback = make_run(), TensorBoard()
    folder = Path(run.args.log_dir)
    with caplog.at_level(logging.INFO, logger="trainer_kit"):
        callback.on_train_begin(run)
        log(run, callback, 1)
        with no_file_grows():
            log(run, callback, 2, 3)
            callback.on_save(run, Path("checkpoint-3"))
        log(run, callback, 4)
        callback.on_train_end(run, None)
    assert scalars(folder, "train/loss") == [(1, 1.0), (4, 0.25)]
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "TensorBoard's files cannot be written",
        "TensorBoard's files are written again from step 4 on",
    ]
    assert len(hyperparameters(folder)) == 3


def test_what_it_could_not_begin_is_begun_later(make_run: Callable[..., Run]) -> None:
    run, callback, before = make_run(), TensorBoard(), TensorBoard()
    before.on_train_begin(run)
    log(run, before, 1, 2, 3)
    before.on_exception(run, ValueError())
    run.state.step = 1
    folder = Path(run.args.log_dir)
    away = folder.rename(folder.with_name("away"))
    folder.write_text("")
    callback.on_train_begin(run)
    folder.unlink()
    away.rename(folder)
    log(run, callback, 3)
    callback.on_train_end(run, None)
    assert [step for step, _ in scalars(folder, "train/loss")] == [1, 3]
    assert "_hparams_/session_end_info" in hyperparameters(folder)


def test_a_disk_that_fills_up_and_is_cleared(
    make_run: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, callback = make_run(), TensorBoard(tmp_path / "disk" / "logs")
    with small_disk(tmp_path / "disk") as disk:
        callback.on_train_begin(run)
        log(run, callback, 1)
        filler = fill(disk)
        with caplog.at_level(logging.WARNING, logger="trainer_kit"):
            log(run, callback, *range(2, 400))
        filler.unlink()
        log(run, callback, 400)
        callback.on_train_end(run, None)
        steps = [step for step, _ in scalars(disk / "logs", "train/loss")]
        assert len([*(disk / "logs").iterdir()]) == 2
    assert steps[0] == 1
    assert steps[-1] == 400
    assert 399 not in steps
    assert caplog.text.count("No space left on device") == 1


def test_a_path_in_bytes_that_the_locale_does_not_know(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run, callback = make_run(logging_dir=os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), TensorBoard()
    callback.on_train_begin(run)
    log(run, callback, 1)
    callback.on_train_end(run, None)
    readable = Path(run.args.log_dir).rename(tmp_path / "readable")  # TensorBoard itself reads no other names
    assert scalars(readable, "train/loss") == [(1, 1.0)]


def hyperparameters(directory: Path) -> dict[str, plugin_data_pb2.HParamsPluginData]:
    """What TensorBoard's table of hyperparameters reads, by tag."""
    content = read(directory).PluginTagToContent("hparams")
    return {tag: plugin_data_pb2.HParamsPluginData.FromString(data) for tag, data in content.items()}


def test_arguments_for_the_table_of_runs(make_run: Callable[..., Run]) -> None:
    metric = {"metric_for_best_model": "accuracy", "eval_strategy": "steps"}
    run, callback = make_run(learning_rate=0.125, optim="sgd", gradient_checkpointing=True, **metric), TensorBoard()
    callback.on_train_begin(run)
    log(run, callback, 1)
    callback.on_train_end(run, None)
    found = hyperparameters(run.args.log_dir)
    started = dict(found["_hparams_/session_start_info"].session_start_info.hparams)
    assert started["learning_rate"].number_value == 0.125
    assert started["optim"].string_value == "sgd"
    assert started["gradient_checkpointing"].number_value == 1
    assert not {"lr_scheduler_kwargs", "report_to", "eval_batch_size", "save_minutes"} & {*started}
    metrics = [each.name.tag for each in found["_hparams_/experiment"].experiment.metric_infos]
    assert metrics == [
        "train/loss", "train/train_loss", "train/train_runtime", "train/peak_memory_gib", "eval/loss", "eval/accuracy",
    ]  # fmt: skip
    assert found["_hparams_/session_end_info"].session_end_info.status == api_pb2.STATUS_SUCCESS
    assert [path.name for path in run.args.log_dir.iterdir() if path.is_dir()] == []
    assert scalars(run.args.log_dir, "train/loss") == [(1, 1.0)]


def test_a_run_that_broke_off_did_not_come_to_its_end(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), TensorBoard()
    callback.on_train_begin(run)
    callback.on_exception(run, ValueError())
    assert [*hyperparameters(run.args.log_dir)] == ["_hparams_/experiment", "_hparams_/session_start_info"]


def test_figures_of_the_whole_run_stand_apart(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), TensorBoard()
    callback.on_train_begin(run)
    run.state.step = 3
    callback.on_log(run, {"step": 3, "epoch": 1.0, "loss": 2.0, "mfu": 0.5, "seconds/callback/Progress": 1.0})
    last = {"train_runtime": 9.0, "train_loss": 3.0, "mfu": 0.25, "seconds/callback/Progress": 8.0}
    callback.on_train_end(run, {"step": 3, "epoch": 1.0, **last})
    found = {tag: scalars(run.args.log_dir, tag) for tag in read(run.args.log_dir).Tags()["scalars"]}
    assert found == {
        "train/epoch": [(3, 1.0), (3, 1.0)], "train/loss": [(3, 2.0)], "train/mfu": [(3, 0.5)],
        "train/seconds/callback/Progress": [(3, 1.0)], "train/train_runtime": [(3, 9.0)],
        "train/train_loss": [(3, 3.0)], "run/mfu": [(3, 0.25)], "run/seconds/callback/Progress": [(3, 8.0)],
    }  # fmt: skip
