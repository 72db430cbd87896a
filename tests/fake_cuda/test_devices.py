"""Tensors know on which device they are, and those of several are not mixed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.fake_cuda import Gpus, fake_cuda
from torch import nn

HOST, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def test_nothing_is_left_when_it_ends() -> None:
    with fake_cuda():
        tensor = torch.ones(3, device="cuda")
        assert torch.cuda.is_available()
        assert tensor.device == FIRST
        assert tensor.is_cuda
    assert not torch.cuda.is_available()
    assert tensor.device == HOST
    assert (tensor + torch.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda host: torch.zeros(3, device="cuda"),
        lambda host: torch.zeros(3, device=torch.device("cuda")),
        lambda host: torch.tensor([1.0], device="cuda"),
        lambda host: torch.as_tensor(host, device="cuda"),
        lambda host: torch.full((), 1.0, device=0),
        lambda host: torch.zeros_like(host, device="cuda"),
        lambda host: host.new_zeros(2, device="cuda"),
        lambda host: host.cuda().new_zeros(2),
        lambda host: torch.rand_like(host.cuda()),
        lambda host: host.cuda(),
        lambda host: host.to("cuda"),
        lambda host: host.to(0),
        lambda host: host.to(torch.ones(1, device="cuda")),
        lambda host: host.to("cuda", torch.float16, non_blocking=True),
        lambda host: host.to(device="cuda", copy=True),
        lambda host: host.cuda().to(torch.float64),
        lambda host: host.cuda()[0],
        lambda host: host.cuda().data,
        lambda host: host.cuda().reshape(3, 1).expand(3, 2),
        lambda host: host.cuda() * 2,
        lambda host: host.cuda() * torch.tensor(2.0),
        lambda host: torch.stack([host.cuda()] * 2),
        lambda host: torch._foreach_norm([host.cuda()])[0],
        lambda host: copy.deepcopy(host.cuda()),
        lambda host: copy.deepcopy(nn.Parameter(host.cuda())),
        lambda host: nn.Linear(3, 3).cuda().weight,
        lambda host: nn.Linear(3, 3).to(device="cuda").weight,
        lambda host: nn.Linear(3, 3, device="cuda")(host.cuda()),
        lambda host: nn.functional.cross_entropy(host.cuda()[None], torch.tensor([1]).cuda()),
    ],
)
def test_a_tensor_is_on_the_gpu(gpus: Gpus, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.ones(3))
    assert tensor.device == FIRST
    assert (tensor.is_cuda, tensor.is_cpu, tensor.get_device()) == (True, False, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.to("cpu"),
        lambda tensor: tensor.to("cpu", non_blocking=True),
        lambda tensor: tensor.to(torch.ones(1)),
        lambda tensor: torch.empty_like(tensor, device="cpu"),
        lambda tensor: torch.ones(3),
        lambda tensor: torch.tensor(tensor.tolist()),
    ],
)
def test_a_tensor_is_on_the_host(gpus: Gpus, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.ones(3, device="cuda"))
    assert tensor.device == HOST
    assert (tensor.is_cuda, tensor.is_cpu, tensor.get_device()) == (False, True, -1)


def test_gradients_are_on_the_gpu(gpus: Gpus) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)).cuda()
    unused = nn.Parameter(torch.ones(3, device="cuda"))
    (model(torch.tensor([1, 2]).cuda()).sum() + 0 * unused.sum()).backward()
    assert {parameter.grad.device for parameter in [*model.parameters(), unused] if parameter.grad is not None} == {
        FIRST
    }


@pytest.mark.parametrize(
    "mix",
    [
        lambda host, own: own + host,
        lambda host, own: torch.add(host, own),
        lambda host, own: own.add_(host),
        lambda host, own: torch.cat([own, host]),
        lambda host, own: torch._foreach_add([own], [host]),
        lambda host, own: nn.Linear(3, 1).cuda()(host),
        lambda host, own: nn.Linear(3, 1)(own),
        lambda host, own: nn.functional.mse_loss(own, host),
    ],
)
def test_devices_are_not_mixed(gpus: Gpus, mix: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu"):
        mix(torch.ones(3), torch.ones(3, device="cuda"))


def test_a_gradient_is_on_its_parameters_device(gpus: Gpus) -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    weight.grad = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="different device"):
        weight.grad = torch.ones(3)


def test_two_gpus_are_not_mixed_either() -> None:
    with fake_cuda(2) as gpus:
        assert torch.cuda.device_count() == 2
        first, second = torch.ones(3, device="cuda:0"), torch.ones(3).to(1)
        assert (first.device, second.device) == (FIRST, SECOND)
        with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
            first + second
        torch.cuda.set_device(1)
        assert torch.ones(3, device="cuda").device == SECOND
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
            assert torch.cuda.current_device() == 0
        assert (second + first.to(1)).sum().item() == 6
    assert gpus.races == []


def test_arrays_are_the_hosts(gpus: Gpus) -> None:
    assert torch.ones(2).numpy().tolist() == [1, 1]
    with pytest.raises(TypeError, match="convert cuda:0"):
        torch.ones(2, device="cuda").numpy()


def test_page_locked_memory(gpus: Gpus) -> None:
    host = torch.ones(3)
    assert not host.is_pinned()
    assert host.pin_memory().is_pinned()
    assert torch.empty_strided((2,), (1,), pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError, match="cannot pin"):
        host.cuda().pin_memory()
    host.pin_memory().to("cuda", non_blocking=True)
    assert gpus.unpinned == []
    host.to("cuda", non_blocking=True)
    assert len(gpus.unpinned) == 1


def test_a_gpu_has_random_numbers_of_its_own(gpus: Gpus) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.equal(torch.get_rng_state(), before)
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    assert not torch.equal(first, second)
    torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.default_generator.manual_seed(1)  # the host's alone
    assert not torch.equal(
        nn.functional.dropout(torch.ones(64, device="cuda")), nn.functional.dropout(torch.ones(64)).cuda()
    )
    torch.cuda.default_generators[0].manual_seed(1)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_memory_is_counted_and_limited() -> None:
    with fake_cuda(memory=4096):
        held = torch.ones(1024, dtype=torch.uint8, device="cuda")
        one = torch.ones(1, device="cuda")
        assert torch.cuda.memory_allocated() == 1024 + 512
        assert torch.cuda.mem_get_info() == (4096 - 1536, 4096)
        del held
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (512, 1536)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 512
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.zeros(4096, dtype=torch.uint8, device="cuda")
        assert torch.zeros(2048, dtype=torch.uint8, device="cuda").sum() + one == 1


def test_a_thread_that_ends_later_leaves_no_mode() -> None:
    may_end = threading.Event()
    with fake_cuda():
        thread = threading.Thread(target=may_end.wait, args=(60,))
        thread.start()
    may_end.set()
    thread.join(60)
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
