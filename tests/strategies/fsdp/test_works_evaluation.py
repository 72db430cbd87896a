"""Evaluation, prediction and generation under FSDP: the same as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.block_training import Blocks, Records, arguments, make_trainer, rows, whole_weights
from kit.ranks import on_ranks
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from trainer_kit import Callback, EvalPrediction, Run, Trainer, TrainingArguments


class MeanLogit:
    """A streaming metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.total += predictions.sum().item()
        self.count += len(labels)

    def compute(self) -> float:
        return self.total / self.count

    def merge_state(self, others: list[MeanLogit]) -> None:
        for other in others:
            self.total, self.count = self.total + other.total, self.count + other.count


def best_logit(prediction: EvalPrediction) -> dict[str, float]:
    return {"best": float(prediction.predictions.max(-1).mean()), "labels": float(prediction.label_ids.sum())}


def evaluated(folder: str, strategy: str) -> dict[str, Any]:
    given = {"compute_metrics": best_logit, "metrics": {"mean_logit": MeanLogit()}}
    records = Records()
    trainer = make_trainer(folder, strategy, [records], given=given, eval_strategy="epoch")
    trainer.train()
    output = trainer.predict(rows(7))
    named = {**records.evaluated[-1], **output.metrics}
    return {
        "predictions": output.predictions, "labels": output.label_ids, "weights": whole_weights(trainer.run.model),
        "metrics": {name: value for name, value in named.items() if "second" not in name and "runtime" not in name},
    }  # fmt: skip


@pytest.mark.distributed
def test_predictions_and_metrics_are_those_of_ddp(tmp_path: Path) -> None:
    """7 rows in batches of 2 give the ranks 2 batches each, the last of them short."""
    theirs = on_ranks(2, evaluated, str(tmp_path), "ddp")
    for ours, other in zip(on_ranks(2, evaluated, str(tmp_path), "fsdp"), theirs, strict=True):
        assert {"eval_best", "eval_mean_logit", "test_best", "test_loss"} <= ours["metrics"].keys()
        assert ours["metrics"] == pytest.approx(other["metrics"], abs=1e-12)
        np.testing.assert_allclose(ours["predictions"], other["predictions"], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(ours["labels"], other["labels"])
        torch.testing.assert_close(ours["weights"], other["weights"], rtol=0, atol=1e-12)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def generate(model: torch.nn.Module, rank: int) -> list[int]:
    """A rank other than the first ends earlier."""
    prompt = torch.tensor([[5 + rank, 7, 9]])
    texts = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=9 - 4 * rank, pad_token_id=0
    )
    return texts[0].tolist()  # type: ignore[no-any-return]


class Writing(Callback):
    """Generates a text before the training, where weights are gathered for the first time, and after each step."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_train_begin(self, run: Run) -> None:
        self.texts.append(generate(run.model, run.strategy.rank))

    def on_step_end(self, run: Run) -> None:
        self.texts.append(generate(run.model, run.strategy.rank))
        assert all(isinstance(each, DTensor) for each in run.model.parameters()) == (run.args.strategy == "fsdp")


def written(folder: str, strategy: str, family: str, **options: Any) -> list[list[int]]:
    torch.manual_seed(0)
    model = {"llama": llama, "t5": t5}[family]()
    data = [{"input_ids": (row := torch.randint(4, 31, (6,))), "labels": row.clone()} for _ in range(8)]
    writing = Writing()
    args = TrainingArguments(
        output_dir=folder, strategy=strategy, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error",
        save_strategy="no", per_device_train_batch_size=1, max_steps=3, learning_rate=0.02, **options,
    )  # fmt: skip
    trainer = Trainer(model, args, data, callbacks=[writing])
    trainer.train()
    return [*writing.texts, generate(model, trainer.run.strategy.rank)]


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_texts_are_those_of_ddp(tmp_path: Path, family: str) -> None:
    ours, theirs = (on_ranks(2, written, str(tmp_path), strategy, family) for strategy in ("fsdp", "ddp"))
    assert ours == theirs
    assert len({str(text) for text in ours[0]}) > 1
    assert len(ours[0][0]) != len(ours[1][0])


@pytest.mark.distributed
def test_texts_are_written_in_the_precision_of_the_weights(tmp_path: Path) -> None:
    texts = on_ranks(2, written, str(tmp_path), "fsdp", "llama", mixed_precision="bf16")
    assert [len(each) for each in texts] == [5, 5]


def first_evaluated(folder: str, strategy: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    args = arguments(folder, strategy, eval_on_start=True, max_steps=2)
    trainer = Trainer(Blocks(), args, rows(8), rows(1), compute_loss=lambda model, batch: model(**batch)["loss"])
    trainer.train()
    return whole_weights(trainer.run.model)


@pytest.mark.distributed
def test_a_training_follows_an_evaluation_that_one_process_had_no_batch_of(tmp_path: Path) -> None:
    """What the evaluation showed of the loss is known to all."""
    ours, theirs = (on_ranks(2, first_evaluated, str(tmp_path), strategy) for strategy in ("fsdp", "ddp"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
