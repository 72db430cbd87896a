"""Collators of transformers, with columns of text that only the user reads."""

from __future__ import annotations

import copy
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments

pytest.importorskip("datasets")

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForPermutationLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
    default_data_collator,
)
from transformers import Trainer as TheirTrainer
from transformers import TrainingArguments as TheirArguments

from trainer_kit import Callback, Run, Trainer

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore:You're using a .* tokenizer:UserWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

TEXTS = ["a b c", "b c", "c d e f", "a", "f e d", "a b", "c c c", "b"]


def tokenizer() -> Any:
    words = ["[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]", *"abcdef"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip


def dataset(special: bool = False) -> Any:
    made = datasets.Dataset.from_dict({"text": TEXTS, "label": [len(text) % 2 for text in TEXTS]})
    return made.map(lambda row: tokenizer()(row["text"], return_special_tokens_mask=special))


def config() -> BertConfig:
    return BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                      hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(config())


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, run: Run, record: Any) -> None:
        self.losses += [record["loss"]] if "loss" in record else []


def test_padding_leaves_out_a_text_column_as_transformers_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    losses, collate = Losses(), DataCollatorWithPadding(tokenizer())
    args = arguments(tmp_path, max_steps=-1, shuffle=False, logging_steps=1, log_level="info", **options)
    trainer = Trainer(classifier(), args, dataset(), dataset(), data_collator=collate, callbacks=[losses])
    with caplog.at_level(logging.INFO, "trainer_kit"):
        trainer.train()
        trainer.evaluate()
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert len(said) == 1
    assert "takes are left out: text (remove_unused_columns=False" in said[0]

    class InOrder(TheirTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    theirs = InOrder(
        classifier(),
        TheirArguments(str(tmp_path / "theirs"), report_to="none", use_cpu=True, save_strategy="no", logging_steps=1,
                       disable_tqdm=True, **options),
        train_dataset=dataset(),
        data_collator=collate,
    )  # fmt: skip
    theirs.train()
    expected = [record["loss"] for record in theirs.state.log_history if "loss" in record]
    assert losses.losses == pytest.approx(expected, abs=1e-5)


def test_masked_language_modeling_keeps_its_mask(tmp_path: Path) -> None:
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5)
    trainer = Trainer(
        BertForMaskedLM(config()), arguments(tmp_path, max_steps=3), dataset(special=True), data_collator=collate
    )
    assert trainer.train().global_step == 3


def masks(folder: Path, seed: int | None, resume: bool = False) -> list[list[int]]:
    """The labels of each step, which are the masked tokens."""
    seen: list[list[int]] = []

    class Masks(Callback):
        def on_step_end(self, run: Run) -> None:
            seen.append(run.batch["labels"].flatten().tolist())

    collate = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5, seed=seed)
    args = arguments(folder, max_steps=6, save_strategy="steps", save_steps=3)
    trainer = Trainer(BertForMaskedLM(config()), args, dataset(True), data_collator=collate, callbacks=[Masks()])
    trainer.train(resume_from_checkpoint=resume)
    return seen


@pytest.mark.parametrize("seed", [None, 5])
def test_masks_are_the_same_after_a_resume(tmp_path: Path, seed: int | None) -> None:
    """With a seed, the collator makes a generator of its own in its first batch."""
    whole = masks(tmp_path, seed)
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert masks(tmp_path, seed, resume=True) == whole[3:]
    assert len({tuple(each) for each in whole}) == len(whole)


def filled() -> Any:
    """Texts of one length, as whole word masking needs them: tokenizers do not pad offsets."""
    return datasets.Dataset.from_dict({"text": TEXTS}).map(
        lambda row: tokenizer()(
            row["text"],
            padding="max_length",
            max_length=6,
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
        )
    )


