"""What to start: the fields, the file, the user's default."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import trainer_kit
from trainer_kit.launch import config as module
from trainer_kit.launch.config import LaunchConfig, default_path, write_basic_config


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"num_processes": 0}, "num_processes=0 is not allowed; it must be a whole number of at least 1, or None"),
        ({"num_processes": 3, "num_nodes": 2}, "num_processes=3 is not allowed with num_nodes=2; it counts"),
        ({"num_nodes": 2, "node_rank": 2}, "the machines have the numbers 0 to 1"),
        ({"node_rank": 1}, "node_rank=1 is not allowed"),
        ({"master_port": 65536}, "master_port=65536 is not allowed; it must be a port from 0 to 65535"),
        ({"master_addr": ""}, "master_addr='' is not allowed; it must be a word without spaces"),
        ({"max_restarts": -1}, "max_restarts=-1 is not allowed"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd' is not allowed; it must be one of 'static', 'c10d'"),
        ({"mixed_precision": "int8"}, "mixed_precision='int8' is not allowed"),
        ({"monitor_interval": 0}, "monitor_interval=0 is not allowed; it must be a number of seconds above 0"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        LaunchConfig(**values)


def test_a_value_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"cpu='yes' is not allowed; it must be True or False"):
        LaunchConfig(cpu="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "values", "expected"),
    [
        (0, {}, 1),
        (4, {}, 4),
        (4, {"cpu": True}, 1),
        (4, {"num_processes": 3}, 3),
        (4, {"num_processes": 8, "num_nodes": 2}, 4),
        (4, {"num_processes": 8, "cpu": True}, 8),
        (0, {"num_processes": 8}, 8),
    ],
)
def test_processes_of_this_machine(
    gpus: int, values: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "count_gpus", lambda: gpus)
    assert LaunchConfig(**values).local_processes() == expected


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    with pytest.raises(
        ValueError, match=re.escape("num_processes=2, but this machine has 1 GPU; use at most 1, or cpu=True")
    ):
        LaunchConfig(num_processes=2).local_processes()
    with pytest.raises(
        ValueError, match="num_processes=4 makes 2 on each machine, but this machine has 1 GPU; use at most 2"
    ):
        LaunchConfig(num_processes=4, num_nodes=2).local_processes()


def test_the_port_is_free_on_one_machine_and_known_on_several() -> None:
    assert LaunchConfig().port == 0
    assert LaunchConfig(num_nodes=2).port == 29500
    assert LaunchConfig(num_nodes=2, master_port=1234).port == 1234


@given(
    nodes=st.integers(1, 4),
    each=st.none() | st.integers(1, 8),
    port=st.integers(0, 65535),
    restarts=st.integers(0, 9),
    precision=st.sampled_from(["no", "fp16", "bf16"]),
    interval=st.floats(0.001, 1e6),
    ending=st.sampled_from([".yaml", ".yml", ".json"]),
)
def test_what_was_saved_is_loaded(
    nodes: int, each: int | None, port: int, restarts: int, precision: Any, interval: float, ending: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    config = LaunchConfig(
        num_nodes=nodes, num_processes=each and each * nodes, master_port=port, max_restarts=restarts,
        mixed_precision=precision, monitor_interval=interval, node_rank=nodes - 1, rdzv_id="run",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("saved") / "folder" / f"config{ending}"
    config.save(path)
    assert LaunchConfig.load(path) == config


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        ("num_proceses: 2", TypeError, "no field 'num_proceses'; the nearest known name is 'num_processes'"),
        ("nproc_per_node: 2", TypeError, "has no field 'nproc_per_node'; the nearest known name is 'num_processes'"),
        ("num_processes: two", TypeError, "num_processes='two' is not allowed"),
        ("num_processes: 0", ValueError, "num_processes=0 is not allowed"),
        ("[1]", ValueError, "holds a list, but must hold fields and their values"),
        ("a: [", ValueError, "is no valid YAML"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense(content: str, error: type[Exception], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(error, match=f"^{re.escape(str(path))}: .*{re.escape(sentence)}"):
        LaunchConfig.load(path)


def test_precision_no_in_a_hand_written_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("mixed_precision: no\nnum_processes: 2\n")
    assert LaunchConfig.load(path) == LaunchConfig(num_processes=2)


def test_the_default_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert default_path() == Path("/settings/trainer_kit/default_config.yaml")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_path() == Path("/home/me/.config/trainer_kit/default_config.yaml")


def test_write_basic_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = trainer_kit.write_basic_config(mixed_precision="bf16")
    assert path
    assert path == default_path()
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    assert LaunchConfig.load(path) == LaunchConfig(mixed_precision="bf16")
    other = tmp_path / "other.json"
    assert write_basic_config(save_location=os.fspath(other)) == other
    assert LaunchConfig.load(other) == LaunchConfig()


def test_write_basic_config_leaves_a_saved_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "saved.yaml"
    LaunchConfig(num_processes=3).save(path)
    before = path.read_bytes()
    assert write_basic_config(mixed_precision="bf16", save_location=path) is False
    assert path.read_bytes() == before
    assert f"a configuration is saved at {path} and stays as it is; remove it, run `trainer-kit config`" in caplog.text


def test_write_basic_config_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mixed_precision='int8' is not allowed"):
        write_basic_config(mixed_precision="int8", save_location=tmp_path / "a.yaml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"use \.json, \.yaml or \.yml"):
        write_basic_config(save_location=tmp_path / "a.toml")
    assert list(tmp_path.iterdir()) == []


# XLA


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> int:
    """As if there were a TPU with 4 devices."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr("trainer_kit.config.environment.has_torch_xla", lambda: True)
    monkeypatch.setattr("trainer_kit.config.environment.xla_devices", lambda device_type: 4)
    return 4


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, 4), ({"num_processes": 4}, 4), ({"num_processes": 1}, 1), ({"num_nodes": 2}, 4),
     ({"num_processes": 8, "num_nodes": 2}, 4)],
)  # fmt: skip
def test_one_process_drives_all_devices(
    values: dict[str, Any], expected: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "count_gpus", lambda: 2)
    config = LaunchConfig(tpu=True, **values)
    assert (config.local_processes(), config.xla_devices(), config.xla_device_type) == (1, expected, "TPU")


