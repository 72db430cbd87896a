"""Optimizers and learning rate schedules by name."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.config.event_schedule import warmup_length
from trainer_kit.config.optimizer_options import optimizer_options
from trainer_kit.utils.adafactor import UnscaledAdafactor
from trainer_kit.utils.closures import needs_closure
from trainer_kit.utils.layer_decay import decay_by_layer
from trainer_kit.utils.lr_curves import SCHEDULES, Span, peak_of
from trainer_kit.utils.muon import Muon, split_matrices
from trainer_kit.utils.pytree import strides_of_copy
from trainer_kit.utils.schedule_free import schedule_free
from trainer_kit.utils.sgd import SGD, is_skipped
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class, without_wrappers

logger = logging.getLogger("trainer_kit")

# Device types with a fused AdamW in torch.
_FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}
# Device types with a fused SGD in all releases of torch that this package supports.
_SGD_DEVICES = {"cpu", "cuda"}

# Matches LayerNorm, BatchNorm2d, LlamaRMSNorm and LayerNormalization, but not LogNormal.
_NORM_NAME = r"(?i)norm(?!al(?!i))"


def make_optimizer(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Make the optimizer that `args.optim` names, over the parameters of `model` that require a gradient.

    The model must already be on its device. `args.weight_decay` applies to all parameters except biases and those of
    normalization modules. Each group has the names of its parameters as `param_names`.
    `args.layer_lr_decay` divides them by layer, see `trainer_kit.utils.layer_decay`.

    - adamw_torch: `torch.optim.AdamW`, fused if the parameters' device and dtype allow it.
    - sgd: `torch.optim.SGD`, with the momentum, dampening and nesterov of `args.optim_args`, fused if device, dtype and
      options allow it.
    - adafactor: Adafactor without a scale by the size of the weights, as in transformers, see `UnscaledAdafactor`.
    - muon: `torch.optim.Muon` for the matrices of hidden layers, with the momentum, nesterov and ns_steps of
      `args.optim_args`, and AdamW for embeddings, the head and all other parameters. One learning rate serves both, see
      `trainer_kit.utils.muon.Muon`; the head is the model's output embeddings, else its last module with a matrix.
    - schedule_free_adamw, schedule_free_sgd: `AdamWScheduleFree`, `SGDScheduleFree` of the package schedulefree, with
      r, weight_lr_power and (SGD) momentum in `args.optim_args`. Evaluations, checkpoints and the trained model have
      the averaged weights.
    - adamw_8bit: `AdamW8bit` of bitsandbytes, else of torchao.

    Raises:
        ValueError: If no parameter requires a gradient, `args.optim` is "muon" and there is no hidden matrix, or
            `args.layer_lr_decay` is not 1 and the model repeats no block.
        RuntimeError: If `args.optim` is "muon", which this release of torch lacks.
        ImportError: If a package of `args.optim` ("adamw_8bit", "schedule_free_adamw") cannot be imported.
    """
    groups = parameter_groups(model, args.weight_decay)
    if args.layer_lr_decay != 1:
        groups = decay_by_layer(model, groups, args.learning_rate, args.layer_lr_decay)
    adam: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    options = optimizer_options(args.optim, args.optim_args)
    if args.optim == "sgd":
        return _sgd(model, groups, args.learning_rate, options)
    if args.optim == "muon":
        return _muon(model, groups, adam, options)
    if args.optim == "adafactor":
        return UnscaledAdafactor(groups, lr=args.learning_rate)
    if args.optim == "schedule_free_sgd":
        return schedule_free("SGDScheduleFree", groups, lr=args.learning_rate, **options)
    if args.optim == "schedule_free_adamw":
        return schedule_free("AdamWScheduleFree", groups, **adam, **options)
    if args.optim == "adamw_8bit":
        optimizer: torch.optim.Optimizer = _adamw_8bit()(groups, **adam)
        return optimizer
    return torch.optim.AdamW(groups, **adam, fused=_can_fuse(groups) or None)


