"""A `python` whose processes need not import torch: a server that has imported it forks them.

    with serve() as python:                      # `trainer-kit` is in the same folder
        subprocess.run([python, "train.py"])

Each command is a small program that sends its words, folder, environment and standard streams to the server. It passes
on the signals that it gets, ends as the forked process ends, and takes it along when it is killed. `sys.executable` is
this `python` in the forked processes, so that those which they start are forked too. Options other than -c, -m and -W
are left to the real Python. Only on Linux; tests that ask how a process starts take a real one.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from kit.preloaded import become, run_to_exit
from trainer_kit.launch.script import run_as_main

_IMPORTED = (
    "kit.measured",
    "torch._dynamo", "trainer_kit.trainer", "trainer_kit.accelerator", "trainer_kit.callbacks", "trainer_kit.cli.main",
    "trainer_kit.cli.launch", "trainer_kit.launch.processes", "trainer_kit.launch.script", "trainer_kit.report.page",
    "trainer_kit.strategies.multinode", "trainer_kit.strategies.fsdp.strategy", "trainer_kit.utils.event_file",
    "trainer_kit.tools.verify.child", "torch.utils.tensorboard.summary", "tensorboard.summary.writer.record_writer",
    "sklearn.datasets", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "kit.frozen",
)  # fmt: skip
_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
if os.path.basename(sys.argv[0]) != "python":
    words = [os.path.join({folder!r}, os.path.basename(sys.argv[0])), *words]
elif not words or (words[0][0] == "-" and words[0] not in ("-c", "-m", "-W")):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
code = int(server.recv(8) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def serve() -> Iterator[Path]:
    """Start the server, which ends with this context, and return the path of the `python`."""
    real = Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="python-") as name:
        folder, address = Path(name), str(Path(name) / "socket")
        for command in ("python", "trainer-kit"):
            path = folder / command
            path.write_text(_COMMAND.format(python=str(real), folder=str(real.parent), address=address))
            path.chmod(0o755)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        words = [str(real), "-m", "kit.interpreter", address, str(folder / "python")]
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n"
                yield folder / "python"
            finally:
                server.kill()


def _serve(address: str, executable: str) -> None:
    for name in _IMPORTED:
        with suppress(ImportError):  # of an extra
            importlib.import_module(name)
    sys.executable = executable
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for a process end by themselves
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _answer(client)
            client.close()


def _answer(client: socket.socket) -> None:
    """Fork a process for a command, pass signals on to it, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    words, folder, environment = json.loads(client.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    process = os.fork()
    if process == 0:
        client.close()
        run_to_exit(lambda: _run(words, folder, environment, streams))
    for stream in streams:
        os.close(stream)
    end = os.pidfd_open(process)
    while end not in select.select([client, end], [], [])[0]:
        signals = client.recv(1)
        os.kill(process, signals[0] if signals else signal.SIGKILL)
        if not signals:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    client.send(str(code).encode())
    os._exit(0)


def _run(words: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    os.chdir(folder)
    become(environment, *streams[1:])
    os.dup2(streams[0], 0)
    tempfile.tempdir = None
    options = [each for each in environment.get("PYTHONWARNINGS", "").split(",") if each]
    while words[0] == "-W":
        options.append(words[1])
        del words[:2]
    warnings._processoptions(options)  # type: ignore[attr-defined]
    if words[0] != "-c":
        run_as_main(words)
        return
    sys.argv = ["-c", *words[2:]]
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(words[1], "<string>", "exec"), vars(module))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
