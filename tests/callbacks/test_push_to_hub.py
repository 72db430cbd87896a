from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from kit.hub_server import TOKEN, HubServer, hub_server

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import PushToHub

REPO = "me/tiny"

# huggingface_hub gives httpx what it is to send under a name that httpx no longer wants.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield server
        server.may_store.set()


class At(Callback):
    """Calls a function after a step."""

    def __init__(self, **at_step: Any) -> None:
        self.at_step = {int(name.removeprefix("step")): function for name, function in at_step.items()}

    def on_step_end(self, run: Run) -> None:
        self.at_step.get(run.state.step, lambda: None)()


def make_trainer(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    data = [{"input_ids": torch.randint(0, 50, (4,)), "labels": i % 2} for i in range(64)]
    defaults = {"max_steps": 8, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 0.01}
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, disable_tqdm=True, report_to=["jsonl"], async_save=False,
        **(defaults | arguments),
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    return Trainer(model, args, data, data[:16], callbacks=callbacks)


def push(**options: Any) -> PushToHub:
    return PushToHub(REPO, token=TOKEN, **options)


def download(folder: Path) -> Path:
    return Path(huggingface_hub.HfApi(token=TOKEN).snapshot_download(REPO, local_dir=folder))


def loaded(folder: Path) -> torch.nn.Module:
    return transformers.BertForSequenceClassification.from_pretrained(folder)  # type: ignore[no-any-return]


def card_of(hub: HubServer) -> tuple[dict[str, Any], str]:
    _, front, text = hub.files[REPO]["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(front), text


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    states = left.state_dict(), right.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def test_the_repository_holds_the_newest_model_and_its_card(hub: HubServer, tmp_path: Path) -> None:
    stale = {"model-00001-of-00002.safetensors": b"1", "model.safetensors.index.json": b"{}", "notes.txt": b"kept"}
    hub.files[REPO] = dict(stale)
    trainer = make_trainer(tmp_path / "run", push(license="mit", pipeline_tag="text-classification", datasets="own"))
    trainer.train()
    assert hub.commits[-1] == (REPO, "main", "Model of checkpoint-8")
    assert set(hub.files[REPO]) == {"README.md", "config.json", "model.safetensors", "notes.txt"}
    folder = download(tmp_path / "cache")
    assert same(loaded(folder), trainer.run.model)
    front, text = card_of(hub)
    assert front["license"] == "mit"
    assert front["library_name"] == "transformers"
    result = front["model-index"][0]["results"][0]
    assert front["model-index"][0]["name"] == "tiny"
    assert result["metrics"][0]["value"] == pytest.approx(trainer.evaluate()["eval_loss"])
    assert "step 8" in text
    assert str(tmp_path) not in text
    assert not list((tmp_path / "run").glob(".push-*"))


def test_with_the_best_model_at_the_end_it_is_pushed(hub: HubServer, tmp_path: Path) -> None:
    class Worse(Callback):
        priority = 10

        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            metrics["eval_made_up"] = float(run.state.step)

    best = {"load_best_model_at_end": True, "metric_for_best_model": "made_up", "greater_is_better": False}
    trainer = make_trainer(tmp_path / "run", push(), Worse(), **best)
    trainer.train()
    assert hub.commits[-1][2] == "Model of checkpoint-4"
    assert same(
        transformers.BertForSequenceClassification.from_pretrained(download(tmp_path / "cache")), trainer.run.model
    )
    assert "step 4" in card_of(hub)[1]
    assert "| eval\\_made\\_up | 4 |" in card_of(hub)[1]


def test_a_model_that_was_pushed_last_is_not_pushed_again_with_the_final_card(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, pushed = push(), list[list[str]]()
    create_commit = callback._api.create_commit

    def noted(repo: str, operations: list[Any], **options: Any) -> Any:
        pushed.append([each.path_in_repo for each in operations])
        return create_commit(repo, operations, **options)

    monkeypatch.setattr(callback._api, "create_commit", noted)
    trainer = make_trainer(tmp_path / "run", callback, save_steps=8)
    trainer.train()
    assert [sorted(each) for each in pushed] == [["README.md", "config.json", "model.safetensors"], ["README.md"]]
    assert same(loaded(download(tmp_path / "cache")), trainer.run.model)


def test_another_machine_resumes_from_the_pushed_checkpoint(hub: HubServer, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_save(self, run: Run, directory: Path) -> None:
            run.requests.stop = True

    whole = make_trainer(tmp_path / "whole")
    whole.train()
    make_trainer(tmp_path / "first", push(checkpoints=True), Stop()).train()
    assert hub.commits[-1][2] == "Model of checkpoint-4"
    second = make_trainer(tmp_path / "second", push(checkpoints=True))
    second.train(resume_from_checkpoint=download(tmp_path / "cache") / "last-checkpoint")
    assert second.run.state.step == 8
    assert same(second.run.model, whole.run.model)
    assert b'"step": 8' in hub.files[REPO]["last-checkpoint/state/trainer.json"]


def test_training_does_not_wait_for_a_push_and_pruned_files_are_pushed_whole(hub: HubServer, tmp_path: Path) -> None:
    hub.may_store.clear()
    there: list[bool] = []
    look = At(step15=lambda: there.append((tmp_path / "run" / "checkpoint-4").exists()), step16=hub.may_store.set)
    trainer = make_trainer(tmp_path / "run", push(), look, max_steps=16, save_total_limit=1)
    trainer.train()
    assert there == [False]  # the first was removed while its push was under way
    assert list(dict.fromkeys(commit[2] for commit in hub.commits)) == [
        "Model of checkpoint-4",
        "Model of checkpoint-16",
    ]
    assert same(
        transformers.BertForSequenceClassification.from_pretrained(download(tmp_path / "cache")), trainer.run.model
    )


def test_a_hub_that_is_down_does_not_end_the_training(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.is_down = True
    trainer = make_trainer(tmp_path / "run", push(), At(step6=lambda: setattr(hub, "is_down", False)))
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        trainer.train()
    assert trainer.run.state.step == 8
    assert "was not pushed to me/tiny: HfHubHTTPError" in caplog.text
    assert hub.commits[-1][2] == "Model of checkpoint-8"


def test_a_server_that_cannot_be_reached_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    trainer = make_trainer(tmp_path / "run", push())
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        trainer.train()
    assert trainer.run.state.step == 8
    assert "training continues" in caplog.text


@pytest.mark.parametrize(("repo", "token"), [(REPO, "hf_wrong"), ("no/such/name", TOKEN)])
def test_what_the_hub_refuses_is_an_error_before_training(
    hub: HubServer, tmp_path: Path, repo: str, token: str
) -> None:
    trainer = make_trainer(tmp_path / "run", PushToHub(repo, token=token))
    with pytest.raises(Exception, match=rf"repo_id='{repo}'.*`hf auth login`") as raised:
        trainer.train()
    assert ("Invalid username or password" in str(raised.value)) == (token != TOKEN)
    assert not list((tmp_path / "run").glob("crash-*"))
    assert "\n" not in str(raised.value)
    assert trainer.run.state.step == 0


def test_a_run_without_checkpoints_has_nothing_to_push(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        make_trainer(tmp_path / "run", push(), save_strategy="no").train()
    assert "nothing was pushed to me/tiny: the run saved no checkpoint; see save_strategy" in caplog.text


def test_only_the_final_model_is_pushed_on_request(hub: HubServer, tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", push(every_save=False)).train()
    assert [commit[2] for commit in hub.commits] == ["Model of checkpoint-8"]
    assert "model.safetensors" in hub.files[REPO]


def test_a_private_repository(hub: HubServer, tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", push(private=True)).train()
    assert REPO in hub.private
    make_trainer(tmp_path / "again", push(private=True)).train()
    hub.private.clear()
    commits = len(hub.commits)
    trainer = make_trainer(tmp_path / "public", push(private=True))
    with pytest.raises(Exception, match="repo_id='me/tiny' is public; make it private in its settings"):
        trainer.train()
    assert (trainer.run.state.step, len(hub.commits)) == (0, commits)


def test_a_finished_run_pushes_its_model_where_the_push_had_failed(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.is_down = True
    make_trainer(tmp_path / "run", push()).train()
    assert REPO not in hub.files
    hub.is_down = False
    caplog.clear()
    trainer = make_trainer(tmp_path / "run", push())
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        trainer.train(resume_from_checkpoint=True)
    assert "saved no checkpoint" not in caplog.text
    assert hub.commits[-1][2] == "Model of checkpoint-8"
    assert same(loaded(download(tmp_path / "cache")), trainer.run.model)


def test_what_a_killed_run_had_staged_is_removed(hub: HubServer, tmp_path: Path) -> None:
    left = tmp_path / "run" / ".push-left"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"1")
    make_trainer(tmp_path / "run", push()).train()
    assert not left.exists()
