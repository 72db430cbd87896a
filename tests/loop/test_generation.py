"""Generation in evaluations: prompts, settings, ranks; the ids are those of the model's own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.architectures import ARCHITECTURES
from kit.ranks import RankFailed, on_ranks
from kit.trainer import arguments
from torch import nn
from torch.nn.functional import pad

from trainer_kit import FSDP, EvalPrediction, Trainer
from trainer_kit.callbacks import EMA

WIDTH = 8
CAUSAL, BOTH = ("gpt2", "llama"), ("gpt2", "llama", "t5")


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    return ARCHITECTURES[kind]()


def causal_sample(index: int) -> dict[str, torch.Tensor]:
    """A prompt of 2 to 4 tokens, an answer, and padding on the right."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(1, 32, (WIDTH,), generator=generator)
    prompt, length = 2 + index % 3, WIDTH - index % 2
    labels = ids.clone()
    labels[:prompt] = labels[length:] = -100
    mask = (torch.arange(WIDTH) < length).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def sample(kind: str, index: int) -> dict[str, torch.Tensor]:
    made = causal_sample(index)
    if kind == "t5":
        made["labels"] = made["input_ids"].flip(0)
    return made


def trainer(folder: Path | str, kind: str, **changes: Any) -> Trainer:
    given = {name: changes.pop(name) for name in ("compute_metrics", "callbacks", "strategy") if name in changes}
    settings = {"predict_with_generate": True, "generation_max_length": 5, "per_device_eval_batch_size": 3}
    args = arguments(Path(folder), **(settings | changes))
    data = [sample(kind, index) for index in range(7)]
    return Trainer(model_of(kind), args, data, data, **given)


def by_hand(kind: str, **settings: Any) -> list[list[int]]:
    """The ids of each sample alone, without padding."""
    model, found = model_of(kind).eval(), []
    for index in range(7):
        one = sample(kind, index)
        if kind == "t5":
            inputs = {name: one[name][None] for name in ("input_ids", "attention_mask")}
            ids = model.generate(**inputs, max_length=5, pad_token_id=0, **settings)
        else:
            prompt = one["input_ids"][None, : 2 + index % 3]
            mask = torch.ones_like(prompt)
            ids = model.generate(prompt, attention_mask=mask, max_new_tokens=5, pad_token_id=0, **settings)
            ids = ids[:, prompt.shape[1] :]
        found.append((ids[0].tolist() + [0] * 5)[:5])
    return found


def rows(predictions: np.ndarray[Any, Any]) -> list[list[int]]:
    return [(row.tolist() + [0] * 5)[:5] for row in predictions]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("beams", [1, 2])
def test_the_ids_are_those_of_each_sample_alone(tmp_path: Path, kind: str, beams: int) -> None:
    made = trainer(tmp_path, kind, generation_num_beams=beams)
    output = made.predict(made.run.eval_dataset)
    assert rows(output.predictions) == by_hand(kind, num_beams=beams)
    assert output.label_ids.tolist() == [sample(kind, index)["labels"].tolist() for index in range(7)]
    without = trainer(tmp_path, kind, predict_with_generate=False).evaluate()
    assert output.metrics["test_loss"] == without["eval_loss"]


def test_metrics_get_ids_and_settings_reach_generate(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"exact": float((prediction.predictions[:, 0] == 1).mean())}

    config = {"max_new_tokens": 2, "suppress_tokens": list(range(2, 32))}
    made = trainer(
        tmp_path, "llama", compute_metrics=compute_metrics, generation_max_length=None, generation_config=config
    )
    made.evaluate()
    (prediction,) = seen
    assert prediction.predictions.shape == (7, 2)
    assert set(prediction.predictions.flatten().tolist()) <= {0, 1}


def predictions_of_rank(folder: str, kind: str, sharded: bool) -> tuple[list[list[int]], Any]:
    made = trainer(folder, kind, strategy=FSDP() if sharded else None, per_device_eval_batch_size=2)
    output = made.predict(made.run.eval_dataset)
    return rows(output.predictions), output.label_ids.tolist()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_ranks_predict_each_sample_once_in_order(tmp_path: Path, kind: str) -> None:
    labels = [sample(kind, index)["labels"].tolist() for index in range(7)]
    for found in on_ranks(2, predictions_of_rank, str(tmp_path), kind, False):
        assert found == (by_hand(kind), labels)


@pytest.mark.distributed
def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="predict_with_generate=True is not possible with a sharded model"):
        on_ranks(2, predictions_of_rank, str(tmp_path), "gpt2", True)


def test_averaged_weights_generate(tmp_path: Path) -> None:
    """The average of an EMA that never decays is the initial model."""
    seen: list[list[list[int]]] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(rows(prediction.predictions))
        return {}

    changes = {"max_steps": 2, "eval_strategy": "epoch", "learning_rate": 0.5, "compute_metrics": compute_metrics}
    trainer(tmp_path, "llama", callbacks=[EMA(decay=1.0 - 1e-12)], **changes).train()
    trainer(tmp_path, "llama", **changes).train()
    assert seen[0] == by_hand("llama") != seen[-1]


def test_half_precision(tmp_path: Path) -> None:
    made = trainer(tmp_path, "llama", mixed_precision="bf16")
    assert made.predict(made.run.eval_dataset).predictions.dtype == np.int64


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_dataset_without_labels_is_a_dataset_of_prompts(tmp_path: Path, kind: str) -> None:
    prompts = [
        {name: sample(kind, index)[name][: 2 + index % 3] for name in ("input_ids", "attention_mask")}
        for index in range(7)
    ]
    made = trainer(tmp_path, kind, per_device_eval_batch_size=1)
    assert rows(made.predict(prompts).predictions) == by_hand(kind)


