"""notebook_launcher without a notebook: what it starts, returns, refuses and says."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import free_port

from trainer_kit.config import environment
from trainer_kit.errors import ProcessesLeft, ProcessFailed
from trainer_kit.launch import config, notebook_state
from trainer_kit.launch.notebook import notebook_launcher

SETTINGS = ("TRAINER_KIT_MIXED_PRECISION", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("output")))
    monkeypatch.setattr(config, "count_gpus", lambda: 0)
    monkeypatch.setattr("trainer_kit.launch.notebook.count_gpus", lambda: 0)
    monkeypatch.delenv("TRAINER_KIT_DEBUG", raising=False)
    monkeypatch.delenv("ACCELERATE_DEBUG_MODE", raising=False)
    monkeypatch.setattr(environment, "xla_device_type", lambda: None)


@pytest.fixture
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_one_process_is_this_one(capfd: pytest.CaptureFixture[str]) -> None:
    before = {name: os.environ.get(name) for name in SETTINGS}
    seen = notebook_launcher(lambda: (os.getpid(), environment.mixed_precision()), mixed_precision="bf16")
    assert seen == (os.getpid(), "bf16")
    assert capfd.readouterr().out == "Launching training on one CPU.\n"
    assert {name: os.environ.get(name) for name in SETTINGS} == before


def test_settings_are_put_back_after_an_error_in_this_process() -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        notebook_launcher(fail, mixed_precision="fp16")
    assert environment.mixed_precision() == "no"
    assert not hasattr(caught.value, "_render_traceback_")  # the notebook shows the whole of it


@pytest.mark.distributed
def test_processes_have_what_is_here_and_rank_0_answers(capfd: pytest.CaptureFixture[str]) -> None:
    before = {name: os.environ.get(name) for name in SETTINGS}
    lock = threading.Lock()  # nothing that could be sent

    def train(factor: float) -> dict[str, Any]:
        with lock:
            place = environment.place()
        print(f"rank {place.rank}")
        return {
            "place": (place.rank, place.world_size, place.local_world_size),
            "precision": environment.mixed_precision(),
            "own": os.getpid(),
            "tensor": factor * torch.ones(2),
        }

    result = notebook_launcher(train, (3.0,), num_processes=2, mixed_precision="bf16")
    assert result["place"] == (0, 2, 2)
    assert result["precision"] == "bf16"
    assert result["own"] != os.getpid()
    assert result["tensor"].tolist() == [3.0, 3.0]
    shown = capfd.readouterr().out
    assert shown.startswith("Launching training on 2 CPUs.\nrank 0\n")
    folder = re.search(r"the output of rank 1 is in (\S+)", shown)
    assert folder is not None
    assert Path(folder[1], "rank-1.out").read_text() == "rank 1\n"
    assert {name: os.environ.get(name) for name in SETTINGS} == before


@pytest.mark.distributed
@pytest.mark.usefixtures("cuda_in_use")
def test_fresh_processes_where_cuda_is_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    class Result:
        def __init__(self, rank: int, precision: str) -> None:
            self.rank = rank
            self.precision = precision

    def train(start: int) -> Result:
        print("training in a fresh process:", start)
        return Result(start + environment.place().rank, environment.mixed_precision())

    result = notebook_launcher(train, (7,), num_processes=2, mixed_precision="fp16")
    assert isinstance(result, Result)  # the very class that only this function knows
    assert (result.rank, result.precision) == (7, "fp16")
    shown = capfd.readouterr().out
    assert "CUDA is already in use in this kernel" in shown
    assert "train() is sent to them" in shown
    assert "training in a fresh process: 7\n" in shown


@pytest.mark.usefixtures("cuda_in_use")
def test_an_object_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    def train() -> None:
        lock.acquire()

    with pytest.raises(TypeError, match=r"^train\(\) cannot be sent .* variable `lock`, a _thread.lock, cannot be"):
        notebook_launcher(train, num_processes=2)
    with pytest.raises(TypeError, match=r"because argument 1, a _thread.lock, cannot be pickled"):
        notebook_launcher(len, ((), lock), num_processes=2)


@pytest.mark.distributed
def test_the_traceback_of_the_process_that_failed() -> None:
    def train() -> None:
        if environment.place().rank == 1:
            raise ArithmeticError("only here")
        time.sleep(120)

    with pytest.raises(ProcessFailed) as caught:
        notebook_launcher(train, num_processes=2)
    assert caught.value.rank == 1
    assert "ArithmeticError: only here" in caught.value.traceback
    assert 'raise ArithmeticError("only here")' in caught.value.traceback
    assert caught.value.traceback.count("File ") == 1  # the user's own frame and none of ours
    [first, *_] = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert first.startswith("ProcessFailed: rank 1")


@pytest.mark.distributed
def test_a_function_that_fails_once_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> int:
        if environment.place().rank == 1 and environment.place().restarts == 0:
            raise ArithmeticError("the first time")
        (tmp_path / str(environment.place().rank)).touch()
        return environment.place().restarts

    assert notebook_launcher(train, num_processes=2, max_restarts=2) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert "ArithmeticError: the first time" in capfd.readouterr().out


@pytest.mark.distributed
def test_one_process_with_restarts_is_another_one() -> None:
    assert notebook_launcher(lambda: (os.getpid(), environment.place().world_size), max_restarts=1)[0] != os.getpid()


@pytest.mark.distributed
def test_processes_that_leave_are_no_failure() -> None:
    with pytest.raises(ProcessesLeft, match="143") as caught:
        notebook_launcher(sys.exit, (143,), num_processes=2)
    assert caught.value.exit_code == 143


def _nothing() -> None:
    raise AssertionError("must not run")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_processes": 0}, ValueError, "num_processes=0 is not allowed"),
        ({"num_processes": "2"}, TypeError, "num_processes='2' is a str"),
        ({"num_nodes": 2, "num_processes": 2, "node_rank": 2}, ValueError, "node_rank=2 is not allowed"),
        ({"num_nodes": 1.5, "num_processes": 2}, TypeError, "num_nodes=1.5 is a float"),
        ({"function": 3}, TypeError, "function=3 cannot be called"),
        ({"args": "abc"}, TypeError, "args='abc' is a str; give a tuple"),
        ({"use_port": "http"}, ValueError, "use_port='http' has no port"),
        ({"rdzv_endpoint": "host"}, ValueError, "rdzv_endpoint='host' has no port"),
        ({"use_port": "70000"}, ValueError, "master_port=70000 is not allowed"),
        ({"mixed_precision": "fp64"}, ValueError, "mixed_precision='fp64' is not allowed"),
        ({"rdzv_backend": "etcd"}, ValueError, "rdzv_backend='etcd' is not allowed"),
        ({"max_restarts": -1}, ValueError, "max_restarts=-1 is not allowed"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        notebook_launcher(**{"function": _nothing, **options})
    assert "\n" not in str(caught.value)
    assert caught.value._render_traceback_() == [f"{error.__name__}: {caught.value}"]  # type: ignore[union-attr]


@pytest.mark.distributed
def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "count_gpus", lambda: 2)
    monkeypatch.setattr("trainer_kit.launch.notebook.count_gpus", lambda: 2)
    with pytest.raises(ValueError, match="num_processes=3, but this machine has 2 GPUs"):
        notebook_launcher(_nothing, num_processes=3)
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "1")
    assert notebook_launcher(environment.use_cpu, num_processes=3) is True


@pytest.mark.distributed
def test_one_process_per_gpu(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(config, "count_gpus", lambda: 2)
    monkeypatch.setattr("trainer_kit.launch.notebook.count_gpus", lambda: 2)
    assert notebook_launcher(lambda: environment.place().world_size) == 2
    assert capfd.readouterr().out == "Launching training on 2 GPUs.\n"


def test_not_from_a_process_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="this process is one of 2 that a launcher started"):
        notebook_launcher(_nothing, num_processes=2)


@pytest.mark.distributed
@pytest.mark.parametrize("variable", ["TRAINER_KIT_DEBUG", "ACCELERATE_DEBUG_MODE"])
def test_a_child_process_is_tried_first(
    variable: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "yes")
    assert notebook_launcher(lambda: 5, num_processes=2) == 5
    assert "A child process (fork) can use the CPU.\nLaunching training on 2 CPUs.\n" in capfd.readouterr().out


def _refuses(devices: list[str], answer: Any) -> None:
    answer.send("RuntimeError: device is busy")


def _dies(devices: list[str], answer: Any) -> None:
    os._exit(3)


def _hangs(devices: list[str], answer: Any) -> None:
    time.sleep(60)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("child", "words"),
    [(_refuses, "RuntimeError: device is busy"), (_dies, "it ended with exit code 3"), (_hangs, "no answer within")],
)
def test_a_child_process_that_cannot_compute(
    child: Callable[..., None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_KIT_DEBUG", "1")
    monkeypatch.setattr(notebook_state, "_try_devices", child)
    monkeypatch.setattr(notebook_state, "_TRIAL_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=rf"a child process \(fork\) cannot compute here: {words}"):
        notebook_launcher(_nothing, num_processes=2)


@pytest.mark.distributed
def test_processes_killed_for_memory(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    advice = (
        r"was killed by SIGKILL .*; if the memory of its host ran out, make the model once in the notebook instead of"
    )
    with pytest.raises(
        ProcessFailed, match=rf"{advice} in each of the 2 processes, and .*_launcher\(train, \(model,\)\)"
    ):
        notebook_launcher(train, num_processes=2)


SEVERAL_MACHINES = """
import sys
from trainer_kit.config import environment
from trainer_kit.launch.notebook import notebook_launcher

