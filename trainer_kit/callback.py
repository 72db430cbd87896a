"""`Callback`, the hooks of a run, and `CallbackList`, which calls them."""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.errors import CallbackError, CheckpointError, LostProcessError
from trainer_kit.strategies.scalars import PLAIN, as_scalar, read_scalars
from trainer_kit.utils.pruning import is_pruned
from trainer_kit.utils.user_warnings import warn

if TYPE_CHECKING:
    from trainer_kit.run import Run
    from trainer_kit.strategies.base import Strategy


logger = logging.getLogger("trainer_kit")

_CHECKED = ("trainer_kit.callbacks.ema", "trainer_kit.callbacks.early_stopping")


class Callback:
    """Base class of callbacks. Override the hooks you need; a hook without an override costs nothing.

    Hooks take the `Run` and are called on every process. Callbacks with a lower `priority` are called first; those
    with the same priority are called in the order of the list. A callback requests an action by
    `run.requests.log|evaluate|save|stop = True`; the loop serves requests at the end of the step. Records and
    evaluations that are due are requested before `on_step_end` and `on_epoch_end`; False, set there on all processes,
    withdraws one.
    """

    priority: int = 0
    is_reporter: bool = False
    """Whether the callback only reports. An error in its hooks is then a warning, once per training, and training
    continues. Such hooks must not use collectives, and make no requests: on several processes those of a step's last
    hooks might be served one step later."""
    _idle_hooks: tuple[str, ...] = ()  # hooks that would do nothing now; only of the callbacks that ship

    def on_init_end(self, run: Run) -> None:
        """Called when the Trainer is made; the model is still on its original device."""

    def on_train_begin(self, run: Run) -> None:
        """Called before the first step; model and optimizer are ready, and a checkpoint to resume from is loaded."""

    def on_epoch_begin(self, run: Run) -> None:
        """Called when an epoch begins or resumes (`run.state.position > 0`)."""

    def on_step_begin(self, run: Run) -> None:
        """Called when the global batch of the step is fetched and counted."""

    def on_substep_end(self, run: Run) -> None:
        """Called after the backward pass of each micro-batch except the step's last; `run.batch` is that batch."""

    def on_pre_optimizer_step(self, run: Run) -> None:
        """Called when all gradients of the step are computed and not yet clipped."""

    def on_optimizer_step(self, run: Run) -> None:
        """Called after the optimizer's step; gradients are not yet zeroed."""

    def on_step_end(self, run: Run) -> None:
        """Called after each step; `run.local_loss` is this rank's share of its loss, and reading it is slow."""

    def on_epoch_end(self, run: Run) -> None:
        """Called after an epoch's last step, before its record, evaluation and save; not if a run ends in mid-epoch."""

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        """Called with each record: step, epoch, loss and every callback's `metrics`. Numbers may be added to it.

        The metrics of the whole training are passed to `on_train_end`.
        """

    def on_evaluate_begin(self, run: Run) -> None:
        """Called before each evaluation or prediction of a dataset."""

    def on_evaluate_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        """Called after each evaluation or prediction of a dataset, before `on_evaluate` and `on_predict`.

        Args:
            run: The run.
            metrics: The dataset's metrics; numbers may be added. None if the evaluation raised or was interrupted.
        """

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        """Called after an evaluation with the metrics of all its datasets. Numbers may be added to `metrics`.

        `metric_for_best_model` may name an added number if the callback's `priority` is below 50. Callbacks with a
        priority of 50 or more are called after `run.state.best_metric` and `best_step` are updated.
        """

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        """Called after a prediction with its metrics. Numbers may be added to `metrics`."""

    def on_save(self, run: Run, directory: Path) -> None:
        """Called when a checkpoint is committed in `directory`; with `async_save`, some steps after the saved one."""

    def on_rollback(self, run: Run, directory: Path) -> None:
        """Called after a non-finite step, when the run is restored from the checkpoint in `directory`."""

    def on_regroup(self, run: Run) -> None:
        """Called when this process continues without processes that were lost, or with some that have joined.

        A process that was a step behind, or has joined, has the state of another one, callbacks' states included. A
        step that broke is taken again, with all its events. `run.strategy.is_main` has changed on the next process if
        the main one is lost. A process that joins has called `on_train_begin` before, with the state of a new run, and
        where `run.strategy.world_size` was 1.
        """

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        """Called after the last step. Requests made here are still served.

        Args:
            run: The run.
            metrics: Metrics of the whole training, as `Trainer.train` returns them; numbers may be added. None if a
                signal ends the training.
        """

    def on_exit(self, run: Run) -> None:
        """Called last, when all requests are served. After an error `on_exception` is called instead."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when `error` ends the training; it is raised again after this."""

    def metrics(self, run: Run) -> dict[str, Any]:
        """Return this callback's metrics for a record. Scalar tensors are read from the device together."""
        return {}

    def summary(self, run: Run) -> dict[str, Any]:
        """Return this callback's metrics of the whole training, when it ends."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves for this callback; empty unless overridden."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


JUDGED = 50
"""Lowest `priority` of the callbacks that `on_evaluate` calls after the best metric is updated."""

_WITH_NUMBERS = ("on_log", "on_evaluate_end", "on_evaluate", "on_predict", "on_train_end")
"""Hooks whose callbacks may add numbers to their argument."""

_LATE = ("on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
"""Hooks of a step that come after the forward pass of its last micro-batch has begun."""

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))

_CALLED = (*HOOKS, "metrics", "summary")


_Listener = tuple[Callback, str, Any]
"""A callback, its activity in the time ledger, and its method for a hook."""


class CallbackList:
    """An ordered list of callbacks, which calls their hooks and collects their states.

    Args:
        callbacks: The callbacks, in the user's order.

    Raises:
        TypeError: If one of them is not a `Callback` instance, or has an attribute with the name of a hook.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = sorted(checked_callbacks(callbacks), key=lambda callback: callback.priority)
        self._warned: set[Callback] = set()  # reporters that raised in this training
        # A subclass may override a hook that its base finds idle.
        self._may_idle = {id(each) for each in self.callbacks if type(each).__module__.startswith("trainer_kit.")}
        self._listeners: dict[str, list[_Listener]] = {
            hook: [
                (each, f"callback/{type(each).__name__}", getattr(each, hook))
                for each in self.callbacks
                if _overrides(each, hook)
            ]
            for hook in _CALLED
        }

    @property
    def may_add_metrics(self) -> bool:
        """Whether a callback that does not ship with trainer_kit may add metrics to an evaluation."""
        heard = [each for hook in ("on_evaluate_end", "on_evaluate", "metrics") for each, _, _ in self._listeners[hook]]
        return any(not type(each).__module__.startswith("trainer_kit.") for each in heard)

    @property
    def may_request_late(self) -> bool:
        """Whether a callback may make requests after a step's forward pass has begun, that of the last micro-batch.

        Those of trainer_kit do so alike on all processes or by the clock, and reporters make none.
        """
        listening = [(each, hook) for hook in _LATE for each, _, _ in self._listeners[hook] if not each.is_reporter]
        own = "trainer_kit.callbacks."
        return any(not type(each).__module__.startswith(own) or hook in vars(each) for each, hook in listening)

    def call_evaluation(self, run: Run, metrics: dict[str, Any], judge: Callable[[], None]) -> None:
        """Call `on_evaluate`; call `judge` after the callbacks with a priority below `JUDGED`."""
        listeners = self._listeners["on_evaluate"]
        adding = sum(callback.priority < JUDGED for callback, _, _ in listeners)
        self._call(listeners[:adding], "on_evaluate", run, metrics)
        judge()
        self._call(listeners[adding:], "on_evaluate", run, metrics)

    def call(self, hook: str, run: Run, *arguments: Any) -> None:
        """Call one hook of every callback that overrides it.

        Raises:
            CallbackError: If a callback raises; the message names it and the hook. optuna's `TrialPruned` is raised
                as it is.
        """
        if hook == "on_train_begin":
            self._warned.clear()
        if listeners := self._listeners[hook]:
            self._call(listeners, hook, run, *arguments)

    def _call(self, listeners: Sequence[_Listener], hook: str, run: Run, *arguments: Any) -> None:
        before = run.ledger.activity
        values = arguments[0] if hook in _WITH_NUMBERS else None
        others = {} if values is None else {name: each for name, each in values.items() if type(each) not in PLAIN}
        for callback, activity, method in listeners:
            if hook in callback._idle_hooks and id(callback) in self._may_idle:
                continue
            run.ledger.enter(activity)
            try:
                method(run, *arguments)
                if values is not None:
                    values.update(_read(_added(values, others), run.strategy))
            except Exception as error:
                self._raise_or_warn(callback, hook, error)
                for name in _added(values or {}, others):  # else the next callback would be blamed for it
                    del arguments[0][name]
        if run.ledger.activity != before:
            run.ledger.enter(before)

    def _raise_or_warn(self, callback: Callback, hook: str, error: Exception) -> None:
        if is_pruned(error) or isinstance(error, LostProcessError):  # no fault of the callback
            raise error
        if not callback.is_reporter:
            raise _named(callback, hook, error) from error
        if callback not in self._warned:
            self._warned.add(callback)
            logger.warning("%s; training continues without what it reports", _named(callback, hook, error))

    def call_exception(self, run: Run, error: BaseException) -> None:
        """Call `on_exception` of every callback. An error in one of them is logged, so that all are called."""
        for callback, _, method in self._listeners["on_exception"]:
            try:
                method(run, error)
            except Exception as second:
                logger.error("%s", _named(callback, "on_exception", second))

    def metrics(self, run: Run) -> dict[str, Any]:
        """Return the merged metrics of all callbacks for a record, read from the device in one transfer."""
        return self._gathered("metrics", run)

    def summary(self, run: Run) -> dict[str, Any]:
        """Return the merged metrics of all callbacks for the whole training."""
        return self._gathered("summary", run)

    def _gathered(self, hook: str, run: Run) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        before = run.ledger.activity
        for callback, activity, method in self._listeners[hook]:
            run.ledger.enter(activity)
            try:
                merged.update({name: as_scalar(name, value) for name, value in method(run).items()})
            except Exception as error:
                self._raise_or_warn(callback, hook, error)
        run.ledger.enter(before)
        return read_scalars(merged, run.strategy)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks that have one, by class name (`EMA`, a second one `EMA#2`)."""
        states = {}
        for name, callback in self._by_name().items():
            try:
                states[name] = callback.state_dict()
            except Exception as error:
                raise _named(callback, "state_dict", error) from error
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of each callback; warn about a state without a callback."""
        callbacks = self._by_name()
        for name, state in state_dict.items():
            if name in callbacks:
                try:
                    callbacks[name].load_state_dict(state)
                except Exception as error:
                    raise _named(callbacks[name], "load_state_dict", error) from error
            else:
                warn(
                    f"the checkpoint holds the state of callback {name}, which this run does not have; it is left out",
                )

    def check_state_dict(self, state_dict: dict[str, Any], directory: Path) -> None:
        """Check that EMA and EarlyStopping can load their states, on copies of the callbacks.

        Raises:
            CheckpointError: If one cannot load its state.
        """
        callbacks = self._by_name()
        for name, state in state_dict.items():
            if name in callbacks and type(callbacks[name]).__module__ in _CHECKED:
                try:
                    copy.copy(callbacks[name]).load_state_dict(copy.deepcopy(state))
                except Exception as error:
                    raise CheckpointError(
                        f"{directory} is damaged: {name} does not take its state: {type(error).__name__}: {error}"
                    ) from error

    def _by_name(self) -> dict[str, Callback]:
        named: dict[str, Callback] = {}
        counts: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            named[name if counts[name] == 1 else f"{name}#{counts[name]}"] = callback
        return named


