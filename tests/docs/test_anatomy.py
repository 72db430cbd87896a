"""What the page on memory and time tells is so: its commands, its estimated figures, the names of its records."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.guides import Guide, unsaid
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.cli.main import main
from trainer_kit.memory import Anatomy, estimate
from trainer_kit.memory.advice import Estimate
from trainer_kit.memory.costs import COSTS
from trainer_kit.tools.model_resolver import resolve

GUIDE = Guide("docs/en/explanation/anatomy.md")
COMMANDS = [line.split()[1:] for block in GUIDE.shell for line in block.splitlines()]
SHOWN = re.findall(r"```text\n(.*?)```", GUIDE.text, re.DOTALL)
[CONFIG] = re.findall(r"```json\n(.*?)```", GUIDE.text, re.DOTALL)
TASK = next(block for block in GUIDE.python if "my_task.py" in block)
MESSAGES = re.findall(r"^\| `(.*?)` \|", GUIDE.text.partition("## Messages")[2], re.MULTILINE)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
TOLD_BY_GPUS = {
    "reserved_memory_gib", "device_memory_gib", "process_memory_gib", "fragmentation", "anatomy/activations_gib",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of which the guide tells, the current one."""
    (tmp_path / "bert-large.json").write_text(CONFIG)
    (tmp_path / "my_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def rows(title: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its head."""
    lines = GUIDE.text.partition(f"## {title}")[2].partition("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines if line.startswith("|")]
    return table[2:]


def same(text: str) -> list[str]:
    """Lines without numbers and the spaces between columns."""
    return [" ".join(re.sub(r"[\d.]+(e\+\d+)?( [KMG]?i?B\b)?", "N", line).split()) for line in text.splitlines()]


def sizes(table: str) -> dict[str, float]:
    found = re.findall(r"^(\w+) +([\d.]+) (\w*B)", table, re.MULTILINE)
    return {name: float(number) * UNITS[unit] for name, number, unit in found}


@pytest.mark.slow
def test_the_table_is_what_is_estimated(folder: Path) -> None:
    origin, _, text = SHOWN[0].partition("\n")
    subject = resolve("bert-large.json", batch_size=4)
    assert subject.origin == origin
    anatomy = estimate(subject.model, TrainingArguments(), subject.batch, device="cuda")
    table, _, verdict = text.partition("\n\n")
    assert same(table) == same(anatomy.table())
    for name, nbytes in sizes(table).items():
        assert nbytes == pytest.approx(sizes(anatomy.table())[name], rel=0.05)
    told = Estimate(anatomy, 8 * 2**30, 4, ()).table().partition("\n\n")[2]
    assert same(verdict)[0] == same(told)[0]


def test_the_exercise_shows_what_its_script_printed_when_it_was_recorded() -> None:
    recorded = Path(__file__).parents[2] / "docs" / "recorded" / "memory-and-time" / "anatomy.txt"
    [shown] = [each for each in SHOWN if each.startswith("a small BERT")]
    assert sorted(same(shown)) == sorted(same(recorded.read_text(encoding="utf-8")))


def test_the_commands_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(model: torch.nn.Module, args: TrainingArguments, batch: Any, **others: Any) -> Estimate:
        asked.append((args, others))
        return Estimate(Anatomy((), 0, "cuda", 1, 1, 1), None, None, ())

    monkeypatch.setattr("trainer_kit.memory.advice.advise", answer)
    assert [main(words) for words in COMMANDS] == [0] * len(COMMANDS)
    (first, others), *_ = asked
    assert (first.per_device_train_batch_size, others["device_memory"]) == (4, 8 * 2**30)
    assert len(asked) == 6


def test_the_costs_are_ours() -> None:
    known = {cost.name: cost.nbytes for cost in COSTS}
    told = {what: float(nbytes) for what, nbytes, _ in rows("What the memory is made of")[: len(COSTS)]}
    assert told == pytest.approx(known, rel=0.01)


def test_the_arguments_are_ours() -> None:
    given = re.findall(r"`(\w+)=([^`]+)`", GUIDE.text)
    fields = {name: ast.literal_eval(value) for name, value in given}
    assert TrainingArguments(**fields)
    assert len(given) == 9


def test_the_names_are_those_of_the_records(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])

    samples = [{"input_ids": torch.arange(4), "labels": torch.tensor(number % 2)} for number in range(8)]
    model = torch.nn.Sequential(torch.nn.Embedding(4, 64), torch.nn.Flatten(), torch.nn.Linear(256, 64))
    args = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=2, logging_steps=2, use_cpu=True,
        report_to="none", disable_tqdm=True, eval_strategy="epoch",
    )  # fmt: skip
    trainer = Trainer(model, args, samples, samples, compute_loss=loss)
    names: set[str] = set()
    emit = trainer.events.call

    def listen(hook: str, run: Any, *given: Any) -> None:
        names.update(given[0] if hook in ("on_log", "on_train_end") else ())
        emit(hook, run, *given)

    trainer.events.call = listen  # type: ignore[method-assign]
    trainer.train()
    activities = {name.partition("/")[2] for name in names if name.startswith("seconds/")}
    known = set(re.findall(r"`([\w/]+)`", " ".join(row[0] for row in rows("What the time is made of"))))
    assert {re.sub("/.*", "/NAME", name) for name in activities} <= known
    told = {name for row in rows("Names in the records") for name in re.findall(r"`([\w/]+)`", row[0])}
    assert told - TOLD_BY_GPUS - {"seconds/ACTIVITY"} <= names
    whole = {name for name in names if "second" in name or "gib" in name or "mfu" in name or "goodput" in name}
    assert {name for name in whole if not name.startswith(("seconds/", "train_", "eval_"))} <= told


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES)
def test_the_messages_are_said(message: str) -> None:
    assert not unsaid(message)