def train(word):
    place = environment.place()
    return word, place.rank, place.world_size, place.node, place.has_several_machines

print("value:", notebook_launcher(train, ("hello",), num_processes=1, num_nodes=2, node_rank=int(sys.argv[1]),
                                  use_port=sys.argv[2]))
"""


@pytest.mark.scenario
def test_one_call_on_each_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-c", SEVERAL_MACHINES]
    nodes = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (1, 0)
    ]
    try:
        second, first = (node.communicate(timeout=120)[0] for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert "Launching training on 2 CPUs." in first
    assert "value: ('hello', 0, 2, 0, True)" in first
    assert "value: None" in second


# The rendezvous, and what the processes print


@pytest.mark.distributed
def test_the_lines_of_all_processes_are_shown_after_a_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        print("at work")

    notebook_launcher(train, num_processes=2, log_line_prefix_template="<${rank}> ")
    shown = capfd.readouterr().out.splitlines()
    assert sorted(line for line in shown if line.endswith("at work")) == ["<0> at work", "<1> at work"]
    with pytest.raises(TypeError, match="log_line_prefix_template=3 is a int; give text"):
        notebook_launcher(train, num_processes=2, log_line_prefix_template=3)  # type: ignore[arg-type]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("backend", "conf", "whom"),
    [
        ("static", {"timeout": "1"}, r"machine 0 at 127.0.0.1:\d+ \(node_rank=0\)"),
        ("static", {"timeout": 1, "rank": 0}, r"machine 0 at 127.0.0.1:\d+ \(node_rank=0\)"),
        ("c10d", {"join_timeout": 1, "timeout": 99, "is_host": False}, r"the first machine at 127.0.0.1:\d+"),
    ],
)
def test_a_notebook_waits_as_long_as_rdzv_conf_says(backend: Any, conf: Any, whom: str) -> None:
    """And is told the names of its own arguments."""
    place = {"num_nodes": 2, "node_rank": 1, "use_port": free_port(), "rdzv_backend": backend}
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{whom} did not answer within 1 s; .*rdzv_conf={{'timeout': 2}}"):
        notebook_launcher(print, num_processes=1, rdzv_conf=conf, **place)
    assert time.monotonic() - begin < 30


@pytest.mark.distributed
def test_machine_0_is_told_of_node_rank_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TimeoutError, match=r"machine 1 of 2 \(node_rank=1\) did not answer within 1 s"):
        notebook_launcher(print, num_processes=1, num_nodes=2, use_port=free_port(), rdzv_conf={"timeout": 1})


@pytest.mark.distributed
def test_machines_meet_as_rdzv_conf_says() -> None:
    """A single one, which needs all of torch's settings all the same."""
    conf = {
        "join_timeout": 60, "last_call_timeout": 1, "close_timeout": 5, "heartbeat_timeout": 3, "read_timeout": 30,
        "keep_alive_interval": 2, "keep_alive_max_attempt": 2, "is_host": "true",
    }  # fmt: skip
    before = dict(conf)
    assert notebook_launcher(sum, ([1, 2],), num_processes=2, rdzv_backend="c10d", rdzv_conf=conf) == 3
    assert conf == before


@pytest.mark.parametrize(
    ("backend", "conf", "sentence"),
    [
        ("static", {"join_timeout": 3}, "rdzv_conf has 'join_timeout', which rdzv_backend='static' does not know"),
        ("c10d", {"store_type": "file"}, "rdzv_conf has 'store_type', which rdzv_backend='c10d' does not know"),
        ("static", {"timeout": 0}, r"rdzv_conf\['timeout'\]=0 is not allowed; give a whole number above 0"),
        ("c10d", {"is_host": "yes"}, r"rdzv_conf\['is_host'\]='yes' is not allowed; give True or False"),
    ],
)
def test_a_rdzv_conf_that_makes_no_sense(backend: Any, conf: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        notebook_launcher(print, num_processes=2, rdzv_backend=backend, rdzv_conf=conf)
