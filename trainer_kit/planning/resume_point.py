"""The point at which a run would begin, read from its checkpoints without changing them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from trainer_kit.checkpoint import find_checkpoints, read_arguments
from trainer_kit.checkpoint.compatibility import check_same_run, find_checkpoint
from trainer_kit.checkpoint.format.trainer_state import read_committed, read_data_state, read_trainer
from trainer_kit.checkpoint.integrity import check_resumable
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import TrainLoader
from trainer_kit.data.run_length import RunLength, make_plan
from trainer_kit.planning.sections import StartSection
from trainer_kit.run import Run


class Beginning:
    """Starting point of a run, with the counters of the checkpoint that it would resume from.

    Args:
        run: Run whose counters are set; its optimizer has the planned type.
        request: Value of `resume_from_checkpoint`.

    Attributes:
        directory: The checkpoint; None for a run that starts at step 0.
        committed: The run's own checkpoints that exist already in its folder.

    Raises:
        ValueError: If the checkpoint is missing, damaged, or belongs to another training.
    """

    def __init__(self, run: Run, request: bool | str | Path | None) -> None:
        self.run = run
        self.folder = Path(run.args.output_dir)
        self.directory = None
        if request:
            self.directory = find_checkpoint(self.folder, request, repair=False, check=partial(check_resumable, run))
        self.committed: list[str] = []
        self._earlier = None
        if self.directory is None:
            return
        trainer = read_trainer(self.directory)
        assert trainer is not None
        check_same_run(run, trainer, read_data_state(self.directory), self.directory)
        run.state.load_state_dict(trainer["counters"])
        self._earlier = (trainer["plan"], read_arguments(self.directory))
        self.committed = [each.name for each in read_committed(trainer) if (self.folder / each.name).is_dir()]

    def lay_out(self, loader: TrainLoader | StreamLoader) -> RunLength:
        """Compute the run's steps, and set their number in the run.

        Args:
            loader: Loader of the training batches.
        """
        run = self.run
        loader.passed_over = run.state.passed_over
        run.state.enter_epochs_of(loader.epoch_length)
        plan = make_plan(run, loader, self._earlier)
        run.total_steps = plan.last_step
        return plan

    def facts(self) -> StartSection:
        """Return the plan's section on the start."""
        others = [path.name for path in find_checkpoints(self.folder) if path.name not in self.committed]
        return StartSection(str(self.folder), None if self.directory is None else str(self.directory), tuple(others))
