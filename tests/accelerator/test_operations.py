"""Operations on trees of tensors, in one process and in two."""

from __future__ import annotations

import collections
import contextlib
import logging as std_logging
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks

from trainer_kit.accelerator import Accelerator, LocalSGD, get_logger, set_seed, unavailable
from trainer_kit.accelerator import utils as names
from trainer_kit.accelerator.state import PartialState
from trainer_kit.accelerator.utils import imports
from trainer_kit.accelerator.utils.memory import find_executable_batch_size, release_memory
from trainer_kit.accelerator.utils.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_to_fp32,
    copy_tensor_to_devices,
    find_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)
from trainer_kit.accelerator.utils.random import synchronize_rng_states


def collected() -> dict[str, Any]:
    PartialState._reset_state()  # of an earlier call in this process
    rank = PartialState(cpu=True).process_index
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    tensor = torch.tensor([1.0, 5.0]) if rank == 0 else torch.tensor([3.0, 2.0])
    return {
        "gather": gather(tensor).tolist(),
        "objects": gather_object([rank, str(rank)]),
        "from 0": broadcast({"a": tensor.clone()})["a"].tolist(),
        "from 1": broadcast(tensor.clone(), from_process=1).tolist(),
        "list": broadcast_object_list([rank, {"rank": rank}], from_process=1),
        "mean": reduce(tensor).tolist(),
        "max": reduce(tensor, "max").tolist(),
        "sum": reduce(tensor, "sum", scale=2.0).tolist(),
        "padded": pad_across_processes(torch.ones(rank + 1), pad_index=-1).tolist(),
        "copied": copy_tensor_to_devices(tensor if rank == 0 else None).tolist(),
        "random": (torch.rand(1).item(), torch.rand(1, generator=generator).item()),
    }


@pytest.mark.distributed
def test_two_processes() -> None:
    first, second = on_ranks(2, collected)
    assert (first.pop("padded"), second.pop("padded")) == ([1, -1], [1, 1])
    assert first == second
    expected = {
        "gather": [1, 5, 3, 2], "objects": [0, "0", 1, "1"], "from 0": [1, 5], "from 1": [3, 2],
        "list": [1, {"rank": 1}], "mean": [2, 3.5], "max": [3, 5], "sum": [8, 14], "copied": [1, 5],
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected


def filled() -> list[Any]:
    PartialState._reset_state()  # of an earlier call in this process
    rank = PartialState(cpu=True).process_index
    layer, column = torch.nn.Linear(2, 1), torch.full((2, 2), rank)[:, 0]
    tree = {"weight": layer.weight, "other": [torch.tensor(rank), column]}
    result = broadcast(tree, from_process=1)
    assert result["weight"] is layer.weight
    assert layer.weight.requires_grad
    assert result["other"][1] is column
    message = r"got a tensor of the shape \[2\], which is \[1\] on process 0; give tensors of the same shape"
    with pytest.raises(ValueError, match=message) if rank else contextlib.nullcontext():
        broadcast(torch.ones(1 + rank))
    return [layer.weight.tolist(), tree["other"][0].item(), column.tolist()]  # type: ignore[union-attr]


@pytest.mark.distributed
def test_broadcast_fills_the_given_tensors() -> None:
    first, second = on_ranks(2, filled)
    assert first == second
    assert first[1:] == [1, [1, 1]]


def test_trees() -> None:
    Pair = collections.namedtuple("Pair", "left right")
    tree = {"a": Pair(torch.ones(4, 2, dtype=torch.float16), [torch.zeros(4)]), "b": "text"}
    assert find_batch_size(tree) == 4
    assert find_batch_size("text") is None
    assert convert_to_fp32(tree)["a"].left.dtype == torch.float32
    assert slice_tensors(tree, slice(0, 3))["a"].right[0].shape == (3,)
    moved = send_to_device(tree, "meta", skip_keys="b")
    assert isinstance(moved["a"], Pair)
    assert moved["a"].left.is_meta
    assert moved["b"] == "text"
    assert concatenate([{"x": torch.ones(2, 1)}, {"x": torch.ones(2, 3)}], dim=1)["x"].shape == (2, 4)
    assert recursively_apply(lambda each: each.sum().item(), [torch.ones(2), (torch.ones(3),)]) == [2.0, (3.0,)]
    with pytest.raises(TypeError, match="a str cannot be given to"):
        recursively_apply(torch.sum, ["text"], error_on_other_type=True)
    with pytest.raises(TypeError, match=r"gather_object\(\) got a int; give a list"):
        gather_object(3)


def test_a_batch_size_that_fits() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, limit: int) -> int:
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    assert train(80) == 72
    assert tried == [100, 90, 81, 72]
    with pytest.raises(TypeError, match=r"train\(\) got too many arguments; leave out \['batch_size'\]"):
        train(3, 80)
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        train(-1)

    @find_executable_batch_size
    def fails(batch_size: int) -> None:
        raise ValueError("another error")

    with pytest.raises(ValueError, match="another error"):
        fails()
    assert release_memory(1, 2) == [None, None]


