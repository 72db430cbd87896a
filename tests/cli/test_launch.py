"""`trainer-kit launch` as it is used: options, a real terminal, signals, what cannot work."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit import launched
from kit.launched import wait_for
from kit.preloaded import PreloadedPython
from kit.ranks import free_port

from trainer_kit.cli import main
from trainer_kit.cli.launch import read_config
from trainer_kit.config.environment import Place
from trainer_kit.launch.config import LaunchConfig

LAUNCH = [sys.executable, "-m", "trainer_kit", "launch"]
LEAVE = [launched.__file__, "leave"]


@pytest.fixture(autouse=True)
def no_configuration_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of settings for these tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "settings"


def configured(*words: str) -> LaunchConfig:
    """What a command line asks for."""
    return read_config(main.make_parser().parse_args(["launch", *words, "train.py"]))


def launch(*words: str) -> int:
    """The exit code of the command in this process."""
    return main.main(["launch", *words])


# Options


def test_without_options_the_defaults_hold() -> None:
    assert configured() == LaunchConfig()


@pytest.mark.parametrize("between", ["-", "_"])
def test_every_option_has_two_spellings(between: str) -> None:
    words = (
        "--num-processes=4 --num-nodes=2 --node-rank=1 --master-addr=host --master-port=1234 --max-restarts=3 "
        "--rdzv-backend=c10d --rdzv-id=run --mixed-precision=bf16 --profile=10:20 --start-timeout=9.5 --cpu"
    )
    assert configured(*words.replace("-", between).replace(f"{between}{between}", "--").split()) == LaunchConfig(
        num_processes=4, num_nodes=2, node_rank=1, master_addr="host", master_port=1234, max_restarts=3,
        rdzv_backend="c10d", rdzv_id="run", mixed_precision="bf16", profile="10:20", start_timeout=9.5, cpu=True,
    )  # fmt: skip


def test_options_go_before_the_file_before_the_user_s_default(
    no_configuration_of_the_user: Path, tmp_path: Path
) -> None:
    usual = no_configuration_of_the_user / "trainer_kit" / "default_config.yaml"
    LaunchConfig(num_processes=2, max_restarts=5).save(usual)
    assert configured() == LaunchConfig(num_processes=2, max_restarts=5)
    assert configured("--num-processes", "3") == LaunchConfig(num_processes=3, max_restarts=5)
    other = tmp_path / "other.yaml"
    other.write_text("num_processes: 7\ncpu: true\n")
    assert configured("--config", str(other)) == LaunchConfig(num_processes=7, cpu=True)
    assert configured("--config", str(other), "--num-processes", "3") == LaunchConfig(num_processes=3, cpu=True)


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    words = [
        "--num-processes",
        "2",
        "--cpu",
        "--dry-run",
        "--mixed-precision",
        "bf16",
        str(script),
        "--dry-run",
        "a b",
        "--",
        "-m",
    ]
    assert launch(*words) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ")
    assert second.startswith("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 ")
    for line in (first, second):
        assert "TRAINER_KIT_MIXED_PRECISION=bf16 TRAINER_KIT_USE_CPU=1" in line
        assert line.endswith(f"{sys.executable} -m trainer_kit.launch.script {script} --dry-run 'a b' -- -m")


def test_the_steps_to_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert launch("--cpu", "--dry-run", "--profile", "1:3", str(script)) == 0
    assert "TRAINER_KIT_PROFILE=1:3 " in capsys.readouterr().out
    assert launch("--cpu", "--dry-run", str(script)) == 0
    assert "TRAINER_KIT_PROFILE" not in capsys.readouterr().out
    for value in ("3", "0:2", "4:3", "1:2:3", "a:b", ""):
        assert launch("--cpu", "--dry-run", "--profile", value, str(script)) == 1
        [sentence] = capsys.readouterr().err.splitlines()
        assert f"profile={value!r} is not allowed; it must be the first and the last step, such as '10:20'" in sentence


def test_a_dry_run_on_a_tpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer_kit.config.environment.has_torch_xla", lambda: True)
    monkeypatch.setattr("trainer_kit.config.environment.xla_devices", lambda device_type: 8)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    script = tmp_path / "train.py"
    script.touch()
    assert launch("--tpu", "--num-processes", "8", "--dry-run", str(script)) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 ")
    assert "TRAINER_KIT_USE_TPU=1 " in line
    assert "PJRT_DEVICE=TPU " in line
    assert launch("--tpu", "--cpu", "--dry-run", str(script)) == 1
    assert "cpu=True (--cpu) and tpu=True (--tpu) contradict each other" in capsys.readouterr().err
    assert launch("--tpu", "--num-processes", "3", "--dry-run", str(script)) == 1
    assert "num_processes=3 is not allowed; it counts XLA devices, which one process drives" in capsys.readouterr().err


def test_a_tpu_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.config.environment.xla_device_type", lambda: "TPU")
    monkeypatch.setattr("trainer_kit.config.environment.tpu_host", lambda: Place(2, 4, 0, 1, 2, "host-a"))
    hosts = {"num_nodes": 4, "node_rank": 2, "master_addr": "host-a"}
    assert configured() == configured("--tpu") == LaunchConfig(tpu=True, **hosts)
    assert configured("--num-processes", "1") == LaunchConfig(tpu=True, num_processes=1)
    assert configured("--num-nodes", "2") == LaunchConfig(tpu=True, num_nodes=2)
    assert configured("--cpu") == LaunchConfig(cpu=True)


def test_a_module_and_its_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--cpu", "-m", "json.tool", "--help") == 0
    assert "usage:" in capfd.readouterr().out


def test_the_variables_of_another_launcher_do_not_confuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "RANK": "7", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text("from trainer_kit.config.environment import place\nprint(place()[:4])")
    assert launch("--cpu", "--num-processes", "2", "--log-dir", str(tmp_path / "logs"), str(script)) == 0
    assert capfd.readouterr().out == "(0, 2, 0, 2)\n"
    assert (tmp_path / "logs" / "rank-1.out").read_text() == "(1, 2, 1, 2)\n"


# What cannot work


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["nowhere.py"], 1, "there is no script 'nowhere.py'; for a module write -m before its name"),
        (["--num-processes", "0", "train.py"], 1, "num_processes=0 is not allowed; it must be a"),
        (["--num-nodes", "2", "--node-rank", "2", "train.py"], 1, "node_rank=2 is not allowed"),
        (["--master-port", "70000", "train.py"], 1, "master_port=70000 is not allowed; it must be a port"),
        (["--config", "no.yaml", "train.py"], 1, "No such file or directory: 'no.yaml'"),
        (["--config", "bad.yaml", "train.py"], 1, "bad.yaml: LaunchConfig has no field 'nodes'; the nearest"),
        (
            ["--num-nodes", "2", "--node-rank", "1", "--start-timeout", "0.2", "--master-port", "1", "train.py"], 1,
            "machine 0 at 127.0.0.1:1 (--node-rank 0) did not answer",
        ),
        (["--num-processes", "two", "train.py"], 2, "argument --num-processes: invalid int value: 'two'"),
        (["--nproc-per-node", "2", "train.py"], 2, "--nproc-per-node"),
        ([], 2, "script"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    words: list[str],
    code: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "bad.yaml").write_text("nodes: 2")
    try:
        found: object = launch(*words)
    except SystemExit as left:
        found = left.code
    error = capsys.readouterr().err
    assert found == code
    assert sentence in error
    assert "Traceback" not in error
    if code == 1:
        assert error.startswith("trainer-kit launch: ")
        assert error.count("\n") == 1


def test_more_processes_than_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer_kit.launch.config.count_gpus", lambda: 2)
    script = tmp_path / "train.py"
    script.write_text("")
    assert launch("--num-processes", "3", str(script)) == 1
    assert "num_processes=3, but this machine has 2 GPUs" in capsys.readouterr().err
    assert launch("--num-processes", "3", "--cpu", str(script)) == 0


# Failures

FAILING = """
import time, torch, torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        open("failed", "w").close()
        raise ValueError("boom")
    WAIT

