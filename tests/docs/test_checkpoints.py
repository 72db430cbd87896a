"""What the page on checkpoints tells is so: its commands say what it shows, its arguments and messages are ours."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.guides import Guide, dry_run, unsaid
from kit.trainer_states import trainer_state

from trainer_kit import Callback, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.checkpoint import newest_valid, take_snapshot, write_checkpoint
from trainer_kit.checkpoint.compatibility import report_changes
from trainer_kit.cli import replay, verify
from trainer_kit.cli.main import main
from trainer_kit.cli.target import read_target
from trainer_kit.data.run_length import RunLength
from trainer_kit.data.sampling import Layout

GUIDE, FORMAT = Guide("docs/en/how-to/checkpoints.md"), Guide("docs/en/reference/checkpoint-format.md")
COMMANDS = [tuple(line.partition(" #")[0].split()[1:]) for block in GUIDE.shell for line in block.splitlines()]
OURS = [words for words in COMMANDS if words[0] == "checkpoints"]
SHOWN = re.findall(r"```text\n(.*?)```", GUIDE.text, re.DOTALL)
MESSAGES = re.findall(r"^\| `(.*?)` \|", GUIDE.text.partition("## Messages")[2], re.MULTILINE)
GIVEN = re.findall(r"`(\w+)=([^`,…]+)`", GUIDE.text)
FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
METRICS = {500: 0.3164, 1000: 0.2871, 1500: 0.2902, 2000: 0.2933}


def write(folder: Path, step: int, name: str | None = None) -> Path:
    committed = [
        [f"checkpoint-{each}", number, METRICS[each]] for number, each in enumerate(METRICS, 1) if each <= step
    ]
    best = METRICS[min(step, 1000)], min(step, 1000)
    weights = {"head.weight": torch.full((300,), 3.0), "head.bias": torch.ones(3)}
    if step > 500:
        weights["head.weight"][:] = 4.0
        weights["head.bias"][:2] = torch.tensor([0.99, torch.nan])
    states = {"trainer": trainer_state(step, committed, "demo", best)}
    arguments = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "seed": 1}
    return write_checkpoint(folder, take_snapshot(step, weights, states, arguments=arguments), name=name)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of which the guide tells."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    folder = Path("runs/demo")
    for step in METRICS:
        write(folder, step)
    write(folder, 1702, name="crash-1702")
    with open(folder / "checkpoint-2000" / "model.safetensors", "rb+") as file:
        file.truncate(1000)
    return folder


def same(text: str) -> list[str]:
    """Lines without what differs from run to run: times, sizes, and the spaces between columns."""
    text = re.sub(r"\d+ bytes instead of \d+", "LESS", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", text)
    text = re.sub(r"[\d.]+ ([KMG]iB)", "SIZE", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def shown(start: str) -> str:
    return next(block for block in SHOWN if block.startswith(start))


def told(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(list(words))
    return capsys.readouterr().out


def test_the_table_is_what_ls_shows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert same(told(OURS[0], capsys)) == same(shown("checkpoint "))


def test_the_differences_are_what_diff_shows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(words for words in OURS if "diff" in words)
    assert shown("2 of 2 tensors") in told(command, capsys)


def test_the_damaged_one_is_skipped_in_these_words(run: Path) -> None:
    said: list[str] = []
    newest_valid(run, said.append)
    assert same(said[0]) == same(shown("checkpoint-2000 is skipped"))


@pytest.mark.parametrize("words", OURS)
def test_the_commands_do_what_the_guide_says(
    words: Sequence[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"ls": 0, "verify": 1, "diff": 1, "prune": 0}
    assert main(list(words)) == codes[words[1]]
    left = sorted(path.name for path in run.glob("checkpoint-*"))
    is_pruned = "prune" in words and "--dry-run" not in words
    assert left == [f"checkpoint-{step}" for step in (1000, 1500, 2000, 500) if step != 500 or not is_pruned]


def test_the_other_commands_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [words for words in COMMANDS if words[0] in ("verify", "replay")]
    taken: list[argparse.Namespace] = []
    for command in (verify, replay):
        monkeypatch.setattr(command, "run", lambda options: taken.append(options) or 0)
    assert [main(list(words)) for words in others] == [0, 0, 0]
    read = [read_target(each, "verify", "", verify._add_options) for each in taken[:2]]
    assert [(options.script, options.steps, options.num_processes, options.arguments) for options in read] == [
        ("train.py", 20, 1, []),
        ("train.py", 50, 2, ["--model", "small"]),
    ]
    assert (taken[2].folder, taken[2].script) == (Path("runs/demo/crash-1702"), "train.py")


def test_the_launcher_takes_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(GUIDE.commands) == 1
    assert dry_run(GUIDE.commands[0], tmp_path, monkeypatch, capsys)


def test_the_arguments_are_ours() -> None:
    given = [(name, ast.literal_eval(value)) for name, value in GIVEN if name in FIELDS - {"resume_from_checkpoint"}]
    assert {name for name, _ in given} >= {name for name in FIELDS if name.startswith("save_")} - {"save_strategy"}
    for name, value in given:
        needed = {"save_minutes": 30} if value == "minutes" else {}
        TrainingArguments(eval_strategy="steps", **{**needed, name: value})
    named = set(re.findall(r"`((?:save|load|max)_\w+|metric_for_best_model|async_save)\b", GUIDE.text))
    assert named - FIELDS == {"load_checkpoint_in_model", "load_state_dict"}
    defaults = TrainingArguments()
    assert (defaults.save_strategy, defaults.nonfinite, defaults.async_save) == ("steps", "stop", True)
    assert (defaults.save_total_limit, defaults.save_best_limit, defaults.max_rollbacks) == (None, 1, 3)
    calls = [node for block in GUIDE.python for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    [call] = [call for call in calls if ast.unparse(call.func) == "TrainingArguments"]
    assert TrainingArguments(**{each.arg or "": ast.literal_eval(each.value) for each in call.keywords})


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        run.requests.stop = run.state.step == self.step


def test_a_resume_under_another_layout_says_this(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"x": torch.full((1,), float(number)), "labels": number % 2} for number in range(320)]

    def train(batch_size: int, **resume: Any) -> None:
        model = torch.nn.Linear(1, 2)
        args = TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=3,
            per_device_train_batch_size=batch_size,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )

        def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])

        Trainer(model, args, samples, compute_loss=loss, callbacks=[StopAt(50)]).train(**resume)

    train(8)
    with caplog.at_level("INFO", logger="trainer_kit"):
        train(16, resume_from_checkpoint=True)
    assert " ".join(shown("resumed with batches").split()) in caplog.text


def test_another_number_of_processes(caplog: pytest.LogCaptureFixture) -> None:
    args = TrainingArguments(max_steps=10)
    run = Run(args, Strategy(), torch.nn.Linear(1, 1))
    plans = [RunLength(each, 10, 3.0, 10, 3, {}) for each in (Layout(128, 1, 4), Layout(128, 1, 3).keep_steps_of(4, 1))]
    with caplog.at_level("INFO", logger="trainer_kit"):
        report_changes(run, plans[1], (plans[0].state_dict(), args.to_dict()))
    assert caplog.messages == [shown("3 processes keep").strip()]


def test_what_is_in_one(tmp_path: Path) -> None:
    [tree] = re.findall(r"```text\n(runs/demo/checkpoint-500/.*?)```", FORMAT.text, re.DOTALL)
    names = re.findall(r"^  (\S+?)/?  ", tree, re.MULTILINE)
    assert sorted(names) == sorted(path.name for path in write(tmp_path, 500).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES)
def test_the_messages_are_said(message: str) -> None:
    assert not unsaid(message)


def test_there_are_commands_and_messages() -> None:
    assert (len(COMMANDS), len(OURS), len(MESSAGES), len(SHOWN)) == (8, 5, 10, 6)
