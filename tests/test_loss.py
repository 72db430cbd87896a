"""The loss contract: gradients and losses are those of all samples in one batch, however they are cut up.

Everything here is in float64, so that what differs at all differs by far more than rounding does.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit import loss as loss_module
from trainer_kit.data.collate import PadCollator
from trainer_kit.data.order import permutation
from trainer_kit.loss import Counts, Loss, count, found_loss, labels_of

VOCABULARY = 11
EXACT = {"rtol": 1e-9, "atol": 1e-12}

relaxed = settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


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
        assert run.last_loss is not None
        self.losses.append(run.last_loss.item())


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def make_trainer(model: nn.Module, folder: str, samples: Any, **given: Any) -> tuple[Trainer, Recorder]:
    """A Trainer that goes through the samples once without changing the model."""
    keywords = {
        name: given.pop(name)
        for name in ("compute_loss", "data_collator", "processing_class", "metrics")
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


CASES = {
    "gpt2": Case(gpt2, tokens_with_labels, gpt2_total, exact=1e-6),  # takes its loss in float32
    "bert-classes": Case(lambda: BertForSequenceClassification(bert_config()), one_label, logits_total),
    "bert-masked": Case(lambda: BertForMaskedLM(bert_config()), tokens_with_labels, logits_total),
    "t5": Case(t5, tokens_with_labels, t5_total),
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


rows = st.lists(st.tuples(st.integers(2, VOCABULARY - 1), st.booleans()), min_size=1, max_size=9)
datasets = st.lists(rows, min_size=1, max_size=14)


@pytest.mark.parametrize("case", CASES)
@settings(parent=relaxed, max_examples=12)
@given(datasets, st.integers(1, 6), st.integers(1, 4))
@example([[(5, True), (6, True)], [(7, False)], [(8, True)], [(9, False)]], 1, 3)
def test_gradients_and_losses_are_those_of_one_batch(
    case: str, drawn: list[list[tuple[int, bool]]], batch_size: int, accumulation: int
) -> None:
    _, make_sample, total, exact = CASES[case]
    model, collate = made(case), PadCollator(Tokenizer())
    samples = [make_sample([token for token, _ in row], [keep for _, keep in row]) for row in drawn]
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = make_trainer(
            model, folder, samples, processing_class=Tokenizer(), per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size, gradient_accumulation_steps=accumulation, logging_steps=1,
        )  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    order, window = permutation(len(samples), 42, 0).tolist(), batch_size * accumulation
    steps = [order[start : start + window] for start in range(0, len(order), window)]
    assert len(recorder.gradients) == len(steps)
    for indices, found, loss in zip(steps, recorder.gradients, recorder.losses, strict=True):
        batch = collate([samples[index] for index in indices])
        expected = reference(model, lambda batch=batch: total(model, batch))
        torch.testing.assert_close(found, expected.gradient, rtol=exact, atol=exact)
        assert loss == pytest.approx(expected.loss if expected.items else 0.0, rel=exact)
    whole = reference(model, lambda: total(model, collate(samples)))
    assert evaluated == pytest.approx(whole.loss, rel=exact, nan_ok=True)
    assert (evaluated != evaluated) == (whole.items == 0)


@pytest.mark.parametrize("case", ["gpt2", "plain", "plain-shifted"])
def test_eval_loss_does_not_depend_on_the_batch_size(case: str, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (32,), generator=generator).tolist()
    samples = [
        {"input_ids": (ids := torch.randint(2, VOCABULARY, (length,), generator=generator)), "labels": ids}
        for length in lengths
    ]
    found = []
    for batch_size in range(1, 17):
        trainer, _ = make_trainer(
            made(case), str(tmp_path), samples, processing_class=Tokenizer(), per_device_eval_batch_size=batch_size
        )
        found.append(trainer.evaluate()["eval_loss"])
    whole = reference(made(case), lambda: CASES[case].total(made(case), PadCollator(Tokenizer())(samples)))
    assert found == pytest.approx([whole.loss] * 16, rel=CASES[case].exact)


# What compute_loss may return


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


def mean(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def pair(kind: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, Any], Any]:
    def compute_loss(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
        return loss, kind((batch["labels"] != -100).sum())

    return compute_loss


MEANS_AND_PAIRS = {
    "mean": mean,
    "int": pair(int),
    "float": pair(float),
    "tensor": pair(lambda count: count),
    "float tensor": pair(lambda count: count.double()),
}


@pytest.mark.parametrize("kind", MEANS_AND_PAIRS)
@relaxed
@given(st.lists(st.sampled_from([0, 1, 2, -100]), min_size=1, max_size=16), st.integers(1, 5), st.integers(1, 4))
@example([-100, -100], 1, 1)
@example([-100, 0, -100, 1, 2], 1, 4)
def test_a_mean_and_a_sum_with_its_count_give_the_same(
    kind: str, labels: list[int], batch_size: int, accumulation: int
) -> None:
    model, samples = Points(), points(labels)
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = make_trainer(
            model, folder, samples, compute_loss=MEANS_AND_PAIRS[kind], per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation, per_device_eval_batch_size=batch_size,
        )  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    order, window = permutation(len(samples), 42, 0).tolist(), batch_size * accumulation
    for place, found in enumerate(recorder.gradients):
        indices = order[place * window : (place + 1) * window]
        x = torch.stack([samples[index]["x"] for index in indices])
        wanted = torch.stack([samples[index]["labels"] for index in indices])
        expected = reference(model, lambda x=x, wanted=wanted: summed(model(x), wanted))
        torch.testing.assert_close(found, expected.gradient, **EXACT)
        assert recorder.losses[place] == pytest.approx(expected.loss if expected.items else 0.0, rel=1e-9)
    x, wanted = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))
    whole = reference(model, lambda: summed(model(x), wanted))
    assert evaluated == pytest.approx(whole.loss, rel=1e-12, nan_ok=True)


def test_a_count_may_be_a_fraction(tmp_path: Any) -> None:
    """Weights of samples, whose sums are no whole numbers and may be less than 1."""
    samples = [sample | {"weight": 0.03 + index / 70} for index, sample in enumerate(points([0, 1, 2, 0, 1]))]

    def weighted(model: nn.Module, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
        return (losses * batch["weight"]).sum(), float(batch["weight"].sum())

    model = Points()
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, compute_loss=weighted, per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
    )  # fmt: skip
    trainer.train()
    x, labels = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))
    weights = torch.tensor([sample["weight"] for sample in samples])
    losses = F.cross_entropy(model(x), labels, reduction="none")
    expected = (losses * weights).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(recorder.gradients[0], gradient(model), rtol=1e-6, atol=1e-8)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_regression_counts_samples(tmp_path: Any, dtype: torch.dtype) -> None:
    class Regression(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": F.mse_loss(self.layer(x)[:, 0], labels.double())}

    model, samples = Regression(1), points([0.5, -100.0, 3.0, 4.0, 2.5], dtype)  # -100 is a number like any other here
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    trainer.train()
    x, labels = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))
    expected = reference(model, lambda: ((model.layer(x)[:, 0] - labels).square().sum(), 5))
    torch.testing.assert_close(recorder.gradients[0], expected.gradient, **EXACT)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("kind", ["tuple", "named tuple", "tensor", "other names"])
def test_batches_of_every_kind_are_weighed_by_what_they_hold(tmp_path: Any, kind: str) -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    class Own(Points):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            logits = self.layer(x)
            return logits.square().mean() if y is None else F.cross_entropy(logits, y)

    labels = [0, 1, -100, 2, -100] if kind in ("tuple", "named tuple") else [0, 1, 2, 2, 0]
    dicts = points(labels)
    samples: list[Any] = {
        "tuple": [(each["x"], each["labels"]) for each in dicts],
        "named tuple": [Pair(each["x"], each["labels"]) for each in dicts],
        "tensor": [each["x"] for each in dicts],
        "other names": [{"x": each["x"], "y": each["labels"]} for each in dicts],
    }[kind]
    model = Own()
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    trainer.train()
    x, wanted = (torch.stack([each[name] for each in dicts]) for name in ("x", "labels"))
    if kind == "tensor":
        expected = reference(model, lambda: (model.layer(x).square().mean() * 5, 5))
    else:
        expected = reference(model, lambda: summed(model.layer(x), wanted))
    torch.testing.assert_close(recorder.gradients[0], expected.gradient, **EXACT)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("kind", ["named tuple", "mapping"])
def test_compute_loss_always_gets_batches_of_their_own_kind(tmp_path: Any, kind: str) -> None:
    class Pair(NamedTuple):
        input_ids: Any
        labels: Any

    def collate(samples: list[Any]) -> Any:
        batch = torch.stack(samples)
        if kind == "mapping":
            return BatchEncoding({"input_ids": batch, "labels": batch.where(batch > 5, -100)})
        return Pair(batch, batch.where(batch > 5, -100))

    def compute_loss(model: Any, batch: Any) -> torch.Tensor:
        logits = model.logits(batch.input_ids)
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    samples = [torch.tensor([2, 3, 4]), torch.tensor([7, 8, 9]), torch.tensor([4, 3, 2]), torch.tensor([9, 2, 9])]
    model = Tokens().double()
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, compute_loss=compute_loss, data_collator=collate, per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
    )  # fmt: skip
    trainer.train()
    batch = torch.stack(samples)
    expected = reference(model, lambda: summed(model.logits(batch), batch.where(batch > 5, -100)))
    torch.testing.assert_close(recorder.gradients[0], expected.gradient, **EXACT)


# Learning whether a model shifts its labels


def context() -> Any:
    return torch.autocast("cpu", enabled=False)


def inspected(model: nn.Module, batch: Any, compute_loss: Any = None) -> bool | None:
    return Loss(model, model, compute_loss).inspect(batch, context)


@pytest.mark.parametrize(("case", "shifts"), [
    ("gpt2", True), ("bert-masked", False), ("t5", False), ("plain", False), ("plain-shifted", True),
])  # fmt: skip
@pytest.mark.parametrize(
    "labels", [[[4, 3, 2], [3, 4, 5]], [[4, 4, 4], [4, 4, 4]], [[4, 3, -100], [3, -100, -100]], [[-100, 4, 4]] * 2,
               [[2, -100, -100]] * 2, [[-100, -100, 5]] * 2, [[7], [8]], [[0, 0, 0]] * 2]
)  # fmt: skip
def test_whether_a_model_shifts_is_seen_in_any_batch_with_a_label(
    case: str, shifts: bool, labels: list[list[int]]
) -> None:
    model, label_tensor = made(case).train(), torch.tensor(labels)
    batch = {
        "input_ids": label_tensor.clamp(min=2),
        "attention_mask": torch.ones_like(label_tensor),
        "labels": label_tensor,
    }
    assert inspected(model, batch) is shifts
    assert all(module.training for module in model.modules())
    assert batch["labels"].tolist() == labels


@pytest.mark.parametrize("case", ["gpt2", "plain"])
def test_a_batch_without_any_label_tells_nothing(case: str) -> None:
    labels = torch.full((2, 3), -100)
    batch = {"input_ids": labels.clamp(min=2), "attention_mask": torch.ones_like(labels), "labels": labels}
    assert inspected(made(case), batch) is None


class KnowsNo100(nn.Module):
    """As many tutorials write it: 0 is padding and is left out, and the labels are embedded too."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        self.shift = shift
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert int(labels.min()) >= 0
        assert int(labels.max()) <= 9
        logits = self.head(self.embedding(input_ids) + 0 * self.embedding(labels))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("labels", [[[4, 3, 2], [3, 9, 0]], [[4, 3], [3, 0]], [[5, 6, 5], [5, 5, 5]]])
