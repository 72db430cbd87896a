"""A SentenceTransformer: its own folder from `save_model`, which its own class loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

sentence_transformers = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")

from trainer_kit import Trainer, TrainingArguments, load_checkpoint_in_model  # noqa: E402

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore:Failed to load:UserWarning")]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "cat", "dog", "runs", "sleeps"]
TEXTS = ["red cat runs", "green dog sleeps", "blue cat sleeps", "red dog runs"] * 4


def make(folder: Path) -> Any:
    folder.mkdir()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast({word: number for number, word in enumerate(WORDS)}).save_pretrained(folder)
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    words = Transformer(str(folder), max_seq_length=8)
    pooling = Pooling(16)
    return sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found = model({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]})["sentence_embedding"]
    return torch.nn.functional.mse_loss(found, torch.ones_like(found))


def test_save_model_writes_its_own_folder_and_a_checkpoint_resumes(tmp_path: Path) -> None:
    def trainer(name: str) -> Trainer:
        model = make(tmp_path / name)
        rows = [{key: torch.tensor(value) for key, value in model.tokenizer(text).items()} for text in TEXTS]
        args = TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=4, save_steps=2, per_device_train_batch_size=4, report_to=()
        )
        return Trainer(model, args, rows, compute_loss=loss)

    first, second = trainer("a"), trainer("b")
    first.train()
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    second.save_model(tmp_path / "saved")
    expected: Any = first.run.model
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert torch.equal(*(torch.tensor(each.eval().encode(TEXTS[:4])) for each in (loaded, expected)))
    assert not [*(tmp_path / "saved").glob(".*")]
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert not (checkpoint / "modules.json").exists()
    assert not (checkpoint / "config.json").exists()
    other = make(tmp_path / "c")
    load_checkpoint_in_model(other, checkpoint)
    assert torch.equal(*(torch.tensor(each.eval().encode(TEXTS[:4])) for each in (other, expected)))
