"""`trainer-kit verify`: an honest script is equal, and each way of breaking is told by its name."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.forked import ForkedVerification

from trainer_kit.cli.main import main
from trainer_kit.errors import ScriptFailed
from trainer_kit.tools.verify.cause import Evidence, find_cause
from trainer_kit.tools.verify.compare import Line, first_difference, read_lines
from trainer_kit.tools.verify.fingerprints import attributes, mark_of, marks, sample_marks, state_marks
from trainer_kit.tools.verify.kill_plan import checkpoint_step, choose_kill
from trainer_kit.tools.verify.report import describe
from trainer_kit.tools.verify.verification import Result, describe_difference
from trainer_kit.utils.pytree import flatten_state

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="starts are forked, and killed by SIGKILL")
TASK = Path(__file__).with_name("task.py")


def verified(way: str, seed: int = 1, steps: int = 6) -> Result:
    return ForkedVerification([str(TASK), way], steps, seed, processes=1, timeout=60, say=lambda sentence: None).run()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("way", "seed"),
    [
        pytest.param("", 1, marks=pytest.mark.smoke),
        ("", 2),
        ("stream", 3),
        ("stream falls back", 3),
        ("unsaved cache", 4),
        ("transformers", 5),
    ],
)
def test_an_honest_script_is_equal(way: str, seed: int, tmp_path: Path) -> None:
    result = verified(way, seed)
    assert result.difference is None, describe(result, "")
    assert result.kill is not None
    assert result.resumed_from is not None
    assert 0 < result.resumed_from < result.kill.step <= result.steps == 6
    assert describe(result, "again").startswith("bitwise equal: 6 of 6 steps, killed and resumed")
    assert not list(tmp_path.iterdir())  # neither the script's own output_dir, nor what it saves after the training


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("way", "resumed", "part", "cause", "told"),
    [
        ("order", False, "batch", "data order", "samples that the straight run had elsewhere"),
        ("noise", False, "batch", "dataset randomness", "train_dataset.noise is a generator"),
        ("seeded noise", True, "batch", "dataset randomness", "train_dataset.noise is a generator"),
        ("clock", False, "batch", "dataset randomness", "read the clock"),
        ("generator", True, "loss", "RNG", "model.generator is a generator"),
        ("global generator", True, "loss", "RNG", "the script's noise is a generator"),
        ("hidden generator", True, "loss", "RNG", "cannot be seen from outside"),
        ("unseeded generator", False, "loss", "RNG", "model.generator is a generator"),
        ("buffer", True, "loss", "an object without state", "the buffer calls of the model"),
        ("callback", True, "hyperparameters", "a callback or object without state", "callback Decay.factor has"),
        ("stops later", True, "end", "a callback or object without state", "callback Stop.left has"),
        ("wrong state", True, "states", "a state that does not come back", "callback Counts"),
        ("system", False, "loss", "nondeterministic kernel", "two uninterrupted runs differ as well"),
        ("clock state", False, "states", "a state that depends on the clock or the machine", "callback Counts differs"),
        ("weights", False, "model", "other weights at the beginning", "something else that is random"),
    ],
)
def test_a_cause_is_told(way: str, resumed: bool, part: str, cause: str, told: str) -> None:
    result = verified(way)
    difference = result.difference
    assert difference is not None
    assert result.cause is not None
    shown = describe(result, "again")
    assert (difference.part, result.cause.name) == (part, cause), shown
    assert told in result.cause.reason
    assert (result.resumed_from is not None) == resumed
    assert shown.startswith("diverged: ")
    if part in ("batch", "model"):  # tensors: both values were written down
        assert "elements, by at most" in result.amount


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("fails", "ValueError: this script has a mistake"),
        ("raises", "LookupError: nothing was found"),
        ("never trains", "without a training by Trainer.train()"),
        ("one step", "ends by itself at step 1, too early"),
        ("stops early", "ends by itself at step 1, too early"),
    ],
)
def test_a_script_that_cannot_be_verified(way: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ScriptFailed) as caught:
        verified(way, seed=8)
    assert told in str(caught.value)
    assert not list(tmp_path.iterdir())


# The command, with real starts


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = (sys.executable, "-m", "trainer_kit", "verify", *words)
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.scenario
def test_the_command_says_equal() -> None:
    done = command(str(TASK), "--steps", "4", "--seed", "1", "--", "workers")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bitwise equal: 4 of 6 steps")
    assert done.stdout.endswith(f"trainer-kit verify --steps 4 --seed 1 {TASK} -- workers\n")
    assert "killed in step" in done.stderr


@pytest.mark.scenario
@pytest.mark.slow
def test_the_command_kills_one_of_two_processes() -> None:
    done = command("--num-processes", "2", "--steps", "4", "--seed", "1", str(TASK))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bitwise equal")
    assert ", process " in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        ([str(TASK), "--steps", "1"], "--steps 1 makes no sense; give 2 or more"),
        ([str(TASK), "--short"], "unrecognized arguments: --short"),
        ([], "the following arguments are required: script"),
        ([str(TASK), "--timeout", "1", "--seed", "1"], "the straight run took longer than 1 s"),
    ],
)
def test_a_command_that_makes_no_sense(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["verify", *words])
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    assert told in capsys.readouterr().err


# The pieces


def line(step: int, **parts: dict[str, str]) -> Line:
    return Line(step, parts, {})


def test_the_first_difference_is_that_which_the_others_follow_from() -> None:
    one = line(3, loss={"": "1"}, model={"a": "1", "b": "1"}, batch={"x": "1"})
    found = first_difference(one, line(3, model={"a": "2", "b": "2"}, loss={"": "2"}, batch={"x": "1"}))
    assert found is not None
    assert (found.place, found.others) == ("loss.", 0)
    found = first_difference(one, line(3, model={"a": "1", "b": "2"}, batch={"x": "2"}), is_restored=True)
    assert found is not None
    assert (found.place, found.expected, found.found) == ("model.b", "1", "2")
    assert first_difference(one, one) is None
    missing = first_difference(one, line(3, loss={"": "1"}, model={"a": "1"}, batch={"x": "1"}))
    assert missing is not None
    assert (missing.place, missing.found) == ("model.b", None)


@pytest.mark.parametrize(
    ("samples", "cause"),
    [
        ("aefg", "data order"),
        ("bacd", "data order"),
        ("bcde", "data order"),  # most are the step's own, at other places
        ("aebx", "data order"),
        ("axyz", "dataset randomness"),
        ("abcx", "dataset randomness"),
        ("exyz", "dataset randomness"),
        ("abcd", "dataset randomness"),  # what differs is no row of a sample, such as a mask
    ],
)
def test_samples_at_other_places_are_another_order(samples: str, cause: str) -> None:
    def step(number: int, marks: str) -> Line:
        return Line(
            number,
            {"ids": {"micro-batch 0": "0,1,2,3"}, "batch": {"micro-batch 0.x": marks}},
            {"samples": {str(place): mark for place, mark in enumerate(marks)}, "attributes": {}},
        )

    straight = {1: step(1, "abcd"), 2: step(2, "efgh")}
    found = {1: dataclasses.replace(step(1, samples), parts=step(1, samples + " collated").parts)}
    difference = first_difference(straight[1], found[1])
    assert difference is not None
    evidence = Evidence(difference, straight, straight, found, found, restored_at=None, is_reproducible=True)
    assert find_cause(evidence).name == cause


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a-0.jsonl"
    assert read_lines(path) == ({}, [])
    path.write_text('{"save_at": 2}\n{"step": 0, "parts": {}, "hints": {}}\n{"step": 1, "pa')
    assert read_lines(path) == ({"save_at": 2}, [Line(0, {}, {})])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.float16)),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        (torch.tensor([[0.0, 1.0]]).to_sparse(), torch.tensor([[1.0, 0.0]]).to_sparse()),
        (0.0, -0.0),
        (1, True),
        ("a" * 200, "a" * 201),
        (None, 0),
    ],
)
def test_marks_differ_where_bits_do(one: object, other: object) -> None:
    assert mark_of(one) != mark_of(other)
    assert mark_of(one) == mark_of(one)


def test_marks_of_a_tree_are_named_by_their_place() -> None:
    tree = {"a": [torch.zeros(2), {"b": 1.0}], "c": object()}
    assert [*marks(tree, "batch")] == ["batch.a.0", "batch.a.1.b"]
    view = torch.arange(6).reshape(2, 3).T
    assert mark_of(view) == mark_of(view.clone(memory_format=torch.contiguous_format))
    assert mark_of(torch.empty(0)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"seen": {1, 2}}, {"seen": {1, 3}}),
        ({"at": Path("a")}, {"at": Path("b")}),
        ({"seen": [], "step": 1}, {"step": 1}),
        ({"seen": []}, {"seen": ()}),
        ({1: 2.0}, {"1": 2.0}),
        ({"a": {1: 0, "1": 1}}, {"a": {1: 1, "1": 0}}),
        ({"ema": {"w": torch.zeros(2)}}, {"ema": {"w": torch.ones(2)}}),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2).numpy()}),
    ],
)
def test_marks_of_a_state_differ_where_a_checkpoint_does(one: object, other: object) -> None:
    assert state_marks(*flatten_state(one), "state") != state_marks(*flatten_state(other), "state")
    assert state_marks(*flatten_state(one), "state") == state_marks(*flatten_state(one), "state")


def test_marks_of_a_state_are_named_by_its_entries() -> None:
    found = state_marks(*flatten_state({"seen": 8, "w": torch.zeros(2)}), "callback EMA")
    assert found["callback EMA.seen"] == "8"
    assert found["callback EMA.w"].endswith(str(mark_of(torch.zeros(2))))


def test_samples_have_the_same_mark_wherever_they_stand() -> None:
    x, labels = torch.arange(12.0).reshape(4, 3), torch.arange(4)
    found = sample_marks({"x": x, "labels": labels, "scale": torch.ones(())})
    assert sample_marks({"x": x.flip(0), "labels": labels.flip(0)}) == found[::-1]
    assert len({*found}) == 4
    assert sample_marks({"text": ["a"]}) == []


def test_attributes_leave_out_what_cannot_be_told() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.count = 0
            self.seen = [1, 2]
            self.many = [*range(10**4)]
            self.generator = torch.Generator().manual_seed(0)
            self.thing = object()

    counter = Counter()
    before = attributes(counter)
    assert {*before} == {"count", "seen", "many", "generator"}
    counter.count += 1
    counter.seen.append(3)
    torch.rand(1, generator=counter.generator)
    assert {name for name, mark in attributes(counter).items() if before[name] != mark} == {
        "count", "seen", "generator",
    }  # fmt: skip
    rate = 0.5
    assert attributes(lambda: rate) == {"rate": mark_of(0.5)}


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_the_kill_comes_after_the_checkpoint(steps: int) -> None:
    kills = [choose_kill(seed, checkpoint_step(seed, steps), steps, 2) for seed in range(200)]
    assert all(checkpoint_step(seed, steps) < kill.step <= steps for seed, kill in enumerate(kills))
    assert {kill.step for kill in kills} == {*range(2, steps + 1)}
    assert {kill.rank for kill in kills} == {0, 1}
    assert kills == [choose_kill(seed, checkpoint_step(seed, steps), steps, 2) for seed in range(200)]


def test_how_much_tensors_differ() -> None:
    one = torch.tensor([1.0, 2.0, float("nan")])
    assert describe_difference(one, one) == ""
    assert describe_difference(one, torch.tensor([1.0, 2.5, float("nan")])) == "in 1 of 3 elements, by at most 0.5"
    assert describe_difference(one, one[:2]) == "torch.float32 of shape [3] and torch.float32 of shape [2]"
    assert describe_difference(torch.tensor([True]), torch.tensor([False])) == "in 1 of 1 elements"