def test_a_model_that_knows_no_100_is_never_given_one(shift: bool, labels: list[list[int]]) -> None:
    torch.manual_seed(0)
    batch = {"input_ids": torch.tensor(labels), "labels": torch.tensor(labels)}
    assert inspected(KnowsNo100(shift), batch) is shift


def test_labels_that_the_loss_does_not_need_empty_no_batch_and_are_looked_at_no_more(tmp_path: Any) -> None:
    looked = []

    class Reconstruction(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            looked.append(not self.training)
            return (self.layer(x) - x).square().mean()

    for width in (1, 3):
        samples = [
            sample | {"labels": torch.full((width,), index % 3)} for index, sample in enumerate(points([0] * 40))
        ]
        trainer, recorder = make_trainer(Reconstruction(4), str(tmp_path), samples, per_device_train_batch_size=2)
        trainer.train()
        assert all(gradient.abs().max() > 0 for gradient in recorder.gradients)
        assert not any(looked[-10:])
        assert sum(looked) <= 30
        looked.clear()


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4), (3, 1)])
def test_whole_numbers_that_are_no_tokens_are_no_shift(shape: tuple[int, ...]) -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.binary_cross_entropy_with_logits(x, labels.double())

    torch.manual_seed(0)
    batch = {"x": torch.randn(shape).double(), "labels": torch.randint(0, 2, shape)}
    assert inspected(Several(), batch) is False


