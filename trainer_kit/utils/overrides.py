"""Names of transformers' and Lightning's classes that trainer_kit does not call, and their replacements."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec

import torch

from trainer_kit.utils.user_warnings import warn

_LOSS = (
    "give Trainer(compute_loss=function); function(model, batch) returns the mean loss over the batch's items, or "
    "(loss_sum, count)"
)
_PASSES = (
    "give Trainer(compute_loss=function) for the loss, a Callback with on_pre_optimizer_step for the gradients and "
    "on_substep_end or on_step_end for what follows, and a Strategy with its own backward for the backward pass"
)
_DATA = (
    "give Trainer(train_dataset=, data_collator=), with Trainer(train_sampler=) for another order, a DataLoader as "
    "train_dataset, or ReadyBatches of a loader that makes whole batches; batch size, workers and the order of samples "
    "are in TrainingArguments (per_device_train_batch_size, dataloader_num_workers, shuffle, group_by_length, seed)"
)
_EVAL_DATA = (
    "give Trainer(eval_dataset=), a dataset, a DataLoader or a dict of several, with Trainer(eval_data_collator=), or "
    "predict(dataset); the batch size is TrainingArguments(per_device_eval_batch_size=)"
)
_EVALUATION = (
    "give Trainer(metrics=) or Trainer(compute_metrics=) for the metrics, Trainer(compute_loss=) for the loss, and a "
    "Callback with on_evaluate for what follows an evaluation"
)
_PREDICTIONS = (
    "give Trainer(preprocess_logits_for_metrics=) for what metrics get of the outputs, return (loss, outputs) from "
    "Trainer(compute_loss=) for other outputs, set TrainingArguments(label_names=) for other labels, and "
    "TrainingArguments(predict_with_generate=True) for generated texts"
)
_COLLATING = "give Trainer(data_collator=) for what a batch holds; a Strategy's to_device moves it"
_COLUMNS = "set TrainingArguments(remove_unused_columns=False) to keep all columns, and give Trainer(data_collator=)"
_OPTIMIZER = "give Trainer(optimizer=), made with the parameter groups that you want, or TrainingArguments(optim=)"
_SCHEDULER = (
    "give Trainer(lr_scheduler=), a scheduler of optimizer= or a function that makes one from an optimizer; "
    "trainer.run.total_steps is the number of steps when the function is called"
)
_BOTH = "give Trainer(optimizer=, lr_scheduler=); the schedule may be a function that makes one from an optimizer"
_RATE = "each record has learning_rate; trainer.run.optimizer.param_groups and trainer.run.lr_scheduler hold the rest"
_RECORDS = (
    "call log_mean(name, value) in the model or compute_loss for a mean over the steps, or return a dict with 'loss' "
    "and its parts; a Callback's metrics(run) adds numbers to each record, and its on_log(run, record) and "
    "on_evaluate(run, metrics) get what is logged"
)
_METRICS = "log_metrics(split, metrics) prints them"
_SAVING = (
    "put objects with state_dict and load_state_dict into run.stateful to have them in each checkpoint, or give a "
    "Callback with state_dict, or with on_save for files of its own: on_save comes when the files of a checkpoint are "
    "written, maybe some steps later, unless async_save=False"
)
_LOADING = (
    "train(resume_from_checkpoint=) restores what a checkpoint holds; a Callback with load_state_dict, or an object in "
    "run.stateful, restores its own part"
)
_BEST = "set TrainingArguments(metric_for_best_model=, greater_is_better=, load_best_model_at_end=)"
_CALLBACKS = "give Trainer(callbacks=); a transformers TrainerCallback goes through callbacks.from_transformers"
_HARDWARE = "give Trainer(strategy=), a Strategy that overrides prepare, autocast or what else differs"
_CLIPPING = (
    "set TrainingArguments(max_grad_norm=, max_grad_value=), or give a Callback with on_pre_optimizer_step, which sees "
    "the gradients"
)
_COUNTS = "return (loss_sum, count) from compute_loss to count a batch's items differently"
_TOKENS = "each record has the tokens; trainer.run.state.tokens counts them"
_FLOPS = "each record has the FLOP/s of the model and of the hardware"
_MODEL = "give Trainer(model=) or Trainer(model_init=); trainer.model holds the model"
_TOKENIZER = "give Trainer(processing_class=); trainer.processing_class holds it"
_HUB = (
    "give Trainer(callbacks=[PushToHub('me/my-model')]) of trainer_kit.callbacks, which pushes each checkpoint with a "
    "model card; create_model_card() writes the card alone"
)
_SEARCH = "make a Trainer for each trial, with Trainer(model_init=)"
_STATE = (
    "trainer.run.state holds the counters (step, epochs, best_metric) and trainer.run.requests the flags log, "
    "evaluate, save and stop; read_log of trainer_kit.callbacks reads the history"
)
_BATCH_SIZE = "set TrainingArguments(per_device_train_batch_size=, gradient_accumulation_steps=, auto_find_batch_size=)"
_LOOP = "train() has its own loop; give a Callback with the hook that you need"
_NEFTUNE = "set TrainingArguments(neftune_noise_alpha=)"

_BY_REPLACEMENT = {
    _LOSS: "compute_loss compute_loss_func label_smoother can_return_loss _loss_shifts_labels",
    _PASSES: "training_step loss_is_scaled_for_ga current_gradient_accumulation_steps",
    _DATA: "get_train_dataloader _get_dataloader _get_train_sampler train_dataset num_examples",
    _EVAL_DATA: "get_eval_dataloader get_test_dataloader _get_eval_sampler eval_dataset _eval_dataloaders",
    _EVALUATION: (
        "evaluate evaluation_loop prediction_loop _evaluate _nested_gather _pad_across_processes gather_function "
        "compute_metrics metrics compute_objective"
    ),
    _PREDICTIONS: "prediction_step preprocess_logits_for_metrics label_names",
    _COLLATING: "data_collator collate _prepare_input _prepare_inputs",
    _COLUMNS: (
        "_get_collator_with_removed_columns _remove_unused_columns _set_signature_columns_if_needed _signature_columns"
    ),
    _OPTIMIZER: (
        "optimizer create_optimizer get_optimizer_cls_and_kwargs optimizer_cls_and_kwargs get_decay_parameter_names"
    ),
    _BOTH: "create_optimizer_and_scheduler",
    _SCHEDULER: "lr_scheduler create_scheduler _created_lr_scheduler",
    _RATE: "_get_learning_rate get_learning_rates get_optimizer_group",
    _RECORDS: "log _loggers_initialized",
    _METRICS: "metrics_format",
    _SAVING: (
        "save_model _save _save_tpu _save_checkpoint _save_rng_state _save_optimizer_and_scheduler "
        "_save_scaler _rotate_checkpoints _sorted_checkpoints _get_output_dir"
    ),
    _LOADING: (
        "_load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler _load_callback_state "
        "_issue_warnings_after_load"
    ),
    _BEST: "_determine_best_metric _load_best_model",
    _CALLBACKS: "callback_handler add_callback pop_callback remove_callback",
    _HARDWARE: (
        "accelerator create_accelerator_and_postprocess _build_accelerator_args _wrap_model _move_model_to_device "
        "compute_loss_context_manager autocast_smart_context_manager _prepare_context_parallel_inputs "
        "place_model_on_device is_model_parallel deepspeed is_deepspeed_enabled is_fsdp_enabled is_fsdp_xla_enabled "
        "is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled get_sp_size get_cp_size get_tp_size "
        "_defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters is_distributed_loading_by_transformers"
    ),
    _CLIPPING: "_clip_grad_norm _get_grad_norm _mixed_mesh_grad_norm _has_mixed_mesh_grads _mixed_mesh_grads",
    _COUNTS: "get_batch_samples _get_num_items_in_batch model_accepts_loss_kwargs",
    _TOKENS: "num_tokens _track_num_input_tokens _initial_num_input_tokens_seen",
    _FLOPS: "store_flos floating_point_ops current_flos",
    _MODEL: "model model_wrapped model_init call_model_init get_num_trainable_parameters",
    _TOKENIZER: "processing_class tokenizer",
    _HUB: ("init_hf_repo push_to_hub _push_from_checkpoint _finish_current_push hub_model_id push_in_progress"),
    _SEARCH: (
        "hyperparameter_search _hp_search_setup _report_to_hp_search _tune_save_checkpoint hp_name hp_space "
        "hp_search_backend objective _trial"
    ),
    _STATE: "state control is_in_train _globalstep_last_logged _initial_global_step",
    _BATCH_SIZE: "_train_batch_size _update_auto_batch_size get_total_train_batch_size",
    _LOOP: (
        "_inner_training_loop _init_training_state _prepare_for_training _run_epoch _finalize_training end "
        "_maybe_log_save_evaluate set_initial_training_values _validate_args _total_loss_scalar _tr_loss "
        "_memory_tracker model_preparation_time _attn_mask_causal_checked"
    ),
    _NEFTUNE: "neftune_hook_handle neftune_noise_alpha",
}
REPLACEMENTS = {name: sentence for sentence, names in _BY_REPLACEMENT.items() for name in names.split()}
"""Replacement for each method or attribute of transformers' Trainer."""

