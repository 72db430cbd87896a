"""Evaluations of transformers' models: the same ids, logits, labels and losses as by transformers' own trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.architectures import llama, mistral
from kit.trainer import arguments

from trainer_kit import Callback, EvalPrediction, Run, Trainer

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

_TINY = {"vocab_size": 32, "pad_token_id": 0, "eos_token_id": 1}


def t5() -> Any:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, **_TINY
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    layers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.BartConfig(
        d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, bos_token_id=2,
        decoder_start_token_id=1, forced_eos_token_id=None, **layers, **_TINY,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def question_answering() -> Any:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
        vocab_size=32,
    )  # fmt: skip
    return transformers.BertForQuestionAnswering(config)


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def texts(length: int = 7) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(2, 32, (6,), generator=generator),
            "attention_mask": torch.tensor([1, 1, 1, 1, int(index % 2), 0]),
            "labels": torch.cat([torch.randint(2, 32, (4,), generator=generator), torch.tensor([-100])]),
        }
        for index in range(length)
    ]


def questions(length: int = 7) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(2, 32, (6,), generator=generator),
            "start_positions": torch.tensor(index % 6),
            "end_positions": torch.tensor(index * 5 % 6),
        }
        for index in range(length)
    ]


_THEIRS = {"per_device_eval_batch_size": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True}


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("beams", [1, 3])
def test_generated_ids_are_those_of_seq2seq_trainer(tmp_path: Path, make: Any, beams: int) -> None:
    settings = {"predict_with_generate": True, "generation_max_length": 9, "generation_num_beams": beams}
    their_args = transformers.Seq2SeqTrainingArguments(str(tmp_path / "theirs"), **_THEIRS, **settings)
    theirs = transformers.Seq2SeqTrainer(seeded(make), their_args, eval_dataset=texts())
    theirs.processing_class = None
    expected = theirs.predict(texts())
    args = arguments(tmp_path, per_device_eval_batch_size=3, **settings)
    found = Trainer(seeded(make), args).predict(texts())
    width = found.predictions.shape[1]
    assert np.array_equal(found.predictions, expected.predictions[:, :width])
    assert (expected.predictions[:, width:] == 0).all()
    assert found.label_ids.tolist() == expected.label_ids[:, :5].tolist()


def test_a_metric_of_torchmetrics_counts_exact_answers(tmp_path: Path) -> None:
    text = pytest.importorskip("torchmetrics.text")

    class Errors:
        """The error rate of ids as characters, with torchmetrics' protocol."""

        def __init__(self) -> None:
            self.edit = text.CharErrorRate()

        def update(self, ids: torch.Tensor, labels: torch.Tensor) -> None:
            self.edit.update(
                [" ".join(map(str, row)) for row in ids.tolist()], [" ".join(map(str, row)) for row in labels.tolist()]
            )

        def compute(self) -> Any:
            return self.edit.compute()

        def reset(self) -> None:
            self.edit.reset()

    model = seeded(t5)
    args = arguments(tmp_path, predict_with_generate=True, generation_max_length=6, per_device_eval_batch_size=7)
    ids = Trainer(seeded(t5), args).predict(texts()).predictions
    answers = [{**sample, "labels": torch.from_numpy(row)} for sample, row in zip(texts(), ids, strict=True)]
    metrics = Trainer(model, args, eval_dataset=answers, metrics={"error": Errors()}).evaluate()
    assert metrics["eval_error"] == 0.0


def test_question_answering_is_that_of_transformers(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    wanted = ["inputs", "loss"]
    their_args = transformers.TrainingArguments(str(tmp_path / "theirs"), include_for_metrics=wanted, **_THEIRS)
    transformers.Trainer(
        seeded(question_answering), their_args, eval_dataset=questions(), compute_metrics=compute_metrics
    ).evaluate()
    args = arguments(tmp_path, include_for_metrics=wanted, per_device_eval_batch_size=3)
    Trainer(seeded(question_answering), args, eval_dataset=questions(), compute_metrics=compute_metrics).evaluate()
    theirs, ours = seen
    for one, other in zip(ours.predictions, theirs.predictions, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert [each.tolist() for each in ours.label_ids] == [each.tolist() for each in theirs.label_ids]
    assert ours.inputs.tolist() == theirs.inputs.tolist()
    assert ours.losses.shape == (7,)
    np.testing.assert_allclose(ours.losses, theirs.losses[:7], rtol=1e-6)
    assert [*ours][2] is ours.inputs


@pytest.mark.parametrize("names", [None, ["start_positions", "end_positions"], ["end_positions"]])
def test_label_names_choose_the_labels(tmp_path: Path, names: list[str] | None) -> None:
    args = arguments(tmp_path, label_names=names)
    found = Trainer(seeded(question_answering), args).predict(questions()).label_ids
    starts, ends = ([int(each[name]) for each in questions()] for name in ("start_positions", "end_positions"))
    if names == ["end_positions"]:
        assert found.tolist() == ends
    else:
        assert [each.tolist() for each in found] == [starts, ends]


def test_preprocessed_logits_are_those_of_transformers(tmp_path: Path) -> None:
    def argmax(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        assert isinstance(labels, torch.Tensor)
        best: torch.Tensor = (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
        return best

    data = [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in texts()]
    their_args = transformers.TrainingArguments(str(tmp_path / "theirs"), **_THEIRS)
    theirs = transformers.Trainer(seeded(llama), their_args, preprocess_logits_for_metrics=argmax).predict(data)
    args = arguments(tmp_path, per_device_eval_batch_size=3)
    ours = Trainer(seeded(mistral), args, preprocess_logits_for_metrics=argmax)
    assert ours.predict(data).predictions.shape == (7, 6)
    ours = Trainer(seeded(llama), args, preprocess_logits_for_metrics=argmax)
    assert ours.predict(data).predictions.tolist() == theirs.predictions.tolist()


def test_the_routers_loss_of_mixtral_is_logged(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    records: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            records.append(record)

    data = [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in texts(4)]
    model = seeded(lambda: transformers.MixtralForCausalLM(config))
    args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=4, learning_rate=0.0)
    Trainer(model, args, data, data, callbacks=[Keep()]).train()
    with torch.no_grad():
        ids = torch.stack([each["input_ids"] for each in data])
        output = model(input_ids=ids, labels=ids)
    assert records[0]["aux_loss"] == pytest.approx(float(output.aux_loss), rel=1e-5)
    assert Trainer(model, args, None, data).evaluate()["eval_aux_loss"] == pytest.approx(
        float(output.aux_loss), rel=1e-5
    )


def test_an_evaluation_before_the_first_step(tmp_path: Path) -> None:
    steps: list[int] = []

    class Keep(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            steps.append(run.state.step)

    args = arguments(tmp_path, eval_on_start=True, eval_strategy="steps", eval_steps=2, max_steps=4)
    Trainer(seeded(question_answering), args, questions(), questions(), callbacks=[Keep()]).train()
    assert steps == [0, 2, 4]
    plan = Trainer(seeded(question_answering), args, questions(), questions()).plan()
    assert "before the first step and every 2 steps" in str(plan)