def test_the_loss_is_looked_at_only_once(tmp_path: Any) -> None:
    calls = []

    class Watched(Tokens):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            calls.append(self.training)
            return super().forward(input_ids, attention_mask, labels)

    samples = [{"input_ids": [2, 3, 4], "labels": [2, 3, 4]} for _ in range(12)]
    trainer, _ = make_trainer(
        Watched(), str(tmp_path), samples, processing_class=Tokenizer(), per_device_train_batch_size=2
    )
    trainer.train()
    assert calls.count(True) == 6
    assert calls.count(False) <= 2
    calls.clear()
    trainer.evaluate()
    assert len(calls) == 6


# Counting


def test_counts() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    labels = torch.tensor([[5, -100, 7], [8, -100, -100]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}
    assert count(batch) == Counts(samples=2, tokens=4, labels=3, shifted=1)
    assert count({"input_ids": ids}) == Counts(2, 6, 2, 2)
    assert count({"x": ids, "label": torch.tensor([1, -100])}) == Counts(2, 0, 1, 1)
    assert count((ids, torch.tensor([1, -100]))) == Counts(2, 0, 1, 1)
    assert count([ids, torch.tensor([0.5, -100.0])]) == Counts(2, 0, 2, 2)
    assert count(ids) == Counts(2, 0, 2, 2)
    assert count((ids,)) == Counts(2, 0, 2, 2)
    assert count({"x": ids, "labels": torch.tensor([True, False])}) == Counts(2, 0, 2, 2)
    assert count({"x": ids, "labels": torch.zeros(2, 3, 4, dtype=torch.int32)}) == Counts(2, 0, 24, 18)


@pytest.mark.parametrize("batch", [{}, {"text": ["a"]}, "text", {"x": torch.tensor(1)}, ()])
def test_a_batch_whose_samples_cannot_be_counted_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="its samples cannot be counted"):
        count(batch)


