"""Noise on embeddings, as NEFTune adds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from trainer_kit import Trainer
from trainer_kit.callbacks import Neftune
from trainer_kit.errors import CallbackError

SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 13, "n_positions": 16}


def made() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES))


def texts() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(13, (16, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trained(folder: Path, alpha: float | None = 5.0, resume: bool = False) -> Trainer:
    args = arguments(
        folder,
        max_steps=4,
        neftune_noise_alpha=alpha,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=2,
    )
    trainer = Trainer(made(), args, texts(), texts())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [*trainer.run.model.state_dict().values()]


def test_the_noise_is_within_its_bound_and_only_in_training() -> None:
    callback, embedding = Neftune(3.0), nn.Embedding(5, 4)
    ids = torch.randint(5, (2, 7))
    noise = callback._add_noise(embedding, (), embedding(ids)) - embedding(ids)
    bound = 3.0 / (7 * 4) ** 0.5
    assert bound * 0.8 < noise.abs().max() <= bound
    assert noise.mean().abs() < bound / 2
    embedding.eval()
    assert torch.equal(callback._add_noise(embedding, (), embedding(ids)), embedding(ids))


def test_a_resume_repeats_the_noise(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "halves")
    (tmp_path / "halves" / "run" / "checkpoint-4" / "manifest.json").unlink()
    resumed = trained(tmp_path / "halves", resume=True)
    plain = trained(tmp_path / "plain", alpha=None)
    assert all(map(torch.equal, weights(whole), weights(resumed)))
    assert not all(map(torch.equal, weights(whole), weights(plain)))


def test_evaluation_has_no_noise_and_training_leaves_no_hook(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    model = trainer.run.model
    assert not model.get_input_embeddings()._forward_hooks
    other = arguments(tmp_path / "other", per_device_eval_batch_size=2)  # as in training: a loss is rounded by batch
    reference = Trainer(model, other, None, texts()).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == reference


def test_a_model_without_input_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match=r"neftune_noise_alpha needs a model .* Linear has none; set it to None"):
        Trainer(nn.Linear(2, 2), args=arguments(tmp_path, neftune_noise_alpha=5.0))
    with pytest.raises(ValueError, match=r"Neftune\(alpha=0\) must be a finite number above 0"):
        Neftune(0)
