"""`PeerCopies`: requests copies of the state in the memory of the run's machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class PeerCopies(Callback):
    """Copy the state of the run to the memory of its machines every few steps, between two checkpoints.

    A copy holds what a checkpoint holds. Each process writes its part of it to `folder`, in a thread, and sends it to a
    process of another machine, the one half of the machines further on. So after the loss of a machine, or of all
    processes, the run resumes from the last copy instead of the last checkpoint: `train(resume_from_checkpoint=True)`,
    also by a launcher's restart, writes the newest complete copy to `output_dir` as a checkpoint, if it is newer than
    those there, and resumes from it. Each file is compared with its checksum. If a file is missing or damaged, the copy
    before is used, or the newest checkpoint.

    Two copies are kept, each also on another machine if there are several: a machine needs host memory for four times
    the part of the state that its processes write. The copies are removed when the run ends; after an error that ends
    it, they stay for the next start.

    Args:
        every: Steps between two copies. A step that saves a checkpoint makes none, nor does one in which a save or a
            copy is under way; a save waits for a copy that is.
        folder: Folder in host memory, on each machine.

    Raises:
        ValueError: If `every` is no number of steps.
    """

    def __init__(self, every: int, folder: str | Path = "/dev/shm") -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"PeerCopies(every={every!r}) must be a number of steps of at least 1")
        if not isinstance(folder, (str, Path)):
            raise TypeError(f"PeerCopies(folder={folder!r}) must be the path of a folder in memory, such as '/dev/shm'")
        self.every = every
        self.folder = Path(folder)

    def on_init_end(self, run: Run) -> None:
        if run.args.save_strategy == "no":
            raise ValueError("PeerCopies needs checkpoints to fall back on; set another save_strategy than 'no'")
        run.copies_folder = self.folder.absolute()

    def on_step_begin(self, run: Run) -> None:
        # Not at the step's end: a vote of all processes may have begun by then.
        step = run.state.step + 1
        if step % self.every == 0 and step < run.total_steps:
            run.requests.copy = True
