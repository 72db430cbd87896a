from __future__ import annotations

import os

import pytest

from trainer_kit import environment

NAMES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process() -> None:
    assert environment.world_size() == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["1", "8", "1024"])
def test_each_launcher_says_how_many(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert environment.world_size() == int(value)


def test_torchruns_word_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `srun torchrun`: one task a node, but several processes in all."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert environment.world_size() == 16


@pytest.mark.parametrize("value", ["0", "-1", "", "two", "1.5", " 2"])
def test_what_is_no_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ValueError, match=f"WORLD_SIZE='{value}' is no positive whole number; unset it"):
        environment.world_size()


def test_an_allocation_alone_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sets these in a batch script too, in which nothing was started in parallel."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert environment.world_size() == 1


def test_settings_hold_what_changes_a_run_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "RANK": "0", "WORLD_SIZE": "1"}
    hidden = {"HF_TOKEN": "secret", "AWS_SECRET_ACCESS_KEY": "secret", "WANDB_API_KEY": "secret", "HOME": "/root"}
    for name, value in (shown | hidden).items():
        monkeypatch.setenv(name, value)
    found = environment.settings()
    assert shown.items() <= found.items()
    assert not set(hidden) & set(found)
    assert all(os.environ[name] == value for name, value in found.items())
