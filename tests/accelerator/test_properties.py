"""Settings that scripts ask an Accelerator for, and its prepared scheduler's class."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from trainer_kit.accelerator import Accelerator, DataLoaderConfiguration, load_checkpoint_and_dispatch


def test_settings_are_attributes() -> None:
    config = DataLoaderConfiguration(even_batches=False, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    assert (accelerator.even_batches, accelerator.use_seedable_sampler) == (False, True)
    names = ("dispatch_batches", "non_blocking", "use_stateful_dataloader")
    assert [getattr(accelerator, name) for name in names] == [getattr(config, name) for name in names]
    accelerator.even_batches = True
    assert config.even_batches
    assert (accelerator.multi_device, accelerator.should_save_model, accelerator.is_fsdp2) == (False, True, False)
    assert (accelerator.deepspeed_plugin, accelerator.parallelism_config, accelerator.torch_device_mesh) == (None,) * 3
    assert not accelerator.is_composable_parallelism_enabled
    assert accelerator.fp8_backend == "NO"


def test_what_is_missing_says_what_to_do() -> None:
    accelerator = Accelerator(cpu=True)
    assert not hasattr(accelerator, "verify_device_map")
    with pytest.raises(AttributeError, match=r"'tensor_parallel_rank': .*process_index is the rank"):
        _ = accelerator.tensor_parallel_rank
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = accelerator.nonsense
    assert copy.copy(accelerator).strategy is accelerator.strategy


def test_a_prepared_scheduler_is_a_scheduler() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0))
    scheduler = accelerator.prepare(StepLR(optimizer, 1, gamma=0.5))
    assert isinstance(scheduler, LRScheduler)
    assert scheduler.get_last_lr() == [1.0]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5] == pickle.loads(pickle.dumps(scheduler)).get_last_lr()
    assert scheduler.last_epoch == scheduler.state_dict()["last_epoch"] == 1
    assert scheduler.scheduler.last_epoch == 1


@pytest.mark.parametrize("device_map", ["disk", {"": "disk"}, {"a": "cpu", "b": "disk"}], ids=str)
def test_a_model_is_not_divided_over_devices(device_map: Any) -> None:
    with pytest.raises(ValueError, match=r"device_map.* (is not available|names several devices); .*shard"):
        load_checkpoint_and_dispatch(torch.nn.Linear(2, 2), "unused", device_map=device_map)