def test_what_cannot_be_generated(tmp_path: Path) -> None:
    args = arguments(tmp_path, predict_with_generate=True)
    with pytest.raises(ValueError, match="needs a transformers model that generates, but the model is Linear"):
        Trainer(nn.Linear(2, 2), args, eval_dataset=[torch.ones(2)]).evaluate()
    made = trainer(tmp_path, "llama")
    with pytest.raises(ValueError, match="a sample has a label at its first token"):
        made.predict([{name: column[4:] for name, column in sample("llama", 0).items()}])
    with pytest.raises(ValueError, match="max_length=9, which counts the padded prompt"):
        trainer(tmp_path, "llama", generation_config={"max_length": 9}).evaluate()
    several = {"num_return_sequences": 2, "do_sample": True}
    made = trainer(tmp_path, "llama", generation_config=several)
    with pytest.raises(ValueError, match="returned 6 texts for 3 samples"):
        made.predict(made.run.eval_dataset)


def test_a_length_wins_over_the_models_own(tmp_path: Path) -> None:
    for changes in ({}, {"generation_max_length": None, "generation_config": {"max_length": 5}}):
        made = trainer(tmp_path, "t5", **changes)
        own: Any = made.run.model
        own.generation_config.max_new_tokens = 2
        own.generation_config.eos_token_id = None  # no text ends by itself
        assert made.predict(made.run.eval_dataset).predictions.shape[1] == 5


@pytest.mark.parametrize(
    ("kind", "name"), [("t5", "max_length"), ("t5", "max_new_tokens"), ("llama", "max_new_tokens")]
)
def test_two_lengths_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    made = trainer(tmp_path, kind, generation_config={name: 9})
    with pytest.raises(ValueError, match=f"generation_max_length=5 and generation_config's {name}=9 are two lengths"):
        made.evaluate()


@pytest.mark.parametrize("kind", BOTH)
def test_a_mask_may_be_none(tmp_path: Path, kind: str) -> None:
    """And the first column need not have a row for each sample."""

    def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        columns = {name: torch.stack([each[name] for each in batch]) for name in ("input_ids", "labels")}
        return {"use_cache": torch.ones(1, dtype=torch.bool), "attention_mask": None, **columns}

    args = arguments(
        tmp_path, predict_with_generate=True, generation_max_length=5, per_device_eval_batch_size=2,
        remove_unused_columns=False,
    )  # fmt: skip
    data = [{"input_ids": torch.arange(1, 5) + index, "labels": torch.tensor([-100, -100, 7, 8])} for index in range(3)]
    output = Trainer(model_of(kind), args, data_collator=collate).predict(data)
    model = model_of(kind).eval()
    for index, row in enumerate(output.predictions.tolist()):
        ids = data[index]["input_ids"][None, : None if kind == "t5" else 2]
        length = {"max_length" if kind == "t5" else "max_new_tokens": 5}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **length)[0].tolist()
        expected = expected if kind == "t5" else expected[2:]
        assert (row + [0] * 5)[:5] == (expected + [0] * 5)[:5]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_found_without_a_mask(tmp_path: Path, side: str) -> None:
    prompts = [torch.arange(1, 3 + index % 3) + index for index in range(7)]

    def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        width, rows = max(len(each["input_ids"]) for each in batch), [each["input_ids"] for each in batch]
        gaps = [(0, width - len(row)) if side == "right" else (width - len(row), 0) for row in rows]
        return {"input_ids": torch.stack([pad(row, gap) for row, gap in zip(rows, gaps, strict=True)])}

    args = arguments(tmp_path, predict_with_generate=True, generation_max_length=5, per_device_eval_batch_size=3)
    model = model_of("gpt2").eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    output = Trainer(model, args, data_collator=collate).predict([{"input_ids": each} for each in prompts])
    for row, prompt in zip(output.predictions.tolist(), prompts, strict=True):
        mask = torch.ones_like(prompt)[None]
        ids = model.generate(prompt[None], attention_mask=mask, max_new_tokens=5, pad_token_id=0)[0, len(prompt) :]
        assert (row + [0] * 5)[:5] == (ids.tolist() + [0] * 5)[:5]


def test_settings_of_one_call(tmp_path: Path) -> None:
    mine = trainer(tmp_path, "t5")
    data = [sample("t5", index) for index in range(7)]
    found = mine.predict(data, max_length=4, num_beams=2, do_sample=None).predictions
    assert found.shape == (7, 4)
    assert np.array_equal(
        found, trainer(tmp_path, "t5", generation_max_length=4, generation_num_beams=2).predict(data)[0]
    )
    assert mine.predict(data).predictions.shape == (7, 5)
    assert mine.evaluate(metric_key_prefix="x", max_new_tokens=3)["x_loss"] > 0
    with pytest.raises(
        TypeError, match=r"evaluate\(\) has no argument 'metric_prefix', and generate\(\) neither; leave"
    ):
        mine.evaluate(metric_prefix="x")
    config = {"max_new_tokens": 5}
    other = trainer(tmp_path, "t5", generation_max_length=None, generation_config=config)
    assert other.predict(data, max_length=4).predictions.shape == (7, 4)
    assert other.predict(data, synced_gpus=False).predictions.shape == (7, 6)  # an argument of generate alone
    with pytest.raises(TypeError, match=r"'ignore_keys', .*; give Trainer\(preprocess_logits_for_metrics=\)"):
        mine.predict(data, ignore_keys=["hidden_states"])