def test_which_entry_holds_the_labels() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert labels_of({"labels": one, "label": two}) is one
    assert labels_of({"labels": None, "label": two}) is two
    assert labels_of({"y": two}) is None
    assert labels_of((one, two)) is two
    assert labels_of(one) is None
    assert labels_of({"labels": [one]}) is None


def test_where_a_loss_is_found() -> None:
    loss, scores = torch.tensor(1.0), torch.ones(3)

    class Output:
        def __init__(self) -> None:
            self.loss = loss

    for output in (loss, {"loss": loss}, {"logits": scores, "loss": loss}, (loss, scores), [loss], Output()):
        assert found_loss(output) is loss
    for output in (scores, {"logits": scores}, {"loss": scores}, (scores, loss), (), None, 1.0):
        assert found_loss(output) is None


# What is said of a mistake


def failing(tmp_path: Any, model: nn.Module, samples: Any, **given: Any) -> Any:
    trainer, _ = make_trainer(model, str(tmp_path), samples, **given)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the callers match)
        trainer.train()
    return str(caught.value)


def test_a_model_without_a_loss_is_told_of_by_what_it_returned(tmp_path: Any) -> None:
    class Logits(Points):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:  # type: ignore[override]
            return {"logits": self.layer(x)}

    class PerSample(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            return {"loss": F.cross_entropy(self.layer(x), labels, reduction="none")}

    message = failing(tmp_path, Logits(), points([0, 1]))
    assert "Logits returned no loss but a dict with logits" in message
    assert "the batch has x, labels" in message
    assert "compute_loss=" in message
    message = failing(tmp_path, PerSample(), points([0, 1]))
    assert "a loss that is a tensor of shape [2]" in message
    samples = [{"input_ids": [2, 3], "label": 1}] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the column that goes into **kwargs
        message = failing(tmp_path, BertForSequenceClassification(bert_config()), samples)
    assert "the batch has input_ids, label" in message
    assert "'labels'" in message


def test_a_column_that_the_model_does_not_take_is_named(tmp_path: Any) -> None:
    class Own(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return F.cross_entropy(self.layer(x), labels)

    samples = [sample | {"id": 3, "extra": 1.0} for sample in points([0, 1])]
    message = failing(tmp_path, Own(), samples)
    assert "columns id, extra, which Own.forward does not take (it takes x, labels)" in message


@pytest.mark.parametrize(
    "result",
    [None, 3.0, torch.ones(2), (torch.tensor(1.0), {"logits": 1}), (torch.tensor(1.0), torch.ones(2)),
     (torch.ones(2), 2), (1.0, 2), (torch.tensor(1.0), 2, 3), (torch.tensor(1.0), None)],
)  # fmt: skip
def test_what_compute_loss_must_return_is_said(tmp_path: Any, result: Any) -> None:
    message = failing(tmp_path, Points(), points([0, 1]), compute_loss=lambda model, batch: result)
    assert "compute_loss returned" in message
    assert "(loss_sum, count)" in message


@pytest.mark.parametrize("label", [7, -1])
@pytest.mark.parametrize("kind", ["module", "transformers", "compute_loss", "tokens"])
def test_labels_outside_the_classes_are_named_with_the_classes(tmp_path: Any, kind: str, label: int) -> None:
    class Own(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return nn.CrossEntropyLoss()(self.layer(x), labels)

    if kind == "module":
        message = failing(tmp_path, Own(), points([0, label]))
    elif kind == "compute_loss":
        message = failing(tmp_path, Points(), points([0, label]), compute_loss=mean)
    elif kind == "tokens":
        samples = [{"input_ids": [2, 3], "attention_mask": [1, 1], "labels": [2, label * 3]}] * 2
        message = failing(tmp_path, Tokens(), samples)
    else:
        samples = [{"input_ids": [2, 3], "labels": label}] * 2
        message = failing(tmp_path, BertForSequenceClassification(bert_config()), samples)
    classes = VOCABULARY if kind == "tokens" else 3
    assert (
        f"the labels hold {label * 3 if kind == 'tokens' else label}, outside the model's {classes} classes" in message
    )


def test_another_index_error_is_left_alone(tmp_path: Any) -> None:
    trainer, _ = make_trainer(Points(), str(tmp_path), points([0, 1]), compute_loss=lambda model, batch: [][1])
    with pytest.raises(IndexError, match="list index out of range"):
        trainer.train()


# Labels that lie on a device are counted there


@pytest.mark.parametrize("case", ["gpt2", "plain"])
def test_counts_on_a_device_give_the_same(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 1, 5, 2, 2, 7]
    samples = [tokens_with_labels(list(range(2, 2 + length)), [length != 2] * length) for length in lengths]

    def gradients() -> list[torch.Tensor]:
        trainer, recorder = make_trainer(
            made(case), str(tmp_path), samples, processing_class=Tokenizer(), per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer.train()
        return recorder.gradients

    expected = gradients()
    monkeypatch.setattr(loss_module, "_count_labels", lambda labels: (labels != -100).sum())
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)
