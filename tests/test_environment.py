from __future__ import annotations

import os

import pytest

from trainer_kit import environment
from trainer_kit.environment import Place, place

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29400", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[07-08],cpu1", "SLURM_JOB_ID": "31000",
    "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *SLURM, *OPEN_MPI, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_a_launcher_there_is_one_process() -> None:
    assert place() == Place() == Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, restarts=0)


def test_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN)
    assert place() == Place(5, 8, 1, 4, 1, "node0", 29400, 2)
    assert place().has_several_machines


def test_a_requeued_job_that_uses_a_launcher_is_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "1"})
    assert place().restarts == 1


def test_slurms_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, SLURM)
    assert place() == Place(4, 5, 0, 1, 2, "gpu07", 15000 + 31003 % 15000, 1)
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert place()[5:7] == ("elsewhere", 1234)


def test_open_mpis_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, OPEN_MPI)
    with pytest.raises(ValueError, match="MASTER_ADDR is not set; give mpirun -x MASTER_ADDR="):
        place()
    set_all(monkeypatch, {"MASTER_ADDR": "node0", "MASTER_PORT": "29400"})
    assert place() == Place(3, 4, 1, 2, 1, "node0", 29400)


def test_two_jobs_of_open_mpi_on_one_machine_have_two_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-host-31@1"})
    first = place()
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host-32@1")
    assert (first.address, place().address) == ("127.0.0.1", "127.0.0.1")
    assert first.port != place().port


def test_torchruns_word_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `srun torchrun`: one task a node, but several processes in all."""
    set_all(monkeypatch, SLURM | TORCHRUN)
    assert place().world_size == 8


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_process_needs_no_further_variable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert place() == Place(restarts=3)


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM, OPEN_MPI], ids=["torchrun", "SLURM", "Open MPI"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    missing = next(name for name in variables if name.endswith(("RANK", "PROCID")))
    set_all(monkeypatch, {name: value for name, value in variables.items() if name != missing})
    with pytest.raises(ValueError, match=f"the environment variable {missing} is missing; set it"):
        place()


@pytest.mark.parametrize("value", ["0", "-1", "", "two", "1.5", " 2"])
def test_what_is_no_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ValueError, match=f"WORLD_SIZE='{value}' is no positive whole number; unset it"):
        place()


@pytest.mark.parametrize(
    ("spread", "node", "tasks"), [("4", 0, 4), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("1,8(x2)", 1, 8)]
)
def test_slurms_tasks_per_node(monkeypatch: pytest.MonkeyPatch, spread: str, node: int, tasks: int) -> None:
    set_all(monkeypatch, SLURM | {"SLURM_STEP_TASKS_PER_NODE": spread, "SLURM_NODEID": str(node)})
    assert place().local_world_size == tasks


@pytest.mark.parametrize("spread", ["", "2(x", "2(x1)"])
def test_a_spread_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, spread: str) -> None:
    set_all(monkeypatch, SLURM | {"SLURM_STEP_TASKS_PER_NODE": spread})
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE="):
        place()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[07-09,12],cpu1", "gpu07"), ("a-[3]-x,b", "a-3-x"),
        ("gpu[2,5-9]", "gpu2"), ("10.0.0.[1-2]", "10.0.0.1"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert environment.first_host(nodes) == first


def test_an_allocation_alone_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sets these in a batch script too, in which nothing was started in parallel."""
    set_all(monkeypatch, {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"})
    assert place() == Place()
    assert environment.slurm_job() == "7"


def test_what_a_launcher_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_kit import TrainingArguments

    assert (environment.mixed_precision(), environment.use_cpu(), environment.progress_file()) == ("no", False, None)
    set_all(
        monkeypatch, {"TRAINER_KIT_MIXED_PRECISION": "bf16", "TRAINER_KIT_USE_CPU": "1", "ACCELERATE_DEBUG_MODE": "yes"}
    )
    assert environment.debug()
    args = TrainingArguments()
    assert (args.mixed_precision, args.use_cpu) == ("bf16", True)
    assert TrainingArguments(mixed_precision="no", use_cpu=False).mixed_precision == "no"
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match="mixed_precision='fp8' is not allowed"):
        TrainingArguments()


def test_settings_hold_what_changes_a_run_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "RANK": "0", "WORLD_SIZE": "1"}
    hidden = {"HF_TOKEN": "secret", "AWS_SECRET_ACCESS_KEY": "secret", "WANDB_API_KEY": "secret", "HOME": "/root"}
    for name, value in (shown | hidden).items():
        monkeypatch.setenv(name, value)
    found = environment.settings()
    assert shown.items() <= found.items()
    assert not set(hidden) & set(found)
    assert all(os.environ[name] == value for name, value in found.items())
