"""The runner of a rank: a script runs as if it had been started directly, and its error goes to the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RUNNER = [sys.executable, "-m", "trainer_kit.launch.script"]

FACTS = """
import json, pickle, sys

class Thing:
    pass

main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "package": __package__,
    "spec": str(getattr(__spec__, "name", None)), "main": main.Thing is Thing, "doc": __doc__,
    "pickles": isinstance(pickle.loads(pickle.dumps(Thing())), Thing), "torch": "torch" in sys.modules,
}))
"""


def started(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in `cwd`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize("words", [["folder/facts.py"], ["-m", "folder.facts"], ["-m", "folder"]])
def test_as_if_started_directly(words: list[str], tmp_path: Path) -> None:
    for name in ("facts", "__main__"):
        write(tmp_path / "folder" / f"{name}.py", '"""Told."""' + FACTS)
    write(tmp_path / "folder" / "__init__.py", "")
    expected = started(sys.executable, *words, "a b", "-m", "--x", cwd=tmp_path)
    found = started(*RUNNER, *words, "a b", "-m", "--x", cwd=tmp_path)
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert json.loads(found.stdout)["torch"] is False  # the runner is light
    assert found.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader(method: str, tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, index): return index * index\n"
        "if __name__ == '__main__':\n"
        f"    loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context='{method}')\n"
        "    print([batch.item() for batch in loader])\n",
    )
    assert started(*RUNNER, "train.py", cwd=tmp_path).stdout == "[0, 1, 4]\n"


def test_what_runs_at_exit_still_finds_the_script(tmp_path: Path) -> None:
    script = "import atexit, pickle\nclass A: pass\natexit.register(lambda: print(len(pickle.dumps(A())) > 0))"
    write(tmp_path / "train.py", script)
    assert started(*RUNNER, "train.py", cwd=tmp_path).stdout == "True\n"


# Errors

FAILING = """
def train():
    try:
        {}["a"]
    except KeyError as error:
        raise ValueError("boom\\nand more") from error

train()
"""


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exception_goes_to_the_launcher_without_our_frames(words: list[str], rank: str, tmp_path: Path) -> None:
    write(tmp_path / "train.py", FAILING)
    file = tmp_path / "error.json"
    begin = time.time()
    done = started(*RUNNER, *words, cwd=tmp_path, TORCHELASTIC_ERROR_FILE=str(file), LOCAL_RANK=rank)
    message = json.loads(file.read_text())["message"]
    plain = started(sys.executable, "train.py", cwd=tmp_path).stderr
    assert done.returncode == 1
    assert message["message"] == "ValueError: boom\nand more"
    assert message["extraInfo"]["py_callstack"] == plain
    assert begin < message["extraInfo"]["time"] < time.time()
    assert int(message["extraInfo"]["timestamp"]) == int(message["extraInfo"]["time"])  # torch's own reader needs it
    assert done.stderr == ("" if rank == "0" else plain)  # the launcher shows that of the first rank


def test_torch_reads_the_error(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    write(tmp_path / "train.py", FAILING)
    file = str(tmp_path / "error.json")
    started(*RUNNER, "train.py", cwd=tmp_path, TORCHELASTIC_ERROR_FILE=file)
    failure: Any = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=file)
    assert failure.message["message"] == "ValueError: boom\nand more"
    assert failure.timestamp > 0


def test_without_a_launcher_it_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "train.py", FAILING)
    assert started(*RUNNER, "train.py", cwd=tmp_path).stderr == started(sys.executable, "train.py", cwd=tmp_path).stderr


def test_a_hook_of_the_user_is_called(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py", "import sys\nsys.excepthook = lambda *error: print('hook', error[0].__name__)\n1 / 0\n"
    )
    done = started(*RUNNER, "train.py", cwd=tmp_path, LOCAL_RANK="0")
    assert (done.stdout, done.returncode) == ("hook ZeroDivisionError\n", 1)


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("0", 0, None),
        ("None", 0, None),
        ("143", 143, None),
        ("130", 130, None),
        ("3", 3, "SystemExit: 3"),
        ("'no data'", 1, "SystemExit: no data"),
    ],
)
def test_exit_codes_pass_through(code: str, exit_code: int, error: str | None, tmp_path: Path) -> None:
    write(tmp_path / "train.py", f"import sys\nsys.exit({code})\n")
    file = tmp_path / "error.json"
    done = started(*RUNNER, "train.py", cwd=tmp_path, TORCHELASTIC_ERROR_FILE=str(file))
    assert done.returncode == exit_code
    assert done.stderr == ("no data\n" if "data" in code else "")
    assert file.exists() == (error is not None)
    if error is not None:
        message = json.loads(file.read_text())["message"]
        assert (message["message"], message["extraInfo"]["py_callstack"]) == (error, "")


def test_ctrl_c_leaves_with_130_and_shows_where(tmp_path: Path) -> None:
    script = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    write(tmp_path / "train.py", script)
    done = started(*RUNNER, "train.py", cwd=tmp_path, LOCAL_RANK="0")
    assert done.returncode == 130
    assert done.stderr.startswith("Traceback")
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "trainer_kit" not in done.stderr


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    started(*RUNNER, "-m", "nowhere", cwd=tmp_path, TORCHELASTIC_ERROR_FILE=str(file))
    message = json.loads(file.read_text())["message"]
    assert message["extraInfo"]["py_callstack"] == "ImportError: No module named nowhere\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells a child of its parent's end on Linux only")
def test_a_rank_leaves_when_its_launcher_is_gone(tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('left', 'w').close(), os._exit(143)))\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n",
    )
    launcher = f"import os, subprocess; subprocess.Popen({[*RUNNER, 'train.py']}).wait()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", launcher], cwd=tmp_path, env=environment) as process:
        wait_for(tmp_path / "pid")
        process.send_signal(signal.SIGKILL)
    wait_for(tmp_path / "left")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
