"""Each option of `accelerate launch` is taken, or refused with what stands for it."""

from __future__ import annotations

import argparse

import accelerate
import pytest

from trainer_kit.cli import launch
from trainer_kit.cli.launch import read_config
from trainer_kit.launch.config import LaunchConfig

VALUES = {"--machine_rank": "0", "--rdzv_backend": "c10d", "--rdzv_conf": "timeout=30"}
TAKEN = {
    "--cpu", "--debug", "--dynamo_backend", "--dynamo_mode", "--enable_cpu_affinity", "--fsdp_activation_checkpointing",
    "--fsdp_activation_checkpointing_offload", "--fsdp_auto_wrap_policy", "--fsdp_backward_prefetch",
    "--fsdp_cpu_ram_efficient_loading", "--fsdp_forward_prefetch", "--fsdp_min_num_params", "--fsdp_offload_params",
    "--fsdp_reshard_after_forward", "--fsdp_sharding_strategy", "--fsdp_state_dict_type", "--fsdp_sync_module_states",
    "--fsdp_use_orig_params", "--fsdp_version", "--gpu_ids", "--gradient_accumulation_steps", "--log_dir",
    "--machine_rank", "--main_process_ip", "--main_process_port", "--main_training_function", "--max_restarts",
    "--mixed_precision", "--module", "--monitor_interval", "--multi_gpu", "--no_tpu_cluster",
    "--num_cpu_threads_per_process", "--num_machines", "--num_processes", "--quiet", "--rdzv_backend", "--rdzv_conf",
    "--role", "--same_network", "--tee", "--tpu", "--use_fsdp",
}  # fmt: skip


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser("trainer-kit launch")
    launch.add_arguments(parser)
    return parser.parse_args([*words, "train.py"])


def theirs() -> dict[str, argparse.Action]:
    """The options of accelerate's own parser, by their longest spelling with underscores."""
    from accelerate.commands.launch import launch_command_parser

    actions = [action for action in launch_command_parser()._actions if action.option_strings]
    found = {next(each for each in action.option_strings if "-" not in each[2:] and each[:2] == "--"): action
             for action in actions if action.dest != "help"}  # fmt: skip
    return {name: action for name, action in found.items() if name != "--config_file"}


@pytest.mark.skipif(not accelerate.__version__.startswith("1.15."), reason="the options are those of accelerate 1.15")
def test_each_option_is_taken_or_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    taken = set()
    for name, action in theirs().items():
        value = action.default if action.default and action.default is not argparse.SUPPRESS else "2"
        values = [] if action.nargs == 0 else [VALUES.get(name, str((action.choices or [value])[0]))]
        if name == "--fsdp_version":
            values = ["2"]
        for spelling in action.option_strings:
            try:
                parse(spelling, *values)
            except SystemExit:
                said = capsys.readouterr().err
                assert f"{spelling} is not available; " in said, said
            else:
                taken.add(name)
    assert taken == TAKEN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--zero_stage=3"], "--zero_stage is not available; --fsdp shards a large model"),
        (["--no_python"], "--no_python is not available; start the program from a Python script"),
        (["--fsdp_offload_params", "true"], "true is not available here; give FullyShardedDataParallelPlugin(cpu_offl"),
        (["--dynamo_mode", "max-autotune"], "give the Accelerator TorchDynamoPlugin(mode=)"),
        (["--dynamo_use_dynamic"], "TorchDynamoPlugin(dynamic=True)"),
        (["--mpirun_hostfile", "hosts"], "start the script by mpirun itself"),
    ],
)
def test_a_refusal_says_what_to_do(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert message in capsys.readouterr().err


def test_the_rendezvous_and_the_checks() -> None:
    options = parse("--rdzv_conf", "timeout=30,rank=0", "--monitor_interval", "0.5", "-q", "--gpu_ids", "all")
    assert read_config(options) == LaunchConfig(rdzv_conf={"timeout": 30, "rank": 0}, monitor_interval=0.5)


@pytest.mark.parametrize(("given", "seen"), [(["--gpu_ids", "1,3"], "1,3"), (["--gpu_ids", "all"], None), ([], None)])
def test_gpus_by_number(given: list[str], seen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = []
    monkeypatch.setattr("trainer_kit.launch.processes.planned", lambda *_: [os.environ.get("CUDA_VISIBLE_DEVICES")])
    monkeypatch.setattr("builtins.print", lambda *lines, **_: found.extend(lines))
    options = parse(*given, "--cpu", "--dry-run", "-m")
    assert launch.run(options) == 0
    assert found == [seen]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