def test_there_are_messages_and_an_example() -> None:
    assert len(MESSAGES) == 7
    assert len(SHOWN) == 2
    for link in re.findall(r"\]\((\.\./[\w/.]+)\)", GUIDE.text):
        assert (Path(__file__).parents[2] / "docs" / "en" / "explanation" / link).exists()


@pytest.mark.parametrize("beams", [1, 3])
def test_the_cache_of_a_generation_has_the_size_that_is_told(beams: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=499
    )
    prompts, new = torch.ones(2, 8, dtype=torch.int64), 8
    output = GPT2LMHeadModel(config).generate(
        prompts, attention_mask=torch.ones_like(prompts), num_beams=beams, max_new_tokens=new, min_new_tokens=new,
        do_sample=False, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    found = sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)
    tokens = 8 + new - 1  # the newest one is in no cache yet
    assert found == 2 * config.n_layer * config.n_head * (64 // 2) * tokens * 4 * len(prompts) * beams


@pytest.mark.slow
def test_attention_that_keeps_its_scores_and_inference_take_what_is_told(folder: Path) -> None:
    subject = resolve("bert-large.json", batch_size=4)
    found = estimate(subject.model, TrainingArguments(), subject.batch, device="cuda", inference=True)
    assert f"that is {found.peak / 2**30:.2f} GiB where training takes" in " ".join(GUIDE.text.split())
    subject.model.set_attn_implementation("eager")
    found = estimate(subject.model, TrainingArguments(), subject.batch, device="cuda")
    assert f"the same estimate is {found.peak / 2**30:.2f} GiB" in " ".join(GUIDE.text.split())


@pytest.mark.slow
def test_chunks_of_logits_save_what_the_guide_says() -> None:
    shape: dict[str, Any] = {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    ids = torch.ones(4, 1024, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    found = []
    for recomputes in (False, True):
        for chunked in (True, False):
            args = TrainingArguments(
                mixed_precision="bf16", gradient_checkpointing=recomputes, chunked_cross_entropy=chunked
            )
            found.append(f"{estimate(model, args, batch, device='cuda').peak / 2**30:.1f}")
    passage = GUIDE.text.partition("- **Logits**")[2].partition("\n- **")[0]
    assert re.findall(r"([\d.]+)\s+GiB", passage) == found
