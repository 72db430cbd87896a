"""`heal`: gives all processes of a run the newest state that one of them has, after others were lost or joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainer_kit.checkpoint.format.model_values import split_values, values_name
from trainer_kit.checkpoint.format.trainer_state import CARRIED_STATE
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.user_states import taken_optimizer_state
from trainer_kit.errors import LostProcessError
from trainer_kit.strategies.regroup import Regroupable
from trainer_kit.utils.optimizer_state import described_groups
from trainer_kit.utils.parameter_order import follow_order


class Progress(NamedTuple):
    """How far a process has come.

    Attributes:
        step: Its step; -1 before it has joined the run.
        served: Number of requests that it has served in this training.
        is_whole: Whether its state is that of a moment between two steps.
    """

    step: int
    served: int
    is_whole: bool


class Healed(NamedTuple):
    """Result of `heal`.

    Attributes:
        progress: How far all processes are now.
        taken: Whether this process has taken the state of another one.
        joined: Whether any process had no state of the run yet.
        extra: What that process has given in addition; its own otherwise.
    """

    progress: Progress
    taken: bool
    joined: bool
    extra: Any


def heal(
    checkpoints: CheckpointManager,
    group: Regroupable,
    own: Progress,
    extra: Any = None,
    on_taking: Callable[[], object] = lambda: None,
) -> Healed:
    """Give all processes the newest whole state. Collective.

    Only the processes that are behind take another state, if they can that of the main process, which alone may know
    what to write. It is what a checkpoint holds; the ledger is taken only by a process that joins the run.

    Args:
        checkpoints: The checkpoint manager of the training.
        group: The run's strategy.
        own: How far this process has come.
        extra: What a process gives in addition to its state.
        on_taking: Called before this process takes another state, part by part.

    Raises:
        LostProcessError: If no process has a whole state.
    """
    run = checkpoints.run
    collectives = run.strategy.collectives
    places = collectives.gather_object(own)
    whole = [rank for rank, each in enumerate(places) if each.is_whole]
    if not whole:
        raise LostProcessError("the other process was lost while weights changed, so that no process has a whole state")
    source = max(whole, key=lambda rank: (places[rank].step, rank == 0, places[rank].served))
    newest, joined = places[source], any(each.step < 0 for each in places)
    is_behind = [each != newest for each in places]
    if not any(is_behind):
        return Healed(newest, False, joined, extra)
    given = (_states(checkpoints), extra) if collectives.rank == source else None
    received = collectives.broadcast(given, source)
    assert received is not None
    states, others = received
    if is_behind[collectives.rank]:
        on_taking()
    group.share_model(run.model, source)
    if not is_behind[collectives.rank]:
        return Healed(newest, False, joined, extra)
    _take(checkpoints, states)
    if own.step < 0:
        run.ledger.join(states["ledger"])
    return Healed(newest, True, joined, others)


def _states(checkpoints: CheckpointManager) -> dict[str, Any]:
    run = checkpoints.run
    states = checkpoints.states(checkpoints.saver.committed, taken_optimizer_state(run)(), False)
    trained = [parameter.requires_grad for parameter in run.model.parameters()]
    return states | {
        "metric": checkpoints.metric,
        "log_means": run.means.state_dict(),
        "resumed_from": checkpoints.resumed_from,
        "trained": trained,
        CARRIED_STATE: checkpoints.carried.own(),
        values_name(): split_values(run.strategy.model_state(run.model))[1],
    }


def _take(checkpoints: CheckpointManager, states: dict[str, Any]) -> None:
    run = checkpoints.run
    assert run.optimizer is not None
    run.state.load_state_dict(states["trainer"]["counters"])
    for parameter, is_trained in zip(run.model.parameters(), states["trained"], strict=True):
        parameter.requires_grad_(is_trained)
    checkpoints.carried.load_state(states[CARRIED_STATE])
    if values := states[values_name()]:
        run.strategy.load_model_state(run.model, values)
    names = run.strategy.parameter_names(run.model)
    follow_order(run.optimizer, names, described_groups(states["optimizer"]), "the other process")
    run.strategy.load_optimizer_state(run.optimizer, states["optimizer"])
    run.lr_scheduler.load_state_dict(states["lr_scheduler"])
    if run.strategy.precision is not None:
        run.strategy.precision.load_state_dict(states["precision"])
    checkpoints.events.load_state_dict(states["callbacks"])
    run.means.load_state_dict(states["log_means"])
    checkpoints.data_state, checkpoints.metric = states["data"], states["metric"]
    checkpoints.resumed_from = states["resumed_from"]
    checkpoints.shifts_labels, checkpoints.run_id = states["trainer"]["shifts_labels"], states["trainer"]["run_id"]
    for name, entry in run.stateful.items():
        entry.load_state_dict(states[name])