main()
"""


@pytest.mark.scenario
@pytest.mark.parametrize("rank_0", ["in a collective", "asleep"])
def test_the_first_failure_ends_the_run_and_is_shown_last(rank_0: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    wait = "dist.all_reduce(torch.ones(1))" if rank_0 == "in a collective" else "time.sleep(120)"
    script.write_text(FAILING.replace("WAIT", wait))
    done = subprocess.run(
        [*LAUNCH, "--cpu", "--num-processes", "2", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 10
    assert done.returncode == 1
    *before, report = done.stderr.split("trainer-kit launch: ")
    assert re.fullmatch(
        r"rank 1 on \S+ failed (with exit code 1|and had to be ended):\nTraceback \(most recent call last\):\n"
        r'  File "\S+train.py", line 11, in <module>\n    main\(\)\n( +~+\^+\n)?'
        r'(  File "\S+train.py", line \d+, in main\n    raise ValueError\("boom"\)\n)ValueError: boom\n',
        report,
    ), report
    known = ("rank 0 failed after that: ", "the output of rank 1 is in ")
    assert [text for text in before if text and not text.startswith(known)] == []


@pytest.mark.parametrize(
    ("statement", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("1 / 0", 1), ("os._exit(77)", 77)]
)
def test_the_exit_code_is_that_of_the_rank(
    statement: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {statement}\ntime.sleep(60)")
    assert launch("--cpu", "--num-processes", "2", str(script)) == code
    assert capsys.readouterr().err.startswith("trainer-kit launch: rank 1 on ") == (code in (77, 137, 3))


@pytest.mark.scenario
def test_a_machine_that_comes_back_is_taken_in(tmp_path: Path) -> None:
    """The launcher of one of two "machines" is killed; started again, it meets the other, and all ranks start anew."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(os.path.join(sys.argv[1], f'start-{os.environ[\"RANK\"]}-{count}'), 'w').write('yes')\n"
        "time.sleep(120 if count == '0' else 0)\n"
    )
    port = str(free_port())
    machines = ["--cpu", "--num-processes", "2", "--num-nodes", "2", "--rdzv-backend", "c10d", "--master-port"]
    words = [*LAUNCH, *machines, port, "--node-rank"]
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                subprocess.Popen([*words, number, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True)
            )
            for number in "01"
        )
        stack.callback(first.kill)
        stack.callback(second.kill)
        wait_for(tmp_path / "start-0-0", tmp_path / "start-1-0")
        second.kill()
        again = subprocess.run([*words, "1", str(script), str(tmp_path)], timeout=120, check=False)
        _, said = first.communicate(timeout=120)
    assert (first.returncode, again.returncode) == (0, 0)
    assert "joins: the run saves and continues with it" in said
    assert sorted(path.name for path in tmp_path.glob("start-*-1")) == ["start-0-1", "start-1-1"]


