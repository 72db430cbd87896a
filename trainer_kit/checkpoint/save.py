"""`Save`: one checkpoint on its way to the disk, which several processes may write together."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from trainer_kit.checkpoint import Committed, FileEntry
from trainer_kit.checkpoint.contribution import Contribution
from trainer_kit.checkpoint.format.commit import commit_staging
from trainer_kit.checkpoint.format.disk import remove_folder
from trainer_kit.strategies.base import Strategy

logger = logging.getLogger("trainer_kit")


class Outcome(NamedTuple):
    """Result of a save.

    Attributes:
        step: Step of the checkpoint.
        committed: The run's checkpoints after the save, oldest first.
        error: Why the save failed; None if it succeeded.
    """

    step: int
    committed: list[Committed]
    error: str | None = None


class Save(NamedTuple):
    """A save that has begun; the main process makes it and sends it to the others.

    Attributes:
        step: Step of the checkpoint.
        staging: Absolute path of the folder in which the checkpoint is staged.
        key: Name of this save, used once in a run.
    """

    step: int
    staging: Path
    key: str

    def commit(
        self,
        contribution: Future[Contribution],
        strategy: Strategy,
        others: Sequence[int],
        max_shard_size: int | str,
        confirm: Callable[[], object],
    ) -> Path:
        """Write the main process's part, and commit the checkpoint once the other parts are written.

        If this fails, the staging folder is removed, after the other processes have ended their parts.

        Args:
            contribution: What this process gives.
            strategy: The strategy.
            others: Ranks of the other processes that write a part.
            max_shard_size: See `write_checkpoint`.
            confirm: See `write_checkpoint`.

        Returns:
            Folder of the checkpoint.

        Raises:
            OSError: If the disk of any process is full or cannot be written, or a process ended before its part was
                written; the message names the rank if it is another one.
        """
        try:
            try:
                given = contribution.result()
                written = given.write(self.staging, max_shard_size)
            finally:  # of all others, so that none writes to the folder any more
                reports = {rank: strategy.session.receive(self._key_of(rank), rank) for rank in others}
            for rank, report in reports.items():
                written |= _entries(strategy.collectives.describe_rank(rank), report)
            return commit_staging(self.staging, written, given.snapshot, confirm)
        except BaseException:
            remove_folder(self.staging)
            raise

    def send_part(self, contribution: Future[Contribution], strategy: Strategy, max_shard_size: int | str) -> None:
        """Write the part of another process, and report its files or its failure to the main process.

        Args:
            contribution: What this process gives.
            strategy: The strategy.
            max_shard_size: See `write_checkpoint`.
        """
        report: dict[str, object] = {"error": "it was interrupted"}
        try:
            written = contribution.result().write(self.staging, max_shard_size)
            report = {"files": {name: dataclasses.asdict(entry) for name, entry in written.items()}}
        except (OSError, MemoryError) as error:
            report = {"error": str(error) or "no memory"}
        except Exception as error:
            logger.warning("a part of the checkpoint of step %d could not be written", self.step, exc_info=True)
            report = {"error": f"{type(error).__name__}: {error}"}
        finally:
            strategy.session.send_to_main(self._key_of(strategy.rank), json.dumps(report))

    def _key_of(self, rank: int) -> str:
        return f"save/{self.key}/{rank}"


def _entries(sender: str, report: str | None) -> dict[str, FileEntry]:
    """Return the entries of another process's files from its report.

    Raises:
        OSError: If there is no report, or it reports a failure.
    """
    if report is None:
        raise OSError(f"{sender} ended before it had written its part")
    content = json.loads(report)
    if "error" in content:
        raise OSError(f"{sender}: {content['error']}")
    return {name: FileEntry(**entry) for name, entry in content["files"].items()}
