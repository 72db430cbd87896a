"""What is learned of a model from the first batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.loss_cases import VOCABULARY, Points, Tokenizer, Tokens, made, make_trainer, points
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainer_kit import SingleDevice
from trainer_kit.loss.loss import Loss
from trainer_kit.loss.probe import LossProbe


def cpu() -> SingleDevice:
    strategy = SingleDevice("cpu")
    strategy.setup()
    return strategy


def inspection(model: nn.Module) -> LossProbe:
    return LossProbe(Loss(model, model, None), cpu())


# Learning whether a model shifts its labels


def inspected(model: nn.Module, batch: Any) -> bool | None:
    return inspection(model).detect_label_shift(batch)


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


class Stateful(nn.Module):
    """A model that carries state from one pass to the next, in whatever mode."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, VOCABULARY)
        self.generator = torch.Generator().manual_seed(3)
        if kind == "buffer":
            self.register_buffer("hidden", torch.zeros(1, 2, 4))
        else:
            self.hidden = torch.zeros(1, 2, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inputs = self.embedding(input_ids)
        if self.kind == "generator":
            inputs = inputs * torch.rand(4, generator=self.generator)
        outputs, hidden = self.rnn(inputs, self.hidden)
        self.hidden = hidden.detach()
        return F.cross_entropy(self.head(outputs).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", ["buffer", "attribute", "generator"])
@pytest.mark.parametrize("sums", [False, True])
def test_the_probe_leaves_the_state_that_a_model_carries(tmp_path: Any, kind: str, sums: bool) -> None:
    rows = torch.randint(2, VOCABULARY, (6, 3), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row.flip(0)} for row in rows]
    torch.manual_seed(0)
    model, alone = Stateful(kind), Stateful(kind)
    alone.load_state_dict(model.state_dict())
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, per_device_train_batch_size=2, shuffle=False,
        compute_loss=(lambda model, batch: (model(**batch) * 6, 6)) if sums else None,
    )  # fmt: skip
    trainer.train()
    expected = [alone(row, row.flip(1)).item() for row in rows.split(2)]
    assert recorder.losses == pytest.approx(expected, rel=1e-6)


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


# Learning whether samples without labels leave the loss as it is


class Own(Points):
    """A mean over labels; those of -100 are left out."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(self.layer(x), labels)


def batch_of(labels: list[int]) -> dict[str, torch.Tensor]:
    samples = points(labels)
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "labels")}


@pytest.mark.parametrize("labels", [[0, 1, 2], [1, -100, -100], [-100, -100], [1, 1]])
def test_that_filler_is_ignored_is_seen_in_any_batch(labels: list[int]) -> None:
    batch = batch_of(labels)
    kept = {name: column.clone() for name, column in batch.items()}
    model = Own().train()
    assert inspection(model).detect_padding_invariance(batch) is True
    assert model.training
    assert all(torch.equal(column, kept[name]) for name, column in batch.items())


def test_a_model_that_fails_with_filler_takes_none() -> None:
    assert inspection(KnowsNo100(shift=False)).detect_padding_invariance({"input_ids": torch.tensor([[1, 2], [2, 3]]),
                                                       "labels": torch.tensor([[1, 2], [2, 3]])}) is False  # fmt: skip


def test_a_loss_of_bfloat16_is_rounded_and_still_a_mean() -> None:
    model = Own().bfloat16()
    batch = batch_of([0, 1, 2, 0, 1, 2, 1])
    assert inspection(model).detect_padding_invariance({"x": batch["x"].bfloat16(), "labels": batch["labels"]}) is True


def test_other_ways_to_compute_the_same_are_not_provoked() -> None:
    class Choosing(Tokens):
        """Leaves out the mask where it masks nothing, as attention does."""

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            factor = 1.0 if attention_mask.all() else 1.0 + 1e-6
            return factor * super().forward(input_ids, attention_mask, labels)

    tokens = torch.tensor([[2, 3, 4], [5, 6, 0], [7, 8, 9]])
    batch = {"input_ids": tokens, "attention_mask": tokens.ne(0).long(), "labels": tokens}
    assert inspection(Choosing()).detect_padding_invariance(batch) is True


def test_a_batch_that_cannot_tell_is_no_answer_and_the_tenth_is_no() -> None:
    class OfNothing(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.layer(x).sum() * 0.0

    for model, batch in (
        (OfNothing(), batch_of([0, 1, 2])),
        (Tokens(), {name: torch.full((2, 3), 4) for name in ("input_ids", "attention_mask", "labels")}),
    ):
        looks = inspection(model)
        assert [looks.detect_padding_invariance(batch) for _ in range(10)] == [None] * 9 + [False]


def test_compute_loss_is_not_looked_at() -> None:
    model = Own()
    looks = LossProbe(Loss(model, model, lambda model, batch: model(**batch)), cpu())
    assert looks.ignores_filler == {False: False, True: False}


def test_a_term_of_the_whole_batch_that_is_there_in_training_alone_is_seen() -> None:
    class Balancing(Own):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.seen += 1
            loss = super().forward(self.dropout(x), labels)
            return loss + self.balance * x.mean() if self.training else loss

        balance = 1.0

    model, batch = Balancing().train(), batch_of([0, 1, 2])
    looks = inspection(model)
    assert looks.detect_padding_invariance(batch) is True
    assert looks.detect_padding_invariance(batch, training=True) is False
    model.balance = 0.0
    before = float(model.seen)
    assert inspection(model).detect_padding_invariance(batch, training=True) is True
    assert float(model.seen) == before
