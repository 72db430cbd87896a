"""Files of `accelerate config` as configuration of the launcher."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.launch.accelerate_config import from_accelerate, is_of_accelerate
from trainer_kit.launch.config import LaunchConfig

FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
dynamo_config: {dynamo_backend: INDUCTOR}
enable_cpu_affinity: false
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 1234
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


def test_a_file_of_accelerate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(FILE)
    config = LaunchConfig.load(path)
    assert config == LaunchConfig(
        num_processes=4, num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=1234, mixed_precision="bf16",
        cpu=True, dynamo_backend="INDUCTOR",
    )  # fmt: skip
    assert not caplog.records


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"distributed_type": "NO", "mixed_precision": False, "gpu_ids": "all"}, {"mixed_precision": "no"}),
        ({"distributed_type": False, "main_process_ip": None}, {}),
        ({"distributed_type": "FSDP"}, {"fsdp": True}),
        ({"distributed_type": "XLA", "num_processes": 8}, {"tpu": True, "num_processes": 8}),
        ({"compute_environment": "LOCAL_MACHINE", "use_cpu": True}, {"cpu": True}),
        (
            {"distributed_type": "NO", "debug": True, "num_cpu_threads_per_process": 3},
            {"debug": True, "num_cpu_threads_per_process": 3},
        ),
        ({"distributed_type": "NO", "num_cpu_threads_per_process": 0}, {}),
    ],
)
def test_kinds(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert is_of_accelerate(values)
    assert from_accelerate(values) == {"fsdp": False, "tpu": False, "cpu": False} | expected


def test_what_has_no_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        from_accelerate(
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"},
                "enable_cpu_affinity": True,
            }
        )
    assert [record.getMessage() for record in caplog.records] == [
        "the configuration of accelerate sets fsdp_config and enable_cpu_affinity without effect"
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}},
            r"fsdp_config: fsdp_offload_params=True is not available here; .* strategy=FSDP\(offload=True\)",
        ),
        ({"distributed_type": "DEEPSPEED"}, "DeepSpeed is not available"),
        ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM is not available"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "start the command on the machine"),
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "0,1"}, "set CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_not_available(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_accelerate(values)


def test_other_files_are_not_accelerate_s() -> None:
    assert not is_of_accelerate({"num_processes": 2})