_OWN_METHODS = frozenset(
    {
        "evaluate", "save_model", "model", "processing_class", "train_dataset", "eval_dataset", "optimizer",
        "lr_scheduler",
    }
)  # fmt: skip
"""Names of `REPLACEMENTS` that the Trainer has here too: those of a subclass are not called in training."""

_OWN_ATTRIBUTES = frozenset(
    {
        "collate", "compute_loss", "compute_metrics", "lr_scheduler", "metrics", "optimizer",
        "preprocess_logits_for_metrics",
    }
)  # fmt: skip
"""Names of `REPLACEMENTS` that trainer_kit's Trainer sets, and reads when `train` is called."""

_FREE_ATTRIBUTES = frozenset({"end", "num_tokens", "objective"})
"""Names of `REPLACEMENTS` that are methods of transformers' Trainer; a subclass may call data of its own so."""

_FIXED = {
    "events": "the callbacks",
    "run": "the model, the strategy and the state of the run",
}
"""Attributes of a made Trainer that no other kind of object may replace, and what they hold."""


def check_class(kind: type, base: type) -> None:
    """Refuse a Trainer class with methods that training would not call.

    Args:
        kind: Class of a Trainer.
        base: trainer_kit's Trainer, which is `kind` or one of its bases.

    Raises:
        TypeError: If `kind` or one of its bases defines a name of `REPLACEMENTS`, or is transformers' Trainer.
    """
    if any(each.__name__ == "Trainer" and each.__module__.startswith("transformers.") for each in kind.__mro__):
        raise TypeError(f"{kind.__name__} derives from transformers' Trainer too; derive it from trainer_kit's alone")
    found = {}
    for name in REPLACEMENTS:
        owner = next((each for each in kind.__mro__ if name in vars(each)), None)
        if owner is not None and not (owner in base.__mro__ and name in _OWN_METHODS):
            found[name] = "" if owner is kind else f" (in {owner.__name__})"
    if found:
        defined = ", ".join(f"{name}{place}" for name, place in found.items())
        todo = "; ".join(dict.fromkeys(REPLACEMENTS[name] for name in found))
        raise TypeError(f"{kind.__name__} defines {defined}, which training here does not call: {todo}")


