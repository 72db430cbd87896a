"""The environment variables that the sources read, and their meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from site_builder.sources import ROOT
from site_builder.tables import code, table

MEANINGS = {
    "Requests to a run": {
        "TRAINER_KIT_MIXED_PRECISION": 'Default of `mixed_precision`: "no", "fp16", "bf16" or "fp8".',
        "TRAINER_KIT_GRADIENT_ACCUMULATION_STEPS": "Batches of an optimizer step of an `Accelerator`; 1 if unset.",
        "TRAINER_KIT_USE_CPU": '"1": train on the CPU, though there are GPUs.',
        "TRAINER_KIT_USE_TPU": '"1": train on XLA devices.',
        "TRAINER_KIT_FSDP": '"1": divide the model over the processes.',
        "TRAINER_KIT_PROFILE": 'Default of `profile`: the first and the last step to profile, such as "10:20".',
        "TRAINER_KIT_DYNAMO_BACKEND": 'Compiler of the models of an `Accelerator`, such as "inductor"; "no": none.',
        "TRAINER_KIT_DEBUG": '"1": compare the shapes of tensors before the collectives of an `Accelerator`.',
        "ACCELERATE_DEBUG_MODE": "accelerate's name of `TRAINER_KIT_DEBUG`.",
        "TRAINER_KIT_ELASTIC": '"1": machines may be lost and come; the launcher sets it with `--num-nodes MIN:MAX`.',
        "TRAINER_KIT_MEMBERSHIP": "ID of such a run, and the number of its machines' membership; the launcher sets it.",
        "TRAINER_KIT_REGROUP_FOLDER": "Folder in which a process asks for a new place; the launcher sets it.",
        "TRAINER_KIT_NEWCOMER": "1 in a process that will join a run that is under way; the launcher sets it.",
        "TRAINER_KIT_PROGRESS_FILE": "File for the step of the newest checkpoint; the launcher sets it.",
        "OMP_NUM_THREADS": "Threads of each process; if unset, launchers divide the processors among processes.",
        "XDG_CONFIG_HOME": "Folder that holds `trainer_kit/default_config.yaml`; `~/.config` if unset.",
    },
    "torchrun": {
        "WORLD_SIZE": "Number of processes; a run has several processes if it is above 1.",
        "RANK": "Rank of this process among all, from 0.",
        "LOCAL_RANK": "Rank of this process on its machine, from 0.",
        "LOCAL_WORLD_SIZE": "Number of processes on this machine.",
        "GROUP_RANK": "Number of this machine, from 0.",
        "MASTER_ADDR": "Host of rank 0, for the rendezvous; with SLURM and Open MPI too.",
        "MASTER_PORT": "Port of the rendezvous; with SLURM, Open MPI and TPU hosts too.",
        "TORCHELASTIC_RESTART_COUNT": "Number of restarts; from the first on, a run resumes without being asked.",
        "TORCHELASTIC_USE_AGENT_STORE": '"True": torchrun\'s agent serves the rendezvous, not rank 0.',
        "TORCHELASTIC_ERROR_FILE": "File into which a process writes the error that ends it.",
    },
    "SLURM": {
        "SLURM_STEP_NUM_TASKS": "Number of processes, if `WORLD_SIZE` is unset.",
        "SLURM_PROCID": "Rank of this process among all, from 0.",
        "SLURM_LOCALID": "Rank of this process on its machine, from 0.",
        "SLURM_NODEID": "Number of this machine, from 0.",
        "SLURM_STEP_TASKS_PER_NODE": "Number of processes of each machine, such as `2(x3),1`.",
        "SLURM_STEP_NODELIST": "Machines of the step; the first one is the host of rank 0 if `MASTER_ADDR` is unset.",
        "SLURM_JOB_ID": "Job; chooses the port of the rendezvous, and is requeued by `Preemption`.",
        "SLURM_STEP_ID": "Step of the job; chooses the port of the rendezvous.",
        "SLURM_RESTART_COUNT": "Number of times that the job was requeued; then a run resumes without being asked.",
    },
    "submitit": {
        "SUBMITIT_EXECUTOR": "Set in a job of submitit: `Preemption` then handles the signal that requeues it.",
        "SUBMITIT_PREEMPT_SIGNAL": "That signal without `SIG`; `USR2` if unset.",
    },
    "Open MPI": {
        "OMPI_COMM_WORLD_SIZE": "Number of processes, if neither `WORLD_SIZE` nor SLURM's variable is set.",
        "OMPI_COMM_WORLD_RANK": "Rank of this process among all, from 0.",
        "OMPI_COMM_WORLD_LOCAL_RANK": "Rank of this process on its machine, from 0.",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "Number of processes on this machine.",
        "PMIX_NAMESPACE": "Job; chooses the port of the rendezvous.",
        "OMPI_MCA_ess_base_jobid": "The same of earlier releases of Open MPI.",
    },
    "TPU and XLA": {
        "PJRT_DEVICE": "Type of XLA device: `TPU`, or `CPU` for XLA's CPU client; `CUDA`: do not use XLA.",
        "CPU_NUM_DEVICES": "Number of devices of XLA's CPU client; 1 if unset.",
        "TPU_VISIBLE_CHIPS": "TPU chips of this machine that the process may use.",
        "TPU_PROCESS_BOUNDS": "Layout of the processes of a slice; `1,1,1`: this process trains alone.",
        "TPU_PROCESS_ADDRESSES": "Processes of the slice; there must be one for each host.",
        "TPU_WORKER_HOSTNAMES": "Hosts of the slice, as GKE sets it.",
        "TPU_WORKER_ID": "Number of this host in the slice, from 0.",
        "TPU_SKIP_MDS_QUERY": "If set, Google's metadata server is not asked for the hosts.",
        "MEGASCALE_NUM_SLICES": "Number of slices; a run takes one.",
        "GCE_METADATA_HOST": "Google's metadata server, if it has another name.",
    },
    "Network and memory": {
        "GLOO_SOCKET_IFNAME": "Network interface between machines; if unset, the one that leads to rank 0 is set.",
        "PYTORCH_ALLOC_CONF": "torch's allocator of GPU memory; with expandable segments, no warning suggests them.",
        "PYTORCH_CUDA_ALLOC_CONF": "The same of earlier releases of torch.",
    },
}
"""Meaning of each variable, by group. The build fails if it does not hold exactly the variables that are read."""


def variables(root: Path = ROOT) -> list[str]:
    """Return the names of the variables that the package reads, in alphabetical order."""
    constants = _constants((root / "trainer_kit" / "config" / "environment.py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for path in sorted((root / "trainer_kit").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "environ" in text:
            functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            known = constants | _constants(text)
            found.update(name for function in functions for name in _names_in(function, known))
    return sorted(found)


def _constants(text: str) -> dict[str, tuple[str, ...]]:
    """Return the constants of a module that are texts, or a dict by texts."""
    found = {}
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and (value := getattr(node, "value", None)) is not None:
            keys = value.keys if isinstance(value, ast.Dict) else ast.walk(value)
            texts = tuple(each.value for each in keys if isinstance(each, ast.Constant))
            found[target.id] = tuple(each for each in texts if isinstance(each, str))
    return found


def _names_in(function: ast.FunctionDef, constants: dict[str, tuple[str, ...]]) -> Iterator[str]:
    loops = {
        name.id: node.iter
        for node in ast.walk(function)
        if isinstance(node, (ast.For, ast.comprehension))
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(function):
        for given in _reads(node):
            for part in ast.walk(loops.get(given.id, given) if isinstance(given, ast.Name) else given):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
                elif isinstance(part, ast.Name):
                    yield from constants.get(part.id, ())


def _reads(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expression that names the variable, where a node reads one."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "_number" or ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            yield from node.args[:1]
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ" and isinstance(node.ctx, ast.Load):
        yield node.slice
    elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
        yield node.left


def environment() -> str:
    """Return a table of all variables for each group of them.

    Raises:
        ValueError: If a variable that the package reads has no meaning here, or one that it does not read has one.
    """
    described = [name for group in MEANINGS.values() for name in group]
    if different := {*described} ^ {*variables()}:
        raise ValueError(
            f"{', '.join(sorted(different))}: MEANINGS of site_builder/environment.py must hold exactly the variables "
            "that the package reads; add or remove them"
        )
    parts = []
    for title, group in MEANINGS.items():
        rows = [[f'<span id="{name}"></span>{code(name)}', meaning] for name, meaning in group.items()]
        parts.append(f"## {title}\n\n{table(['variable', 'meaning'], rows)}")
    return "\n\n".join(parts)
