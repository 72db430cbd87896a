"""A training whose connections break goes on in its processes, and ends as an undisturbed one, bit for bit.

No process is lost here, and no launcher deals the places: see tests/scenarios/test_elastic.py.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import free_port, on_ranks, try_on_ranks
from scenarios import task
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer_kit import Callback, Run
from trainer_kit.callbacks import EMA, read_log
from trainer_kit.checkpoint.async_saver import AsyncSaver
from trainer_kit.checkpoint.healing import heal
from trainer_kit.config import environment
from trainer_kit.errors import LostProcessError
from trainer_kit.loop import regrouping
from trainer_kit.strategies.ddp import DDP
from trainer_kit.utils.new_place import NEW, open_for, set_joining

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
        self.regrouped = self.saved = 0
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


class Meets(Breaks):
    """Communicates after each checkpoint."""

    def on_save(self, run: Run, directory: Path) -> None:
        self.saved += 1
        run.strategy.barrier()


class Poisons(Breaks):
    """Makes the gradients of a step infinite, once, and breaks the connections after it; or in the rollback, too."""

    is_done = False

    def __init__(self, hook: str) -> None:
        super().__init__("never")
        self.step, self.breaks_again = int(hook.split()[1]), hook.endswith("again")

    def on_pre_optimizer_step(self, run: Run) -> None:
        if run.state.step == self.step - 1 and not self.is_done:
            for parameter in run.model.parameters():
                parameter.grad = torch.full_like(parameter, torch.inf)

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step and not self.is_done:
            self.is_done = True
            self.break_off(run)

    def on_rollback(self, run: Run, directory: Path) -> None:
        if self.breaks_again:
            self.break_off(run)

    def break_off(self, run: Run) -> None:
        if run.strategy.rank == 1:
            run.strategy.group.break_off()  # type: ignore[attr-defined]


class Prunes(Breaks):
    """Adds a parameter, as pruning does, and says that newcomers are ready."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == BREAK:
            run.model.register_parameter("mask", torch.nn.Parameter(torch.ones(1)))
            if run.strategy.is_main:
                set_joining(Path(os.environ["TRAINER_KIT_REGROUP_FOLDER"]), True)


KINDS = {"poison": Poisons, "deaf": Meets, "prune": Prunes}


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
        if hook == "deaf":
            patch.setattr(AsyncSaver, "finish", forget_once(AsyncSaver.finish))
        torch.manual_seed(0)
        breaks = KINDS.get(hook.split()[0], Breaks)(hook)
        strategy = DDP(device="cpu")
        trainer = task.make_trainer(
            Path(folder) / "run", breaks, model={"net": task.Net, "plain": Plain}[model](), strategy=strategy,
            async_save=False, nonfinite="rollback" if hook.startswith("poison") else "stop",
        )  # fmt: skip
        run = trainer.run
        try:
            output = trainer.train(resume_from_checkpoint=False)
        except SystemExit as end:
            return str(end.code), run.state.step, breaks.regrouped, 0
        if hook == "deaf":
            return str(breaks.saved), run.state.step, breaks.regrouped, 0
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


def forget_once(finish: Any) -> Callable[..., Any]:
    """Rank 1 is lost to the others as it hears that the second checkpoint is written."""
    calls = list[int]()

    def call(self: AsyncSaver) -> Any:
        known, directory = self.committed, finish(self)
        calls.append(1)
        if self.run.strategy.rank == 1 and len(calls) == 2:
            self.committed = known
            raise LostProcessError("a connection broke")
        return directory

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


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("step", "way", "regrouped"), [(5, "", 1), (8, "", 1), (5, " again", 2)])
def test_a_step_that_was_not_finite_before_a_break_is_rolled_back(
    tmp_path: Path, step: int, way: str, regrouped: int
) -> None:
    """After step 8, an evaluation and a checkpoint are due, which are not made in the step that the run returns to."""
    first, second = try_train(tmp_path / "run", f"poison {step}{way}", "net")
    assert first == second
    assert first[2] == regrouped
    records = read_log(tmp_path / "run" / "run" / "log.jsonl")
    assert [record["step"] for record in records if record["event"] == "rollback"] == [4]
    for event in ("evaluate", "save"):
        steps = [record["step"] for record in records if record["event"] == event]
        assert steps == sorted({*steps}), event
    assert first[1] == max(record["step"] for record in records if "learning_rate" in record)


@pytest.mark.distributed
@pytest.mark.slow
def test_all_hear_of_a_checkpoint_together(tmp_path: Path) -> None:
    """Rank 0 has heard of the second one before the break, rank 1 has not; their callbacks communicate."""
    first, second = try_train(tmp_path / "run", "deaf", "net")
    assert first == ("5", 12, 1, 0)  # both hear of it again, and once more since its save was not served to the end
    assert second == ("4", 12, 1, 0)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_training_that_has_changed_since_it_was_opened_goes_on_in_new_processes(tmp_path: Path) -> None:
    assert try_train(tmp_path / "run", "prune", "net") == [("143", BREAK, 0, 0)] * 2
    assert (tmp_path / "run" / "run" / f"checkpoint-{BREAK}").is_dir()
    assert open_for(tmp_path / "run") is None


