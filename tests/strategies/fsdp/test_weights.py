"""`Trainer(weights=)`: a model begins with a folder's weights, the same under each strategy."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.architectures import llama
from kit.ranks import free_port, on_ranks
from kit.releases import without_gloo
from kit.token_training import whole
from torch import nn

from trainer_kit import FSDP, Trainer, TrainingArguments


class Classifier(nn.Module):
    """A body that a folder has, a head that it lacks, and a buffer that no file has."""

    def __init__(self, has_head: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 3) if has_head else None
        self.register_buffer("scale", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x) * self.scale
        return {"loss": (hidden if self.head is None else self.head(hidden)).square().mean()}


MODELS: dict[str, Any] = {"classifier": Classifier, "llama": llama, "tied": lambda: llama(tie_word_embeddings=True)}


def begin(folder: str, name: str, weights: str | None, strategy: str) -> dict[str, torch.Tensor]:
    """The tensors of a model after a step with a learning rate of 0."""
    samples = [{"x": torch.ones(4)}] * 4
    if name != "classifier":
        samples = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 4
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, strategy=strategy, report_to="none", save_strategy="no", disable_tqdm=True,
        log_level="error", max_steps=1, learning_rate=0.0,
    )  # fmt: skip
    trainer = Trainer(args=args, train_dataset=samples, model_init=MODELS[name], weights=weights)
    trainer.train()
    named = [*trainer.run.model.named_parameters(), *trainer.run.model.named_buffers()]
    return {name: whole(each).detach().clone() for name, each in named}


def evaluate_after_a_refusal(folder: str, strategy: str) -> float:
    """The loss of a model whose training was refused before any weights were loaded."""
    samples = [{"x": torch.ones(4)}] * 4
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, strategy=strategy, report_to="none", save_strategy="no", disable_tqdm=True,
        log_level="error", max_steps=1,
    )  # fmt: skip
    trainer = Trainer(args=args, train_dataset=samples, eval_dataset=samples, model_init=Classifier)
    with pytest.raises(ValueError, match="none"):
        trainer.train(resume_from_checkpoint=f"{folder}/none")
    loss: float = trainer.evaluate()["eval_loss"]
    return loss


@pytest.mark.distributed
def test_a_model_has_weights_after_a_training_was_refused(tmp_path: Path) -> None:
    expected = evaluate_after_a_refusal(str(tmp_path), "auto")
    assert on_ranks(2, evaluate_after_a_refusal, str(tmp_path), "fsdp") == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_weights_of_a_folder(tmp_path: Path, name: str, processes: int) -> None:
    torch.manual_seed(5)
    saved = MODELS[name]()
    saved.save_pretrained(tmp_path / "saved", max_shard_size="5KB")
    expected = dict([*saved.named_parameters(), *saved.named_buffers()])
    for found in on_ranks(processes, begin, str(tmp_path / "run"), name, str(tmp_path / "saved"), "fsdp"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:weights=.* lacks 'head")
def test_a_new_head_is_the_same_under_each_strategy(tmp_path: Path) -> None:
    torch.manual_seed(5)
    Trainer(Classifier(has_head=False), TrainingArguments(output_dir=str(tmp_path))).save_model(tmp_path / "saved")
    given = str(tmp_path / "run"), "classifier", str(tmp_path / "saved")
    expected = begin(*given, "single")
    assert torch.equal(begin(*given[:2], None, "single")["head.weight"], expected["head.weight"])
    for strategy in ("ddp", "fsdp"):
        for found in on_ranks(2, quietly, given, strategy):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], value) for key, value in expected.items())


def quietly(given: tuple[str, str, str], strategy: str) -> dict[str, torch.Tensor]:
    with pytest.warns(UserWarning, match="lacks 'head") if os.environ["RANK"] == "0" else contextlib.nullcontext():
        return begin(*given, strategy)


def on_meta(folder: str) -> str:
    with torch.device("meta"):
        model = Classifier()
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", log_level="error", disable_tqdm=True)
    with pytest.raises(ValueError, match="no value for") as refusal:
        Trainer(model, args, [{"x": torch.ones(4)}] * 4, strategy=FSDP(device="cpu")).train()
    return str(refusal.value)


@pytest.mark.distributed
def test_a_model_without_values_is_refused_by_name(tmp_path: Path) -> None:
    for text in on_ranks(2, on_meta, str(tmp_path)):
        assert text.startswith("no value for 'body.0.weight', 'body.0.bias'")


def test_what_is_no_folder_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder; give one that"):
        begin(str(tmp_path), "llama", str(tmp_path / "nowhere"), "single")
    Trainer(Classifier(), TrainingArguments(output_dir=str(tmp_path))).save_model(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"lacks .* all that this LlamaForCausalLM has"):
        begin(str(tmp_path), "llama", str(tmp_path / "saved"), "single")


MEMORY = """
import gc, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from trainer_kit import FSDP, Callback, Precision, Trainer, TrainingArguments
from trainer_kit.utils.pytree import tensors

config = LlamaConfig(vocab_size=4000, hidden_size=512, intermediate_size=2048, num_hidden_layers=16,
                     num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64)

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

class Peak(Callback):
    def on_train_begin(self, run):
        held = [*run.model.parameters(), *tensors([*run.optimizer.state.values()])]
        shards = sum(each.to_local().nbytes for each in held if hasattr(each, "to_local"))
        print((kilobytes("VmHWM") - before) * 1024 / shards, end=" ")

def trainer(saves, strategy=None, callbacks=(), **given):
    folder = sys.argv[1] + ("/new" if saves == "no" else "/run")
    args = TrainingArguments(folder, max_steps=1, save_strategy=saves, report_to="none", use_cpu=True,
                             disable_tqdm=True, log_level="error", per_device_train_batch_size=1)
    samples = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
    return Trainer(args=args, train_dataset=samples, model_init=lambda: LlamaForCausalLM(config), strategy=strategy,
                   callbacks=callbacks, **given)

if len(sys.argv) > 2:
    trainer("epoch").train()
    sys.exit()
saved = sys.argv[1] + "/run/checkpoint-1"
for given, resume in (({"weights": saved}, None), ({}, saved)):
    strategy = FSDP(device="cpu", precision=Precision())
    strategy.setup()
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins again
    before = kilobytes("VmRSS")
    one = trainer("no", strategy, [Peak()], **given)
    one.train(resume_from_checkpoint=resume)
    del one, strategy
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_holds_more_than_its_shards(tmp_path: Path) -> None:
    """With weights from a folder, and where a training is resumed, with the optimizer's state."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    subprocess.run([*command, "make"], check=True, timeout=120)
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(4)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4
    peaks = [[float(each) for each in without_gloo(output).splitlines()[-1].split()] for output in outputs]
    assert [len(each) for each in peaks] == [2] * 4
    assert max(map(max, peaks)) < 1.2, peaks
