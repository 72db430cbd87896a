"""`TrainingArguments`: the validated settings of a training run, and their files."""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

from trainer_kit.config import environment
from trainer_kit.config.checkpointing_options import CheckpointingOptions
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.config.field_types import (
    Artifacts,
    Beta,
    Count,
    CountOrFraction,
    CountOrZero,
    Factor,
    Folder,
    Interval,
    Lengths,
    MetricInputs,
    Name,
    Names,
    NormLimit,
    NotNegative,
    Numbers,
    OptimizerOptions,
    Positive,
    Ratio,
    Reporters,
    Seed,
    Size,
    Steps,
    StepsOrFraction,
)
from trainer_kit.config.optimizer_options import check_schedule, optimizer_options
from trainer_kit.config.parser_hints import FLAG, JSON_TEXT, PRECISION
from trainer_kit.config.reporters import REPORTERS, check_reporters, chosen_reporters, reporters_as_data
from trainer_kit.config.sources import ArgumentSources, with_other_names
from trainer_kit.config.validation import check_values, read_options


@with_other_names
@dataclasses.dataclass
class TrainingArguments(ArgumentSources):
    """Settings of a training run. Fields have the names of transformers where the meaning is the same.

    Steps are optimizer steps. The constructor checks all values; later assignments are not checked
    (`dataclasses.replace(args)` checks again). The constructor also replaces None in `eval_steps`,
    `metric_for_best_model` and `greater_is_better` by the values given below. If `dataclasses.replace` changes the
    metric, therefore give `greater_is_better=None` too.

    Args:
        output_dir: Folder of checkpoints and logs; created if missing.
        num_train_epochs: Training epochs; may be fractional.
        max_steps: Steps to train; -1: as many as `num_train_epochs` needs. With a number, the schedule counts steps,
            even if a resume changes the number of samples of a step.
        per_device_train_batch_size: Samples of one micro-batch on one process.
        auto_find_batch_size: Whether to split micro-batches into halves, quarters and so on until they fit into the
            memory of all devices, starting from an estimate. A step keeps its samples and accumulates gradients over
            more passes; evaluation batches are halved too. The result stays for the whole training and its resumes.
            Before training, the model and `compute_loss` are called on tensors without values. A step that does not fit
            is repeated, with its `on_step_begin` and `on_substep_end`.
        per_device_eval_batch_size: Samples of one evaluation batch on one process; None: the training batch size.
        gradient_accumulation_steps: Micro-batches of one step.
        on_resize: What a resume under another number of processes does with the samples of a step: "keep" them, dealt
            evenly to the processes, so that steps and schedule stay as they are, or "scale" them with the number of
            processes. Where batch size times accumulation has changed too, that counts.
        learning_rate: Peak learning rate.
        layer_lr_decay: Factor of the learning rate from each block that the model repeats to the one below; the head
            has `learning_rate`. 1.0: all parameters have it.
        weight_decay: Weight decay of all parameters except biases and parameters of normalization layers.
        adam_beta1: Decay rate of AdamW's first moment.
        adam_beta2: Decay rate of AdamW's second moment.
        adam_epsilon: Constant that AdamW adds to its denominator.
        optim: Name of the optimizer, see `trainer_kit.optim.make_optimizer`.
        optim_args: Options of the optimizer, comma-separated, such as "momentum=0.9,nesterov=true": momentum, dampening
            and nesterov of "sgd"; momentum, nesterov and ns_steps of "muon". None: the defaults of torch.
        lr_scheduler_type: Name of the schedule, see `trainer_kit.optim.make_scheduler`.
        lr_scheduler_kwargs: Numeric options of the schedule, such as `{"num_cycles": 2}`.
        warmup_steps: Steps in which the learning rate rises from 0; below 1: as `warmup_ratio`; 0: use that. If a
            resume changes the samples of a step, the warmup and `num_decay_steps` keep their numbers of samples.
        warmup_ratio: Warmup as a fraction of all steps.
        max_grad_norm: Largest total norm of the gradients, by scaling; 0: no limit.
        max_grad_value: Largest absolute value of a gradient's element, by clipping; None: no limit.
        mixed_precision: Precision of forward passes: "no", "fp16", "bf16", or "fp8": bf16, and the products of hidden
            linear layers in 8 bits by torchao, on NVIDIA GPUs of compute capability 8.9 or later (Ada, Hopper); only
            faster with `torch_compile`. Default: the launcher's, else "no".
        float32_matmul_precision: Precision of matrix products of float32 tensors: "highest" is float32; "high" allows
            TF32, with 10 bits of mantissa, which NVIDIA GPUs from Ampere on compute about 8 times as fast; "medium"
            allows bfloat16 too. See `torch.set_float32_matmul_precision`. None: as the program has set it.
        channels_last: Whether convolutions' weights, and floating-point tensors of batches with 4 dimensions (samples,
            channels, height, width), lie in memory with the channels last, for which GPUs and CPUs have faster
            convolutions; with 5 dimensions too. Shapes and checkpoints are the same, and results up to rounding; but
            torch's dropout drops other elements of such data.
        seed: Seed of the order of samples, of dropout and of all other random numbers of a run.
        torch_compile: Whether to compile the model with `torch.compile`, or a dict of its options: "mode", "backend",
            "dynamic" and "fullgraph". With "regional": True, only the blocks that the model repeats are compiled, and
            their code once, so that training starts sooner. See `CompileOptions`.
        gradient_checkpointing: Whether to recompute activations in the backward pass, to save memory, or a dict of
            options: "modules" (patterns of names), "every" (2: every second one recomputes) and "policy" ("all", or
            "save_matmuls" to keep what is slow to compute). See `CheckpointingOptions`. Without options, a model that
            has `gradient_checkpointing_enable` recomputes as that method does it, another one in its repeated blocks.
        chunked_cross_entropy: Whether a causal language model of transformers computes its logits and its loss in
            chunks of tokens, to save memory. Loss and gradients are the same up to rounding. Not with `compute_loss`.
        label_smoothing_factor: Share of the uniform distribution in the labels of the model's own loss, in training and
            evaluation; see `trainer_kit.loss.label_smoothing`. Not with `compute_loss` or `chunked_cross_entropy`.
        neftune_noise_alpha: Scale of the noise on the input embeddings in training, see `callbacks.Neftune`; None: off.
        logging_strategy: When to log a record: every `logging_steps` ("steps"), after each "epoch" and at the end, or
            "no".
        logging_steps: Steps between two records; below 1: as a fraction of all steps.
        logging_first_step: Whether to log step 1 too.
        eval_strategy: When to evaluate: every `eval_steps` ("steps") or after each "epoch", and after the last step, or
            "no".
        eval_steps: Steps between two evaluations; below 1: as a fraction of all steps; None: `logging_steps`.
        eval_on_start: Whether to evaluate before the first step too; this result is never the best one.
        label_names: Columns that metrics get as labels, in this order; None: "labels" or "label", or "start_positions"
            and "end_positions"; []: none, and `predict` needs none to call `compute_loss`. What a loss counts does not
            depend on it.
        eval_do_concat_batches: Whether `compute_metrics` and `predict` get the batches joined to arrays; False: lists
            with an entry for each batch.
        batch_eval_metrics: Whether `compute_metrics(batch, compute_result=)` gets one batch at a time, see
            `trainer_kit.loop.batch_metrics`.
        include_for_metrics: What `compute_metrics` gets in addition: "inputs" (the main input) and "loss".
        predict_with_generate: Whether metrics and `predict` get token ids that a transformers model generates, in
            place of its logits. A causal model generates from the tokens before each sample's first label.
        generation_max_length: Longest text in tokens, without the prompt of a causal model; None: as
            `generation_config` or the model's own says.
        generation_num_beams: Number of beams; None: as for `generation_max_length`.
        generation_config: Further arguments of the model's `generate` by name; None: none.
        save_strategy: When to save a checkpoint: every `save_steps` ("steps"), after each "epoch", after each
            evaluation with a new "best" metric, every `save_minutes` ("minutes"), or "no".
        save_steps: Steps between two checkpoints; below 1: as a fraction of all steps.
        save_minutes: Minutes between two checkpoints, in addition to any `save_strategy` but "no"; None: off.
        async_save: Whether training continues while a checkpoint is written. It pauses only to copy the state to host
            memory, which is reused for the next checkpoint. False: training waits, and no copy is needed.
        save_failures: Reaction to a checkpoint that cannot be written (a full disk): "warn" and try again when the next
            one is due, or "raise". A failure of the last checkpoint always raises.
        save_total_limit: Number of newest checkpoints to keep; None: all. The best ones, those of `save_keep_every`,
            and the one that the run resumed from are kept in addition.
        save_best_limit: Number of checkpoints to keep for their `metric_for_best_model`.
        save_keep_every: Interval of checkpoints to keep permanently (10: each 10th checkpoint); None: none.
        max_shard_size: Largest size of a file of weights: bytes, or a string such as "5GB" or "200MiB".
        load_best_model_at_end: Whether to load the best checkpoint's weights when training ends.
        metric_for_best_model: Metric that defines "best", with or without the prefix `eval_`. None: "eval_loss" if
            `load_best_model_at_end`, `save_strategy="best"` or "reduce_lr_on_plateau" needs a metric.
        greater_is_better: Whether a greater metric is better; None: True unless the metric's name ends with "loss".
        shuffle: Whether to shuffle the samples of each epoch; False: the order of the dataset. A sampler or DataLoader
            has an order of its own.
        remove_unused_columns: Whether to leave out columns of samples that neither the model nor the collator takes;
            see `data.columns`.
        dataloader_num_workers: Number of processes that load data; 0: the training process loads it.
        dataloader_prefetch_factor: Batches that each worker reads ahead; None: 2.
        dataloader_multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver"; None: as Python
            does.
        dataloader_timeout: Seconds that a worker may take for a batch before training ends with an error that names
            the worker; 0: no limit.
        dataloader_drop_last: Whether to drop the last batch of an epoch if it is not full.
        dataloader_pin_memory: Whether to put batches into page-locked memory, from which copies to a GPU are faster.
        group_by_length: Whether to batch samples of similar length, which saves padding.
        pad_to_multiple_of: Pad sequences to a multiple of this number of tokens; None: to the longest of the batch.
        pad_to_lengths: Pad sequences to the smallest of these lengths that fits the batch's longest; None: as
            `pad_to_multiple_of`, or to the next power of two if each new shape costs a compilation (TPU).
        report_to: Where records go: a list of the files "tensorboard", "jsonl" and "html" (a page of plots, created
            from "jsonl" at the end) and of trackers, by name ("wandb", "mlflow", "trackio", "comet_ml", "clearml",
            "dvclive", "swanlab", "aim") or as a `trainer_kit.trackers.Tracker`; "all": the files; or "none".
        report_artifacts: What trackers store when training ends: "report" (the page), and the "best" and the "last"
            checkpoint.
        run_name: Name of the run at trackers; None: that of `output_dir`.
        project: Project of the run at trackers; None: the tracker's own, or that of its environment variable.
        logging_dir: Folder of TensorBoard's files; None: `output_dir`/logs.
        profile: First and last step to profile, such as "10:20"; see `callbacks.Profiler`. None: no profile. Default:
            the launcher's, else None.
        disable_tqdm: Whether to hide the progress bar.
        log_level: "debug", "info", "warning", "error" or "critical".
        use_cpu: Whether to train on the CPU even if there is an accelerator; None: as the launcher says, else False.
        strategy: Hardware to use: "auto" follows the launcher's environment, "single" uses one device, "ddp" the
            processes of one machine, "multinode" those of several machines, "fsdp" shards the model over the
            processes, "xla" uses all TPU devices. For further settings, give the Trainer `strategy=DDP(...)` instead.
        nonfinite: Reaction to a loss or gradient that is not finite: "stop" training, "skip" the step (if its gradient
            is not finite), "rollback" to the newest checkpoint and skip the samples of that step, or "ignore" it.
        max_rollbacks: Number of rollbacks with `nonfinite="rollback"` before training stops.
        resume_from_checkpoint: Checkpoint, or folder of a run, that `train` resumes from if its own argument is None;
            None: the default of `train`.
        do_train: For a script that reads it; the Trainer does not.
        do_eval: As `do_train`; True if `eval_strategy` is not "no".
        do_predict: As `do_train`.

    Raises:
        TypeError: If a field is unknown or a value has the wrong type; the message names the nearest known field.
        ValueError: If a value is not allowed, alone or in combination with others.
    """

    output_dir: Folder = "trainer_output"
    num_train_epochs: Positive = 3.0
    max_steps: Steps = -1
    per_device_train_batch_size: Count = 8
    auto_find_batch_size: bool = False
    per_device_eval_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1
    on_resize: Literal["keep", "scale"] = "keep"
    learning_rate: NotNegative = 5e-5
    layer_lr_decay: Factor = 1.0
    weight_decay: NotNegative = 0.0
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.999
    adam_epsilon: Positive = 1e-8
    optim: Literal[
        "adamw_torch", "sgd", "adafactor", "muon", "adamw_8bit", "schedule_free_adamw", "schedule_free_sgd"
    ] = "adamw_torch"
    optim_args: OptimizerOptions | None = None
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "inverse_sqrt",
        "reduce_lr_on_plateau",
        "constant",
        "constant_with_warmup",
        "polynomial",
        "one_cycle",
        "warmup_stable_decay",
    ] = "linear"
    lr_scheduler_kwargs: Numbers = dataclasses.field(default_factory=dict, metadata=JSON_TEXT)
    warmup_steps: CountOrFraction = 0
    warmup_ratio: Ratio = 0.0
    max_grad_norm: NormLimit = 1.0
    max_grad_value: Positive | None = None
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = dataclasses.field(
        default_factory=environment.mixed_precision,  # type: ignore[arg-type]  # checked like any other value
        metadata=PRECISION,
    )
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    channels_last: bool = False
    seed: Seed = 42
    torch_compile: bool | dict[str, Any] = False
    gradient_checkpointing: bool | dict[str, Any] = False
    chunked_cross_entropy: bool = False
    label_smoothing_factor: Ratio = 0.0
    neftune_noise_alpha: Positive | None = None
    logging_strategy: Literal["steps", "epoch", "no"] = "steps"
    logging_steps: StepsOrFraction = 50
    logging_first_step: bool = False
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: StepsOrFraction | None = None
    eval_on_start: bool = False
    label_names: Names | None = None
    eval_do_concat_batches: bool = True
    batch_eval_metrics: bool = False
    include_for_metrics: MetricInputs = dataclasses.field(default_factory=list)
    predict_with_generate: bool = False
    generation_max_length: Count | None = None
    generation_num_beams: Count | None = None
    generation_config: dict[str, Any] | None = None
    save_strategy: Literal["steps", "epoch", "best", "minutes", "no"] = "steps"
    save_steps: StepsOrFraction = 500
    save_minutes: Positive | None = None
    async_save: bool = True
    save_failures: Literal["warn", "raise"] = "warn"
    save_total_limit: Count | None = None
    save_best_limit: Count = 1
    save_keep_every: Count | None = None
    max_shard_size: Size = "5GB"
    load_best_model_at_end: bool = False
    metric_for_best_model: Name | None = None
    greater_is_better: bool | None = dataclasses.field(default=None, metadata=FLAG)
    shuffle: bool = True
    remove_unused_columns: bool = True
    dataloader_num_workers: CountOrZero = 0
    dataloader_prefetch_factor: Count | None = None
    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    dataloader_timeout: NotNegative = 0.0
    dataloader_drop_last: bool = False
    dataloader_pin_memory: bool = True
    group_by_length: bool = False
    pad_to_multiple_of: Count | None = None
    pad_to_lengths: Lengths | None = None
    report_to: Reporters = dataclasses.field(default_factory=lambda: list(REPORTERS))
    report_artifacts: Artifacts = dataclasses.field(default_factory=list)
    run_name: Name | None = None
    project: Name | None = None
    logging_dir: Folder | None = None
    profile: Interval | None = dataclasses.field(default_factory=environment.profile)
    disable_tqdm: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    use_cpu: bool | None = dataclasses.field(default=None, metadata=FLAG)
    strategy: Literal["auto", "single", "ddp", "multinode", "fsdp", "xla"] = "auto"
    nonfinite: Literal["stop", "skip", "rollback", "ignore"] = "stop"
    max_rollbacks: Count = 3
    resume_from_checkpoint: Folder | None = None
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False

    def __post_init__(self) -> None:
        check_values(self)
        if self.use_cpu is None:
            self.use_cpu = environment.use_cpu()
        self._check_together()
        self._resolve()

    def _check_together(self) -> None:
        if self.load_best_model_at_end and self.save_strategy == "no":
            raise ValueError(
                "load_best_model_at_end=True has no checkpoint to load with save_strategy='no'; "
                "set save_strategy to 'best', 'steps', 'epoch' or 'minutes'"
            )
        if 0 < self.warmup_steps < 1 and self.warmup_ratio not in (0, self.warmup_steps):
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} contradict each other; set one "
                "of them"
            )
        needs_metric = "load_best_model_at_end=True" if self.load_best_model_at_end else "save_strategy='best'"
        if self.eval_strategy == "no" and (self.load_best_model_at_end or self.save_strategy == "best"):
            raise ValueError(
                f"{needs_metric} needs evaluations, but eval_strategy='no'; set eval_strategy to 'steps' or 'epoch'"
            )
        if self.save_strategy == "minutes" and self.save_minutes is None:
            raise ValueError("save_strategy='minutes' needs save_minutes; set it, such as save_minutes=30")
        if self.save_strategy == "no" and self.save_minutes is not None:
            raise ValueError(
                f"save_minutes={self.save_minutes} contradicts save_strategy='no'; set save_strategy='minutes'"
            )
        if self.nonfinite == "rollback" and self.save_strategy == "no":
            raise ValueError(
                "nonfinite='rollback' needs checkpoints to go back to; set save_strategy to another than 'no'"
            )
        self._check_workers()
        optimizer_options(self.optim, self.optim_args)
        check_schedule(self.lr_scheduler_type, self.optim, self.eval_strategy)
        CompileOptions.read(self.torch_compile)
        read_options(CheckpointingOptions, "gradient_checkpointing", self.gradient_checkpointing)
        if self.strategy == "xla" and self.use_cpu:
            raise ValueError("strategy='xla' and use_cpu=True contradict each other; set one of them")
        if self.pad_to_lengths is not None and self.pad_to_multiple_of is not None:
            raise ValueError(
                f"pad_to_lengths={self.pad_to_lengths} and pad_to_multiple_of={self.pad_to_multiple_of} contradict "
                "each other; set one of them"
            )
        check_reporters(self)

    def _check_workers(self) -> None:
        for name in ("dataloader_prefetch_factor", "dataloader_multiprocessing_context"):
            if getattr(self, name) is not None and not self.dataloader_num_workers:
                raise ValueError(f"{name}={getattr(self, name)!r} needs workers; set dataloader_num_workers")

    def _resolve(self) -> None:
        """Replace short forms and None by the values that they stand for."""
        if 0 < self.warmup_steps < 1:
            self.warmup_steps, self.warmup_ratio = 0, self.warmup_steps
        for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
            value = getattr(self, name)
            setattr(self, name, int(value) if value is not None and value == int(value) else value)
        self.output_dir = os.path.expanduser(self.output_dir)
        if self.logging_dir is not None:
            self.logging_dir = os.path.expanduser(self.logging_dir)
        self.report_to = chosen_reporters(self.report_to)
        self.do_eval = self.do_eval or self.eval_strategy != "no"
        if self.eval_steps is None:
            self.eval_steps = self.logging_steps
        by_metric = self.load_best_model_at_end or self.save_strategy == "best"
        if self.metric_for_best_model is None and (by_metric or self.lr_scheduler_type == "reduce_lr_on_plateau"):
            self.metric_for_best_model = "eval_loss"
        if self.metric_for_best_model is not None:
            self.metric_for_best_model = "eval_" + self.metric_for_best_model.removeprefix("eval_")
            if self.greater_is_better is None:
                self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, as strings, numbers, booleans, None, and lists and dicts of these.

        A tracker in `report_to` is given by its name, and left out if it is of your own.
        """
        described = copy.copy(self)
        described.report_to = reporters_as_data(self.report_to)
        return super(TrainingArguments, described).to_dict()

    def fix_folders(self) -> None:
        """Make relative folders absolute, so that a later `os.chdir` does not change them."""
        self.output_dir = os.path.abspath(self.output_dir)
        if self.logging_dir is not None:
            self.logging_dir = os.path.abspath(self.logging_dir)

    @property
    def checkpointing_options(self) -> CheckpointingOptions | None:
        """Options of activation checkpointing; None if it is off."""
        if self.gradient_checkpointing is False:
            return None
        return read_options(CheckpointingOptions, "gradient_checkpointing", self.gradient_checkpointing)

    @property
    def eval_batch_size(self) -> int:
        """Samples of one evaluation batch on one process."""
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    @property
    def log_dir(self) -> Path:
        """Folder of TensorBoard's files."""
        return Path(self.logging_dir) if self.logging_dir is not None else Path(self.output_dir) / "logs"
