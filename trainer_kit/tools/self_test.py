"""Checks that `trainer-kit test` runs in each process: collectives, precision, saving and resuming."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from trainer_kit.checkpoint import newest_valid
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.trainer import Trainer
from trainer_kit.utils.units import format_count

_STEPS = 4
_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


class SelfTest:
    """Checks of the setup; each returns its result and raises an error if it fails.

    Args:
        folder: Folder of the checkpoints, the same on all processes.
        strategy: Strategy that is set up.
    """

    def __init__(self, folder: Path, strategy: Strategy) -> None:
        self.folder = folder
        self.strategy = strategy
        self.dtypes: set[torch.dtype] = set()
        self.trained: dict[str, torch.Tensor] = {}

    def checks(self) -> dict[str, Callable[[], str]]:
        """Return the checks by name, in order."""
        return {
            "collectives": self.collectives,
            "precision": self.precision,
            "saving": self.saving,
            "resuming": self.resuming,
        }

    def collectives(self) -> str:
        """Check all-reduce, gather and broadcast."""
        strategy, count = self.strategy, self.strategy.world_size
        mine = torch.full((strategy.rank + 1,), float(strategy.rank), device=strategy.device)
        total = strategy.collectives.all_reduce(mine.new_tensor([strategy.rank + 1.0])).item()
        _expect("a sum over all processes", total, count * (count + 1) / 2)
        gathered = strategy.gather(mine).tolist()
        _expect("what was gathered", gathered, [float(rank) for rank in range(count) for _ in range(rank + 1)])
        _expect("what the main process sent", strategy.collectives.broadcast(strategy.rank), 0)
        strategy.barrier()
        devices = f", {format_count(strategy.devices, 'device')}" if strategy.devices > 1 else ""
        return f"{format_count(count, 'process')} on {strategy.device.type}{devices}"

    def precision(self) -> str:
        """Train with the chosen precision."""
        trainer = self._trainer()
        loss = trainer.train().training_loss
        if not torch.isfinite(torch.tensor(loss)):
            raise ArithmeticError(f"the loss of a tiny model is {loss}")
        mode = trainer.args.mixed_precision
        _expect("the dtype of a forward pass", self.dtypes, {_DTYPES[mode]})
        self.trained = _weights(trainer)
        return "float32" if mode == "no" else mode

    def saving(self) -> str:
        """Check the checkpoint of the training."""
        names = self.strategy.collectives.on_main(lambda: self._newest())
        _expect("the newest valid checkpoint", names, f"checkpoint-{_STEPS}")
        return f"checkpoints in {tempfile.gettempdir()}"

    def resuming(self) -> str:
        """Resume from the middle and compare the final weights."""
        trainer = self._trainer()
        trainer.train(resume_from_checkpoint=str(self.folder / f"checkpoint-{_STEPS // 2}"))
        weights = _weights(trainer)
        different = [name for name, value in weights.items() if not torch.equal(value, self.trained[name])]
        _expect("weights that differ from those of a run without a break", different, [])
        return "bit for bit"

    def _newest(self) -> str | None:
        complaints: list[str] = []
        newest = newest_valid(self.folder, complaints.append)
        return newest.name if newest is not None and not complaints else "; ".join(complaints) or None

    def _trainer(self) -> Trainer:
        args = TrainingArguments(
            output_dir=str(self.folder),
            max_steps=_STEPS,
            per_device_train_batch_size=2,
            save_strategy="steps",
            save_steps=_STEPS // 2,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        )
        torch.manual_seed(args.seed)
        layers = torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        inputs = torch.randn(8 * _STEPS * self.strategy.world_size * self.strategy.devices, 16)
        samples = [{"x": each, "y": each.sum()} for each in inputs]
        return Trainer(torch.nn.Sequential(*layers), args, samples, compute_loss=self._loss)

    def _loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = model(batch["x"])
        self.dtypes.add(outputs.dtype)
        return torch.nn.functional.mse_loss(outputs.squeeze(1).float(), batch["y"])


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    model = trainer.run.strategy.unwrap(trainer.run.model)
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"{what}: {found}, expected {expected}")


def main() -> None:
    """Run the checks; the main process prints one line each.

    Raises:
        RuntimeError: If a check fails; the message begins with its name.
    """
    args = TrainingArguments(output_dir=tempfile.gettempdir(), log_level="error")
    strategy = choose_strategy(args)
    name, folder = "collectives", None
    try:
        strategy.setup()
        folder = Path(
            strategy.collectives.broadcast(tempfile.mkdtemp(prefix="trainer_kit_test_") if strategy.is_main else "")
        )
        for name, check in SelfTest(folder, strategy).checks().items():
            found = check()
            if strategy.is_main:
                sys.stdout.write(f"{name:12} ok ({found})\n")
        strategy.barrier()
    except Exception as error:
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
    finally:
        if folder is not None and strategy.collectives.is_local_main:
            shutil.rmtree(folder, ignore_errors=True)
    strategy.teardown()


if __name__ == "__main__":
    main()
