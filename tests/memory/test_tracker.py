"""Storages from birth to end, on real tensors whose sizes are known."""

from __future__ import annotations

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from trainer_kit.memory.tracker import Tracker

KIB = 1024


def kibibyte() -> torch.Tensor:
    return torch.zeros(256)


def test_the_peak_is_the_moment_with_most_in_use() -> None:
    tracker = Tracker()
    with tracker:
        first = kibibyte()
        second = torch.cat([first, first])  # 3 KiB in all
        del first
        third = second + 1  # 4 KiB
        del second
        third.mul_(2)
        kibibyte()  # 3 KiB
    assert tracker.peak() == {"temporary": 4 * KIB}


def test_memory_that_is_shared_counts_once() -> None:
    tracker = Tracker()
    with tracker:
        whole = kibibyte()
        views = [whole[:100], whole.view(2, 128), whole.t(), whole.detach()]
        del whole
        other = kibibyte()
    assert tracker.peak() == {"temporary": 2 * KIB}
    del views, other


def test_a_use_that_is_told_late_counts_from_the_birth() -> None:
    tracker = Tracker()
    weight = kibibyte()
    tracker.mark("weights", [weight, weight[:3]])
    with tracker:
        gradient = weight * 2
        more = weight * 3
        del more
    tracker.mark("gradients", [gradient, None])
    assert tracker.peak() == {"weights": KIB, "gradients": KIB, "temporary": KIB}


def test_the_state_of_a_first_step_counts_from_the_start() -> None:
    tracker = Tracker()
    with tracker:
        activations = torch.cat([kibibyte()] * 4)
        del activations
        state = kibibyte()
    assert sum(tracker.peak().values()) == 5 * KIB
    tracker.move_to_start("optimizer", [state])
    assert tracker.peak() == {"optimizer": KIB, "temporary": 5 * KIB}


def test_what_is_saved_for_the_backward_pass_is_an_activation() -> None:
    tracker = Tracker()
    weight = torch.ones(256, requires_grad=True)
    tracker.mark("weights", [weight])
    with tracker.following():
        hidden = weight.exp()  # saves its result
        total = (hidden + 1).sum()  # saves nothing
    assert tracker.peak() == {"weights": KIB, "activations": KIB, "temporary": KIB + 4}  # and the sum
    del hidden, total


def test_what_is_computed_again_is_an_activation() -> None:
    tracker = Tracker()
    weight = torch.ones(256, requires_grad=True)
    with tracker.following():
        total = checkpoint(lambda x: x.exp().exp().exp(), weight, use_reentrant=False).sum()
        kept = tracker.peak()
        total.backward()
    assert kept["activations"] == KIB  # the input
    assert tracker.peak()["activations"] == 4 * KIB
    del total


def test_copies_of_weights_in_another_dtype_are_casts() -> None:
    tracker = Tracker()
    layer = nn.Linear(256, 4, bias=False)
    tracker.mark("weights", layer.parameters())
    with tracker.following(), torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.ones(1, 256))
    found = tracker.peak()
    assert found["weights"] == 4 * KIB
    assert found["casts"] == 2 * KIB
    del output


def test_sizes_are_those_that_the_allocator_gives() -> None:
    tracker = Tracker(512)
    with tracker:
        held = [torch.zeros(1), torch.zeros(129), torch.zeros(0)]
    assert tracker.peak() == {"temporary": 512 + 1024}
    del held


def test_sparse_gradients() -> None:
    tracker = Tracker()
    table = nn.Embedding(100, 16, sparse=True)
    with tracker:
        table(torch.tensor([3, 5])).sum().backward()
    tracker.mark("gradients", [table.weight.grad])
    found = tracker.peak()
    assert found["gradients"] >= 2 * 16 * 4


def test_a_tensor_that_keeps_its_numbers_in_others() -> None:
    tracker = Tracker()
    tracker.mark("optimizer", [TwoTensor(kibibyte(), kibibyte())])
    assert tracker.peak() == {"optimizer": 2 * KIB}
    tracker.close()