# Signals


@pytest.mark.scenario
def test_sigterm_to_the_launcher_ten_times(tmp_path: Path) -> None:
    """Quick ranks, so that their ends and the launcher's handling fall together; half the time at random moments."""
    pids: set[str] = set()
    for number in range(10):
        for path in (*tmp_path.glob("ready-*"), *tmp_path.glob("signals-*")):
            path.unlink()
        words = ["--cpu", "--num-processes", "2", "--log-dir", str(tmp_path / "logs"), *LEAVE, str(tmp_path)]
        process = PreloadedPython([*LAUNCH[1:], *words], tmp_path / f"out{number}", tmp_path / f"err{number}")
        try:
            wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
            time.sleep(0.03 * number)
            process.send_signal(signal.SIGTERM)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 143
        assert error == ""
        assert [(tmp_path / f"signals-{rank}").read_text() for rank in range(2)] == ["SIGTERM\n"] * 2
        pids |= {(tmp_path / f"ready-{rank}").read_text() for rank in range(2)}
    assert len(pids) == 20
    assert not any(Path("/proc", pid).exists() for pid in pids)


# A terminal


@pytest.mark.scenario
def test_the_first_rank_keeps_the_terminal_and_ctrl_c_reaches_each_rank_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "print('terminal', sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), flush=True)\n"
        f"from kit import launched; launched.leave({str(tmp_path)!r})\n"
    )
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [*LAUNCH, "--cpu", "--num-processes", "2", str(script)])
    try:
        wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
        os.write(terminal, b"\x03")
        shown = read_all(terminal)
    finally:
        os.kill(process, signal.SIGTERM)  # has no effect on one that has ended
        _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert "terminal True True True" in shown
    assert "Traceback" not in shown
    assert [(tmp_path / f"signals-{rank}").read_text() for rank in range(2)] == ["SIGINT\n"] * 2


def read_all(terminal: int) -> str:
    """What is written to a terminal until all who have it are gone."""
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # all are gone
                break
    os.close(terminal)
    return shown.decode()


def test_options_of_accelerate() -> None:
    config = configured(
        "--multi_gpu", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1",
        "--main-process-port", "1234", "--num_processes=4", "--same-network", "--use_fsdp", "--dynamo_backend",
        "inductor", "--gradient_accumulation_steps", "3", "--num_cpu_threads_per_process", "1", "--debug",
    )  # fmt: skip
    assert config == LaunchConfig(
        num_processes=4, num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=1234, fsdp=True,
        dynamo_backend="inductor", gradient_accumulation_steps=3, num_cpu_threads_per_process=1, debug=True,
    )  # fmt: skip


def test_a_file_of_accelerate(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\n")
    assert configured("--config_file", str(path)) == LaunchConfig(num_processes=3, cpu=True)


def test_options_of_accelerate_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert configured("--enable_cpu_affinity", "--tee", "3", "--role", "worker") == LaunchConfig()
    said = capsys.readouterr().err
    assert all(f"{option} has no effect" in said for option in ("--enable_cpu_affinity", "--tee", "--role"))


@pytest.mark.parametrize("option", ["--use_deepspeed", "--use-megatron-lm"])
def test_what_accelerate_has_alone(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        configured(option)
    assert f"{option} is not available; --fsdp shards a large model" in capsys.readouterr().err