def test_every_name_of_accelerate_s_scripts() -> None:
    assert names.is_torch_version(">=", "2.0")
    assert names.is_pytest_available() is True
    assert not any(getattr(names, name)() for name in imports._NEVER)
    assert names.str_to_bool("Yes") == 1
    assert names.str_to_bool("off", to_bool=True) is False
    with names.patch_environment(accel_test="1"):
        import os

        assert os.environ["ACCEL_TEST"] == "1"
    assert "ACCEL_TEST" not in os.environ
    for name in unavailable.__all__:
        with pytest.raises(ValueError, match=f"{name}: .*;"):
            getattr(names, name)()
    assert not isinstance(3, names.DeepSpeedPlugin)
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from trainer_kit.accelerator.utils import nonsense  # type: ignore[attr-defined]  # noqa: F401


def test_a_logger_of_the_main_process(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = get_logger("some.script", log_level=None)
    with caplog.at_level(std_logging.INFO):
        logger.info("first %d", 1)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "1")
        logger.info("hidden")
        logger.info("everywhere", main_process_only=False)
        for _ in range(2):
            logger.warning_once("once", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["first 1", "[RANK 1] everywhere", "[RANK 1] once"]
    assert {record.filename for record in caplog.records[:2]} == {"test_operations.py"}


@pytest.mark.distributed
def test_all_processes_log_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert on_ranks(2, log_in_order, str(path)) == [None, None]
    assert path.read_text().split("\n") == ["only 0", "[RANK 0] all: 0", "[RANK 1] all: 1", ""]


def log_in_order(path: str) -> None:
    PartialState._reset_state()  # of an earlier call in this process
    rank = PartialState(cpu=True).process_index
    logger, handler = get_logger("a.script"), std_logging.FileHandler(path)
    logger.logger.setLevel(std_logging.INFO)
    logger.logger.addHandler(handler)
    logger.info("only %d", rank)
    logger.info("all: %d", rank, in_order=True)
    logger.logger.removeHandler(handler)
    handler.close()


def local_training(enabled: bool) -> list[float]:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model, optimizer = torch.nn.Linear(2, 1), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    weights = []
    with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=enabled) as sgd:
        for step in range(3):
            batch = torch.ones(1, 2) * (step + 1 + accelerator.process_index)
            accelerator.backward(model(batch).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            sgd.step()
            weights.append(accelerator.unwrap_model(model).weight.sum().item())
    return [*weights, accelerator.unwrap_model(model).weight.sum().item()]


def accumulated_local_training() -> list[bool]:
    """`step()` after each of 8 batches, of which 2 make an optimizer step: whether it averaged the weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    averaged = []
    with LocalSGD(accelerator, model, local_sgd_steps=3) as sgd:
        for step in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2) * (step + 1 + accelerator.process_index)).sum())
                optimizer.step()
                optimizer.zero_grad()
            own = accelerator.unwrap_model(model).weight.sum().item()
            sgd.step()
            averaged.append(accelerator.unwrap_model(model).weight.sum().item() != own)
    return averaged


@pytest.mark.distributed
def test_the_search_for_a_batch_size_does_not_choose_the_strategy() -> None:
    assert on_ranks(2, search_before_an_accelerator) == [["4 on cpu"]] * 2


def search_before_an_accelerator() -> list[str]:
    PartialState._reset_state()  # of an earlier call in this process
    found = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 4)
    def train(batch_size: int) -> None:
        assert "strategy" not in PartialState._shared_state
        if batch_size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        found.append(f"{batch_size} on {Accelerator(cpu=True).device}")

    train()
    return found


@pytest.mark.distributed
def test_local_sgd_counts_calls_while_gradients_accumulate() -> None:
    assert on_ranks(2, accumulated_local_training) == [[number in (2, 5) for number in range(8)]] * 2


@pytest.mark.distributed
def test_local_sgd() -> None:
    first, second = on_ranks(2, local_training, True)
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True, False, True]
    first, second = on_ranks(2, local_training, False)
    assert first == second
