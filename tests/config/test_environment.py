from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainer_kit.config import environment
from trainer_kit.config.environment import Place, place

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
TPU_HOSTS = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "host-a,host-b,host-c", "PJRT_DEVICE": "TPU"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "CPU_NUM_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_SKIP_MDS_QUERY"]
    for name in [*TORCHRUN, *SLURM, *OPEN_MPI, *TPU_HOSTS, *others]:
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


def test_the_signal_by_which_submitit_requeues(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.submitit_signal() is None
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    assert environment.submitit_signal() is None
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert environment.submitit_signal() == "SIGUSR1"
    monkeypatch.delenv("SUBMITIT_PREEMPT_SIGNAL")
    assert environment.submitit_signal() == "SIGUSR2"


def test_what_a_launcher_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_kit import TrainingArguments

    assert (environment.mixed_precision(), environment.use_cpu(), environment.progress_file()) == ("no", False, None)
    assert environment.profile() is TrainingArguments().profile is None
    set_all(
        monkeypatch, {"TRAINER_KIT_MIXED_PRECISION": "bf16", "TRAINER_KIT_USE_CPU": "1", "ACCELERATE_DEBUG_MODE": "yes"}
    )
    assert environment.debug()
    args = TrainingArguments()
    assert (args.mixed_precision, args.use_cpu) == ("bf16", True)
    monkeypatch.setenv("TRAINER_KIT_PROFILE", "10:20")
    assert environment.profile() == TrainingArguments().profile == "10:20"
    assert TrainingArguments(profile=None).profile is None
    monkeypatch.setenv("TRAINER_KIT_PROFILE", "")
    assert environment.profile() is None
    assert TrainingArguments(mixed_precision="no", use_cpu=False).mixed_precision == "no"
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "int8")
    with pytest.raises(ValueError, match="mixed_precision='int8' is not allowed"):
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


