"""The memberships of a run as its loop notes them, and the closing line of a run that lost machines."""

from __future__ import annotations

import os
import socket
import time

from trainer_kit.config import environment
from trainer_kit.profiling.memberships import Members
from trainer_kit.run import Run
from trainer_kit.utils.units import format_count, format_duration


def present_members(run: Run) -> Members:
    """Return the machines and processes that train now. Collective if machines may change."""
    collectives, place, launch = run.strategy.collectives, environment.place(), environment.membership()
    processes = collectives.world_size
    if launch is None or processes < place.world_size:  # a process that trains alone
        return Members(-(-processes // place.local_world_size), processes)
    launcher = os.path.basename(environment.regroup_folder() or "")
    machines = dict(collectives.gather_object((place.node, (socket.gethostname(), launcher))))
    hosts, launchers = zip(*sorted(machines.values()), strict=True)
    return Members(len(machines), processes, launch.run, launch.number, hosts, launchers if all(launchers) else ())


def note_start(run: Run) -> None:
    """Note who trains, after the checkpoint is restored. Collective if machines may change."""
    ledger = run.ledger
    history = ledger.memberships
    pause = ledger.idle + time.time() - ledger.started
    history.record(present_members(run), pause=pause, again=history.discarded)
    ledger.resize(since_start=True)


def note_regroup(run: Run, cause: str, pause: float, again: int) -> None:
    """Note who trains, after others were lost or have joined. Collective if machines may change.

    Args:
        run: The run.
        cause: What the processes noticed of a loss; "" if others have joined.
        pause: Seconds since the last step.
        again: Steps that are taken again.
    """
    ledger, members = run.ledger, present_members(run)
    ledger.memberships.steps_again += again
    ledger.memberships.record(members, cause, pause, again, in_process=True)
    ledger.resize()


def closing_line(run: Run) -> str | None:
    """Return what the loss of machines has cost a run, in one line; None if it lost none."""
    ledger, history = run.ledger, run.ledger.memberships
    if not history.lost:
        return None
    parts = [f"{format_count(history.lost, 'machine')} lost"]
    if returned := history.returned:
        parts.append(f"{returned:,} came again")
    if joined := history.joined - history.returned:
        parts.append(f"{joined:,} joined")
    parts.append(f"{format_duration(history.pause)} of regrouping")
    parts.append(f"{format_count(history.steps_again, 'step')} done again")
    missing = ledger.reduced() / max(ledger.wall(), 1e-9)
    parts.append(f"{100 * missing:.1f} % of the machines' time missing")
    return f"finished: {', '.join(parts)}; goodput {100 * ledger.goodput():.1f} %"
