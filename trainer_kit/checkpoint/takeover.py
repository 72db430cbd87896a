"""`take_over`: claims the folder of a run for those that continue after a loss, also of the main process."""

from __future__ import annotations

from trainer_kit.checkpoint import Committed, remove_stale_staging
from trainer_kit.checkpoint.base_weights import refer_to_base
from trainer_kit.checkpoint.earlier_runs import set_aside
from trainer_kit.checkpoint.format.discovery import find_checkpoints
from trainer_kit.checkpoint.format.trainer_state import read_committed, read_trainer
from trainer_kit.checkpoint.manager import CheckpointManager


def take_over(checkpoints: CheckpointManager) -> bool:
    """Claim the folder for the present membership, and continue with its checkpoints. Collective.

    Args:
        checkpoints: The checkpoint manager of the training.

    Returns:
        Whether the main process is another one than before.

    Raises:
        FolderInUseError: If another training holds the folder.
        CutOffError: If another membership of this run owns the folder.
        ValueError: If the folder cannot be written.
    """
    run, collectives = checkpoints.run, checkpoints.run.strategy.collectives
    is_new = collectives.on_main(lambda: not checkpoints.has_taken_folder)
    checkpoints.lock_folder()
    if is_new:
        collectives.on_main(lambda: _take_folder(checkpoints))
        checkpoints.saver.base = refer_to_base(run)
        checkpoints.has_taken_folder = collectives.is_main  # last: a further loss may have broken it off
    return is_new


def _take_folder(checkpoints: CheckpointManager) -> None:
    """Take in what the last main process has left; on another disk, that may be nothing."""
    remove_stale_staging(checkpoints.folder)
    checkpoints.saver.committed = committed = _committed(checkpoints)
    set_aside(checkpoints.folder, {each.name for each in committed}, [], goes_on=True)
    if checkpoints.copier is not None:
        checkpoints.copier.mark()


def _committed(checkpoints: CheckpointManager) -> list[Committed]:
    """Return the run's checkpoints, with one that the last main process has committed without a word to the others."""
    known, names = checkpoints.saver.committed, [each.name for each in checkpoints.saver.committed]
    unknown = [each for each in find_checkpoints(checkpoints.folder) if each.name not in names]
    for directory in reversed(unknown):
        if checkpoints.is_of_this_run(directory) and (trainer := read_trainer(directory)) is not None:
            newest = read_committed(trainer)
            if not known or newest[-1].number > known[-1].number:
                known = newest
            break
    return [each for each in known if (checkpoints.folder / each.name).is_dir()]
