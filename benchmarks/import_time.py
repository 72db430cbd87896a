"""What `import trainer_kit` costs beyond `import torch`, against its bound of 60 ms.

Each measure is the median and the minimum over fresh processes that have imported torch already. The second one is that
of a script that goes on to use the Trainer, which is when trainer_kit's own modules are loaded.

Run: python benchmarks/import_time.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

BOUND_MS = 60.0
REPEATS = 15
STATEMENTS = ("import trainer_kit", "from trainer_kit import Trainer, TrainingArguments")


def milliseconds(statement: str) -> float:
    """Wall time of `statement` in a fresh process, in milliseconds, after `import torch`."""
    script = (
        f"import time, torch\nstart = time.perf_counter()\n{statement}\nprint(1000 * (time.perf_counter() - start))"
    )
    # With bytecode kept, as wherever a package is installed.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return float(done.stdout)


def main() -> None:
    """Prints one line a statement; turn by turn, so that a busy moment of the machine meets both."""
    rounds = [[milliseconds(statement) for statement in STATEMENTS] for _ in range(REPEATS)]
    for statement, times in zip(STATEMENTS, zip(*rounds, strict=True), strict=True):
        median = statistics.median(times)
        print(
            f"{statement}: {median:.1f} ms after `import torch`, at least {min(times):.1f} ms, "
            f"{median / BOUND_MS:.2f} of {BOUND_MS:.0f} ms"
        )


if __name__ == "__main__":
    main()
