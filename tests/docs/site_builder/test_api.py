"""Each public name is on one page of the reference."""

from __future__ import annotations

from site_builder import api

import trainer_kit
from trainer_kit import accelerator, callbacks, memory
from trainer_kit.accelerator import unavailable, utils

PAGES = {path: entry.page for path, entry in api.entries().items()}


def test_each_name_has_the_page_of_its_kind() -> None:
    assert PAGES["trainer_kit.Trainer"] == "trainer"
    assert PAGES["trainer_kit.TrainingArguments"] == "arguments"
    assert PAGES["trainer_kit.FSDP"] == PAGES["trainer_kit.Precision"] == "strategies"
    assert PAGES["trainer_kit.Callback"] == PAGES["trainer_kit.callbacks.EMA"] == "callbacks"
    assert PAGES["trainer_kit.memory.COSTS"] == "memory"
    assert PAGES["trainer_kit.errors.SaveError"] == "exceptions"
    assert PAGES["trainer_kit.Accelerator"] == PAGES["trainer_kit.accelerator.LocalSGD"] == "accelerator"
    assert PAGES["trainer_kit.accelerator.utils.operations.gather"] == "accelerator-utils"


def test_each_public_name_has_an_entry() -> None:
    values = [entry.value for entry in api.entries().values()]
    for module in (trainer_kit, callbacks, memory, accelerator):
        assert all(any(getattr(module, name) is value for value in values) for name in api.public_names(module))
    assert len([path for path in PAGES if path.startswith("trainer_kit.accelerator.utils.")]) > 80
    assert {"set_seed", "gather"} <= {*dir(utils)}


def test_a_thing_with_two_names_is_shown_once() -> None:
    assert trainer_kit.set_seed is utils.set_seed
    assert [path for path, entry in api.entries().items() if entry.value is trainer_kit.set_seed] == [
        "trainer_kit.set_seed"
    ]


def test_members_of_bases_without_an_entry_are_shown_with_the_class() -> None:
    assert "backward" in api.inherited_members(trainer_kit.Accelerator)
    assert api.inherited_members(trainer_kit.DDP) == []  # those of Strategy have their own entry
    assert api.inherited_members(trainer_kit.FSDP) == []  # those of a protocol have no text of their own
    assert api.inherited_members(callbacks.Deterministic) == []


def test_what_comes_first_is_what_the_page_is_about() -> None:
    assert [api.on_page(page)[0].path for page in ("trainer", "strategies", "accelerator", "callbacks")] == [
        "trainer_kit.Trainer", "trainer_kit.Strategy", "trainer_kit.Accelerator", "trainer_kit.Callback",
    ]  # fmt: skip


def test_each_refused_name_of_accelerate_is_listed_with_its_reason() -> None:
    page = api.accelerator_utils()
    assert [name for name in unavailable.__all__ if f"- `{name}`: " not in page] == []


def test_functions_that_are_made_stand_under_a_heading_of_their_own() -> None:
    before, _, after = api.accelerator_utils().partition("## More functions\n\n")
    assert "_available()`: " not in before
    assert "_available()`: " in after


def test_names_that_other_pages_show_are_linked() -> None:
    assert "[`trainer_kit.notebook_launcher`](trainer.md#trainer_kit.notebook_launcher)" in api.accelerator()


def test_defaults_that_functions_make_are_plain_values() -> None:
    made = api.made_defaults()
    arguments = made["trainer_kit.config.arguments.TrainingArguments"]
    assert arguments["report_to"] == "['tensorboard', 'jsonl', 'html']"
    assert (arguments["mixed_precision"], arguments["profile"]) == ("'no'", "None")
    assert made["trainer_kit.run.Run"] == {"local_sums": "{}", "stateful": "{}"}  # no object with its address


def test_a_function_with_the_name_of_its_module_is_found() -> None:
    assert api.names_of_modules() == ["trainer_kit.callbacks.from_transformers"]


def test_tables_that_are_made_are_plain_values() -> None:
    made = api.made_values()
    assert made["trainer_kit.trackers.TRACKERS"].startswith("{'tensorboard': TensorBoardTracker, 'jsonl': JsonLines")
    assert made["trainer_kit.memory.COSTS"].startswith("(Cost(name='float32 weights', nbytes=4, ")
    assert "_MIXED" not in made["trainer_kit.memory.COSTS"]