@pytest.mark.parametrize("values", [{"num_processes": 3}, {"num_processes": 8}, {"num_processes": 2, "num_nodes": 2}])
def test_some_of_the_devices_are_refused(values: dict[str, Any], devices: int) -> None:
    with pytest.raises(
        ValueError, match=f"num_processes={values['num_processes']} is not allowed; .* this machine has 4: leave"
    ):
        LaunchConfig(tpu=True, **values).local_processes()


def test_tpu_and_cpu_contradict() -> None:
    with pytest.raises(ValueError, match=r"cpu=True \(--cpu\) and tpu=True \(--tpu\) contradict each other"):
        LaunchConfig(cpu=True, tpu=True)


def test_tpu_where_the_environment_names_something_else(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CUDA")
    with pytest.raises(ValueError, match="PJRT_DEVICE='CUDA', but tpu=True"):
        LaunchConfig(tpu=True).local_processes()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert LaunchConfig(tpu=True).xla_device_type == "CPU"
    with pytest.raises(ValueError, match="CPU_NUM_DEVICES makes more"):
        LaunchConfig(tpu=True, num_processes=8).local_processes()


def test_tpu_needs_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.config.environment.has_torch_xla", lambda: False)
    with pytest.raises(ImportError, match=r"needs torch_xla; run pip install 'torch~=2.9.0' 'torch-xla\[tpu\]~=2.9.0'"):
        LaunchConfig(tpu=True).local_processes()
