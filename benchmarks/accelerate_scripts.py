"""Runs accelerate's own examples and test scripts on `trainer_kit.accelerator`, with the import line changed.

    git clone https://github.com/huggingface/accelerate
    python benchmarks/accelerate_scripts.py accelerate

The scripts run on CPU processes, with small stand-ins for what they would download. What fails is run with accelerate
itself too. Prints a table for docs/en/coming-from/accelerate.md.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

STAND_INS = Path(__file__).with_name("accelerate_stand_ins.py")
PICTURES, OUT = "{work}/pictures", ["--output_dir", "out"]
TRACKED = ["--with_tracking", "--project_dir", "project"]
EXAMPLES: dict[str, list[str]] = {
    "nlp_example": ["--cpu"],
    "cv_example": ["--cpu", "--data_dir", PICTURES],
    "complete_nlp_example": ["--cpu", "--checkpointing_steps", "epoch", *OUT, *TRACKED],
    "complete_cv_example": ["--cpu", "--data_dir", PICTURES, "--checkpointing_steps", "1", *OUT, *TRACKED],
    "by_feature/automatic_gradient_accumulation": ["--cpu"],
    "by_feature/checkpointing": ["--cpu", "--checkpointing_steps", "epoch", *OUT],
    "by_feature/cross_validation": ["--cpu", "--num_folds", "2"],
    "by_feature/ddp_comm_hook": ["--cpu"],
    "by_feature/early_stopping": ["--cpu"],
    "by_feature/fsdp_with_peak_mem_tracking": ["--model_name_or_path", "bert-base-cased", *OUT],
    "by_feature/gradient_accumulation": ["--cpu"],
    "by_feature/gradient_accumulation_for_autoregressive_models": ["--cpu"],
    "by_feature/local_sgd": ["--cpu"],
    "by_feature/memory": ["--cpu"],
    "by_feature/multi_process_metrics": ["--cpu"],
    "by_feature/profiler": ["--cpu"],
    "by_feature/schedule_free": ["--cpu"],
    "by_feature/tracking": ["--cpu", *TRACKED],
}
TESTS = (
    "test_script",
    "test_ops",
    "test_sync",
    "test_distributed_data_loop",
    "external_deps/test_metrics",
    "test_ddp_comm_hook",
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "COMET_START_ONLINE": "0"}


def changed(source: str) -> str:
    """Return a source with the import lines changed, those of the helpers of accelerate's tests too."""
    source = re.sub(r"(?m)^(\s*from )accelerate\.test_utils\b", r"\1changed_test_utils", source)
    source = re.sub(
        r"(?m)^(\s*from )\.\.(\w?)",
        lambda found: f"{found[1]}trainer_kit.accelerator{'.' * bool(found[2])}{found[2]}",
        source,
    )
    return re.sub(r"(?m)^(\s*(?:from|import) )accelerate\b", r"\1trainer_kit.accelerator", source)


def change_helpers(checkout: Path, work: Path) -> None:
    """Write a copy of the helpers of accelerate's tests that imports from trainer_kit."""
    source = checkout / "src/accelerate/test_utils"
    for each in source.rglob("*.py"):
        copy = work / "changed_test_utils" / each.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(changed(each.read_text()))


def run(script: Path, processes: int, work: Path, arguments: list[str], library: str = "", **variables: str) -> Any:
    """Run a script, and return the finished process."""
    copies = work / (library or "changed")
    copies.mkdir(exist_ok=True)
    for each in script.parent.glob("*.py"):  # some examples import others
        (copies / each.name).write_text(each.read_text() if library else changed(each.read_text()))
    folder = Path(tempfile.mkdtemp(dir=work))
    launcher = [f"{library or 'trainer-kit'}", "launch", "--cpu", "--num_processes", str(processes)]
    words = [*launcher, *([] if library else ["--prefix"]), str(STAND_INS), str(copies / script.name)]
    given = [each.format(work=work) for each in arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **OFFLINE, **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(work), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run(
        [*words, *given], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def last_error(output: str) -> str:
    """Return the last line of an output that names an error."""
    lines = [line for line in output.splitlines() if re.search(r"\w(Error|Exception|Exit)\b", line)]
    return lines[-1].strip()[:160] if lines else "failed"


def outcomes(output: str) -> dict[str, str]:
    """Return the outcome of each function, that of the process where it failed."""
    found: dict[str, str] = {}
    for name, outcome in re.findall(r"OUTCOME (\w+) (.*)", output):
        if found.get(name, "ok") == "ok":
            found[name] = outcome
    return found


def pictures(folder: Path) -> None:
    """Write some pictures of noise for the examples on images."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"cat{number % 3}_{number}.jpg")


def measure_example(checkout: Path, name: str, processes: int, work: Path) -> str:
    """Run an example; return "ok", or its error, and whether accelerate itself fails too."""
    script, arguments = checkout / "examples" / f"{name}.py", EXAMPLES[name]
    done = run(script, processes, work, arguments)
    if done.returncode == 0:
        return "ok"
    theirs = run(script, processes, work, arguments, "accelerate")
    return f"{last_error(done.stderr + done.stdout)}{' (accelerate too)' if theirs.returncode else ''}"


def main() -> None:
    """Run everything that is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of accelerate's repository")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="a part of the names of the scripts to run")
    options = parser.parse_args()
    packages = ("accelerate", "torch", "transformers", "datasets")
    say("Versions: " + ", ".join(f"{name} {version(name)}" for name in packages) + "\n")
    counts = [f"{count} process{'es' if count > 1 else ''}" for count in options.processes]
    say(f"| script | {' | '.join(counts)} |\n|---|{'---|' * len(counts)}")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        pictures(work / "pictures")
        change_helpers(options.checkout, work)
        for name in (each for each in EXAMPLES if options.only in each):
            cells = [measure_example(options.checkout, name, count, work) for count in options.processes]
            say(f"| `{name}.py` | {' | '.join(cells)} |")
        for name in (each for each in TESTS if options.only in each):
            cells = []
            for count in options.processes:
                script = options.checkout / "src/accelerate/test_utils/scripts" / f"{name}.py"
                done = run(script, count, work, [], FUNCTIONS="1")
                found = outcomes(done.stdout + done.stderr)
                passed = sum(outcome == "ok" for outcome in found.values())
                cells.append(f"{passed} of {len(found)} functions" if found else last_error(done.stderr + done.stdout))
                failures += [f"- `{name}.{one}`, {count}: {what}" for one, what in found.items() if what != "ok"]
            say(f"| `{name}.py` | {' | '.join(cells)} |")
    say("\n" + "\n".join(failures))


def say(text: str) -> None:
    """Print a part of the table at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
