"""Train on a TPU: the examples `digits.py` and `language_model.py`, unchanged but for the strategy.

    python examples/tpu.py                     all of the digits, 30 steps of the language model
    python examples/tpu.py --whole             all 1,500 steps of the language model too
    python examples/tpu.py --only digits       one of the two
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/tpu.py
                                               without a TPU: XLA's own CPU client with 4 devices

It shows what is different on a TPU: a batch is divided over all devices, and each new shape of a batch is compiled. The
example counts the compilations, and the ledger of shapes explains their number. Needs torch_xla (`pip install -e
'.[xla]'`) and what the two examples need.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import digits
import language_model

from trainer_kit import XLA
from trainer_kit.callbacks import read_log


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run both examples and print what each compiled; return their figures by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/tpu", help="checkpoints and logs of both (%(default)s)")
    parser.add_argument("--short", action="store_true", help="2 epochs of the digits, to see that everything works")
    parser.add_argument("--whole", action="store_true", help="train the language model to its end")
    parser.add_argument("--only", choices=["digits", "language_model"], help="one of the two (default: both)")
    options = parser.parse_args(argv)

    figures, compiled = {}, (0, 0.0)
    for example, is_short in ((digits, options.short), (language_model, not options.whole)):
        name = example.__name__
        if options.only not in (None, name):
            continue
        strategy = XLA()
        folder = Path(options.output_dir, name)
        print(f"\n{name}\n{'=' * len(name)}")
        ended = example.main(["--output-dir", str(folder), *["--short"] * is_short], strategy)

        before, compiled = compiled, strategy.device_info.compilations()  # that of the whole process
        graphs, seconds = compiled[0] - before[0], compiled[1] - before[1]
        losses = [record["loss"] for record in read_log(folder / "log.jsonl") if "loss" in record]
        print(f"\n{graphs} graphs for {strategy.devices} devices were compiled in {seconds:.0f} s")
        print(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
        print(strategy.shapes.advice())
        figures[name] = {**ended, "devices": strategy.devices, "graphs": graphs, "losses": losses}
    return figures


if __name__ == "__main__":
    main()