def test_whole_word_masking_keeps_the_offsets(tmp_path: Path) -> None:
    collate = DataCollatorForLanguageModeling(
        tokenizer(), whole_word_mask=True, mlm_probability=0.5, mask_replace_prob=1, random_replace_prob=0
    )
    trainer = Trainer(BertForMaskedLM(config()), arguments(tmp_path, max_steps=3), filled(), data_collator=collate)
    samples = [filled()[index] for index in range(4)]
    torch.manual_seed(0)
    batch = trainer.collate(samples)
    torch.manual_seed(0)
    names = ("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask", "offset_mapping")
    expected = collate([{name: each[name] for name in names if name in each} for each in samples])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert trainer.train().global_step == 3


def test_offsets_are_left_out_without_whole_word_masking(tmp_path: Path) -> None:
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5)
    data = datasets.Dataset.from_dict({"text": TEXTS}).map(
        lambda row: tokenizer()(row["text"], return_offsets_mapping=True)
    )
    trainer = Trainer(BertForMaskedLM(config()), arguments(tmp_path, max_steps=3), data, data_collator=collate)
    assert trainer.train().global_step == 3


def other_collators() -> dict[str, Any]:
    """Models and data of transformers' further collators, each with a column of text that only the user reads."""
    small: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "pad_token_id": 0}
    t5 = T5Config(**small, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    xlnet = XLNetConfig(**small, n_layer=1, n_head=2, d_inner=16)
    gpt2 = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, bos_token_id=3, eos_token_id=4)
    make, ids = tokenizer(), [tokenizer()(text)["input_ids"] for text in TEXTS]
    long = [(each * 16)[:16] for each in ids]  # so that some tokens are masked
    return {
        "tokens": (
            BertForTokenClassification(config()),
            DataCollatorForTokenClassification(make),
            {"input_ids": ids, "labels": [[index % 2 for index in each] for each in ids]},
        ),
        "choices": (
            BertForMultipleChoice(config()),
            DataCollatorForMultipleChoice(make),
            {"input_ids": [[each, [*each, 5]] for each in ids], "label": [0, 1] * 4},
        ),
        "seq2seq": (
            (model := T5ForConditionalGeneration(t5)),
            DataCollatorForSeq2Seq(make, model=model),
            {"input_ids": ids, "labels": ids},
        ),
        "permutation": (
            XLNetLMHeadModel(xlnet),
            DataCollatorForPermutationLanguageModeling(make),
            {"input_ids": long},
        ),
        "flattening": (GPT2LMHeadModel(gpt2), DataCollatorWithFlattening(), {"input_ids": ids}),
        "default": (
            BertForSequenceClassification(config()),
            default_data_collator,
            {"input_ids": [[5, 6]] * 8, "label": [0, 1] * 4},
        ),
    }


@pytest.mark.parametrize("kind", ["tokens", "choices", "seq2seq", "permutation", "flattening", "default"])
def test_other_collators_get_the_columns_that_they_read(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model, collate, columns = other_collators()[kind]
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    data = [sample | {"text": text} for sample, text in zip(samples, TEXTS, strict=True)]
    args = arguments(tmp_path, max_steps=2, per_device_train_batch_size=4)
    trainer = Trainer(model, args, data, data_collator=collate)
    torch.manual_seed(0)
    batch = trainer.collate(data[:4])
    torch.manual_seed(0)
    expected = collate(copy.deepcopy(samples[:4]))
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert math.isfinite(trainer.train().training_loss)


def test_evaluation_has_a_collator_of_its_own(tmp_path: Path) -> None:
    seen: list[str] = []

    def noted(name: str) -> Any:
        padding = DataCollatorWithPadding(tokenizer())

        def collate(samples: list[Any]) -> Any:
            seen.append(name)
            return padding([{key: value for key, value in each.items() if key != "text"} for each in samples])

        return collate

    trainer = Trainer(
        classifier(), arguments(tmp_path, max_steps=1), dataset(), dataset(),
        data_collator=noted("train"), eval_data_collator=noted("evaluation"),
    )  # fmt: skip
    trainer.train()
    assert set(seen) == {"train"}
    seen.clear()
    trainer.evaluate()
    assert set(seen) == {"evaluation"}