def check_attribute(trainer: object, name: str, value: object) -> None:
    """Refuse an attribute of a Trainer that training would not read, or that it could not do without.

    Args:
        trainer: The Trainer.
        name: Name of the attribute that is set.
        value: Its value.

    Raises:
        AttributeError: If only transformers' Trainer has the attribute, or it holds a part of the Trainer.
    """
    kind, is_made = type(trainer), "_initial" in vars(trainer)
    if name in _FIXED and is_made and not isinstance(value, type(vars(trainer)[name])):
        raise AttributeError(f"{kind.__name__}.{name} is set, which holds {_FIXED[name]}; choose another name")
    if name in REPLACEMENTS and name not in _OWN_ATTRIBUTES | _FREE_ATTRIBUTES:
        raise AttributeError(f"{kind.__name__}.{name} is set, which training here does not read: {REPLACEMENTS[name]}")


_ARGUMENTS = {
    "tokenizer": "processing_class=",
    "optimizers": "optimizer= and lr_scheduler=, each by its name",
    "compute_loss_func": "compute_loss=function; function(model, batch) returns the mean loss, or (loss_sum, count)",
    "optimizer_cls_and_kwargs": "optimizer=, made with that class",
    "peft_config": "model=peft.get_peft_model(model, config)",
}
"""Arguments of other Trainers, and those of this one that stand for them."""

