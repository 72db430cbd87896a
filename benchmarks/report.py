"""What a report of a long run costs: reading its log, drawing it, and the whole command.

The records hold what a run on a GPU with all callbacks writes. The budget is that of the whole in a fresh process,
the imports included, with matplotlib and orjson installed; a first start of matplotlib that has to look for the
system's fonts is not counted. On a machine that does other things too, the seconds of the processor tell what it costs.

Run: python benchmarks/report.py [--records 100000]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainer_kit.callbacks import read_log

BUDGET = 2.0
REPEATS = 5
ACTIVITIES = ("data", "forward", "backward", "optimizer", "logging", "loop", "callback/Progress", "callback/Memory")
SIZES = (
    "memory_gib", "peak_memory_gib", "reserved_memory_gib", "host_memory_gib", "device_memory_gib",
    "process_memory_gib", "anatomy/weights_gib", "anatomy/gradients_gib", "anatomy/optimizer_gib",
    "anatomy/activations_gib",
)  # fmt: skip
RATES = (
    "samples_per_second", "steps_per_second", "tokens_per_second", "model_flops_per_second",
    "hardware_flops_per_second", "mfu", "goodput", "data_wait", "fragmentation",
)  # fmt: skip
SCRIPT = """
import sys, time
begin = time.perf_counter()
from trainer_kit.report import write_report
write_report(sys.argv[1])
print(time.perf_counter() - begin, time.process_time())
"""


def write_log(path: Path, records: int) -> None:
    """Writes a log of so many records, one every ten steps, with a restart in the middle."""
    noise, moment = random.Random(0), 1.79e9
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            if number in (0, records // 2):
                file.write(f'{{"event": "start", "time": {moment}, "step": {10 * number}, "format": 1}}\n')
            moment += 5
            figures = {name: noise.random() for name in (*SIZES, *RATES)}
            figures |= {f"seconds/{name}": noise.random() / 2 for name in ACTIVITIES}
            figures |= {"loss": 3 + 8 * math.exp(-4 * number / records) + noise.gauss(0, 0.1)}
            figures |= {"grad_norm": noise.lognormvariate(0, 0.3), "learning_rate": 3e-4 * (1 - number / records)}
            record = {"event": "log", "time": moment, "step": 10 * number + 10, "epoch": number / records}
            file.write(json.dumps(record | figures) + "\n")


def main() -> None:
    """Prints one line for each way to use the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000, metavar="N", help="in the log (default: %(default)s)")
    records = parser.parse_args().records
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        write_log(log, records)
        print(f"{records:,} records, {log.stat().st_size / 2**20:.0f} MiB")
        begin = time.perf_counter()
        read_log(log)
        print(f"read_log: {time.perf_counter() - begin:.2f} s")
        command = [sys.executable, "-c", SCRIPT, folder]
        outputs = [subprocess.run(command, check=True, capture_output=True, timeout=300) for _ in range(REPEATS)]
        taken = [tuple(map(float, output.stdout.split())) for output in outputs]
        seconds, computing = (sorted(each) for each in zip(*taken, strict=True))
        print(f"report.html: {seconds[REPEATS // 2]:.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), budget {BUDGET} s")
        print(f"of the processor: {computing[REPEATS // 2]:.2f} s")
        print(f"its size: {(Path(folder) / 'report.html').stat().st_size / 2**10:.0f} KiB")


if __name__ == "__main__":
    main()
