"""Seconds from the loss of a machine to the next step of the others, and for which they stand still when it is back.

Three machines are network namespaces of this one, with one process each; one machine is killed by SIGKILL in the middle
of the run, and started again. The others go on in their processes, or with new ones. A checkpoint is saved every 5
steps. Needs Linux and root.

Run: python benchmarks/goodput.py [TURNS]
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TASK, NEW = "--as-task", "GOODPUT_NEW_PROCESSES"
STEP_SECONDS, STEPS, KILLED_AFTER = 0.1, 200, 12


def task(folder: Path) -> None:
    """Train on a rank; the file `steps-PID` gets the time and the number of each step."""
    import torch

    from trainer_kit import Callback, Run, Trainer, TrainingArguments

    if NEW in os.environ:  # as if the launcher offered no other way
        os.environ.pop("TRAINER_KIT_REGROUP_FOLDER", None)
    steps = folder / f"steps-{os.getpid()}"

    class Marks(Callback):
        def on_step_end(self, run: Run) -> None:
            time.sleep(STEP_SECONDS)
            with steps.open("a") as file:
                file.write(f"{time.time()} {run.state.step}\n")
            if (folder / "stop").exists():
                run.requests.stop = True

    torch.set_num_threads(1)
    args = TrainingArguments(
        output_dir=str(folder / "run"), max_steps=STEPS, per_device_train_batch_size=2, save_steps=5, use_cpu=True,
        report_to="none", disable_tqdm=True, log_level="error",
    )  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 3))
    data = [{"x": torch.randn(64), "labels": torch.tensor(number % 3)} for number in range(2000)]

    def loss(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])

    Trainer(model, args, data, compute_loss=loss, callbacks=[Marks()]).train(resume_from_checkpoint=True)


def measured(with_new_processes: bool) -> tuple[float, int, float]:
    """Return the seconds from the kill to the next new step, the steps taken twice, and the seconds of the return.

    The last are those between two steps of the run, the second one of which is the first of the machine that is back.
    """
    kit: Any = importlib.import_module("scenarios.machines")
    with tempfile.TemporaryDirectory() as name, kit.made_machines(Path(name), 3) as machines:
        folder = Path(name) / "shared"
        folder.mkdir()
        place = ["--num-nodes", "2:3", "--num-processes", "3", "--master-addr", kit.ADDRESSES[0], "--cpu"]
        words = ["-m", "trainer_kit", "launch", *place, str(Path(__file__).resolve()), TASK, str(folder)]
        settings = {NEW: "1"} if with_new_processes else {}
        for number in range(3):
            machines.start(number, *words, preloaded=False, **settings)
        wait_for(lambda: max((step for _, step in taken(folder)), default=0) >= KILLED_AFTER)
        machines.kill(2)
        killed = time.time()
        known = max(step for _, step in taken(folder))
        wait_for(lambda: max(step for _, step in taken(folder)) > known + 3)
        after = [each for each in taken(folder) if each[0] > killed]
        known_files = set(folder.glob("steps-*"))
        machines.start(2, *words, preloaded=False, **settings)
        wait_for(lambda: len(set(folder.glob("steps-*")) - known_files) >= (3 if with_new_processes else 1))
        (folder / "stop").touch()
        first = min(moment for path in set(folder.glob("steps-*")) - known_files for moment, _ in taken_by(path))
        before = max(moment for path in known_files for moment, _ in taken_by(path) if moment < first - STEP_SECONDS)
        new = min(moment for moment, step in after if step > known + 1)
        again = {step for moment, step in after if step <= known}
        return new - killed, len(again), first - before - STEP_SECONDS


def taken(folder: Path) -> list[tuple[float, int]]:
    """Return time and number of the steps that processes have taken."""
    return [each for path in folder.glob("steps-*") for each in taken_by(path)]


def taken_by(path: Path) -> list[tuple[float, int]]:
    """Return time and number of the steps in a process's file."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(float(each[0]), int(each[1])) for each in lines if len(each) == 2]


def wait_for(is_true: Any, seconds: float = 180) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError("the run does not go on")
        time.sleep(0.05)


def main() -> None:
    """Print the seconds of each way."""
    sys.path.insert(0, str(ROOT / "tests"))
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for name, with_new_processes in (("in the process", False), ("with new processes", True)):
        results = [measured(with_new_processes) for _ in range(turns)]
        lost, back = ([each[place] for each in results] for place in (0, 2))
        print(
            f"{name:<20}{statistics.median(lost):7.2f} s from SIGKILL to the next new step ({spread(lost)}), "
            f"{max(again for _, again, _ in results)} steps taken twice; "
            f"{statistics.median(back):.2f} s of standing still for its return ({spread(back)})",
            flush=True,
        )


def spread(seconds: list[float]) -> str:
    """Return the smallest and the largest value."""
    return f"from {min(seconds):.2f} to {max(seconds):.2f}"


if __name__ == "__main__":
    if TASK in sys.argv:
        task(Path(sys.argv[-1]))
    else:
        main()
