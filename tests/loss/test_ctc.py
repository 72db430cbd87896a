"""CTC models of transformers: the loss of a step is the mean over its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loss_cases import gradient, make_trainer
from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

LENGTHS = (1, 2, 9, 12, 3, 0)
"""Labels of each sample; a sample without labels counts too."""

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""The models compute CTC in float32, whatever their dtype."""


class Renamed(Wav2Vec2ForCTC):
    """A user's own class, whose name does not tell transformers the loss."""

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__(config)
        self.loss_type = "ForCTC"


def made(kind: type[Wav2Vec2ForCTC] = Wav2Vec2ForCTC, reduction: str = "mean") -> nn.Module:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, conv_dim=(8, 8),
        conv_kernel=(10, 8), conv_stride=(8, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=8, mask_time_prob=0.0, layerdrop=0.0, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        ctc_loss_reduction=reduction, attn_implementation="eager",
    )  # fmt: skip
    return kind(config).double()


def speech() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_values": torch.randn(2400, generator=generator, dtype=torch.float64),
            "labels": torch.randint(1, 8, (length,), generator=generator) if length else torch.tensor([-100]),
        }
        for length in LENGTHS
    ]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    labels = [each["labels"] for each in samples]
    return {
        "input_values": torch.stack([each["input_values"] for each in samples]),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    }


@pytest.mark.parametrize("kind", [Wav2Vec2ForCTC, Renamed])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 6])
def test_gradients_and_losses_are_means_over_samples(
    tmp_path: Any, batch_size: int, kind: type[Wav2Vec2ForCTC]
) -> None:
    model, samples = made(kind).train(), speech()
    mean = torch.stack([model(**collate([each])).loss for each in samples]).mean()
    mean.backward()
    expected = gradient(model)
    model.zero_grad()
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, data_collator=collate, per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size, gradient_accumulation_steps=len(LENGTHS) // batch_size, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    torch.testing.assert_close(recorder.gradients[0], expected, **CLOSE)
    assert recorder.losses == pytest.approx([mean.item()], rel=1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean.item(), rel=1e-6)


def test_a_sum_is_refused_unless_compute_loss_makes_another_loss_of_it(tmp_path: Any) -> None:
    def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(**batch).loss, len(batch["labels"])

    model, samples = made(reduction="sum"), speech()
    trainer, _ = make_trainer(model, str(tmp_path / "refused"), samples, data_collator=collate)
    for refused in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=r"config\.ctc_loss_reduction='sum' of Wav2Vec2ForCTC is a loss that"):
            refused()
    unlabelled = [{"input_values": each["input_values"]} for each in samples]
    trainer, _ = make_trainer(model, str(tmp_path / "predicted"), samples)
    assert len(trainer.predict(unlabelled).predictions) == len(samples)
    trainer, _ = make_trainer(
        model, str(tmp_path / "own"), samples, data_collator=collate, compute_loss=mean, per_device_eval_batch_size=4
    )
    with torch.no_grad():
        expected = model.eval()(**collate(samples)).loss.item() / len(samples)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
