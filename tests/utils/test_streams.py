from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.disks import small_disk

from trainer_kit.callbacks import read_log

GUARD = "from trainer_kit.utils.streams import guard_standard_streams, unreported_failures\nguard_standard_streams()\n"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


def python(code: str, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program whose standard error, unless it is set, is read."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    return subprocess.run([sys.executable, *options, "-c", code], text=True, timeout=100, **settings)


@needs_full
@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "-u"])
def test_a_full_disk_under_stdout_is_no_error(options: tuple[str, ...]) -> None:
    lines = "import sys\nfor n in range(2000): print(n, 'x' * 20, flush=n % 100 == 0)\n"
    with open("/dev/full", "w") as full:
        assert python(lines, *options, stdout=full).returncode != 0
        guarded = python(GUARD + lines + "print(unreported_failures(), unreported_failures(), file=sys.stderr)",
                         *options, stdout=full)  # fmt: skip
    assert guarded.returncode == 0
    assert (
        guarded.stderr.strip()
        == str(["standard output could not be written to: No space left on device; what does not reach it is lost"])
        + " []"
    )


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "-u"])
def test_a_reader_that_has_seen_enough(options: tuple[str, ...]) -> None:
    code = GUARD + "import sys\nfor n in range(20000): print(n, 'x' * 20)\nprint('through', file=sys.stderr)"
    command = [sys.executable, *options, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0 xxxxxxxxxxxxxxxxxxxx\n"
        process.stdout.close()
        lost = "standard output could not be written to: Broken pipe; what does not reach it is lost"
        assert process.stderr.read() == f"through\n{lost}\n"
    assert process.returncode == 0


@needs_full
def test_what_is_lost_at_the_end_is_not_lost_in_silence() -> None:
    with open("/dev/full", "w") as full:
        done = python(GUARD + "print('the result')", stdout=full)
    lost = "standard output could not be written to: No space left on device; what does not reach it is lost\n"
    assert (done.returncode, done.stderr) == (0, lost)


@pytest.mark.slow
def test_what_is_printed_while_the_interpreter_ends() -> None:
    code = """
import builtins, sys
import torch, trainer_kit
class Late:
    def __del__(self, modules=sys.modules): print(len(modules))
builtins.late = Late()
"""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = [python(start + code, env=buffered) for start in ("", GUARD)]
    assert [each.stdout for each in done] == ["0\n"] * 2
    assert done[1].stderr == ""


@needs_full
def test_no_stream_at_all_can_be_written_to() -> None:
    code = (
        GUARD
        + """
import logging, sys, tqdm, warnings
logging.basicConfig()
for _ in tqdm.tqdm(range(3)):
    logging.warning("careful")
    warnings.warn("odd")
    print("here", flush=True)
    print("there", file=sys.stderr, flush=True)
assert len(unreported_failures()) == 2
"""
    )
    with open("/dev/full", "w") as full:
        assert python(code, stdout=full, stderr=full).returncode == 0


def test_what_comes_after_the_spell_is_written(tmp_path: Path) -> None:
    code = (
        GUARD
        + """
import resource
print("before", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
print("meanwhile", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("after", flush=True)
"""
    )
    pytest.importorskip("resource")
    with open(tmp_path / "out", "w") as out:
        assert python(code, stdout=out).returncode == 0
    assert (tmp_path / "out").read_text() == "before\nafter\n"


@pytest.mark.skipif(not hasattr(os, "set_blocking"), reason="needs pipes that do not block")
def test_a_pipe_that_does_not_block_waits_for_its_reader() -> None:
    code = "import os; os.set_blocking(1, False)\n" + GUARD + "for n in range(20000): print('x' * 20)"
    assert python(code).stdout == f"{'x' * 20}\n" * 20000


def test_characters_that_the_encoding_lacks_become_escapes() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = python(GUARD + "print('\\u062a\\u062f\\u0631\\u064a\\u0628', chr(0xdcd8))", env=environment)
    assert (done.returncode, done.stdout) == (0, "\\u062a\\u062f\\u0631\\u064a\\u0628 \\udcd8\n")


def test_other_objects_than_files_stay_as_they_are() -> None:
    code = "import io, sys\nsys.stdout = sys.__stdout__ = mine = io.StringIO()\nsys.stderr = None\n" + GUARD
    assert python(code + "print('x'); assert mine.getvalue() == 'x\\n' and sys.stdout is mine").returncode == 0


TRAINING = """
import sys
import torch
from transformers import PrinterCallback, ProgressCallback
from trainer_kit import Trainer, TrainingArguments
from trainer_kit.callbacks import Console, from_transformers

class Net(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}

if __name__ == "__main__":
    for folder in sys.argv[1:]:
        args = TrainingArguments(folder, max_steps=6, logging_steps=1, save_steps=3, per_device_train_batch_size=1,
                                 report_to=["jsonl", "tensorboard"], use_cpu=True)
        callbacks = [Console(every=0), from_transformers(PrinterCallback), from_transformers(ProgressCallback)]
        Trainer(Net(4, 1), args, [{"x": torch.ones(4)}] * 12, callbacks=callbacks).train()
        print("x" * 100_000)
"""


def warned(folder: Path) -> list[str]:
    records = read_log(folder / "log.jsonl")
    assert records[-1]["event"] == "end"
    assert (folder / "checkpoint-6" / "manifest.json").exists()
    return sorted(record["message"] for record in records if record["event"] == "warning")


@needs_full
@pytest.mark.slow
def test_a_training_whose_output_goes_nowhere(tmp_path: Path) -> None:
    """With callbacks of transformers that print and draw bars."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", TRAINING, str(tmp_path)], stdout=full, stderr=full, timeout=200)
    assert done.returncode == 0
    lost = "No space left on device; what does not reach it is lost; training continues"
    assert warned(tmp_path) == [f"standard {name} could not be written to: {lost}" for name in ("error", "output")]


@pytest.mark.slow
def test_a_training_whose_reader_has_seen_enough(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", TRAINING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    assert process.returncode == 0
    assert any("Broken pipe" in message for message in warned(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["ascii", "ascii:strict", "utf-8"])
def test_a_locale_that_does_not_know_the_path(tmp_path: Path, stream: str) -> None:
    folder = tmp_path / "تدريب"
    folder.mkdir()
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": stream}
    script = tmp_path / "train.py"
    script.write_text(TRAINING.replace('"tensorboard"]', '"tensorboard", "html"]'))
    command = [sys.executable, script, "runs", os.fsencode(folder / "mine")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert warned(folder / "runs") == warned(folder / "mine") == []
    assert (folder / "mine" / "report.html").exists()


LAUNCH = [sys.executable, "-m", "trainer_kit", "launch", "--cpu", "--num_processes", "2"]


@pytest.mark.scenario
@pytest.mark.slow
def test_the_files_of_other_ranks_are_full(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("for _ in range(10_000): print('x' * 100)\nprint('done', flush=True)")
    with small_disk(tmp_path / "logs") as logs:
        done = subprocess.run([*LAUNCH, "--log_dir", logs, script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


@pytest.mark.scenario
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_shown_where_its_file_has_no_room(tmp_path: Path, rank: int) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom kit.disks import fill\n"
        f"if os.environ['RANK'] == '{rank}':\n    fill(Path(os.environ['TMPDIR']))\n    raise ValueError('boom')\n"
        "time.sleep(60)"
    )
    logs = tmp_path / "logs"
    with small_disk(tmp_path / "tmp", "256k") as disk:
        done = subprocess.run([*LAUNCH, "--log_dir", logs, script], capture_output=True, text=True, timeout=200,
                              env={**os.environ, "TMPDIR": str(disk)})  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    assert "No space left" not in done.stderr