def _sgd(model: nn.Module, groups: list[dict[str, Any]], rate: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    is_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    has_skipped = any(map(is_skipped, parameters))
    # torch has no fused SGD for DTensor.
    if _can_fuse(groups, _SGD_DEVICES) and not (is_sparse or is_sharded or has_skipped or options.get("dampening")):
        return SGD(groups, lr=rate, fused=True, **options)
    return torch.optim.SGD(groups, lr=rate, **options)


def _muon(
    model: nn.Module, groups: list[dict[str, Any]], adam: dict[str, Any], options: dict[str, Any]
) -> torch.optim.Optimizer:
    matrices, others = split_matrices(model, groups)
    if not matrices:
        raise ValueError(
            f"optim='muon' trains matrices of hidden layers, and {model_class(model).__name__} has none that requires "
            "a gradient; use optim='adamw_torch'"
        )
    return Muon(matrices, others, adamw={**adam, "fused": _can_fuse(others) or None}, **options)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Check that an optimizer can train a model.

    Raises:
        TypeError: If it is not a `torch.optim.Optimizer`, or if its step needs a closure, as that of LBFGS or SAM does.
        ValueError: If it has no parameter of the model, a group without a learning rate, or is fused and has a
            parameter with gaps in memory.
    """
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(f"optimizer={name} is a class; give an object of it, such as {name}(model.parameters(), lr=…)")
    if isinstance(optimizer, (list, tuple, dict)):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give one torch.optim.Optimizer, and its schedule as "
            "lr_scheduler, or write the loop with Accelerator, which takes several optimizers (examples/gan.py)"
        )
    if callable(optimizer):
        raise TypeError("optimizer is a function; call it, and give the torch.optim.Optimizer that it returns")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if needs_closure(type(optimizer)):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, whose step runs the model by a closure; write the loop with "
            "Accelerator, whose optimizers take step(closure)"
        )
    own = set(model.parameters())
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"optimizer holds no parameter of this {model_class(model).__name__}, so that nothing would be trained; "
            "make it from model.parameters()"
        )
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has a parameter group without 'lr', which a schedule sets; give "
            "each group an 'lr', or write the loop with Accelerator"
        )
    check_fused(optimizer)


def may_draw(optimizer: torch.optim.Optimizer | None) -> bool:
    """Return whether the steps of an optimizer may draw random numbers: those of torch and of this package do not."""
    return not type(optimizer).__module__.startswith(("torch.optim.", "trainer_kit."))


def check_all_known(optimizer: torch.optim.Optimizer, model: nn.Module, known: Collection[str]) -> None:
    """Check that an optimizer holds the parameters that a model has got since it was made.

    Args:
        optimizer: The optimizer.
        model: The model, after a forward pass.
        known: Names of the parameters that the model had when the optimizer was made.

    Raises:
        ValueError: If there are new parameters that the optimizer does not hold.
    """
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    new = {name: each for name, each in model.named_parameters() if name not in known}
    if missing := [name for name, each in new.items() if each.requires_grad and each not in held]:
        raise ValueError(
            f"the parameter {join_names(map(repr, missing), 2)} of this {model_class(model).__name__} appeared after "
            "the optimizer was made, which would never train it; create it in __init__, or run a forward pass before "
            "Trainer(...)"
        )


def check_fused(optimizer: torch.optim.Optimizer) -> None:
    """Check that fused kernels can update an optimizer's parameters.

    Raises:
        ValueError: If the optimizer is fused and has a parameter with gaps in memory, or that torch leaves as it is.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if not _fills_its_memory(parameter):
                raise ValueError(
                    f"optimizer={type(optimizer).__name__} is fused, but a parameter of shape {[*parameter.shape]} has "
                    f"gaps in memory (strides {[*parameter.stride()]}), which torch's fused kernels take for values; "
                    "give fused=False, or call contiguous() on it before it becomes a parameter"
                )
            if isinstance(optimizer, torch.optim.SGD) and is_skipped(parameter):
                raise ValueError(
                    f"optimizer={type(optimizer).__name__} is fused, with which torch {torch.__version__} leaves most "
                    f"of a {parameter.dtype} parameter on the CPU as it is; give fused=False"
                )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups with and without weight decay, as `torch.optim` takes them.

    Each group's "params" are (name, parameter) pairs. A tied parameter appears once. Empty groups are left out.

    Raises:
        ValueError: If no parameter requires a gradient.
    """
    model = without_wrappers(model)
    plain = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "bias" in name or _is_norm(module) or re.search(_NORM_NAME, name.rpartition("/")[0])  # a path of keras
    }
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError(
            f"{model_class(model).__name__} has no parameter that requires a gradient; "
            "unfreeze some with parameter.requires_grad_(True) before training"
        )
    if not weight_decay:  # one group is one kernel
        return [{"params": named, "weight_decay": 0.0}]
    decayed = [pair for pair in named if pair[1] not in plain]
    others = [pair for pair in named if pair[1] in plain]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_norm(module: nn.Module) -> bool:
    return any(re.search(_NORM_NAME, cls.__name__) for cls in type(module).__mro__)


def _can_fuse(groups: list[dict[str, Any]], devices: Collection[str] = _FUSED_DEVICES) -> bool:
    """Return whether the fused kernel supports all parameters; not every version of MPS supports bfloat16."""
    return all(
        parameter.device.type in devices
        and parameter.is_floating_point()
        and _fills_its_memory(parameter)
        and not (parameter.device.type == "mps" and parameter.dtype == torch.bfloat16)
        for group in groups
        for _, parameter in group["params"]
    )


def _fills_its_memory(parameter: torch.Tensor) -> bool:
    return parameter.stride() == strides_of_copy(parameter)


def _adamw_8bit() -> Any:
    for name in ("bitsandbytes.optim", "torchao.optim"):
        try:
            return importlib.import_module(name).AdamW8bit
        except ImportError:
            continue
    raise ImportError("optim='adamw_8bit' needs a package of its own; run `pip install bitsandbytes`, or torchao")


class Schedule(LambdaLR):
    """A learning rate schedule made by `make_scheduler`.

    It sets the learning rate of each group after each step. To change the learning rate permanently, scale the peaks:
    `run.lr_scheduler.base_lrs = [rate / 2 for rate in run.lr_scheduler.base_lrs]`. Checkpoints keep the peaks. A value
    set directly in `param_groups[0]["lr"]` holds for one step.
    """

    _warned: ClassVar[weakref.WeakSet[Schedule]] = weakref.WeakSet()  # checkpoints would keep an attribute

    @property  # after a rollback or resume, an attribute would differ from the groups
    def base_lrs(self) -> list[Any]:
        """The peak learning rate of each group, its "initial_lr"."""
        return [group["initial_lr"] for group in self._groups()]

    @base_lrs.setter
    def base_lrs(self, peaks: Sequence[Any]) -> None:
        for group, peak in zip(self._groups(), peaks, strict=True):
            group["initial_lr"] = peak

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups with a peak; groups that were added to the optimizer later have none."""
        return [group for group in self.optimizer.param_groups if "initial_lr" in group]

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next step; warn once if other code has set one."""
        for group, own in zip(self.optimizer.param_groups, getattr(self, "_last_lr", ()), strict=False):
            rate = group["lr"]
            if rate is not own and not isinstance(rate, torch.Tensor) and rate != own:
                self._warn(rate)
        super().step(epoch)

    def _warn(self, rate: float) -> None:
        if self not in self._warned:
            self._warned.add(self)
            logger.warning(
                "a learning rate was set to %g, which held for one step: the schedule sets it after each; to change it "
                "for good set run.lr_scheduler.base_lrs, the peaks of the schedule", rate,
            )  # fmt: skip

    def go_on_at(self, step: int) -> None:
        """Move to a step of the schedule, and set the learning rates of that step."""
        self.last_epoch, self._step_count = step, step + 1
        self._last_lr = [peak * factor(step) for peak, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_rate(group, rate)


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Set a group's learning rate; in place if it is a tensor, which compiled steps read."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: TrainingArguments, total_steps: int, place: int = 0
) -> Schedule:
    """Make the schedule that `args.lr_scheduler_type` names, to be stepped once after each optimizer step.

    The learning rate of step s (from 0) is the peak, the learning rate of each parameter group, times a factor. In the
    factor, `peak` is the optimizer's default learning rate, `optimizer.defaults["lr"]`, as in transformers. The warmup
    takes `w = args.warmup_steps` steps, or `ceil(args.warmup_ratio * total)` if that is 0. Its factor is `s / w`. After
    the warmup, `p = (s - w) / (total - w)` goes from 0 to 1, and the factor is:

    - linear: `1 - p`
    - cosine: `(1 + cos(2 pi num_cycles p)) / 2`, with `num_cycles=0.5`
    - cosine_with_restarts: `(1 + cos(pi (num_cycles p mod 1))) / 2`, and 0 at the end, with `num_cycles=1`
    - cosine_with_min_lr: cosine from 1 to `min_lr / peak`, or to `min_lr_rate`; one of the two must be given
    - inverse_sqrt: `(1 + (s - w) / t) ** -0.5`, with `timescale` t = w, or 10,000 without a warmup
    - constant: 1, without a warmup
    - constant_with_warmup: 1
    - polynomial: from 1 to `lr_end / peak` as `(1 - p) ** power`, with `lr_end=1e-7` and `power=1`
    - warmup_stable_decay (<https://arxiv.org/abs/2404.06395>): 1, and half a cosine down to `min_lr_ratio` (0) in the
      last `num_decay_steps` (a tenth of all); the warmup starts at `min_lr_ratio`
    - one_cycle: `torch.optim.lr_scheduler.OneCycleLR` without its momentum: half a cosine from `1 / div_factor` (25) up
      to 1 at `pct_start` (0.3) of the run, and one down to `1 / (div_factor * final_div_factor)` (1e4) in its last step

    `args.lr_scheduler_kwargs` sets the named parameters, such as `num_cycles`. "reduce_lr_on_plateau" is no function of
    the step: the Trainer steps torch's `ReduceLROnPlateau` with `args.metric_for_best_model` at each evaluation.

    Args:
        optimizer: Its groups' learning rates are the peaks.
        args: The arguments of the run.
        total_steps: Optimizer steps of the whole run.
        place: The step of the schedule to start at, from 0.

    Raises:
        ValueError: If `total_steps` is less than 1, or a name or number in `lr_scheduler_kwargs` is not allowed.
    """
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} is not allowed; a schedule needs at least 1 step")
    schedule = SCHEDULES[args.lr_scheduler_type]
    allowed = [p.name for p in inspect.signature(schedule).parameters.values() if p.kind is p.KEYWORD_ONLY]
    _check_options(args, allowed)
    warmup = warmup_length(args, total_steps)
    factor = schedule(Span(total_steps, warmup, peak_of(optimizer)), **args.lr_scheduler_kwargs)
    made = Schedule(optimizer, lambda step: factor(min(step, total_steps)))
    made.go_on_at(place)
    return made


_PLATEAU_OPTIONS = ("factor", "patience", "threshold", "cooldown", "min_lr", "eps")


def make_plateau_scheduler(optimizer: torch.optim.Optimizer, args: TrainingArguments) -> ReduceLROnPlateau:
    """Make the schedule "reduce_lr_on_plateau", which steps with `args.metric_for_best_model` at each evaluation.

    Args:
        optimizer: Its groups' learning rates are those to begin with.
        args: The arguments; `lr_scheduler_kwargs` has the options of `torch.optim.lr_scheduler.ReduceLROnPlateau`.

    Raises:
        ValueError: If an option is unknown or not allowed.
    """
    _check_options(args, _PLATEAU_OPTIONS)
    mode: Any = "max" if args.greater_is_better else "min"
    try:
        return ReduceLROnPlateau(optimizer, mode, **args.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"lr_scheduler_kwargs={args.lr_scheduler_kwargs}: {error}") from error


def _check_options(args: TrainingArguments, allowed: Sequence[str]) -> None:
    for name in args.lr_scheduler_kwargs:
        if name not in allowed:
            raise ValueError(
                f"lr_scheduler_kwargs has {name!r}, which lr_scheduler_type={args.lr_scheduler_type!r} does not know; "
                f"allowed: {', '.join(allowed) or 'nothing'}"
            )
    if (args.warmup_steps or args.warmup_ratio) and args.lr_scheduler_type in _WITHOUT_WARMUP:
        warn(
            f"lr_scheduler_type={args.lr_scheduler_type!r} has no warmup; warmup_steps={args.warmup_steps} and "
            f"warmup_ratio={args.warmup_ratio} have no effect",
        )


_WITHOUT_WARMUP = ("constant", "one_cycle", "reduce_lr_on_plateau")


def own_scheduler(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the user's scheduler, calling it with the optimizer if it is a function or class.

    Raises:
        TypeError: If the result is not a scheduler whose `step` needs no arguments, or the function or class needs more
            than the optimizer.
    """
    made = given
    if isinstance(given, type) or (callable(given) and not hasattr(given, "state_dict")):
        _check_takes_optimizer(given)
        made = given(optimizer)
    if not hasattr(made, "step"):
        raise TypeError(f"lr_scheduler gave {made!r}; give a scheduler, or a function that returns one")
    if not isinstance(made, ReduceLROnPlateau):
        _check_steps_alone(made)
    return made


def _check_steps_alone(scheduler: Any) -> None:
    """Raise a TypeError unless a scheduler's `step` can be called without arguments, as after each optimizer step."""
    if (error := _misfit(scheduler.step)) is not None:
        raise TypeError(
            f"the step() of lr_scheduler={type(scheduler).__name__} needs arguments ({error}), but is called without "
            "any after each optimizer step; give a scheduler of torch, such as LambdaLR"
        ) from error


def _check_takes_optimizer(function: Callable[..., Any]) -> None:
    """Raise a TypeError unless a function or class can be called with an optimizer alone."""
    if (error := _misfit(function, None)) is not None:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"lr_scheduler={name} cannot be called with the optimizer alone ({error}); give a function such as "
            f"lambda optimizer: {name}(optimizer, …)"
        ) from error


def _misfit(function: Callable[..., Any], *arguments: Any) -> TypeError | None:
    """Return why a function cannot be called with these arguments; None if it can, or its signature is not known."""
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:
        return None
    except TypeError as error:
        return error
    return None
