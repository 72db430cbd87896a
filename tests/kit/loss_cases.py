"""Models whose loss is a mean over items, samples for them, and the loss that they must come to.

Everything is in float64, so that what differs at all differs by far more than rounding does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5 import modeling_t5

from trainer_kit import Callback, Run, Trainer, TrainingArguments

VOCABULARY = 11
EXACT = {"rtol": 1e-9, "atol": 1e-12}


class Tokenizer:
    pad_token_id = 0
    padding_side = "right"


class Recorder(Callback):
    """Keeps each step's gradient, all parameters in one vector, and its loss."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, run: Run) -> None:
        self.gradients.append(gradient(run.model))

    def on_step_end(self, run: Run) -> None:
        assert run.local_loss is not None
        self.losses.append(run.local_loss.item())


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def make_trainer(model: nn.Module, folder: str, samples: Any, **given: Any) -> tuple[Trainer, Recorder]:
    """A Trainer that goes through the samples once without changing the model."""
    keywords = {
        name: given.pop(name)
        for name in ("compute_loss", "data_collator", "processing_class", "metrics", "compute_metrics", "strategy")
        if name in given
    }
    values: dict[str, Any] = {
        "output_dir": folder, "num_train_epochs": 1, "learning_rate": 0.0, "optim": "sgd", "max_grad_norm": 0.0,
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip
    recorder = Recorder()
    args = TrainingArguments(**(values | given))
    return Trainer(model, args, samples, samples, callbacks=[recorder], **keywords), recorder


class Reference(NamedTuple):
    """The mean loss over all items and its gradient, of all samples at once."""

    loss: float
    gradient: torch.Tensor
    items: int


def reference(model: nn.Module, total: Callable[[], tuple[torch.Tensor, int]]) -> Reference:
    model.eval()
    model.zero_grad()
    summed, items = total()
    if items:
        (summed / items).backward()
    found = Reference(summed.item() / items if items else float("nan"), gradient(model), items)
    model.zero_grad()
    return found


# Models, samples for them, and the sum of the loss over all items of a batch


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    sample: Callable[[list[int], list[bool]], dict[str, Any]]
    """From tokens, and which of them have a label."""
    total: Callable[[nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, int]]
    exact: float = 1e-9


def summed(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return F.cross_entropy(*flat, reduction="sum"), int((labels != -100).sum())


def without_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: column for name, column in batch.items() if name != "labels"}


def tokens_with_labels(tokens: list[int], labelled: list[bool]) -> dict[str, Any]:
    return {"input_ids": tokens, "labels": [t if keep else -100 for t, keep in zip(tokens, labelled, strict=True)]}


def gpt2() -> nn.Module:
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, attn_implementation="eager", **sizes, **drop)
    )


def gpt2_total(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    logits = model(**without_labels(batch)).logits
    return summed(logits[:, :-1], batch["labels"][:, 1:])


def bert_config() -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
        attn_implementation="eager",
    )  # fmt: skip


def logits_total(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return summed(model(**without_labels(batch)).logits, batch["labels"])


def one_label(tokens: list[int], labelled: list[bool]) -> dict[str, Any]:
    return {"input_ids": tokens, "labels": tokens[0] % 3 if labelled[0] else -100}


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def t5_total(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    shifted = model._shift_right(batch["labels"])
    return summed(model(**without_labels(batch), decoder_input_ids=shifted).logits, batch["labels"])


class Tokens(nn.Module):
    """A plain module whose loss is a mean over tokens; `shift` predicts the next token."""

    def __init__(self, shift: bool = False) -> None:
        super().__init__()
        self.shift = shift
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(input_ids)))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.logits(input_ids)
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


class MaskedTokens(Tokens):
    """Writes the mean itself: where no label counts, the gradient of its 0/0 is NaN."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = labels != -100
        losses = F.cross_entropy(self.logits(input_ids).transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (losses * mask).sum() / mask.sum()


def tokens_total(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    logits, labels = model.logits(batch["input_ids"]), batch["labels"]
    return summed(logits[:, :-1], labels[:, 1:]) if model.shift else summed(logits, labels)


T5_EXACT = 1e-9 if hasattr(modeling_t5, "eager_attention_forward") else 1e-6
"""Earlier releases take the softmax in float32."""

CASES = {
    "gpt2": Case(gpt2, tokens_with_labels, gpt2_total, exact=1e-6),  # takes its loss in float32
    "bert-classes": Case(lambda: BertForSequenceClassification(bert_config()), one_label, logits_total),
    "bert-masked": Case(lambda: BertForMaskedLM(bert_config()), tokens_with_labels, logits_total),
    "t5": Case(t5, tokens_with_labels, t5_total, exact=T5_EXACT),
    "plain": Case(Tokens, tokens_with_labels, tokens_total),
    "plain-masked": Case(MaskedTokens, tokens_with_labels, tokens_total),
    "plain-shifted": Case(lambda: Tokens(shift=True), tokens_with_labels, tokens_total),
}
_made: dict[str, nn.Module] = {}


def made(case: str) -> nn.Module:
    """The case's model with weights large enough to tell labels apart; made once, since nothing changes it."""
    if case not in _made:
        torch.manual_seed(0)
        model = CASES[case].model().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        _made[case] = model
    return _made[case]


class Points(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, classes, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def points(labels: list[Any], dtype: torch.dtype = torch.int64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(labels), 4, generator=generator, dtype=torch.float64)
    return [{"x": each, "labels": torch.tensor(label, dtype=dtype)} for each, label in zip(x, labels, strict=True)]
