"""A process among others: what it minds."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from typing import Any

import pytest
import torch
from kit.ranks import free_port, try_on_ranks
from torch.distributed import HashStore

from trainer_kit.config import environment
from trainer_kit.config.environment import Place
from trainer_kit.strategies import process_group
from trainer_kit.strategies.connections import Connections
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.process_group import Membership, check_own_gpus
from trainer_kit.strategies.watchdog.heartbeat import Heartbeat


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
@pytest.mark.parametrize("is_joined", [True, False])
def test_threads_are_given_time_before_a_fork(is_joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(process_group.time, "sleep", slept.append)
    monkeypatch.setattr(process_group.Membership, "current", object() if is_joined else None)
    child = os.fork()
    if child == 0:
        os._exit(0)
    monkeypatch.undo()
    assert os.waitpid(child, 0)[1] == 0
    assert slept == [process_group._REST_SECONDS] * (is_joined and process_group._FORKS_MAY_HANG)
    assert not (process_group._FORKS_MAY_HANG and sys.version_info >= (3, 12))


def test_the_store_of_a_lost_launcher_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has served it since before the process began."""
    monkeypatch.setenv(environment.ELASTIC, "1")
    place = Place(rank=1, world_size=2, local_rank=0, address="127.0.0.1", port=free_port(), restarts=0)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"rank 1 found no launcher at 127.0.0.1:\d+, .*: its machine is lost"):
        process_group._connect(place, serves=False)
    assert time.monotonic() - begin < process_group._SILENCE_SECONDS


def test_other_limits_of_a_second_training_are_not_ignored_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        place = Place(rank=rank, world_size=2, local_rank=rank, address="127.0.0.1", port=1, restarts=0)
        heartbeat = Heartbeat(HashStore(), rank, 2, patience=30.0)
        membership = Membership(heartbeat, True, place, Connections(), 1800.0)
        membership.check_limits(1800.0, 30.0)
        membership.check_limits(600.0, 4.0)
        membership.check_limits(600.0, 4.0)
        Membership(heartbeat, False, place, Connections(), 1800.0).check_limits(600.0, 30.0)
    expected = (
        "ddp_timeout and heartbeat_timeout stay 1800 s and 30 s, as in the first training of this program, instead of "
        "600 s and 4 s"
    )
    assert caplog.messages == [expected]


def lose_a_process(port: int, rank: int, texts: Any) -> None:
    """In a child that was forked after the import; without a launcher, rank 0 serves the store."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    strategy = DDP(device="cpu", heartbeat_timeout=4.0)
    strategy.setup()
    strategy.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 * rank)  # rank 0 is the first that notices, and ends
    try:
        strategy.barrier()
    except RuntimeError as error:
        texts.put((rank, str(error)))
        sys.exit(1)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_first_process_leaves_its_words_to_the_others() -> None:
    fork, port = multiprocessing.get_context("fork"), free_port()
    texts = fork.SimpleQueue()
    processes = [fork.Process(target=lose_a_process, args=(port, rank, texts)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [1, 1, -signal.SIGKILL]
    finally:
        for process in processes:
            process.kill()
    for _, text in (texts.get(), texts.get()):
        assert f"process {processes[2].pid}) has ended without a message" in text
        assert f"process {processes[0].pid}) has ended without a message" not in text


def work_until_one_is_lost(port: int, rank: int, texts: Any, number: signal.Signals) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    strategy = DDP(device="cpu", heartbeat_timeout=3.0)
    strategy.setup()
    careless = strategy.session.watch()
    strategy.expect_regroup(True)
    check = strategy.session.watch()
    channel = strategy.session.open_peer_channel()
    assert channel is not None
    strategy.barrier()
    if rank == 1:
        channel.break_off()  # a copy has failed
        strategy.group.heartbeat.report_failure(ValueError("in a training before, which the program has caught"))
        time.sleep(2)
        strategy.group.heartbeat.take_back_failure()
    else:
        for _ in range(20):
            time.sleep(0.1)
            check()
    strategy.barrier()
    if rank == 1:
        os.kill(os.getpid(), number)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        time.sleep(0.01)
        careless()
        try:
            check()
        except RuntimeError as error:
            texts.put(f"{type(error).__name__}: {error}")
            os._exit(0)
    texts.put("nothing was noticed")


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_loss_is_noticed_in_work_without_collectives(number: signal.Signals) -> None:
    """At once by its connection, or after the patience of the heartbeat."""
    at_once = number == signal.SIGKILL
    fork, port = multiprocessing.get_context("fork"), free_port()
    texts = fork.SimpleQueue()
    args = [(port, rank, texts, number) for rank in range(2)]
    processes = [fork.Process(target=work_until_one_is_lost, args=each) for each in args]
    for process in processes:
        process.start()
    try:
        processes[0].join(60)
        assert processes[0].exitcode == 0
        known = rf"rank 1 \(.*process {processes[1].pid}\) has not answered .*"
        cause = r"a connection to another process broke \(closed by its other end\)" if at_once else known
        here = "rank 0 \\(this process\\) was in work_until_one_is_lost"
        assert re.match(f"LostProcessError: {cause}; {here} ", text := texts.get()), text
    finally:
        for process in processes:
            process.kill()


GPU = "NVIDIA H100 80GB HBM3 GPU-5e6f"


def join_with_gpus(gpus: list[str], leaves_first: int) -> None:
    """Each process has the GPU of its rank; NCCL would come after the meeting."""
    strategy = DDP(device="cpu")
    gpu = gpus[strategy.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDP, "_location", lambda self: ("node1", gpu))
        patch.setattr(torch.distributed, "init_process_group", duplicate_gpu)
        if strategy.rank != leaves_first:
            patch.setattr(process_group, "check_own_gpus", late_check)
        strategy.setup()


def late_check(locations: Any) -> None:
    time.sleep(1.0)
    check_own_gpus(locations)


def duplicate_gpu(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("NCCL error: Duplicate GPU detected")


@pytest.mark.distributed
@pytest.mark.parametrize("leaves_first", [0, 1])
def test_processes_that_share_a_gpu_are_refused_before_nccl_meets(leaves_first: int) -> None:
    for result in try_on_ranks(3, join_with_gpus, ["A100 GPU-1a2b", GPU, GPU], leaves_first):
        assert isinstance(result.error, ValueError), result
        assert f"ranks 1 and 2 on node1 share one GPU ({GPU})" in str(result.error)


@pytest.mark.distributed
def test_processes_with_gpus_of_their_own_go_on_to_meet() -> None:
    for result in try_on_ranks(2, join_with_gpus, [GPU, "A100 GPU-1a2b"], 0):
        assert "Duplicate GPU" in str(result.error)


def test_a_gpu_of_the_same_name_on_another_machine_is_another_one() -> None:
    check_own_gpus([("node1", GPU), ("node2", GPU), ("node1", "cpu"), ("node1", "cpu"), ("a", "xla:0"), ("a", "xla:0")])
    with pytest.raises(ValueError, match="ranks 1 and 2 on node2"):
        check_own_gpus([("node1", "mps:0"), ("node2", "mps:0"), ("node2", "mps:0")])


def test_a_group_for_devices_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for backends in ("cpu:gloo", "cpu:gloo,cuda:nccl"):
        monkeypatch.setattr(process_group.dist, "get_backend_config", lambda each=backends: each)
        process_group._check_backends()
    monkeypatch.setattr(process_group.dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ValueError, match=r"process group \(cuda:nccl\) has no backend for tensors on the host"):
        process_group._check_backends()