def checked_callbacks(callbacks: Any) -> list[Callback]:
    """Return the user's callbacks as a list; warn about methods that look like hooks but are none.

    Raises:
        TypeError: If `callbacks` is not a list of `Callback` instances, or a hook has the wrong parameters.
    """
    if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable):
        name = callbacks.__name__ if isinstance(callbacks, type) else type(callbacks).__name__
        raise TypeError(f"callbacks={callbacks!r} is no list of callbacks; give callbacks=[{name}(...)]")
    given = list(callbacks)
    for each in given:
        kind = each if isinstance(each, type) else type(each)
        if any(base.__name__ == "TrainerCallback" for base in kind.__mro__):
            raise TypeError(
                f"callbacks holds transformers' {kind.__name__}; give trainer_kit.callbacks.from_transformers"
                f"({kind.__name__}) with the class or its instance"
            )
        if isinstance(each, type):
            raise TypeError(f"callbacks holds the class {each.__name__}; give an instance, {each.__name__}(...)")
        if not isinstance(each, Callback):
            raise TypeError(f"callbacks holds {each!r}, which is no trainer_kit Callback")
        _warn_of_unknown_hooks(kind)
        _check_parameters(each)
    return given


def _added(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that a callback added and that are not plain numbers; `others` were there before."""
    return {
        name: value
        for name, value in values.items()
        if type(value) not in PLAIN and (name not in others or others[name] is not value)
    }


def _read(values: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Convert values of callbacks to plain numbers; raise a TypeError for one that is not a number."""
    return read_scalars({name: as_scalar(name, value) for name, value in values.items()}, strategy)


def _warn_of_unknown_hooks(kind: type) -> None:
    """Warn about methods that look like hooks but are never called, such as Lightning's `on_train_batch_end`."""
    unknown = [name for name in dir(kind) if name.startswith("on_") and name not in HOOKS]
    for name in unknown:
        near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.0)[0]
        warn(
            f"callback {kind.__name__} defines {name}, which is no hook of a Callback and is never called; the nearest "
            f"is {near}",
        )


def _check_parameters(callback: Callback) -> None:
    """Raise a TypeError for a hook that is no method or whose parameters do not match, before training begins."""
    for hook in _CALLED:
        if _overrides(callback, hook):
            if not callable(getattr(callback, hook)):
                raise TypeError(
                    f"callback {type(callback).__name__} has the attribute {hook}={getattr(callback, hook)!r}, which "
                    "takes the place of the method that the Trainer calls; give it another name"
                )
            names = list(inspect.signature(getattr(Callback, hook)).parameters)
            try:
                inspect.signature(getattr(callback, hook)).bind(*names[1:])
            except TypeError as error:
                raise TypeError(
                    f"callback {type(callback).__name__} cannot be called in {hook}: {error}; define "
                    f"{hook}({', '.join(names)})"
                ) from None


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback)


def _named(callback: Callback, hook: str, error: Exception) -> CallbackError:
    return CallbackError(f"callback {type(callback).__name__} raised in {hook}: {type(error).__name__}: {error}")
