"""What XLA compiles and when it sends something back, by torch_xla's own counters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from kit import xla_task
from kit.on_xla import on_xla

from trainer_kit import Callback, Run

pytestmark = pytest.mark.xla


class Epochs(Callback):
    """Counts what was compiled before each epoch."""

    def __init__(self) -> None:
        self.compiled: list[int] = []

    def on_epoch_begin(self, run: Run) -> None:
        self.compiled.append(xla_task.compiled())


@pytest.mark.parametrize(("devices", "strategy"), [(1, "xla"), (4, "fsdp")])
def test_nothing_is_compiled_after_the_first_epoch(tmp_path: Path, devices: int, strategy: str) -> None:
    def train() -> list[int]:
        epochs = Epochs()
        trainer = xla_task.make_trainer(
            tmp_path, "bert", xla_task.strategy(strategy), samples=250, dropout=0.1, callbacks=[epochs],
            per_device_train_batch_size=32 // devices, num_train_epochs=3, logging_first_step=True,
            eval_strategy="epoch", save_strategy="epoch",
            lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 1},  # 0 in the second epoch
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output = trainer.train()
        assert output.global_step == 12  # the last one of an epoch has a batch of 32 and one of 26
        assert trainer.evaluate()["eval_loss"] > 0
        return [*epochs.compiled, xla_task.compiled()]

    first, *later = on_xla(devices, train)
    assert first < later[0]
    assert later == [later[0]] * 3


def test_a_length_that_comes_later_is_compiled_and_warned_of(tmp_path: Path) -> None:
    class Longer(Epochs):
        length = 32

        def on_epoch_begin(self, run: Run) -> None:
            super().on_epoch_begin(run)
            self.length = 48 if run.state.epoch == 1 else 32

    def train() -> tuple[list[int], list[str]]:
        from trainer_kit.data.collate import PadCollator

        longer = Longer()

        def collate(samples: list[Any]) -> Any:
            return PadCollator(xla_task.Tokenizer(), pad_to_lengths=[longer.length])(samples)

        trainer = xla_task.make_trainer(
            tmp_path, "bert", xla_task.strategy("xla"), num_train_epochs=3, callbacks=[longer],
            trainer={"data_collator": collate},
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        return [*longer.compiled, xla_task.compiled()], [str(each.message) for each in caught]

    (_, first, second, third), messages = on_xla(1, train)
    assert first < second == third
    said = [message for message in messages if "compil" in message]
    assert len(said) == 1
    assert "48" in said[0]


def test_the_device_sends_nothing_back_in_a_step_that_does_not_log(tmp_path: Path) -> None:
    def transfers() -> int:
        from torch_xla.debug import metrics

        assert "TransferToDeviceTime" in metrics.metric_names()  # that is what they are called today
        data = metrics.metric_data("TransferFromDeviceTime")
        return data[0] if data else 0

    def train() -> list[int]:
        watch = xla_task.Watch(transfers)
        trainer = xla_task.make_trainer(
            tmp_path, "net", xla_task.strategy("xla"), num_train_epochs=5, logging_steps=10, callbacks=[watch]
        )
        assert trainer.train().global_step == 20
        return watch.seen

    seen = on_xla(1, train)
    assert seen[4:10] == [seen[4]] * 6  # after the first epoch, which looks at how the model counts
    assert seen[10] > seen[9]  # the log after step 10
    assert seen[10:] == [seen[10]] * 10
