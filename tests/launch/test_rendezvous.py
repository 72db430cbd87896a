"""Machines that meet, and those that do not come."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kit import launched
from kit.launching import run
from kit.ranks import free_port

from trainer_kit.errors import ProcessesLeft
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.processes import run_processes

RUNNER = ("-m", "trainer_kit.launch.script")


@pytest.mark.scenario
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_restart_meets_anew(backend: Any, tmp_path: Path) -> None:
    """The second process group must not find the addresses of the first."""
    code = (
        "import os, sys, time, torch, torch.distributed as dist\n"
        "is_first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "time.sleep(0 if is_first else int(os.environ['RANK']))  # rank 0 looks before rank 1 has come\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if is_first:\n"
        "    sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(120)\n"
        "os._exit(0)  # torch 2.6 may hang in destroy_process_group()\n"
    )
    script = tmp_path / "train.py"
    script.write_text(code)
    assert run(sys.executable, *RUNNER, str(script), max_restarts=1, rdzv_backend=backend) == {0: None, 1: None}


@pytest.mark.distributed
def test_a_master_that_nobody_answers() -> None:
    config = LaunchConfig(num_nodes=2, node_rank=1, master_port=free_port(), start_timeout=0.5, cpu=True)
    with pytest.raises(TimeoutError, match=r"machine 0 at 127.0.0.1:\d+ \(node_rank=0\) did not answer within 0.5 s"):
        run_processes(config, launched.place)


@pytest.mark.distributed
def test_the_user_hears_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.launch.rendezvous._PATIENCE_SECONDS", 0.2)
    said: list[str] = []
    config = LaunchConfig(num_nodes=2, master_port=free_port(), start_timeout=0.5, cpu=True)
    with pytest.raises(TimeoutError, match=r"machine 1 of 2 \(node_rank=1\) did not answer"):
        run_processes(config, launched.place, say=said.append)
    assert said == ["waiting for machine 1 of 2 (node_rank=1), up to 0.5 s"]


def test_a_master_address_that_leads_elsewhere() -> None:
    config = LaunchConfig(num_nodes=2, master_addr="nowhere.invalid", master_port=free_port(), cpu=True)
    with pytest.raises(OSError, match=r"master_addr='nowhere\.invalid' does not lead to this machine"):
        run_processes(config, launched.place)


@pytest.mark.distributed
def test_what_answers_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.launch.store._CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = LaunchConfig(num_nodes=2, node_rank=1, master_port=server.getsockname()[1], cpu=True)
        with pytest.raises(TimeoutError, match="is not the launcher of machine 0"):
            run_processes(config, launched.place)


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"master_port={port} is in use on this machine"):
            run(launched.place, master_port=port)


@pytest.mark.distributed
def test_a_signal_while_waiting_for_machines() -> None:
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    with pytest.raises(ProcessesLeft) as caught:
        run_processes(LaunchConfig(num_nodes=2, master_port=free_port(), cpu=True), launched.place)
    assert caught.value.exit_code == 143


@pytest.mark.scenario
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_launchers_restart_together_and_end_together(backend: str) -> None:
    """Two "machines" of one process each: the failure of the second ends both, and both say whose it was."""
    options = f"num_processes=2, num_nodes=2, master_port={free_port()}, max_restarts=2, rdzv_backend={backend!r}"
    code = (
        "import sys\nfrom kit import launched\n"
        "from trainer_kit.launch.config import LaunchConfig\n"
        "from trainer_kit.launch.processes import run_processes\n"
        f"words = [sys.executable, [*{RUNNER}, launched.__file__, 'machine']]\n"
        f"run_processes(LaunchConfig(node_rank=int(sys.argv[1]), {options}), *words, say=print)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        outputs = [machine.communicate(timeout=120)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()
    for output in outputs:
        assert "restart" in output, output
        assert "ValueError: failure 1" in output, output
        assert output.count("ValueError: failure 0") == 1, output
