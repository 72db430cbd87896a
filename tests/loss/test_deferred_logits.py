"""Losses of transformers' models that are computed in chunks, against the models' own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.architectures import ARCHITECTURES, VOCABULARY, llama
from kit.ranks import on_ranks
from kit.token_training import whole
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.loss import linear_cross_entropy
from trainer_kit.loss.loss import Loss
from trainer_kit.memory import estimate, measure
from trainer_kit.strategies.fsdp.strategy import FSDP

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def made(family: str, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**_SIZES | changes)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **{name: ARCHITECTURES[name] for name in ("gpt2", "llama", "llama-tied", "qwen3", "mixtral")},
    "mistral": lambda: made("Mistral"),
    "phi, with a bias": lambda: made("Phi"),
    "gemma2, with capped logits": lambda: made("Gemma2", head_dim=8, final_logit_softcapping=0.1),
    "granite, with scaled logits": lambda: made("Granite", logits_scaling=7.0),
    "cohere, with scaled logits": lambda: made("Cohere", logit_scale=0.3),
    "mixtral, with a router's loss": lambda: made("Mixtral", num_local_experts=2, output_router_logits=True),
}


@pytest.fixture(autouse=True)
def chunks_of_four_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LEAST_ROWS", 4)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def batch_of(rows: int = 3, length: int = 9, ignored: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows))
    labels = ids.clone()
    labels[0, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def losses(model: nn.Module, batch: Any, context: Any = contextlib.nullcontext) -> list[tuple[Any, dict[str, Any]]]:
    """The loss and the gradients of the model itself, and in chunks."""
    found = []
    for chunked in (False, True):
        model.zero_grad()
        with context():
            loss, _ = Loss(model, model, None, chunked)(batch)
        loss.backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found.append((loss.detach(), grads))
    return found


def check_same(model: nn.Module, batch: Any, tolerance: float, context: Any = contextlib.nullcontext) -> None:
    (own, expected), (chunked, found) = losses(model, batch, context)
    torch.testing.assert_close(chunked, own, rtol=tolerance, atol=0, check_dtype=False)
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_the_models_own(name: str) -> None:
    torch.manual_seed(0)
    check_same(without_dropout(FAMILIES[name]()), batch_of(), 1e-6)


def test_the_capped_logits_of_the_test_change_the_loss() -> None:
    torch.manual_seed(0)
    model: Any = without_dropout(FAMILIES["gemma2, with capped logits"]())
    (capped, _), _ = losses(model, batch_of())
    model.config.final_logit_softcapping = None
    assert abs(float(losses(model, batch_of())[0][0] - capped)) > 1e-4


@pytest.mark.parametrize("mode", [torch.bfloat16, torch.float16])
def test_under_autocast(mode: torch.dtype) -> None:
    torch.manual_seed(0)
    check_same(without_dropout(llama()), batch_of(), 1e-2, lambda: torch.autocast("cpu", mode))


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_frozen_parts(frozen: str) -> None:
    torch.manual_seed(0)
    model = without_dropout(llama())
    model.get_submodule(frozen).requires_grad_(False)
    check_same(model, batch_of(), 1e-6)


def test_a_model_within_another_module() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = llama()

        def forward(self, **columns: Any) -> Any:
            return self.base_model(**columns)

    check_same(without_dropout(Wrapper()), batch_of(), 1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile itself
def test_a_compiled_model() -> None:
    torch.manual_seed(0)
    model = without_dropout(llama())
    own, _ = Loss(model, model, None)(batch_of())
    model.compile(backend="eager")
    for rows in (3, 3, 5):
        chunked, _ = Loss(model, model, None, chunked=True)(batch_of(rows))
        chunked.backward()
        if rows == 3:
            torch.testing.assert_close(chunked, own, rtol=1e-6, atol=0)


def test_loss_arguments_of_the_model_are_kept() -> None:
    model, batch = without_dropout(llama()), batch_of()
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    check_same(model, {**batch, "num_items_in_batch": 50}, 1e-6)
    check_same(model, {**batch, "shift_labels": shifted.clamp(min=0), "ignore_index": 0}, 1e-6)


def test_a_batch_without_valid_labels_has_the_loss_of_the_model() -> None:
    model, batch = without_dropout(llama()), batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert all(loss.isnan() for loss, _ in losses(model, batch))


def test_a_label_outside_the_vocabulary_is_an_error_that_says_so() -> None:
    model, batch = llama(), batch_of()
    batch["labels"][1, 3] = VOCABULARY
    with pytest.raises(ValueError, match=f"the labels hold {VOCABULARY}, outside the model's {VOCABULARY} classes"):
        Loss(model, model, None, chunked=True)(batch)


def test_the_model_is_unchanged_after_a_loss() -> None:
    model, batch = without_dropout(llama()), batch_of()
    before = {name: {*vars(each)} for name, each in model.named_modules()}
    losses(model, batch)
    assert {name: {*vars(each)} for name, each in model.named_modules()} == before
    assert model(**batch).logits.shape == (3, 9, VOCABULARY)
    copy.deepcopy(model)


# What is refused


class _OwnLoss(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return {"loss": self.use(logits, labels)}

    def use(self, logits: Any, labels: Any) -> Any:
        raise NotImplementedError


def own_loss(use: Callable[[Any, Any, Any], Any]) -> nn.Module:
    model: Any = _OwnLoss(llama().config)  # type: ignore[arg-type]
    model.use = lambda logits, labels: use(model, logits, labels)
    return model


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a function": lambda model, logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    "cross_entropy": lambda model, logits, labels: nn.functional.cross_entropy(logits, labels),
    "an index": lambda model, logits, labels: logits[..., :-1, :].sum(),
    "a sum": lambda model, logits, labels: (logits + 1).sum(),
    "a tensor": lambda model, logits, labels: model.loss_function(
        logits * torch.tensor(2.0), labels, vocab_size=VOCABULARY
    ),
    "a tensor on the left": lambda model, logits, labels: model.loss_function(
        torch.tensor(2.0) * logits, labels, vocab_size=VOCABULARY
    ),
    "sigmoid": lambda model, logits, labels: model.loss_function(torch.sigmoid(logits), labels, vocab_size=VOCABULARY),
    "another loss in addition": lambda model, logits, labels: (
        model.loss_function(logits, labels, vocab_size=VOCABULARY) + torch.logsumexp(logits, -1).square().mean()
    ),
}


@pytest.mark.parametrize("use", USES)
def test_another_use_of_the_logits_is_refused(use: str) -> None:
    model = own_loss(USES[use])
    with pytest.raises(ValueError, match=r"chunked_cross_entropy=True is not possible with _OwnLoss, which computes"):
        Loss(model, model, None, chunked=True)(batch_of())
    assert "forward" not in vars(model.lm_head)


def test_logits_that_do_not_come_from_the_head_are_refused() -> None:
    model = own_loss(
        lambda model, logits, labels: model.loss_function(torch.ones(3, 9, 32), labels, vocab_size=VOCABULARY)
    )
    with pytest.raises(ValueError, match="needs all logits from the output embedding"):
        Loss(model, model, None, chunked=True)(batch_of())


def test_another_error_of_the_model_stays() -> None:
    model = own_loss(lambda model, logits, labels: None + 1)  # type: ignore[operator]
    with pytest.raises(TypeError, match="NoneType"):
        Loss(model, model, None, chunked=True)(batch_of())


def other_head() -> nn.Module:
    model: Any = llama()
    model.set_output_embeddings(nn.Sequential(model.lm_head))
    return model


def patched_head() -> nn.Module:
    model: Any = llama()
    model.lm_head.forward = lambda hidden: hidden
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Linear(2, 2), "needs a causal language model of transformers, but the model is Linear"),
        (ARCHITECTURES["bert"], "transformers' loss of causal language models, which BertForMaskedLM does not have"),
        (ARCHITECTURES["modernbert"], "which ModernBertForMaskedLM does not have; set it to False"),
        (other_head, r"needs a torch\.nn\.Linear as output embedding, which LlamaForCausalLM does not have"),
        (patched_head, r"needs a torch\.nn\.Linear as output embedding"),
    ],
)
def test_another_model_is_refused_at_the_start(make: Callable[[], nn.Module], sentence: str, tmp_path: Path) -> None:
    trainer = Trainer(make(), arguments(tmp_path, chunked_cross_entropy=True), [batch_of()])
    with pytest.raises(ValueError, match=sentence):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_a_loss_of_the_user_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, chunked_cross_entropy=True)
    trainer = Trainer(llama(), args, [batch_of()], compute_loss=lambda model, batch: model(**batch).loss)
    with pytest.raises(ValueError, match="chunked_cross_entropy=True computes the model's own loss"):
        trainer.train()


def test_t5_is_refused_before_the_first_step() -> None:
    model = ARCHITECTURES["t5"]()
    with pytest.raises(ValueError, match="T5ForConditionalGeneration, which computes with its logits outside"):
        Loss(model, model, None, chunked=True)(batch_of())


# Training


def texts() -> list[dict[str, torch.Tensor]]:
    """Texts of which some count for little, in a number that leaves a rank without samples."""
    rows = torch.randint(1, VOCABULARY, (7, 8), generator=torch.Generator().manual_seed(3))
    return [
        {"input_ids": row, "labels": row.where(torch.arange(8) < 8 - index, -100)} for index, row in enumerate(rows)
    ]


def train(folder: str, name: str, batch_size: int, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(0)
    linear_cross_entropy.LEAST_ROWS = 4
    defaults: dict[str, Any] = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "log_level": "error", "save_strategy": "no",
        "num_train_epochs": 2, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1,
    }  # fmt: skip
    args = TrainingArguments(output_dir=folder, per_device_train_batch_size=batch_size, **defaults | options)
    trainer = Trainer(without_dropout(ARCHITECTURES[name]()), args, texts(), texts()[:3])
    trainer.train()
    weights = {key: whole(each).detach().clone() for key, each in trainer.run.model.state_dict().items()}
    return weights, trainer.evaluate()["eval_loss"]


def check_weights(found: tuple[Any, float], expected: tuple[Any, float], tolerance: float = 1e-6) -> None:
    assert found[1] == pytest.approx(expected[1], abs=tolerance)
    for key, weight in expected[0].items():
        torch.testing.assert_close(found[0][key], weight, rtol=0, atol=tolerance, msg=key)


@pytest.mark.parametrize(
    ("name", "options"), [("llama-tied", {}), ("gpt2", {}), ("llama", {"gradient_checkpointing": True})]
)
def test_a_training_has_the_same_weights_and_eval_loss(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected = train(str(tmp_path), name, 4)
    check_weights(train(str(tmp_path), name, 4, chunked_cross_entropy=True, **options), expected)


def test_a_training_in_fp16(tmp_path: Path) -> None:
    expected = train(str(tmp_path), "llama", 4, mixed_precision="fp16")
    check_weights(train(str(tmp_path), "llama", 4, mixed_precision="fp16", chunked_cross_entropy=True), expected, 1e-3)


def test_metrics_get_the_logits(tmp_path: Path) -> None:
    shapes = []

    def shape_of(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {}

    args = arguments(tmp_path, chunked_cross_entropy=True)
    trainer = Trainer(llama(), args, texts(), texts()[:3], compute_metrics=shape_of)
    scored = trainer.evaluate()
    assert shapes == [(3, 8, VOCABULARY)]
    trainer.compute_metrics = None
    assert trainer.evaluate()["eval_loss"] == pytest.approx(scored["eval_loss"], abs=1e-6)
    assert trainer.predict(texts()).predictions.shape == (7, 8, VOCABULARY)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_two_processes_have_the_weights_of_one(name: str, strategy: str, tmp_path: Path) -> None:
    expected = train(str(tmp_path), name, 2)
    for found in on_ranks(2, train, str(tmp_path), name, 1, strategy=strategy, chunked_cross_entropy=True):
        check_weights(found, expected)


def train_with_head_as_unit(folder: str) -> str:
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", log_level="error", chunked_cross_entropy=True
    )
    strategy = FSDP(units=["LlamaDecoderLayer", "lm_head"], device="cpu")
    trainer = Trainer(llama(), args, texts(), strategy=strategy)
    with pytest.raises(ValueError, match="chunked_cross_entropy=True is not possible with an FSDP unit") as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.distributed
def test_a_head_that_is_sharded_alone_is_refused(tmp_path: Path) -> None:
    assert len({*on_ranks(2, train_with_head_as_unit, str(tmp_path))}) == 1


# Memory


def large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.randint(1, 50_000, (4, 256), generator=torch.Generator().manual_seed(1))
    return llama(vocab_size=50_000, max_position_embeddings=256), {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_estimate_shows_the_saving(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LEAST_ROWS", 256)
    model, batch = large()
    usual, chunked = (
        estimate(model, arguments(tmp_path, chunked_cross_entropy=each), batch, device=device) for each in (False, True)
    )
    logits = 4 * 256 * 50_000 * 4
    assert usual.in_tensors > 3 * logits
    assert chunked.in_tensors < 1.5 * logits  # one chunk is a quarter of them
    assert chunked.model_flops == usual.model_flops


@pytest.mark.slow
def test_a_measured_step_saves_what_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "LEAST_ROWS", 256)
    model, batch = large()
    args = arguments(tmp_path, chunked_cross_entropy=True)
    assert measure(model, args, batch).peak == pytest.approx(estimate(model, args, batch).peak, rel=0.01)
