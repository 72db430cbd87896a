"""Start a script on several processes and machines."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from trainer_kit.cli.accelerate_options import add_accelerate_options, say
from trainer_kit.config.environment import quiet_cpp_logs
from trainer_kit.launch.config import LaunchConfig, default_path

RUNNER = "trainer_kit.launch.script"

_REMEDY = "let fewer workers load data, keep less of it in memory, or take a machine with more"


def _restarts(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _pairs(text: str) -> dict[str, int | str]:
    pairs = [pair.partition("=")[::2] for pair in text.split(",") if pair]
    return {name.strip(): int(value) if value.strip().isdecimal() else value.strip() for name, value in pairs}


class _Nodes(argparse.Action):
    """Number of machines, or the smallest and the largest one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        least, colon, most = str(values).rpartition(":")
        if not most.isdecimal() or (colon and not least.isdecimal()):
            parser.error(f"argument {option}: {values!r} is neither a number nor a range such as 2:4")
        namespace.num_nodes, namespace.min_nodes = int(most), int(least) if colon else None


# Option and its settings for argparse. The names are those of `LaunchConfig`.
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("num-processes", {"type": int, "metavar": "N", "help": "processes on all machines together (default: one for each "
                       "GPU, or one for a machine without GPUs); with --tpu devices, all (default) or 1"}),
    ("num-nodes", {"action": _Nodes, "metavar": "N|MIN:MAX", "help": "number of machines (default: 1); 2:4 "
                   "continues with 2 to 4 of them when some are lost or come"}),
    ("node-rank", {"type": int, "metavar": "N", "help": "number of this machine, from 0 (default: 0)"}),
    ("master-addr", {"metavar": "ADDRESS[,...]", "help": "name or address of machine 0 (default: 127.0.0.1); several "
                     "with MIN:MAX, of which the first that is left serves the store"}),
    ("master-port", {"type": int, "metavar": "PORT",
                     "help": "port on machine 0 (default: a free one, or 29500 with several machines)"}),
    ("max-restarts", {"type": _restarts, "metavar": "N|N/TIME", "help": "restart N times after failures, then only "
                      "after a newer checkpoint; 5/1h: while fewer than 5 failures came before within an hour "
                      "(default: 0, or 5/1h with MIN:MAX)"}),
    ("rdzv-backend", {"choices": ("static", "c10d"), "help": "how machines find one another: static by --node-rank, "
                      "c10d in order of arrival (default: static, or c10d with MIN:MAX)"}),
    ("rdzv-id", {"metavar": "NAME", "help": "name of the run, the same on all machines (default: trainer_kit)"}),
    ("rdzv-conf", {"type": _pairs, "metavar": "NAME=VALUE,...",
                   "help": "options of the rendezvous, as for torchrun (default: none)"}),
    ("monitor-interval", {"type": float, "metavar": "SECONDS",
                          "help": "seconds between two checks of the processes (default: 0.1)"}),
    ("start-timeout", {"type": float, "metavar": "SECONDS",
                       "help": "seconds to wait for the other machines (default: 600)"}),
    ("last-call", {"type": float, "metavar": "SECONDS",
                   "help": "seconds to wait at the start for more machines than MIN (default: 3)"}),
    ("mixed-precision", {"choices": ("no", "fp16", "bf16", "fp8"),
                         "help": "precision of runs whose arguments leave it at no (default: no)"}),
    ("gradient-accumulation-steps", {"type": int, "metavar": "N", "help": "batches of an optimizer step of an "
                                     "Accelerator whose arguments leave it out (default: 1)"}),
    ("dynamo-backend", {"metavar": "NAME", "help": "compiler of the models of an Accelerator, such as inductor "
                        "(default: no, not compiled)"}),
    ("num-cpu-threads-per-process", {"type": int, "metavar": "N", "help": "threads of torch in each process (default: "
                                     "OMP_NUM_THREADS, else an equal share of the processors)"}),
    ("profile", {"metavar": "FIRST:LAST",
                 "help": "first and last step to write a trace of, such as 10:20 (default: no trace)"}),
)  # fmt: skip


# Names of options in accelerate and torchrun, and ours.
_OTHER_NAMES = {
    "num_machines": "num-nodes",
    "machine_rank": "node-rank",
    "main_process_ip": "master-addr",
    "main_process_port": "master-port",
    "nnodes": "num-nodes",
    "config_file": "config",
    "use_fsdp": "fsdp",
}