Parameters = ParamSpec("Parameters")


def explains_arguments(settings: Iterable[str]) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Return a decorator that makes a Trainer's constructor explain unknown arguments.

    Args:
        settings: Names that belong to `TrainingArguments`.
    """
    settings = frozenset(settings)

    def decorate(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
        known = inspect.signature(init).parameters

        @functools.wraps(init)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            unknown = [name for name in kwargs if name not in known]
            if unknown:
                raise TypeError("; ".join(_argument_sentence(name, settings) for name in unknown))
            init(*args, **kwargs)

        return checked

    return decorate


def _argument_sentence(name: str, settings: Collection[str]) -> str:
    if name in _ARGUMENTS:
        return f"Trainer has no argument {name!r}: give {_ARGUMENTS[name]}"
    if name in REPLACEMENTS:
        return f"Trainer has no argument {name!r}: {REPLACEMENTS[name]}"
    if name in settings:
        return f"Trainer has no argument {name!r}: give Trainer(args=TrainingArguments({name}=...))"
    return f"Trainer has no argument {name!r}"


def missing_attribute(kind: type, name: str, is_made: bool) -> AttributeError:
    """Return the error for an attribute that a Trainer does not have, with what stands for it.

    Args:
        kind: Class of the Trainer.
        name: Name of the attribute.
        is_made: Whether the Trainer's constructor has run.
    """
    if not is_made and (hasattr(kind, name) or name in {"run", *_OWN_ATTRIBUTES}):
        text = f"{kind.__name__}.{name} is read before Trainer.__init__ has run; call super().__init__(...) first"
        return AttributeError(text, name=name)
    todo = f": {REPLACEMENTS[name]}" if name in REPLACEMENTS else ""
    return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}{todo}", name=name)


_HOOK_OF_LIGHTNING = re.compile(
    r"(on|configure)_\w+|\w+_(step|dataloader)|setup|teardown|prepare_data|backward|optimizer_zero_grad|"
    r"transfer_batch_to_device"
)
"""Methods of a LightningModule that Lightning's Trainer calls; `log` and others are for the user to call."""


def check_lightning_module(model: torch.nn.Module, has_loss: bool, has_optimizer: bool) -> None:
    """Refuse a LightningModule whose own loss or optimizer training would not use, and warn of its other hooks.

    Args:
        model: The user's model.
        has_loss: Whether the caller gives the Trainer `compute_loss`.
        has_optimizer: Whether the caller gives the Trainer `optimizer`.

    Raises:
        TypeError: If the module defines `training_step` or `configure_optimizers` without a replacement.
    """
    overrides = _lightning_overrides(type(model))
    todo = []
    if "training_step" in overrides and not has_loss:
        todo.append("training_step: give compute_loss=lambda module, batch: module.training_step(batch, 0)")
    if "configure_optimizers" in overrides and not has_optimizer:
        todo.append("configure_optimizers: give optimizer=, and lr_scheduler= where it has a schedule")
    if todo:
        raise TypeError(
            f"model is a LightningModule ({type(model).__name__}), of which the Trainer calls forward alone, and not "
            + " or ".join(todo)
        )
    others = [name for name in overrides if name not in ("training_step", "configure_optimizers")]
    others = [name for name in others if _HOOK_OF_LIGHTNING.fullmatch(name)]
    if others:
        warn(
            f"training here does not call {', '.join(others)} of the LightningModule {type(model).__name__}; callbacks "
            "have hooks, eval_loss and metrics= stand for validation_step, and datasets are arguments of the Trainer"
        )


def _lightning_overrides(kind: type) -> list[str]:
    """Return the names of LightningModule that a class or its bases override; none for other classes."""
    bases = kind.__mro__
    for number, each in enumerate(bases):
        if each.__name__ == "LightningModule" and "lightning" in each.__module__:
            own = {name for base in bases[:number] for name in vars(base)}
            return sorted(own & set(dir(each)) - set(dir(torch.nn.Module)))
    return []