JOINED = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
STAYED = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


class LetsJoin(Callback):
    """Says after a step that newcomers are ready, as a launcher does."""

    def __init__(self, folder: str, is_first: bool) -> None:
        self.folder, self.is_first = Path(folder), is_first
        self.joined_at, self.joins = -1, 0

    def on_step_end(self, run: Run) -> None:
        if run.state.step == BREAK and self.is_first and self.joined_at < 0:
            deadline = time.monotonic() + 60
            while not (self.folder / "words").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert (self.folder / "words").read_text() == NEW + str(open_for(self.folder))
            set_joining(self.folder, True)

    def on_regroup(self, run: Run) -> None:
        self.joined_at = run.state.step
        self.joins += 1


class LetsJoinAhead(LetsJoin):
    """Makes no requests, so that the vote of a step begins within it."""

    is_reporter = True


def join(
    folder: str, port: int, kind: type[LetsJoin], stops_at: int | None = None
) -> tuple[str, int, int, dict[str, Any]]:
    """Return a checksum of the state in the end, the step of the join, the last one and facts of the process."""
    is_newcomer = os.environ["RANK"] == "2" and stops_at is None

    def place(folder: Path, number: int, words: str, is_stopped: Any) -> dict[str, str]:
        if is_newcomer:
            assert not environment.membership()
            (folder / "words").write_text(words)
        else:
            set_joining(folder, False)
        known = {"TORCHELASTIC_RESTART_COUNT": "1", "TRAINER_KIT_MEMBERSHIP": "run/2/1/0", "WORLD_SIZE": "3"}
        return known | {"LOCAL_WORLD_SIZE": "3"}

    with pytest.MonkeyPatch.context() as patch:
        variables = {
            "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TRAINER_KIT_ELASTIC": "1",
            "TORCHELASTIC_RESTART_COUNT": "0", "TRAINER_KIT_REGROUP_FOLDER": folder,
            "TRAINER_KIT_NEWCOMER": str(int(is_newcomer)),
            "TRAINER_KIT_MEMBERSHIP": "" if is_newcomer else "run/1/0/0",
        }  # fmt: skip
        if stops_at is None:
            variables |= JOINED if is_newcomer else STAYED
        elif stops_at < 0:
            variables |= {"TORCHELASTIC_RESTART_COUNT": "1", "TRAINER_KIT_MEMBERSHIP": "run/2/1/0"}
        for variable, value in variables.items():
            patch.setenv(variable, value)
        patch.setattr(regrouping, "ask_for_place", place)
        patch.setattr(regrouping, "_numbers", itertools.count(1))  # these processes may have trained before
        joins = kind(folder, is_first=stops_at is None and os.environ["RANK"] == "0")
        ends = [task.StopAt(stops_at)] if stops_at is not None and stops_at > 0 else []
        trainer = task.make_trainer(
            Path(folder) / "run", joins, *ends, strategy=DDP(device="cpu"), async_save=False, on_resize="keep",
        )  # fmt: skip
        output = trainer.train(resume_from_checkpoint=stops_at is not None and stops_at < 0)
        run = trainer.run
        (averages,) = (each.state_dict() for each in trainer.events.callbacks if isinstance(each, EMA))
        assert run.optimizer is not None
        place_of_rate = run.lr_scheduler.state_dict()["last_epoch"]
        state = task.checksum(run.model.state_dict(), run.optimizer.state_dict(), averages, place_of_rate)
        losses = (run.state.loss_sum, run.state.loss_steps)
        facts = {"losses": losses, "is_main": run.strategy.is_main, "id": trainer._loop.checkpoints.run_id}  # type: ignore[union-attr]
        facts["joins"] = joins.joins
        facts["entries"] = [(each.processes, each.in_process) for each in run.ledger.memberships.entries]
        return state, joins.joined_at, output.global_step, facts


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", [LetsJoin, LetsJoinAhead])
def test_a_process_joins_with_the_bits_of_a_resume(tmp_path: Path, kind: type[LetsJoin]) -> None:
    """A run of 2 processes that a third one joins ends as one that stops at that step and resumes on 3."""
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    (tmp_path / "run").mkdir()
    joined = on_ranks(3, join, str(tmp_path), store.port, kind)
    at = joined[0][1]
    assert BREAK <= at <= BREAK + 1
    assert {each[:3] for each in joined} == {(joined[0][0], at, 12)}
    assert [each[3].pop("is_main") for each in joined] == [True, False, False]
    assert joined[1][3] == joined[2][3] == joined[0][3]
    assert joined[0][3]["entries"] == [(2, False), (3, True)]
    assert joined[0][3]["joins"] == 1

    (tmp_path / "resumed" / "run").mkdir(parents=True)
    folder = str(tmp_path / "resumed")
    for processes, stop in ((2, at), (3, -1)):
        store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
        resumed = on_ranks(processes, join, folder, store.port, kind, stop)
    assert resumed[0][2] == 12
    assert resumed[0][0] == joined[0][0]
    assert resumed[0][3]["losses"] == joined[0][3]["losses"]
