"""`scripts/gpu-check` and the trainings that it measures, without a GPU."""

from __future__ import annotations

import json
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]


def load(path: Path) -> ModuleType:
    loader = SourceFileLoader(path.stem.replace("-", "_"), str(path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # scripts/gpu-checkc
        patch.syspath_prepend(path.parent)
        loader.exec_module(module)
    return module


script = load(ROOT / "scripts" / "gpu-check")


def code(text: str, limit: float = 60) -> object:
    return script.Check("a check", [sys.executable, "-c", text], limit)


def test_a_check_gives_the_figures_of_its_last_line(tmp_path: Path) -> None:
    outcome = script.execute(code("print('warm-up'); print('{\"mfu\": 0.25}')"), tmp_path / "none.xml")
    assert (outcome.status, outcome.figures) == ("passed", {"mfu": 0.25})


@pytest.mark.parametrize(
    ("text", "limit", "status"),
    [("import time; time.sleep(60)", 1, "timed out"), ("raise SystemExit(3)", 60, "failed")],
)
def test_a_check_that_does_not_pass(tmp_path: Path, text: str, limit: float, status: str) -> None:
    outcome = script.execute(code(f"print('before', flush=True); {text}", limit), tmp_path / "none.xml")
    assert outcome.status == status
    assert outcome.output.startswith("before")


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_check_leaves_no_process(tmp_path: Path) -> None:
    text = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    outcome = script.execute(code(text), tmp_path / "none.xml")
    until = time.monotonic() + 20
    while is_running(int(outcome.output)):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_tests_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/>'
        '<testcase classname="a" name="two"><failure message="no"/></testcase>'
        '<testcase classname="a" name="three"><skipped/></testcase></testsuite></testsuites>'
    )
    counts = script.counts_of(report)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1, "names of the failed": ["a::two"]}
    assert script.counts_of(tmp_path / "none.xml") == {}


def test_the_table_compares_with_the_plain_loop_of_the_same_model() -> None:
    def training(runner: str, rate: float, compiled: bool) -> object:
        figures = {"workload": "gpt2", "runner": runner, "compiled": compiled, "samples_per_second": rate, "idle": 0.02}
        return script.Outcome(f"gpt2 {runner}", "passed", 12.3, figures, "")

    outcomes = [training("plain", 50, False), training("trainer_kit", 49, False), training("trainer_kit", 75, True)]
    outcomes.append(script.Outcome("tests", "failed", 5, {"passed": 3, "failed": 1, "skipped": 0}, ""))
    lines = script.table(outcomes).splitlines()
    assert "1.000" in lines[1]
    assert "0.980" in lines[2]
    assert "75.0" in lines[3]
    assert "failed: 3 passed, 1 failed, 0 skipped" in lines[4]
    assert lines[2].endswith("2.0%")
    assert not lines[3].endswith("0.980")


def test_bert_large_stands_beside_the_guide() -> None:
    figures = {"samples_per_second": 25.6, "driver_mib": 15_500.4, "allocated_mib": 14_000.0, "small": False}
    lines = script.beside_the_guide([script.Outcome("bert-large trainer_kit", "passed", 60, figures, "")]).splitlines()
    assert lines[0].endswith("57.8 s, 8.86 samples/s, 14,949 MB on a V100")
    assert lines[1].endswith("20.0 s, 25.60 samples/s, 15,500 MB here")
    small = script.Outcome("bert-large trainer_kit", "passed", 60, figures | {"small": True}, "")
    assert len(script.beside_the_guide([small]).splitlines()) == 1, "a smaller model is no comparison"
    assert len(script.beside_the_guide([]).splitlines()) == 1


def test_no_check_runs_for_longer_than_what_is_left(tmp_path: Path) -> None:
    sleeps = code("import time; time.sleep(60)")
    assert script.execute(sleeps, tmp_path / "none.xml", left=1.0).status == "timed out"
    assert script.execute(sleeps, tmp_path / "none.xml", left=0.0)[1:4] == ("left out", 0.0, {})


def test_every_check_names_a_file_that_is_there(tmp_path: Path) -> None:
    for quick in (False, True):
        checks = script.checks(quick, tmp_path / "tests.xml")
        assert len({check.name for check in checks}) == len(checks) > 9
        for word in (word for check in checks for word in check.words if word.endswith(".py")):
            assert Path(word).is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-check"])
    assert script.main() == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["plain", "trainer_kit", "transformers"])
@pytest.mark.filterwarnings("ignore")  # transformers' Trainer warns of a machine without a GPU
def test_a_training_is_measured(runner: str, capsys: pytest.CaptureFixture[str]) -> None:
    if runner == "transformers":
        pytest.importorskip("accelerate")
    training = load(ROOT / "benchmarks" / "gpu_training.py")
    figures = training.main(["gpt2", "--runner", runner, "--small", "--steps", "3"])
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == figures
    assert figures["samples_per_second"] == pytest.approx(8e3 / figures["milliseconds_per_step"])
    assert figures["tokens_per_second"] == pytest.approx(32 * figures["samples_per_second"])
    assert figures["mfu"] > 0


def test_the_share_of_time_in_which_nothing_runs() -> None:
    training = load(ROOT / "benchmarks" / "gpu_training.py")
    assert training.idle_share([(0, 4), (2, 5), (8, 10), (3, 4)]) == pytest.approx(0.3)
    assert training.idle_share([(1, 2), (2, 4)]) == 0
    assert training.idle_share([]) is None  # a profile that saw no kernel
