"""One start of a user's script under `trainer-kit verify`: `python -m trainer_kit.tools.verify.child JSON script…`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from trainer_kit.callback import CallbackList
from trainer_kit.callbacks import Tracking
from trainer_kit.tools.script_runner import Train, run_script
from trainer_kit.tools.verify.recorder import RecordedStart, Recorder
from trainer_kit.trainer import Trainer
from trainer_kit.utils.rng import seed_generators


def main() -> None:
    """Run the script in `sys.argv` up to the end of its first training, which ends the process."""
    start = RecordedStart.loads(sys.argv[1])

    def take_over(trainer: Trainer, train: Train, resume_from_checkpoint: bool | str | Path | None) -> int:
        watch(trainer, start)
        train(start.resume)
        return 0

    # Otherwise a script that creates its model unseeded would differ in each start.
    seed_generators(start.chance)
    run_script(sys.argv[2:], take_over)


def watch(trainer: Trainer, start: RecordedStart) -> None:
    """Change the Trainer's output folder, number of steps and checkpoints, and add a recorder."""
    args = trainer.args
    trainer.run.args = dataclasses.replace(
        args,
        output_dir=str(Path(start.folder, start.output_dir)),
        logging_dir=None,
        report_to="none",
        report_artifacts=[],
        disable_tqdm=True,
        # The recorder requests the only checkpoint. It must exist when the next step begins, because the next start
        # resumes from it.
        save_strategy="no",
        save_minutes=None,
        load_best_model_at_end=False,
        async_save=False,
        save_failures="raise",
        nonfinite="stop" if args.nonfinite == "rollback" else args.nonfinite,
    )
    recorder = Recorder(trainer, start)
    own = [each for each in trainer.events.callbacks if not isinstance(each, Tracking)]  # each start would be a run
    trainer.events = CallbackList([*own, *recorder.callbacks])
    strategy = trainer.run.strategy
    prepare = strategy.prepare_loader
    strategy.prepare_loader = lambda batches: recorder.watch_batches(prepare(batches))  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
