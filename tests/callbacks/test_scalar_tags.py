from __future__ import annotations

import math

from trainer_kit.callbacks.scalar_tags import final_tags, scalar_tags


def test_tags_are_those_of_transformers() -> None:
    record = {"step": 3, "loss": 0.5, "eval_loss": 1, "test_f1": math.inf, "eval_": 2.0, "note": "text", "flag": True}
    assert scalar_tags(record, "train") == {
        "train/loss": 0.5, "eval/loss": 1.0, "test/f1": math.inf, "train/eval_": 2.0, "train/flag": 1.0,
    }  # fmt: skip


def test_what_callbacks_measured_in_the_whole_training_is_apart() -> None:
    metrics = {"step": 3, "epoch": 1.0, "train_loss": 0.5, "goodput": 0.9}
    assert final_tags(metrics) == {"train/epoch": 1.0, "train/train_loss": 0.5, "run/goodput": 0.9}
