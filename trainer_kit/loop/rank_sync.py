"""Agreement between ranks: the requests to serve after a step, and the check that all ranks run the same thing."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from trainer_kit.config.event_schedule import EventSchedule
from trainer_kit.data.map_loader import GlobalBatch
from trainer_kit.data.source import data_length
from trainer_kit.data.stream_evaluation import different_samples
from trainer_kit.run import Run
from trainer_kit.state import Requests
from trainer_kit.strategies.vote import Vote
from trainer_kit.utils.user_warnings import warn

TOLD_TO_LEAVE = 143
"""Exit code where no signal to this process is the reason."""

_FLAGS = ("log", "evaluate", "save", "copy", "stop", "written", "join")
# Places of the other numbers of a vote.
_LEAVES, _IS_DUE = len(_FLAGS), len(_FLAGS) + 1
_HERE, _COUNTS = slice(_IS_DUE + 1, _IS_DUE + 5), slice(_IS_DUE + 5, None)
_PACKAGES = ("trainer_kit", "torch", "transformers", "numpy")


class _Ballot(NamedTuple):
    """What this rank gave to a vote that is not read yet.

    Attributes:
        flags: Its requests; the last one says whether it leaves the run.
        window: Its next global batch; None if it has none.
        here: Whether it has one, where that ends, and what this rank has read.
    """

    flags: list[bool]
    window: GlobalBatch | None
    here: tuple[int, int, int, int]


class RankSync:
    """Share each rank's requests with all ranks.

    A callback or a signal makes a request on one rank, at any moment. `run.requests` holds this rank's requests since
    the last vote. `pending` holds the requests that all ranks know and have not served yet.

    A vote takes place after each step, or begins within the step and is read after it. The latter costs no time, but
    misses requests made later in the step. Therefore the vote takes place after a step if anything is scheduled
    there, or if any rank has a callback that may make requests late in a step.

    Args:
        run: The run; its strategy is set up.

    Attributes:
        pending: The requests to serve after this step, the same on all ranks.
        disagreement: Error message if the ranks have not all read the same global batch; None if they have.
        all_have_read: Whether every rank passed a global batch to the last vote.
        ballot: What this rank gave to a vote that is not read yet; None if there is none.
        votes_ahead: Whether the vote of the next step begins within it, the same on all ranks.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pending = Requests()
        self.disagreement: str | None = None
        self.all_have_read = True
        self.votes_ahead = self._has_warned = False
        self._vote = Vote(run.strategy.collectives.all_reduce_ints)
        self._is_open = self._is_ahead = False  # whether votes may begin within a step
        self._schedule = EventSchedule(run.args)
        self.ballot: _Ballot | None = None

    def open(self, may_request_late: bool) -> None:
        """Agree whether votes may begin within a step, unless this is done. Collective.

        Args:
            may_request_late: Whether a callback of this rank may make requests late in a step.
        """
        if self._is_open:
            return
        self._is_open = True
        run, collectives = self.run, self.run.strategy.collectives
        # A step that does not fit into memory is repeated, with other micro-batches.
        waits = may_request_late or run.args.auto_find_batch_size
        is_ahead = not collectives.all_reduce_ints([waits])[0]
        self._vote = collectives.make_vote(is_ahead)
        self._is_ahead = is_ahead and self._vote.runs_ahead

    def close(self) -> None:
        """Release the connections of votes; the requests of one that was not read are made again."""
        if self.ballot is not None:
            self._restore(self.ballot.flags)
        self._vote.close()
        self._vote, self._is_ahead = Vote(self.run.strategy.collectives.all_reduce_ints), False
        self.ballot, self.votes_ahead, self._is_open = None, False, False

    def sync(self, window: GlobalBatch | None = None) -> bool:
        """Share the requests of all ranks, and sum the counts of the next global batch, in one vote. Collective.

        Args:
            window: The global batch of the next step; None if this rank has none. Its counts are set to the sums.

        Returns:
            Whether any request is pending.
        """
        asked, known = self.run.requests, self.pending
        # Without `_is_any`: a call is a share of the cost of the smallest step.
        asks = asked.log or asked.evaluate or asked.save or asked.copy or asked.stop or asked.written or asked.join
        if self.run.strategy.collectives.is_alone and not asks and asked.exit_code is None:
            self.all_have_read = window is not None
            return known.log or known.evaluate or known.save or known.copy or known.stop or known.written or known.join
        self.begin(window, self.run.state.step + 1)
        return self._read()

    def begin(self, window: GlobalBatch | None, step: int) -> None:
        """Begin a vote within a step, which `read` ends. Collective.

        Args:
            window: See `sync`.
            step: Number of the step that the global batch is for.
        """
        assert self.ballot is None, "the last vote was not read"
        flags = self._flags()
        _clear(self.run.requests, flags)
        here = (0, 0, 0, 0)
        if window is not None:
            here = (1, window.stop, int(window.closes_epoch), window.fingerprint)
        self.ballot = _Ballot(flags, window, here)
        is_due = self._is_ahead and self._is_scheduled_after(step)
        self._vote.begin([*flags, is_due, *here, *(window.numbers() if window is not None else (0, 0, 0, 0))])

    def read(self) -> bool:
        """Read the vote that was begun within the step. Collective.

        Returns:
            Whether any request is pending.
        """
        if not self._read():
            return False
        pending = self.pending
        if pending.log or pending.evaluate or pending.save or pending.stop:
            all_have_read = self.all_have_read
            self.sync()  # requests made since then are served with these
            self.all_have_read = all_have_read
        return True

    def _read(self) -> bool:
        run, pending, collectives = self.run, self.pending, self.run.strategy.collectives
        assert self.ballot is not None
        (flags, window, here), begin = self.ballot, time.perf_counter()
        sums = self._vote.wait_for_sums()
        seconds = time.perf_counter() - begin
        self.ballot = None
        self.votes_ahead = self._is_ahead and not sums[_IS_DUE]
        present = sums[_HERE]
        self.all_have_read = present[0] == collectives.world_size
        if window is not None:
            self._compare(window, here, present)
        if collectives.world_size > 1:
            if not run.strategy.static_shapes:  # else the sums are those of the device, which has more to do
                run.ledger.slowest += seconds
            self._set_counts(window, sums[_COUNTS])
        if not any(sums[: _LEAVES + 1]):
            return _is_any(pending)
        for name, asking in zip(_FLAGS, sums, strict=False):
            if asking:
                setattr(pending, name, True)
        if sums[_LEAVES]:
            codes = collectives.gather_object(run.requests.exit_code if flags[_LEAVES] else None)
            pending.exit_code = next((code for code in codes if code is not None), TOLD_TO_LEAVE)
            run.requests.exit_code = pending.exit_code
            pending.stop = True
            pending.save = pending.save or run.args.save_strategy != "no"
        return True

    def _compare(self, window: GlobalBatch, here: tuple[int, int, int, int], sums: Sequence[int]) -> None:
        """Note what is wrong unless all ranks have read the same, or warn of it."""
        strategy, compared = self.run.strategy, 3 if window.may_differ else 4
        processes = strategy.collectives.world_size
        self.disagreement = _disagreement(here[:compared], sums[:compared], processes)
        if self.disagreement is None and not self._has_warned and here[3] * processes != sums[3]:
            self._has_warned = True
            if strategy.is_main:
                warn(different_samples("train_dataset"))

    def _flags(self) -> list[bool]:
        """Return this rank's requests; the last one says whether it leaves the run."""
        asked = self.run.requests
        # asked.exit_code is never cleared: a signal handler may set it at any moment.
        leaves = asked.exit_code is not None and self.pending.exit_code is None
        return [*(getattr(asked, name) for name in _FLAGS), leaves]

    def _restore(self, flags: Sequence[bool]) -> None:
        for name, flag in zip(_FLAGS, flags, strict=False):
            if flag:
                setattr(self.run.requests, name, True)

    def _is_scheduled_after(self, step: int) -> bool:
        """Return whether the arguments schedule anything after a step."""
        total = self.run.total_steps
        return any(self._schedule.is_due_after_step(event, step, total) for event in ("log", "evaluate", "save"))

    def hand_back(self) -> None:
        """Make the pending requests those of this rank again, after a loss of other ranks."""
        for name in ("log", "evaluate", "save", "stop"):
            setattr(self.run.requests, name, getattr(self.run.requests, name) or getattr(self.pending, name))

    def _set_counts(self, window: GlobalBatch | None, sums: Sequence[int]) -> None:
        """Set the counts of a global batch to those of all readers, from the sums over all ranks. Collective."""
        collectives = self.run.strategy.collectives
        if collectives.reader_size > 1:
            numbers = collectives.gather_object(window.numbers() if window is not None else None)
            self.disagreement = self.disagreement or _different_peers(numbers, collectives.reader_size)
        if window is not None and self.disagreement is None:
            window.set_numbers([total // collectives.reader_size for total in sums], collectives.sum_over_readers)


def _is_any(requests: Requests) -> bool:
    each = requests
    return each.log or each.evaluate or each.save or each.copy or each.stop or each.written or each.join


def _clear(asked: Requests, flags: Sequence[bool]) -> None:
    """Clear the requests that are shared; one that a thread made since remains."""
    for name, flag in zip(_FLAGS, flags, strict=False):
        if flag:
            setattr(asked, name, False)


def _disagreement(here: Sequence[int], sums: Sequence[int], processes: int) -> str | None:
    """Return what is wrong unless all ranks have a next global batch that ends at the same position."""
    if sums[0] < processes:
        return "another process of this run could not read its data; its own error says why"
    if [number * processes for number in here] != [*sums]:
        return (
            "train_dataset does not give all processes the same samples in the same order; neither it nor its sampler "
            "may divide itself by rank or shuffle without a seed: each process takes its share of the whole"
        )
    return None


def _different_peers(numbers: Sequence[tuple[int, ...] | None], size: int) -> str | None:
    """Return what is wrong if processes that count as one reader have not counted the same in their batches."""
    for first in range(0, len(numbers), size):
        if len({*numbers[first : first + size]}) > 1:
            return (
                f"ranks {first} to {first + size - 1} compute layers together, but have read other batches; "
                "train_dataset must give all processes the same samples"
            )
    return None


def check_same_start(run: Run) -> None:
    """Check that all processes of a run have the same versions, script, arguments and data.

    Raises:
        ValueError: If they differ; the message names the first process and the first difference.
    """
    if not run.strategy.collectives.is_alone:
        run.strategy.collectives.check_same_on_all_ranks(start_facts(run))


def start_facts(run: Run) -> dict[str, Any]:
    """Return what must be the same on all processes of a run, by name."""
    facts: dict[str, Any] = {"the version of Python": platform.python_version()}
    facts |= {f"the version of {name}": _version(name) for name in _PACKAGES}
    facts["the script"] = _script()
    facts |= run.args.to_dict()
    for name in ("output_dir", "logging_dir"):  # absolute paths may differ between machines
        facts[name] = facts[name] and Path(facts[name]).name
    for role in ("train_dataset", "eval_dataset"):
        dataset = getattr(run, role)
        facts[f"the length of {role}"] = data_length(dataset)
    return facts


def _version(package: str) -> str | None:
    try:
        return torch.__version__ if package == "torch" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _script() -> str | None:
    """Return name and checksum of the main script; None in a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        return None
    return f"{Path(path).name} ({xxhash.xxh3_64_hexdigest(Path(path).read_bytes())})"
