"""`trainer-kit env` shows what is there."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trainer_kit
from trainer_kit.cli.env import facts
from trainer_kit.cli.main import main


def test_env_prints_one_fact_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: line for line in lines}
    assert trainer_kit.__version__ in shown["trainer_kit"]
    assert platform.python_version() in shown["python"]
    assert torch.__version__ in shown["torch"]
    for package in ("transformers", "safetensors", "numpy"):
        assert importlib.metadata.version(package) in shown[package]
    assert platform.system() in shown["system"]
    assert shown["memory"].endswith("GiB")
    assert "gpu" in shown
    assert len({line.index(value) for line, (_, value) in zip(lines, facts(), strict=True)}) == 1  # one column


def test_env_shows_the_settings_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("SLURM_JWT", "jwt_secret")
    shown = dict(facts())
    assert shown["NCCL_DEBUG"] == "INFO"
    assert shown["WORLD_SIZE"] == "4"
    assert "secret" not in str(shown)


def test_env_shows_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Test GPU", total_memory=24 * 2**30, major=9, minor=0)
    pynvml = SimpleNamespace(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.65"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    shown = dict(facts())
    assert shown["gpu 0"] == shown["gpu 1"] == "Test GPU, 24 GiB, capability 9.0"
    assert shown["gpu driver"] == "580.65"


def test_env_says_how_to_see_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    assert "pip install nvidia-ml-py" in dict(facts())["gpu driver"]


def test_env_shows_the_devices_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr("trainer_kit.config.environment.xla_device_type", lambda: None)
    assert dict(facts())["xla"] == 'not taken by strategy "auto"'
    monkeypatch.setattr("trainer_kit.config.environment.xla_device_type", lambda: "TPU")
    monkeypatch.setattr("trainer_kit.config.environment.xla_devices", {"TPU": 8}.__getitem__)
    assert dict(facts())["xla"] == "TPU, 8 devices"
    assert "torch_xla" in dict(facts())


def test_env_shows_the_saved_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert dict(facts())["configuration"] == "none saved"
    path = trainer_kit.write_basic_config()
    assert path
    assert dict(facts())["configuration"] == f"{path}: all defaults"
    path.unlink()
    trainer_kit.write_basic_config(mixed_precision="bf16")
    assert dict(facts())["configuration"] == f"{path}: mixed_precision=bf16"
    path.write_text("processes: 2")
    assert "has no field 'processes'" in dict(facts())["configuration"]
