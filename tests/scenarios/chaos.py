"""Kills a training at random moments and starts it anew, until it is finished; then every bit must be as without that.

By hand, for as long as wanted::

    python tests/scenarios/chaos.py --kills 500 --seed 7 --ranks 2

One process, which never trains, forks all others: so none has to import torch. It prints a table by the moments of the
kills, and exits with 1 where a run was lost or ended in another way.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenarios import moments
from scenarios.moments import Death, read_journal
from scenarios.starts import DATA, SAVE_STEPS, STEPS, Job, Outside, Start

from trainer_kit.checkpoint import find_checkpoints, verify
from trainer_kit.checkpoint.format.manifest import REPLACED_PREFIX

OUTSIDE, ALL, TOLD = "whenever, from outside", "all ranks at once", "in a save after SIGTERM"


class Kill(NamedTuple):
    """What a kill did.

    Attributes:
        card: The moment, as in the table.
        step: The last step that was finished.
        newest: Step of the newest valid checkpoint afterwards; 0 without one.
        begun: Of the newest save that had begun; 0 without one.
        rots: Whether a file of that checkpoint was damaged then.
    """

    card: str
    step: int
    newest: int
    begun: int
    rots: bool


class End(NamedTuple):
    """How a run ends.

    Attributes:
        results: By rank: checksums of all that it computed, its losses and its evaluations, by name.
        kept: Names of the checkpoints that stay.
    """

    results: list[dict[str, Any]]
    kept: set[str]


class Wrong(Exception):
    """Something that must not be; the text says what."""


class Story:
    """One run from its first start to its end.

    Args:
        folder: For all that it writes.
        ranks: Processes.
        chance: Decides everything.
        counts: How often a start may pass each moment before it dies there.
        data: What it reads.

    Attributes:
        kills: In order.
        wrong: What must not be; None where nothing is wrong.
        different: Results whose bits are not those of a run that nobody killed; None until it has ended.
    """

    def __init__(
        self, folder: Path, ranks: int, chance: random.Random, counts: dict[str, int], data: str = "map"
    ) -> None:
        self.data = data
        self.folder, self.ranks, self.chance, self.counts = folder, ranks, chance, counts
        self.output_dir = Start(folder).output_dir
        self.kills: list[Kill] = []
        self.wrong: str | None = None
        self.different: list[str] | None = None
        self.starts = 0
        self._only_due = True  # no checkpoints but those that any run makes: they count for `save_keep_every`
        self._rotten: set[str] = set()
        folder.mkdir()

    @property
    def equal(self) -> bool:
        """Whether it ended with the same bits."""
        return self.different == []

    def live(self, deck: list[str], kills: int, expected: End | None) -> None:
        """Is killed `kills` times at the most, as the first cards of the deck that fit say, and finishes."""
        try:
            while len(self.kills) < kills and not self._has_finished():
                card = next(card for card in deck if self._fits(card))
                deck.remove(card)
                if not self._start(*self._plan(card), card):
                    deck.insert(0, card)  # the run had less left to do
            if not self._has_finished():
                self._start(Start(self.folder, ranks=self.ranks, data=self.data))
            end = self.end()
            if expected is not None:
                self.different = sorted({
                    name for own, straight in zip(end.results, expected.results, strict=True)
                    for name in straight if own[name] != straight[name]
                })  # fmt: skip
                self._check_kept(end.kept, expected.kept)
            left = [path.name for path in self.output_dir.rglob(".*")]
            if left:
                raise Wrong(f"it leaves {left}")
        except Wrong as error:
            self.wrong = f"start {self.starts}: {error}"

    def end(self) -> End:
        """How it finished."""
        kept = {path.name for path in find_checkpoints(self.output_dir)}
        return End([json.loads(path.read_text()) for path in self._ends()], kept)

    def _has_finished(self) -> bool:
        return all(path.exists() for path in self._ends())

    def _ends(self) -> list[Path]:
        start = Start(self.folder, self.starts)
        return [start.file("end", rank) for rank in range(self.ranks)]

    def _check_kept(self, kept: set[str], expected: set[str]) -> None:
        """Retention goes on as if nothing had been.

        There may be two more: the one that a start came from, which it leaves, and one that was to go after the last
        save of all.
        """
        if self._only_due and not (expected <= kept and len(kept) <= len(expected) + 2):
            raise Wrong(f"of the checkpoints {sorted(kept)} are left instead of {sorted(expected)}")

    def _fits(self, card: str) -> bool:
        if card == "a data worker" and self.data != "map":
            return False  # a stream is resumed with as many workers as before
        if card == "clearing the folder":
            return any(self.output_dir.glob(".*"))
        return card not in ("reading a checkpoint", *moments.IN_A_REPLACEMENT) or bool(self._steps())

    def _plan(self, card: str) -> tuple[Start, Outside | None]:
        chance, counts = self.chance, self.counts
        first = 1 if card in moments.ON_ANOTHER_RANK else 0
        several = first or card in (*moments.ON_ANY_RANK, OUTSIDE)
        victim = chance.randrange(first, self.ranks) if several else 0
        start = Start(
            self.folder,
            ranks=self.ranks,
            workers={"a data worker": 2, "fetching": 0}.get(card, 2 * (chance.random() < 0.3) * (self.data == "map")),
            async_save=chance.random() < 0.8,
            saves_first=card in moments.IN_A_REPLACEMENT,
            data=self.data,
        )
        if card in (OUTSIDE, ALL):
            ranks = list(range(self.ranks)) if card == ALL else [victim]
            return start, Outside(ranks, chance.randint(1, 300))
        if card == TOLD:
            death = Death(moments.IN_A_SAVE, chance.randint(1, 60), chance.randint(1, 2 * counts["training"]))
        else:
            death = Death((card,), chance.randint(1, counts[card]))
        return start._replace(deaths={victim: death}), None

    def _start(self, start: Start, outside: Outside | None = None, card: str = "") -> bool:
        """Starts it once; whether that was killed."""
        self.starts += 1
        start = start._replace(number=self.starts)
        resumed = max(self._steps(), default=0)
        job = Job(start)
        try:
            if waiting := job.wait(outside):
                raise Wrong(f"{card}: rank {waiting} does not end")
        finally:
            job.end()
        journals = [read_journal(start.file("journal", rank)) for rank in range(self.ranks)]
        for rank, journal in enumerate(journals):
            if journal.start not in (None, resumed):
                raise Wrong(f"rank {rank} goes on from step {journal.start}, the newest checkpoint is of {resumed}")
        begun = set(journals[0].begun)
        self._only_due &= begun <= {*range(SAVE_STEPS, STEPS, SAVE_STEPS), STEPS}
        self._rotten -= {f"checkpoint-{step}" for step in begun}
        died = [rank for rank in range(self.ranks) if "killed" in journals[rank].moments or job.is_killed(rank)]
        for rank in range(self.ranks):
            self._check_end(job, rank, died, card)
        if died:
            self._check_checkpoints(journals[0], resumed, card)
        return bool(died)

    def _check_end(self, job: Job, rank: int, died: list[int], card: str) -> None:
        """A process that was not killed finishes, or says which one it missed."""
        code, said = job.processes[rank].exitcode, job.start.file("log", rank).read_text()
        if code == 0 or job.is_killed(rank) or (code == 143 and card == TOLD):
            return
        sentences = [rf"rank {each}\b.*; rank {rank} \(this process\)" for each in died if each != rank]
        sentences += ["DataLoader worker", "another process of this run could not read its data"]
        if not died or code != 1 or not any(re.search(each, said) for each in sentences):
            raise Wrong(f"{card}: rank {rank} ends with {code} and says: {said}")

    def _check_checkpoints(self, journal: moments.Journal, resumed: int, card: str) -> None:
        """What must be on the disk after a kill."""
        saves = [resumed, *(step for step in journal.begun if step != resumed)]
        there, step = self._steps(), max(journal.step, resumed)
        newest = max(there, default=0)
        if newest not in saves[-2:] or newest < max(journal.committed, default=0):
            raise Wrong(f"{card}: of the saves {saves}, {journal.committed} committed for sure, there are {there}")
        if step - newest > 2 * SAVE_STEPS:
            raise Wrong(f"{card}: the newest checkpoint is of {newest}, but step {step} was finished")
        path = self.output_dir / f"checkpoint-{newest}"
        rots = len(there) > 1 and path.exists() and self.chance.random() < 0.1
        if rots:
            _let_rot(path, self.chance)
            self._rotten.add(path.name)
        self.kills.append(Kill(card, step, newest, saves[-1], rots))

    def _steps(self) -> list[int]:
        """The steps of the checkpoints that there are, which must be whole, those moved aside for others too."""
        found = {path.name: path for path in find_checkpoints(self.output_dir)}
        for path in self.output_dir.glob(f"{REPLACED_PREFIX}*"):
            found.setdefault(path.name.removeprefix(REPLACED_PREFIX), path)
        for name, path in found.items():
            if name not in self._rotten:
                try:
                    verify(path)
                except ValueError as error:
                    raise Wrong(str(error)) from error
        return [int(name.rpartition("-")[2]) for name in found if name not in self._rotten]


def _let_rot(checkpoint: Path, chance: random.Random) -> None:
    """Flips a bit of a file, cuts it or deletes it."""
    path = chance.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    how = chance.choice(("flip", "cut", "delete"))
    if how == "delete":
        path.unlink()
        return
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content if how == "flip" else content[:place])


def straight(folder: Path, ranks: int, data: str) -> tuple[End, dict[str, int]]:
    """What a run ends with that nobody kills, and how often two of its saves pass each moment."""
    story = Story(folder, ranks, random.Random(0), {}, data)
    story.live([], 0, None)
    assert story.wrong is None, story.wrong
    journal = read_journal(Start(folder, 1).file("journal", 0))
    passed = collections.Counter(journal.moments)
    counts = {name: max(1, 2 * count // len(journal.begun)) for name, count in passed.items()}
    more = {
        "reading a checkpoint": 8,
        "a data worker": 40,
        "clearing the folder": 4,
        "leaving": 2,
        "writing another part": 16,
    }
    return story.end(), counts | more | dict.fromkeys(moments.IN_A_REPLACEMENT, 1) | {"deleting the replaced": 15}


def cards(ranks: int) -> list[str]:
    """All moments of the table."""
    several = [ALL, *moments.ON_ANOTHER_RANK] if ranks > 1 else []
    return [*several, *moments.ON_ANY_RANK, *moments.ON_THE_MAIN_RANK, OUTSIDE, TOLD]


def stories(folder: Path, ranks: int, kills: int, seed: int) -> Iterator[Story]:
    """Runs that are killed and finish, until there were as many kills."""
    chance = random.Random(f"{seed} {ranks}")
    ends = {data: straight(folder / f"straight-{ranks}-{data}", ranks, data) for data in DATA}
    deck: list[str] = []
    done = 0
    for number in range(1, kills + 2):
        if done >= kills:
            return
        if len(deck) < 20:
            deck += chance.sample(cards(ranks), len(cards(ranks)))
        data = list(DATA)[number % len(DATA)]
        expected, counts = ends[data]
        story = Story(folder / f"{ranks}-ranks-{number}", ranks, chance, counts, data)
        story.live(deck, min(kills - done, chance.randint(4, 9)), expected)
        done += len(story.kills)
        yield story


def table(told: list[Story]) -> str:
    """A line for each moment."""
    head = ("moment of the kill", "kills", "resumed from newest", "one before", "start", "steps again", "lost", "equal")
    rows = [head]
    for card in cards(max(story.ranks for story in told)):
        lived = [(kill, story) for story in told for kill in story.kills if kill.card == card]
        kills = [kill for kill, _ in lived]
        again = [kill.step - kill.newest for kill in kills]
        numbers = [
            len(kills),
            sum(0 < kill.newest == kill.begun for kill in kills),
            sum(0 < kill.newest < kill.begun for kill in kills),
            sum(not kill.newest for kill in kills),
            f"{min(again)}-{max(again)}" if again else "-",
            sum(story.wrong is not None for _, story in lived),
            sum(story.equal for _, story in lived),
        ]
        rows.append((card, *map(str, numbers)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    rotten = sum(kill.rots for story in told for kill in story.kills)
    kills_in_all = sum(len(story.kills) for story in told)
    lost = sum(story.wrong is not None for story in told)
    equal = sum(story.equal for story in told)
    return "\n".join([
        *lines, "",
        f"{kills_in_all} kills of {len(told)} runs: {lost} runs lost, {equal} ended with equal bits; "
        f"{rotten} times the newest checkpoint was damaged after the kill as well",
    ])  # fmt: skip


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=60, help="for each number of ranks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--report", type=Path, help="file for the kills as JSON")
    options = parser.parse_args()
    os.environ["CHAOS_STRATEGY"] = options.strategy  # for the processes that `starts` forks
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    told = []
    for ranks in options.ranks:
        for story in stories(folder, ranks, options.kills, options.seed):
            told.append(story)
            if story.wrong or not story.equal:
                print(
                    f"{story.folder} ({story.data}): {story.wrong or f'it ended with other bits of {story.different}'}",
                    file=sys.stderr,
                    flush=True,
                )
    print(table(told))
    if options.report:
        rows = [{"ranks": story.ranks, **kill._asdict()} for story in told for kill in story.kills]
        options.report.write_text(json.dumps(rows))
    good = all(story.equal and not story.wrong for story in told)
    if good:
        shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
