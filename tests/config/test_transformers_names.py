"""transformers' settings: each is known, taken with its meaning or refused with a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.training_args import OptimizerNames

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.config.reporters import TRACKER_NAMES
from trainer_kit.config.sources import OTHER_NAMES
from trainer_kit.config.transformers_names import ATTRIBUTES, settings_of

OWN = {field.name for field in dataclasses.fields(TrainingArguments)}
REMOVED = (
    *("evaluation_strategy", "fp16_full_eval", "warmup_ratio", "tpu_num_cores", "logging_dir", "overwrite_output_dir"),
    *("per_gpu_train_batch_size", "per_gpu_eval_batch_size", "torchdynamo", "push_to_hub_token", "no_cuda"),
    *("push_to_hub_model_id", "push_to_hub_organization", "use_mps_device", "half_precision_backend", "fp16_backend"),
    *("fp16_opt_level", "sharded_ddp", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "mp_parameters"),
    *("xpu_backend", "use_ipex", "jit_mode_eval", "ray_scope", "past_index", "use_legacy_prediction_loop"),
    *("save_safetensors", "include_inputs_for_metrics", "include_tokens_per_second", "dispatch_batches"),
    *("split_batches", "adafactor", "group_by_length", "evaluate_during_training", "tpu_metrics_debug"),
)


def test_every_setting_of_transformers_is_known() -> None:
    for kind in (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments):
        names = {field.name for field in dataclasses.fields(kind)}
        assert names - OWN - OTHER_NAMES.keys() == set()
    assert {*REMOVED} - OWN - OTHER_NAMES.keys() == set()


def test_every_optimizer_and_schedule_of_transformers_is_known() -> None:
    def sentence_or_value(**settings: Any) -> str:
        try:
            if settings.get("optim", "").startswith("schedule_free"):
                settings["lr_scheduler_type"] = "constant"
            return f"taken as {TrainingArguments(eval_strategy='steps', **settings).optim}"
        except ValueError as error:
            return str(error)

    for field, names in (("optim", OptimizerNames), ("lr_scheduler_type", transformers.SchedulerType)):
        for name in names:
            said = sentence_or_value(**{field: name})
            assert said.startswith("taken") or "is not allowed; " in said
            assert "it must be one of" not in said, name
    assert {name for name in OptimizerNames if sentence_or_value(optim=name).startswith("taken")} == {
        *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adafactor", "sgd", "adamw_8bit", "adamw_bnb_8bit"),
        *("schedule_free_adamw", "schedule_free_sgd"),
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optim": "adamw_torch_fused"}, {"optim": "adamw_torch"}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"bf16": True, "fp16": False}, {"mixed_precision": "bf16"}),
        ({"fp16": True}, {"mixed_precision": "fp16"}),
        ({"tf32": True}, {"float32_matmul_precision": "high"}),
        ({"tf32": False}, {"float32_matmul_precision": "highest"}),
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}),
        ({"warmup_steps": 10.0}, {"warmup_steps": 10}),
        ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch", "do_eval": True}),
        ({"evaluate_during_training": True}, {"eval_strategy": "steps", "do_eval": True}),
        ({"eval_steps": 0.1, "save_steps": 0.2, "logging_steps": 0.3}, {"eval_steps": 0.1, "save_steps": 0.2}),
        ({"no_cuda": True}, {"use_cpu": True}),
        ({"per_gpu_train_batch_size": 4}, {"per_device_train_batch_size": 4}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, {}),
        ({"gradient_checkpointing": None, "output_dir": None, "lr_scheduler_kwargs": None, "disable_tqdm": None}, {}),
        ({"gradient_checkpointing": '{"every": 2}'}, {"gradient_checkpointing": {"every": 2}}),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"num_cycles": 2}'}, {"lr_scheduler_type": "cosine"}),
        ({"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}),
        ({"train_sampling_strategy": "sequential"}, {"shuffle": False}),
        ({"log_level": "passive", "average_tokens_across_devices": True, "data_seed": None}, {}),
        ({"push_to_hub": False, "hub_token": None, "fsdp": "", "deepspeed": None, "do_train": False}, {}),
    ],
)
def test_a_setting_that_means_the_same_is_taken(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    args = TrainingArguments(**settings)
    changed = {**TrainingArguments().to_dict(), **expected}
    assert {name: args.to_dict()[name] for name in expected} == expected
    if settings.keys() - expected.keys() <= OTHER_NAMES.keys():
        assert args.to_dict() == changed


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("fsdp", "full_shard", "use strategy='fsdp', or Trainer(strategy=FSDP(...)) for its options"),
        ("ddp_timeout", 60, "use Trainer(strategy=DDP(ddp_timeout=...))"),
        (
            "gradient_checkpointing_kwargs",
            {"context_fn": 1},
            "checkpointing is never reentrant; use gradient_checkpointing={'policy': ...}",
        ),
        ("use_liger_kernel", True, "use chunked_cross_entropy=True, which needs no other package"),
        ("average_tokens_across_devices", False, "the loss is always the mean over the tokens of all processes"),
        ("train_sampling_strategy", "curriculum", "use Trainer(train_sampler=...)"),
    ],
)
def test_a_setting_without_counterpart_is_refused(name: str, value: Any, sentence: str) -> None:
    for make in (lambda settings: TrainingArguments(**settings), TrainingArguments.from_dict):
        with pytest.raises(TypeError) as raised:
            make({name: value})
        assert str(raised.value) == f"TrainingArguments has no field {name!r}; {sentence}"


def test_settings_of_a_script_are_kept_for_it() -> None:
    assert not TrainingArguments().do_eval
    assert TrainingArguments(eval_strategy="epoch").do_eval  # as in transformers
    args = TrainingArguments(do_train=True, do_eval=True, do_predict=True, resume_from_checkpoint="out/checkpoint-2")
    assert (args.do_train, args.do_eval, args.do_predict) == (True, True, True)
    assert TrainingArguments(resume_from_checkpoint=False).resume_from_checkpoint is None
    with pytest.raises(ValueError, match=r"^resume_from_checkpoint=True is not allowed; give it to train\("):
        TrainingArguments(resume_from_checkpoint=True)


def test_every_attribute_of_transformers_arguments_is_known(tmp_path: Path) -> None:
    theirs = transformers.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True)
    names = {name for name in dir(theirs) if not name.startswith(("_", "set_", "to_", "is_torch"))}
    unknown = []
    for name in names - {"deepspeed_plugin", "hf_deepspeed_config", "framework", "default_optim", "fsdp_plugin_args"}:
        with contextlib.suppress(AttributeError):
            getattr(TrainingArguments(), name)
            continue
        if name not in ATTRIBUTES.keys() | OTHER_NAMES.keys():
            unknown.append(name)
    assert unknown == []


def test_trackers_have_transformers_names(tmp_path: Path) -> None:
    for name in {*TRACKER_NAMES, "tensorboard"} - {"aim"}:  # which has a callback of its own
        assert name in transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
    given = transformers.TrainingArguments(str(tmp_path), project="mine", run_name="a", use_cpu=True)
    given.report_to = ["wandb", "mlflow"]  # which transformers refuses where they are not installed
    args = TrainingArguments.from_transformers(given)
    assert (args.report_to, args.project, args.run_name) == (["wandb", "mlflow"], "mine", "a")
    given.project = "huggingface"  # transformers' default, for trackio only
    assert TrainingArguments.from_transformers(given).project is None


def test_a_reporter_without_a_tracker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^report_to=\['codecarbon'\] is not allowed; codecarbon is not available by"):
        TrainingArguments(report_to=["codecarbon"])
    with pytest.raises(ValueError, match="neptune is not available, since its service has been shut down; use another"):
        TrainingArguments(report_to=["neptune", "wandb"])
    with pytest.raises(ValueError, match=r"report_to='comet' is not allowed; use 'comet_ml'$"):
        TrainingArguments(report_to="comet")


def test_from_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = transformers.TrainingArguments(
        str(tmp_path),
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=True,
        warmup_steps=0.1,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=0.2,
        run_name="a",
        label_smoothing_factor=0.1,
        load_best_model_at_end=True,
        save_steps=0.4,
    )
    with caplog.at_level(logging.WARNING, logger="trainer_kit"):
        args = TrainingArguments.from_transformers(given)
    assert args == TrainingArguments(
        str(tmp_path),
        mixed_precision="bf16",
        use_cpu=True,
        warmup_ratio=0.1,
        learning_rate=1e-3,
        logging_steps=500,
        eval_strategy="steps",
        eval_steps=0.2,
        save_steps=0.4,
        per_device_eval_batch_size=8,
        label_smoothing_factor=0.1,
        load_best_model_at_end=True,
        disable_tqdm=given.disable_tqdm,
        dataloader_pin_memory=given.dataloader_pin_memory,
        report_to="none",
        run_name="a",
    )
    assert not [message for message in caplog.messages if "without effect" in message]


def test_from_transformers_lists_what_has_no_counterpart(tmp_path: Path) -> None:
    given = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), eval_delay=3, ddp_bucket_cap_mb=5, full_determinism=False, use_cpu=True
    )
    with pytest.raises(TypeError) as raised:
        TrainingArguments.from_transformers(given)
    assert [line.partition(":")[0] for line in str(raised.value).splitlines()[1:]] == [
        "  eval_delay=3",
        "  ddp_bucket_cap_mb=5",
    ]


def test_the_scripts_arguments_and_accelerators_state_stay_as_they_are(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState, PartialState

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, bf16=True)
    before = [dict(state._shared_state) for state in (PartialState, AcceleratorState)]
    TrainingArguments.from_transformers(args)
    assert [dict(state._shared_state) for state in (PartialState, AcceleratorState)] == before


def test_fields_of_a_subclass_are_the_scripts_own(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class OfAScript(transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]
        base_learning_rate: float = 1e-3
        nonfinite: str = "mine"

    args = OfAScript(str(tmp_path), base_learning_rate=0.1, use_cpu=True, generation_num_beams=3)
    made: Any = TrainingArguments.from_transformers(args)
    assert (made.generation_num_beams, made.base_learning_rate, made.nonfinite) == (3, 0.1, "stop")


def test_what_a_script_sets_beyond_the_fields_stays(tmp_path: Path) -> None:
    class Distillation(transformers.TrainingArguments):  # type: ignore[misc]
        def __init__(self, *args: Any, alpha: float = 0.5, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.alpha = alpha

    args = Distillation(str(tmp_path), alpha=0.3, use_cpu=True)
    args.temperature = 2.0
    assert args.device.type == "cpu"
    made: Any = TrainingArguments.from_transformers(args)
    assert (made.alpha, made.temperature) == (0.3, 2.0)
    plain = TrainingArguments.from_transformers(transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    assert {*vars(made)} - {*vars(plain)} == {"alpha", "temperature"}


def test_from_transformers_takes_nothing_else() -> None:
    with pytest.raises(TypeError, match="takes transformers' TrainingArguments, but got a TrainingArguments"):
        TrainingArguments.from_transformers(TrainingArguments())
    with pytest.raises(TypeError, match="but got a dict"):
        settings_of({}, [])


def test_only_changed_options_of_accelerate_are_refused() -> None:
    default = transformers.TrainingArguments(output_dir="x").accelerator_config
    settings: dict[str, Any]
    for harmless in (default, None, {}, {"even_batches": True}, '{"split_batches": false}'):
        settings = {"accelerator_config": harmless}
        assert TrainingArguments(**settings) == TrainingArguments()
    for changed in ({"split_batches": True}, {"dispatch_batches": False}, {"nonsense": 1}, "config.json"):
        settings = {"accelerator_config": changed}
        with pytest.raises(TypeError, match="batches are dealt to the processes exactly"):
            TrainingArguments(**settings)


def test_a_generation_config_is_a_dict() -> None:
    config = transformers.GenerationConfig(num_beams=2)
    with pytest.raises(ValueError, match=r"^generation_config=GenerationConfig [^\n]* is not allowed; give a dict of"):
        TrainingArguments(generation_config=config)  # type: ignore[arg-type]
    assert TrainingArguments(generation_config={"num_beams": 2}).generation_config == {"num_beams": 2}


@pytest.mark.parametrize("name", ["set_training", "set_dataloader", "to_json_string", "to_sanitized_dict"])
def test_methods_of_its_arguments_have_a_sentence(name: str) -> None:
    assert hasattr(transformers.TrainingArguments, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': (use|give)"):
        getattr(TrainingArguments(), name)
