from __future__ import annotations

from trainer_kit.callbacks.formatting import HIDDEN, metrics_line, pairs, summary_line


def test_pairs() -> None:
    values = {"step": 3, "loss": 0.5, "learning_rate": 1e-4, "samples_per_second": 80.0}
    assert pairs(values) == "loss 0.5  lr 0.0001  samples/s 80"
    assert pairs(values, {"learning_rate"}) == "loss 0.5  samples/s 80"


def test_metrics_line() -> None:
    metrics = {"eval_loss": 0.5, "eval_samples_per_second": 8.0, "eval_steps_per_second": 2.0}
    assert metrics_line(metrics) == "eval_loss 0.5  eval_samples_per_second 8"


def test_a_line_has_no_groups_and_few_figures() -> None:
    record = {
        "loss": 0.5, "mfu": 0.4, "memory_gib": 1.0, "host_memory_gib": 1.0, "fragmentation": 0.1, "goodput": 0.9,
        "model_flops_per_second": 1e12, "seconds/callback/EMA": 1.0, "anatomy/weights_gib": 1.0, "xla/compiles": 2,
    }  # fmt: skip
    assert pairs(record, HIDDEN) == "loss 0.5  mfu 40.0%"
    assert summary_line({"train_loss": 0.5, "peak_memory_gib": 2.0} | record).split("  ") == [
        "train_loss 0.5", "peak_memory_gib 2", "loss 0.5", "mfu 40.0%", "goodput 0.9",
    ]  # fmt: skip
    assert metrics_line({"eval_squad/f1": 0.5}) == "eval_squad/f1 0.5"


def test_an_mfu_that_says_nothing_is_not_shown() -> None:
    assert pairs({"loss": 0.5, "mfu": 1.627e-07}) == "loss 0.5"
    assert pairs({"mfu": 0.0012}) == "mfu 0.1%"
    assert pairs({"mfu": float("nan")}) == "mfu nan%"
