"""Goodput of trainings on 64 to 16,384 GPUs, simulated, for several ways to go on after failures.

Nothing here is measured but the inputs that say so. `python benchmarks/goodput_simulation.py` writes its part of
docs/en/explanation/performance.md and the plot goodput.svg, and takes about ten seconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
from goodput_plot import picture
from page import PAGE, replace_part, table

GPUS = (64, 256, 1024, 4096, 16384)
HOUR, DAY = 3600.0, 86400.0


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the simulation assumes.

    Attributes:
        days: Days of a run.
        runs: Runs of each way and size, each with a seed of its own.
        gpus_per_machine: GPUs, and processes, of a machine.
        samples: Samples a step of a process at full size.
        failures: Failures a machine and day: one in 1.8 h on 16,384 GPUs (Kokolis et al. 2024, arXiv 2410.21680).
            Llama 3 had 3.8e-3: 419 in 54 days on 16,384 GPUs (Grattafiori et al. 2024, arXiv 2407.21783).
        taken: Share of failures that take the machine away. A guess.
        away: Mean seconds until it comes back, exponentially distributed. A guess.
        silent: Share of failures that break no connection. A guess.
        noticed: Seconds until the others continue after a silent one, where machines may change.
        noticed_fixed: The same with `heartbeat_timeout` of its default and the time to explain it.
        person: Seconds until a person has started the run again. A guess.
        patience: Seconds for which a launcher waits for a machine: `--start-timeout`.
        checkpoint: Seconds from one checkpoint to the next. A guess; training goes on while they are written.
        step: Seconds of a step. A guess.
        copies: Steps from one copy into a peer's memory to the next; a copy takes one step more.
    """

    days: float = 60.0
    runs: int = 50
    gpus_per_machine: int = 8
    samples: int = 16
    failures: float = 6.5e-3
    taken: float = 0.7
    away: float = HOUR
    silent: float = 0.15
    noticed: float = 15.0
    noticed_fixed: float = 35.0
    person: float = 2 * HOUR
    patience: float = 600.0
    checkpoint: float = 900.0
    step: float = 10.0
    copies: int = 20


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds to go on after a failure is noticed: a constant and a part for each machine.

    Attributes:
        new: With new processes.
        new_per_machine: The same.
        stay: In the processes.
        stay_per_machine: The same.
    """

    new: float
    new_per_machine: float
    stay: float
    stay_per_machine: float


HERE = Costs(4.0, 0.0, 0.5, 0.0)
"""Measured by benchmarks/goodput.py, on one quiet machine as three: 3.4 to 4.9 s and 0.36 to 0.54 s."""

FIELD = Costs(120.0, 0.5, 10.0, 0.15)
"""Guesses. They meet reports of 15 to 30 minutes on thousands of accelerators, and under 2 in the process."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to go on after failures.

    Attributes:
        is_fixed: Whether the run needs all of its machines.
        needs_person: Whether it ends when a machine does not come back in time.
        stays: Whether the processes of the other machines stay.
        joins: Whether a machine joins them, or a spare one, without new processes.
        interval: What is lost with a failure: "checkpoint", "copies" or "step", the time since the last one.
        scales: Whether a step has fewer samples with fewer machines, instead of larger shares.
        spares: Machines that wait. They are not charged.
    """

    is_fixed: bool = False
    needs_person: bool = False
    stays: bool = False
    joins: bool = False
    interval: str = "checkpoint"
    scales: bool = False
    spares: int = 0


_REPLICAS = Way(stays=True, joins=True, interval="step")

WAYS: Mapping[str, Way] = {
    "a person starts it again": Way(is_fixed=True, needs_person=True),
    "fixed size, restarts by itself": Way(is_fixed=True),
    "min:max, new processes": Way(),
    "min:max, new processes, 2 spares": Way(spares=2),
    "in the process, peer copies every 20 steps": dataclasses.replace(_REPLICAS, interval="copies"),
    'in the process, replicas, "keep"': _REPLICAS,
    "the same, but machines join with new processes": dataclasses.replace(_REPLICAS, joins=False),
    'in the process, replicas, "scale"': dataclasses.replace(_REPLICAS, scales=True),
    'in the process, replicas, "keep", 2 spares': dataclasses.replace(_REPLICAS, spares=2),
}

PLOTTED = tuple(name for name in WAYS if "join with" not in name and "scale" not in name and "es, 2 spares" not in name)


@dataclasses.dataclass(frozen=True)
class Safety:
    """How much of a stretch of training a failure leaves.

    Attributes:
        interval: Seconds of work from one safe state to the next.
        stall: Seconds for which training stands still for each.
        lag: Seconds after a state until it is safe.
    """

    interval: float
    stall: float = 0.0
    lag: float = 0.0

    def kept(self, seconds: float) -> float:
        """Return the seconds of work that a failure leaves of a stretch of that length."""
        return max(0, math.floor((seconds - self.lag) / (self.interval + self.stall))) * self.interval

    def work(self, seconds: float) -> float:
        """Return the seconds of work in a stretch of that length."""
        whole, rest = divmod(seconds, self.interval + self.stall)
        return whole * self.interval + min(rest, self.interval)


def simulate(
    way: Way, gpus: int, costs: Costs, seed: int, inputs: Inputs = Inputs(), safety: Safety | None = None
) -> float:
    """Return the goodput of one run: work that counts at full speed, divided by the time.

    Failures are a Poisson process, while the run recovers too. A failure in a recovery begins it again.

    Args:
        way: The way to go on.
        gpus: GPUs at full size.
        costs: Seconds to go on.
        seed: Seed of the failures.
        inputs: What else is assumed.
        safety: What a failure leaves; None: as `way` says.
    """
    machines, chance = gpus // inputs.gpus_per_machine, np.random.default_rng(seed)
    safety = safety or _safety(way, inputs)
    new, stay = costs.new + costs.new_per_machine * machines, costs.stay + costs.stay_per_machine * machines
    end, done, away = inputs.days * DAY, 0.0, list[float]()
    begun = 0.0  # of the present stretch; later than `now` during a recovery
    waits = 0.0  # until when the run waits for a machine or a person
    mean = DAY / (inputs.failures * machines)
    failure = chance.exponential(mean)
    while True:
        back = away[0] if away else math.inf
        speed = _speed(way, machines, max(0, len(away) - way.spares), inputs)
        now = min(failure, back, end)
        if now == end:
            return (done + speed * safety.work(max(0.0, end - begun))) / end
        if now == back:
            heapq.heappop(away)
            if way.is_fixed or len(away) < way.spares:
                continue  # the run does not train, or the machine becomes a spare one
            # It stops for the newcomer at the end of a step, after a save.
            done += speed * safety.work(max(0.0, now - begun))
            begun = max(begun, now) + (stay if way.joins else new)
            continue
        done += speed * safety.kept(max(0.0, now - begun))
        seconds = stay if way.stays else new
        if chance.random() < inputs.silent:
            seconds += inputs.noticed_fixed if way.is_fixed else inputs.noticed
        if chance.random() < inputs.taken:
            gone = chance.exponential(inputs.away)
            if not way.is_fixed:
                heapq.heappush(away, now + gone)
            else:
                waits = max(waits, now + (inputs.person if way.needs_person and gone > inputs.patience else gone))
        begun = max(now, waits) + seconds
        failure = now + chance.exponential(mean)


def _safety(way: Way, inputs: Inputs) -> Safety:
    return {
        "checkpoint": Safety(inputs.checkpoint),
        "copies": Safety(inputs.copies * inputs.step, lag=inputs.step),
        "step": Safety(inputs.step),
    }[way.interval]


def _speed(way: Way, machines: int, missing: int, inputs: Inputs) -> float:
    """Return the samples a second with fewer machines, as a part of those at full size."""
    left = machines - missing
    if left <= 0:
        return 0.0
    if way.scales:
        return left / machines
    return inputs.samples / math.ceil(inputs.samples * machines / left)  # the fullest share sets the pace


def goodput(way: Way, gpus: int, costs: Costs, inputs: Inputs = Inputs()) -> tuple[float, float]:
    """Return the mean goodput of several runs, and its standard error."""
    found = np.array([simulate(way, gpus, costs, seed, inputs) for seed in range(inputs.runs)])
    return float(found.mean()), float(found.std(ddof=1) / math.sqrt(len(found)))


def percent(value: float) -> str:
    """Format a goodput; one that is not 1 is not rounded to it."""
    if value > 0.99995:
        return "> 99.99"
    return f"{100 * value:.1f}" if value < 0.9995 else f"{100 * value:.2f}"


def rows(means: Mapping[str, Mapping[str, Sequence[float]]]) -> list[list[str]]:
    """Return the rows of the table: the ways, with the goodput at each size under both costs."""
    here, field = means.values()
    return [
        [name, *(f"{percent(one)} / {percent(other)}" for one, other in zip(here[name], field[name], strict=True))]
        for name in WAYS
    ]


def main() -> None:
    """Simulate all, and write the table and the plot."""
    means, errors = dict[str, dict[str, list[float]]](), [0.0]
    for label, costs in (("times as measured here", HERE), ("times as guessed for the field", FIELD)):
        means[label] = {}
        for name, way in WAYS.items():
            results = [goodput(way, gpus, costs) for gpus in GPUS]
            means[label][name] = [mean for mean, _ in results]
            errors += [error for _, error in results]
    body = table(["goodput in %, here / field", *(f"{gpus:,} GPUs" for gpus in GPUS)], rows(means))
    drawn = {label: {name: each[name] for name in PLOTTED} for label, each in means.items()}
    (PAGE.parent / "goodput.svg").write_text(picture(drawn, GPUS), encoding="utf-8")
    runs, days = Inputs().runs, Inputs().days
    note = f"Means of {runs} runs of {days:.0f} days; standard errors are {100 * max(errors):.2g} points at most."
    text = f"![Simulated share of the time that is lost](goodput.svg)\n\n{body}\n\n{note}"
    replace_part("goodput", text)
    print(text)


if __name__ == "__main__":
    main()