CUT_OFF = 75  # EX_TEMPFAIL of sysexits.h
EXIT_CODES = {
    0: "all processes ended well",
    1: "a process failed; if it has another exit code, that one, or 128 + S after signal S, such as 137 for SIGKILL",
    CUT_OFF: "the other machines of an elastic run may still be training without this one; start it again to join them",
    130: "the processes left after Ctrl-C",
    143: "the processes left after SIGTERM or SIGUSR1; start them again to resume",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, each with dashes and with underscores, the script and its arguments."""
    parser.usage = "trainer-kit launch [options] [-m] script.py|module [arguments of the script]"
    parser.allow_abbrev = False
    for name, settings in _OPTIONS:
        _add(parser, name, settings)
    _add(parser, "cpu", {"action": "store_true", "help": "train on the CPU even if there are GPUs"})
    _add(
        parser,
        "debug",
        {"action": "store_true", "help": "compare the shapes of tensors before an Accelerator's collectives"},
    )
    _add(parser, "fsdp", {"action": "store_true", "help": "shard the model over the processes"})
    _add(parser, "tpu", {"action": "store_true", "help": "train on all TPU devices of a machine, by one process"})
    _add(
        parser,
        "config",
        {"metavar": "FILE", "help": f"file of `trainer-kit config` with other defaults (default: {default_path()})"},
    )
    _add(parser, "gpu-ids", {"metavar": "N,...", "help": "numbers of this machine's GPUs to use (default: all)"})
    _add(
        parser,
        "log-dir",
        {"metavar": "DIR", "help": "folder for the output of the ranks after the first (default: a temporary one)"},
    )
    _add(parser, "prefix", {"action": "store_true", "help": "show the output of all ranks, each line after [rank N]"})
    _add(parser, "dry-run", {"action": "store_true", "help": "print what would be started, and start nothing"})
    add_accelerate_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="script, or module with -m, to run in each process")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(options: argparse.Namespace) -> int:
    """Start the script and return 0, the exit code of the failed rank, or 143 or 130 after a signal."""
    quiet_cpp_logs()  # read when torch is imported, which comes next
    from trainer_kit.errors import CutOffError, ProcessesLeft, ProcessFailed
    from trainer_kit.launch.processes import PREFIX, Logs, planned, run_processes, set_variables

    if options.gpu_ids not in (None, "all"):
        with set_variables({"CUDA_VISIBLE_DEVICES": options.gpu_ids}):
            return run(argparse.Namespace(**vars(options) | {"gpu_ids": None}))
    config = read_config(options)
    if not options.module and not os.path.isfile(options.script):
        raise FileNotFoundError(f"there is no script {options.script!r}; for a module write -m before its name")
    module = ["-m"] if options.module else []
    words = ["-m", RUNNER, *module, options.script, *options.arguments]
    if options.dry_run:
        print(*planned(config, [sys.executable, *words]), sep="\n")
        return 0
    try:
        logs, remedy = Logs(options.log_dir, PREFIX if options.prefix else None), _REMEDY if config.tpu else ""
        run_processes(config, sys.executable, words, logs=logs, say=say, remedy=remedy)
    except ProcessesLeft as error:
        return error.exit_code
    except CutOffError as error:
        say(str(error))
        return CUT_OFF
    except ProcessFailed as error:
        sys.stdout.flush()
        say(str(error))
        return _exit_code(error.exit_code)
    return 0


def read_config(options: argparse.Namespace) -> LaunchConfig:
    """Return the configuration: options override the file, and the file the defaults; an existing TPU is used.

    Args:
        options: Parsed command line, with `config` and fields of `LaunchConfig`.

    Raises:
        TypeError: If the file names an unknown field, or a value has the wrong type.
        ValueError: If a value is invalid.
        FileNotFoundError: If the file in `config` does not exist.
    """
    path = Path(options.config) if options.config else default_path()
    config = LaunchConfig.load(path) if options.config or path.exists() else LaunchConfig()
    fields = [field.name for field in dataclasses.fields(LaunchConfig)]
    given = {name: value for name, value in vars(options).items() if name in fields}
    config = dataclasses.replace(config, **given)
    return config if config.cpu else config.with_tpu()


def _add(parser: argparse.ArgumentParser, name: str, settings: dict[str, Any]) -> None:
    """Add an option without a default, so that the file's value applies if it is missing."""
    is_field = name.replace("-", "_") in {field.name for field in dataclasses.fields(LaunchConfig)}
    if is_field:
        settings = {**settings, "default": argparse.SUPPRESS}
    parser.add_argument(f"--{name}", **settings)
    hidden = {"dest": name.replace("-", "_"), **settings, "help": argparse.SUPPRESS}
    others = [theirs for theirs, ours in _OTHER_NAMES.items() if ours == name]
    spellings = {*([name.replace("-", "_")] if "-" in name else []), *others, *(n.replace("_", "-") for n in others)}
    for spelling in sorted(spellings):
        parser.add_argument(f"--{spelling}", **hidden)


def _exit_code(code: int | None) -> int:
    """Convert a rank's exit code to a shell's: 137 for SIGKILL."""
    if not code:
        return 1
    return code if code > 0 else 128 - code
