"""A training whose connections break goes on in its processes, and ends as an undisturbed one, bit for bit.

No process is lost here, and no launcher deals the places: see tests/scenarios/test_elastic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import free_port, try_on_ranks
from scenarios import task
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer_kit import Callback, Run
from trainer_kit.callbacks import EMA, read_log
from trainer_kit.checkpoint.healing import heal
from trainer_kit.errors import LostProcessError
from trainer_kit.loop import regrouping
from trainer_kit.strategies.ddp import DDP

BREAK = 5
"""The step that is taken when the connections break."""

HOOKS = (
    "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end", "on_evaluate_begin", "on_log", "on_save"
)  # fmt: skip


class Plain(task.Net):
    """Without buffers, so that no collective stands between the gradients and the new weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Identity()  # type: ignore[assignment]


class Breaks(Callback):
    """Breaks the connections of rank 1 in a hook, once."""

    def __init__(self, hook: str) -> None:
        self.regrouped = 0
        self._hook, self._done = "on_step_end" if hook == "note" else hook, False

    def on_regroup(self, run: Run) -> None:
        self.regrouped += 1


def _breaking(hook: str) -> Callable[..., None]:
    def call(self: Breaks, run: Run, *given: Any) -> None:
        is_due = hook == self._hook and not self._done
        if is_due and run.strategy.rank == 1 and run.state.step >= BREAK - 1:
            self._done = True
            run.strategy.group.break_off()  # type: ignore[attr-defined]

    return call


for name in HOOKS:
    setattr(Breaks, name, _breaking(name))


def train(folder: str, port: int, hook: str, model: str, always: bool = False) -> tuple[str, int, int, int]:
    """Return a checksum of the state in the end, its step, and how often it regrouped and took the other's state."""
    taken = list[bool]()

    def counted(*given: Any) -> Any:
        healed = heal(*given)
        taken.append(healed.taken)
        return healed

    with pytest.MonkeyPatch.context() as patch:
        variables = {
            "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TRAINER_KIT_ELASTIC": "1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TRAINER_KIT_MEMBERSHIP": "run/1/0/0", "TRAINER_KIT_REGROUP_FOLDER": folder,
        }  # fmt: skip
        for variable, value in variables.items():
            patch.setenv(variable, value)
        patch.setattr(regrouping, "ask_for_place", next_place)
        patch.setattr(regrouping, "heal", counted)
        if hook == "note":
            patch.setattr(regrouping, "note_regroup", break_once(regrouping.note_regroup))
        if hook == "behind":
            patch.setattr(DDP, "step", lose_once(DDP.step, always))
        torch.manual_seed(0)
        breaks = Breaks(hook)
        strategy = DDP(device="cpu")
        trainer = task.make_trainer(
            Path(folder) / "run", breaks, model={"net": task.Net, "plain": Plain}[model](), strategy=strategy,
            async_save=False,
        )  # fmt: skip
        output = trainer.train(resume_from_checkpoint=False)
        run = trainer.run
        (averages,) = (each.state_dict() for each in trainer.events.callbacks if isinstance(each, EMA))
        assert run.optimizer is not None
        place = run.lr_scheduler.state_dict()["last_epoch"]
        state = task.checksum(run.model.state_dict(), run.optimizer.state_dict(), averages, place)
        return state, output.global_step, breaks.regrouped, sum(taken)


def next_place(folder: Path, number: int, membership: str, is_stopped: Any) -> dict[str, str]:
    name, _, count = membership.partition("/")
    return {"TORCHELASTIC_RESTART_COUNT": count, "TRAINER_KIT_MEMBERSHIP": f"{name}/{int(count) + 1}/{count}/0"}


def break_once(note: Any) -> Callable[..., None]:
    """The connections break once more while the processes that are left count one another."""
    begun = list[int]()

    def call(run: Run, *given: Any) -> None:
        begun.append(1)
        if len(begun) == 1 and run.strategy.rank == 1:
            run.strategy.group.break_off()  # type: ignore[attr-defined]
        note(run, *given)

    return call


def lose_once(step: Any, always: bool) -> Callable[..., Any]:
    """Rank 1 does not hear that all gradients are summed, rank 0 does."""
    lost, taken = list[int](), list[int]()

    def call(self: DDP, *given: Any) -> Any:
        if self.rank == 1 and len(taken) == BREAK - 1 and (always or not lost):
            lost.append(1)
            raise LostProcessError("a connection broke")
        taken.append(1)
        return step(self, *given)

    return call


def try_train(folder: Path, *given: Any) -> list[Any]:
    folder.mkdir()
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    results: list[Any] = try_on_ranks(2, train, str(folder), store.port, *given)
    return results


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "hooks"), [("net", (*HOOKS, "note", "behind")), ("plain", ("on_step_end", "behind"))]
)
def test_it_ends_as_an_undisturbed_one(tmp_path: Path, model: str, hooks: tuple[str, ...]) -> None:
    quiet = try_train(tmp_path / "quiet", "never", model)
    assert [result[2:] for result in quiet] == [(0, 0)] * 2
    kept = {each.name for each in (tmp_path / "quiet" / "run").glob("checkpoint-*")}
    for hook in hooks:
        broken = try_train(tmp_path / hook, hook, model)
        assert [result[2] for result in broken] == [1, 1], hook
        assert [result[:2] for result in broken] == [result[:2] for result in quiet], hook
        assert [result[3] for result in broken] == [0, int(hook == "behind" and model == "plain")], hook
        run = tmp_path / hook / "run"
        steps = [record["step"] for record in read_log(run / "log.jsonl") if "learning_rate" in record]
        assert steps == [3, 6, 9, 12], hook
        assert {each.name for each in run.glob("checkpoint-*")} == kept, hook


@pytest.mark.distributed
@pytest.mark.slow
def test_what_breaks_again_without_a_loss_is_no_loss(tmp_path: Path) -> None:
    first, second = try_train(tmp_path / "run", "behind", "net", True)
    assert isinstance(second.error, LostProcessError)
    assert isinstance(first.error, LostProcessError)
