"""The pages "Coming from" name what exists, on both sides, and their scripts run and train alike."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import transformers
from kit.guides import Guide
from kit.name_tables import Names, attributes, example, named, ours, problems, public, rows, spans, version
from kit.releases import is_pinned

from trainer_kit import Accelerator, TrainingArguments
from trainer_kit.config.sources import OTHER_NAMES

PEERS = ("transformers", "accelerate", "lightning", "composer", "keras")
OWN = {field.name for field in dataclasses.fields(TrainingArguments)}


def names_of_transformers() -> Names:
    roots = {
        "trainer": transformers.Trainer, "state": transformers.TrainerState, "control": transformers.TrainerControl,
    }  # fmt: skip
    scopes = (transformers, transformers.trainer_callback, transformers.TrainerCallback, transformers.Trainer)
    functions = (transformers.Trainer, transformers.Seq2SeqTrainingArguments)
    return Names(roots, scopes, functions, {"torchrun": (), "accelerate launch": (), "python": (), "xla_spawn.py": ()})


def names_of_accelerate() -> Names:
    from accelerate.commands.launch import launch_command_parser

    options = [option for action in launch_command_parser()._actions for option in action.option_strings]
    commands = {f"accelerate {each}": () for each in ("config", "env", "test", "estimate-memory")}
    scopes = (accelerate, accelerate.utils, accelerate.state, accelerate.Accelerator)
    roots = {"accelerator": accelerate.Accelerator, "accelerate": accelerate}
    return Names(roots, scopes, (accelerate.Accelerator,), {"accelerate launch": options, **commands})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "theirs"), [("transformers", names_of_transformers), ("accelerate", names_of_accelerate)]
)
def test_each_name_exists(page: str, theirs: Any) -> None:
    name, release = version(page).split()
    if not is_pinned(name):
        pytest.skip("the page has the names of the release in constraints.txt")
    assert problems(page, theirs()) == []
    if sys.version_info < (3, 11):
        return  # constraints.txt has other releases
    assert importlib.metadata.version(name).startswith(f"{release}."), "check the page against the installed release"


def test_the_front_page_names_the_same_versions() -> None:
    front = Guide("docs/en/coming-from/index.md").text
    assert {page: f"| {version(page)} |" in front for page in PEERS} == dict.fromkeys(PEERS, True)


@pytest.mark.parametrize("page", PEERS)
def test_each_name_of_ours_exists(page: str) -> None:
    own = ours()
    assert len(rows(page)) > 20
    assert [name for row in rows(page) for span in spans(row.ours) for name in own.unknown(span)] == []


@pytest.mark.parametrize(
    ("span", "unknown"),
    [
        ("Trainer(model=, optimiser=)", ["optimiser"]),
        ("run.state.stop", ["TrainState has no stop"]),
        ("EarlyStopping(patience=, monitor=)", ["monitor"]),
        ("on_train_batch_end", ["on_train_batch_end"]),
        ("learning_rate=, lr=", ["lr"]),
        ("Stopping()", ["Stopping"]),
        ("trainer-kit launch --num-processes 8 --nodes 2", ["--nodes"]),
        ("trainer-kit start", ["trainer-kit start"]),
        ("from trainer_kit import Trainer, Training", ["Training"]),
        ("a b", ["no Python: a b"]),
        ("run.requests.stop", []),
        ('report_to=["jsonl"], eval_steps=0.1', []),
        ("torch.utils.data.Subset(dataset, range(n))", []),
        ("trainer.train(resume_from_checkpoint=True)", []),
    ],
)
def test_a_wrong_name_is_found(span: str, unknown: list[str]) -> None:
    assert ours().unknown(span) == unknown


@pytest.mark.slow
def test_what_is_public_in_transformers_is_on_its_page() -> None:
    wanted = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    wanted |= {name for name in dir(transformers.trainer_callback) if re.fullmatch(r"[A-Z]\w+Callback", name)}
    wanted |= {*inspect.signature(transformers.Trainer).parameters}
    assert wanted - named("transformers") == set()


def test_what_is_public_in_accelerate_is_on_its_page_or_ours() -> None:
    here = {*dir(Accelerator), *attributes(Accelerator)}
    assert public(accelerate.Accelerator) - here == named("accelerate") & (public(accelerate.Accelerator) - here)


def test_the_example_is_taken() -> None:
    text = Guide("docs/en/coming-from/transformers.md").text
    call = re.search(r"^args = (TrainingArguments\(\n.*?^\))$", text, re.MULTILINE | re.DOTALL)
    assert call is not None
    names_in: dict[str, Any] = {"TrainingArguments": TrainingArguments}
    args = eval(call[1], names_in)
    assert (args.mixed_precision, args.warmup_ratio, args.eval_steps) == ("bf16", 0.03, 0.1)


@pytest.mark.slow
def test_each_setting_in_a_table_of_transformers_is_known() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert len(named("transformers") & fields) > 20
    assert named("transformers") & fields <= OWN | OTHER_NAMES.keys()


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 11),
    reason="before 5.11, transformers counts the first token of each row too, which no logit predicts",
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # transformers', without a GPU
def test_a_script_for_transformers_trains_the_same(tmp_path: Path) -> None:
    before = example("transformers_before")(str(tmp_path / "before"), shuffle=False)
    after = example("transformers_after")(str(tmp_path / "after"), shuffle=False)
    for name in ("train_loss", "eval_loss", "eval_accuracy"):
        assert after[name] == pytest.approx(before[name], rel=1e-5)
    assert before["train_loss"] < 2.6  # chance: the logarithm of 31, 3.4
    shuffled = example("transformers_after")(str(tmp_path / "shuffled"))
    assert shuffled["train_loss"] != pytest.approx(after["train_loss"], rel=1e-4)
    assert shuffled["eval_accuracy"] > 0.3


@pytest.mark.slow
def test_a_script_for_accelerate_trains_to_the_same_bits(tmp_path: Path) -> None:
    before = example("accelerate_before")(str(tmp_path / "before"))
    after = example("accelerate_after")(str(tmp_path / "after"))
    assert after == before
    assert after["eval_accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning_after", "composer_after", "keras_after"])
def test_a_migrated_script_trains(name: str, tmp_path: Path) -> None:
    result = example(name)(str(tmp_path))
    assert result["eval_accuracy"] > 0.8
    assert list(tmp_path.glob("checkpoint-*/model.safetensors"))