# XLA


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if torch_xla were installed; returns the folder of the PCI bus, on which there is nothing."""
    monkeypatch.setattr(environment, "has_torch_xla", lambda: True)
    monkeypatch.setattr(environment, "_PCI_DEVICES", tmp_path)
    return tmp_path


def plug_in(bus: Path, device: str, count: int = 1, vendor: str = "0x1ae0") -> None:
    for _ in range(count):
        folder = bus / f"0000:00:{len(list(bus.iterdir())):02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")


@pytest.mark.parametrize(
    ("variables", "there", "expected"),
    [
        ({}, "nothing", None),
        ({}, "TPU", "TPU"),
        ({}, "GPU", None),
        ({"PJRT_DEVICE": "TPU"}, "nothing", "TPU"),
        ({"PJRT_DEVICE": "TPU_C_API"}, "GPU", "TPU"),
        ({"PJRT_DEVICE": "CPU"}, "nothing", "CPU"),
        ({"PJRT_DEVICE": "CPU"}, "TPU", "CPU"),
        ({"PJRT_DEVICE": "CPU"}, "GPU", None),
        ({"PJRT_DEVICE": "CUDA"}, "GPU", None),
        ({"PJRT_DEVICE": "NEURON"}, "nothing", None),
        ({"TRAINER_KIT_USE_TPU": "1"}, "GPU", "TPU"),
        ({"TRAINER_KIT_USE_TPU": "1", "PJRT_DEVICE": "CPU"}, "GPU", "CPU"),
        ({"TRAINER_KIT_USE_CPU": "1", "PJRT_DEVICE": "TPU"}, "TPU", None),
    ],
)
def test_which_devices_xla_would_drive(
    variables: dict[str, str], there: str, expected: str | None, torch_xla: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, variables)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2 * (there == "GPU"))
    if there == "TPU":
        plug_in(torch_xla, "0x0063")
    assert environment.xla_device_type() == expected
    monkeypatch.setattr(environment, "has_torch_xla", lambda: False)
    assert environment.xla_device_type() is None


def test_the_devices_of_a_tpu_are_counted_on_the_bus(torch_xla: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(torch_xla, "0x0042")  # the network card of Google's machines
    plug_in(torch_xla, "0x0063", vendor="0x8086")
    assert environment.xla_devices("TPU") == 0
    plug_in(torch_xla, "0x0063", count=4)
    assert environment.xla_devices("TPU") == 4
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1")
    assert environment.xla_devices("TPU") == 2


def test_a_chip_of_the_older_tpus_is_two_devices(torch_xla: Path) -> None:
    plug_in(torch_xla, "0x0027", count=4)
    assert environment.xla_devices("TPU") == 8


def test_the_devices_of_the_cpu_are_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.xla_devices("CPU") == 1
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert environment.xla_devices("CPU") == 4
    monkeypatch.setenv("CPU_NUM_DEVICES", "none")
    with pytest.raises(ValueError, match="CPU_NUM_DEVICES='none' is no positive whole number"):
        environment.xla_devices("CPU")


@pytest.mark.usefixtures("torch_xla")
def test_the_hosts_of_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TPU_HOSTS | {"TPU_PROCESS_ADDRESSES": "host-a:8471,host-b:8471,host-c:8471"})
    expected = Place(rank=1, world_size=3, local_rank=0, local_world_size=1, node=1, address="host-a")
    assert place() == expected
    assert place().has_several_machines
    set_all(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "2"})  # each has a launcher
    assert place() == expected._replace(restarts=2)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert place() == Place(restarts=2)


def test_the_hosts_of_a_tpu_as_the_metadata_name_them(torch_xla: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"worker-network-endpoints": "a:1:10.0.0.1,b:2:10.0.0.2", "agent-worker-number": "1"}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            known = self.headers["Metadata-Flavor"] == "Google" and name in answers
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(answers.get(name, "").encode())

        def log_message(self, *_: object) -> None: ...

    environment._metadata.cache_clear()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        assert place() == Place()  # no TPU: nobody is asked
        plug_in(torch_xla, "0x0063", count=4)
        assert place() == Place(rank=1, world_size=2, local_rank=0, local_world_size=1, node=1, address="10.0.0.1")
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        assert place() == Place()
        server.shutdown()
    environment._metadata.cache_clear()
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    assert place() == Place()  # nobody answers


@pytest.mark.usefixtures("torch_xla")
@pytest.mark.parametrize(
    "alone", [{"TPU_WORKER_HOSTNAMES": "localhost"}, {"TPU_PROCESS_BOUNDS": "1,1,1"}, {"TRAINER_KIT_USE_CPU": "1"}]
)
def test_one_host_of_a_tpu_alone(alone: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TPU_HOSTS | alone)
    assert place() == Place()


@pytest.mark.usefixtures("torch_xla")
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"TPU_WORKER_ID": "3"}, "TPU_WORKER_ID=3, but there are 3 TPU hosts"),
        ({"TPU_WORKER_ID": "one"}, "TPU_WORKER_ID='one' is no whole number"),
        (
            {"TPU_PROCESS_ADDRESSES": "a:1,a:2,b:1,b:2,c:1,c:2"},
            "TPU_PROCESS_ADDRESSES names 6 processes for 3 TPU",
        ),
        ({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_NUM_SLICES=2 joins TPU slices, but a run takes one slice"),
    ],
)
def test_hosts_of_a_tpu_that_contradict(
    variables: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, TPU_HOSTS | variables)
    with pytest.raises(ValueError, match=sentence):
        place()


def test_processes_that_would_share_the_devices_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.check_drives_machine_alone()
    set_all(monkeypatch, TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    environment.check_drives_machine_alone()  # one process on each of several machines
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ValueError, match="on 8 machines, but XLA joins machines on TPUs alone"):
        environment.check_drives_machine_alone()
    set_all(monkeypatch, TORCHRUN)
    with pytest.raises(ValueError, match=r"started 4 processes on this machine.*`trainer-kit launch --tpu script.py`"):
        environment.check_drives_machine_alone()
