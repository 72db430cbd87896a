"""Kill a run of your script and resume it, and say whether it ends with the same bits.

The script, unmodified, is started three times: for some steps without a stop, once more until it is killed (SIGKILL)
at a random moment after a checkpoint, and again from that checkpoint. At each step the samples, the batch, the loss,
the gradients' norm, weights, buffers, optimizer, states of callbacks and of run.stateful, and logged losses must have
the same bits. Else it says what differs first, and likely why; for that the script runs once more.

Only the script's first train() runs, up to --steps, into a temporary folder; what follows it is left out, and
a `finally` too. What the script does before, and what its callbacks do, happens in each start.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys

from trainer_kit.cli.target import declare_target, missing_target, read_target, target_words

_STEPS = 20
_TIMEOUT = 3600.0
_USAGE = "trainer-kit verify [options] [-m] script.py|module [options] [-- arguments of the script]"

EXIT_CODES = {0: "the same bits", 1: "the runs diverged", 2: "the script failed or never trained"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, the script and its arguments."""
    parser.description = __doc__
    _add_options(parser)
    declare_target(parser, _USAGE)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N",
        help="optimizer steps to compare, at least 2 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, metavar="S",
        help="number that chooses the checkpoint and the moment of the kill, to repeat a verification (default: a "
        "random one, which the result shows)",
    )  # fmt: skip
    parser.add_argument(
        "--num-processes", type=int, default=1, metavar="P",
        help="processes to start on this machine (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=_TIMEOUT, metavar="SECONDS",
        help="seconds after which a start of the script counts as failed (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")


def run(options: argparse.Namespace) -> int:
    """Run the comparison and return 0 if all bits are equal, 1 if not, 2 if the script failed."""
    from trainer_kit.errors import ScriptFailed
    from trainer_kit.tools.verify.report import describe
    from trainer_kit.tools.verify.verification import Verification

    options = read_target(options, "verify", _USAGE, _add_options)
    if (wrong := _wrong(options)) is not None:
        _say(wrong)
        return 2
    seed = random.randrange(10**6) if options.seed is None else options.seed
    words, steps = target_words(options), options.steps
    verification = Verification(words, steps, seed, options.num_processes, options.timeout, _say)
    try:
        result = verification.run()
    except ScriptFailed as error:
        _say(str(error))
        return 2
    print(describe(result, _command(options, seed)))
    return 0 if result.difference is None else 1


def _wrong(options: argparse.Namespace) -> str | None:
    """Return the error in the command line; None if there is none."""
    if (missing := missing_target(options)) is not None:
        return missing
    for name, least in (("steps", 2), ("num_processes", 1), ("timeout", 1)):
        if getattr(options, name) < least:
            return f"--{name.replace('_', '-')} {getattr(options, name)} makes no sense; give {least} or more"
    return None


def _command(options: argparse.Namespace, seed: int) -> str:
    """Return the command line that repeats the verification."""
    words = ["trainer-kit", "verify", "--steps", str(options.steps), "--seed", str(seed)]
    words += ["--num-processes", str(options.num_processes)] if options.num_processes > 1 else []
    words += [*(["-m"] if options.module else []), options.script]
    return shlex.join([*words, *(["--", *options.arguments] if options.arguments else [])])


def _say(sentence: str) -> None:
    print(f"trainer-kit verify: {sentence}", file=sys.stderr, flush=True)
