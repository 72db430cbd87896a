"""A compiled model computes what the same model computes without a compilation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.architectures import ARCHITECTURES, VOCABULARY
from kit.ranks import on_ranks
from kit.trainer import arguments
from torch import nn

from trainer_kit import FSDP, Callback, Run, SingleDevice, Strategy, Trainer
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.strategies import compilation
from trainer_kit.strategies.compilation import compile_model
from trainer_kit.strategies.ddp import DDP

# torch's compiler hides this warning of its own, but not where warnings are errors.
NO_LEAF = "The .grad attribute of a Tensor that is not a leaf"
pytestmark = pytest.mark.filterwarnings(f"ignore:{NO_LEAF}")

REGIONAL = CompileOptions(backend="aot_eager", regional=True)
WHOLE = CompileOptions(backend="aot_eager")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def made(name: str, layers: int = 4, dropout: float = 0.0) -> nn.Module:
    """A model in float64 with so many layers."""
    torch.manual_seed(0)
    config = copy.copy(ARCHITECTURES[name]().config)
    for key in ("n_layer", "num_hidden_layers"):
        if key in config.to_dict():
            setattr(config, key, layers)
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(config, key, dropout)
    config.loss_type = "ForCausalLM" if name == "gpt2" else "ForMaskedLM"  # else transformers warns in each pass
    return type(ARCHITECTURES[name]())(config).double()


def batch(rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def trained(model: nn.Module) -> list[float]:
    """The losses of 10 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(**batch())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_blocks_of_foreign_models_are_compiled_once_and_train_as_without(name: str, checkpointed: bool) -> None:
    plain, compiled = made(name).train(), made(name).train()
    if checkpointed:
        for model in (plain, compiled):
            Strategy().enable_activation_checkpointing(model)
    compile_model(compiled, REGIONAL)
    assert trained(compiled) == pytest.approx(trained(plain), rel=0, abs=1e-10)
    assert Strategy().device_info.compilations()[0] == 1
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), rtol=0, atol=1e-8)
    with torch.no_grad():
        theirs = plain.eval()(**batch())["logits"]
        torch.testing.assert_close(compiled.eval()(**batch())["logits"], theirs, rtol=0, atol=1e-8)
    assert Strategy().device_info.compilations()[0] == 2


class Repeated(nn.Module):
    """Blocks with dropout, and a loss."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": x.square().mean()}


def test_a_block_is_compiled_once_and_names_stay() -> None:
    model = Own()
    names = [*model.state_dict()]
    compile_model(model, CompileOptions(backend="eager", regional=True))
    model(torch.ones(2, 4, requires_grad=True))["loss"].backward()
    assert Strategy().device_info.compilations()[0] == 1
    assert [*model.state_dict()] == names


@pytest.mark.parametrize("regional", [False, True])
def test_modules_of_torch_itself_are_compiled_too(regional: bool) -> None:
    layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    plain = nn.Sequential(*layers)
    compiled, x = copy.deepcopy(plain), torch.ones(2, 4, requires_grad=True)
    compile_model(compiled, CompileOptions(backend="eager", fullgraph=True, regional=regional))
    torch.testing.assert_close(compiled(x), plain(x))
    assert Strategy().device_info.compilations()[0] == 1
    torch.testing.assert_close(copy.deepcopy(compiled)(x), plain(x))


class Own(Repeated):
    """The same with a class of its own for the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch_compile has backend='bogus', .* use one of .*'inductor'"):
        compile_model(Own(), CompileOptions(backend="bogus"))


@pytest.fixture
def small_budget() -> Iterator[None]:
    """torch recomputes activations on its own."""
    from torch._functorch import config

    with config.patch(activation_memory_budget=0.1):
        yield


@pytest.mark.usefixtures("small_budget")
def test_wrong_gradients_of_dropout_are_refused() -> None:
    with pytest.raises(ValueError, match=r"activation_memory_budget=0\.1.*dropout wrong; set it to 1"):
        compile_model(Repeated(), WHOLE)


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("model", [Own(), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))])
def test_without_modules_of_dropout_they_are_possible(model: nn.Module) -> None:
    """The model may draw random numbers by functions."""
    with pytest.warns(UserWarning, match="makes the gradients of dropout wrong"):
        compile_model(model, WHOLE)


@pytest.mark.slow
@pytest.mark.usefixtures("small_budget")
@pytest.mark.xfail(strict=True, reason="pytorch#190758: when this passes, compile_model need not refuse it any more")
def test_torch_recomputes_dropout_as_it_was() -> None:
    """What was dropped has no gradient."""
    layer = nn.Linear(64, 64)
    compiled = torch.compile(lambda x: nn.functional.dropout(layer(x).sin(), 0.5), backend="aot_eager")
    output = compiled(torch.ones(64, 64))
    (output * (output == 0)).sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.abs().max() == 0


def test_a_wrong_fusion_of_norms_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only kernels of GPUs have it."""
    from torch._inductor import config

    if not hasattr(config.triton, "mix_order_reduction"):
        pytest.skip("this torch has no such fusion")
    monkeypatch.setattr(compilation, "_compile", lambda module, options: None)  # inductor takes seconds to import
    with config.patch({"triton.mix_order_reduction": True}):
        monkeypatch.setattr(compilation, "_FUSES_NORMS_WRONGLY", False)
        compile_model(Own(), CompileOptions())
        assert config.triton.mix_order_reduction
        monkeypatch.setattr(compilation, "_FUSES_NORMS_WRONGLY", True)
        compile_model(Own(), CompileOptions())
        assert not config.triton.mix_order_reduction


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"regional=True, but Repeated repeats no block .*; use regional=False"):
        SingleDevice("cpu").compile(Repeated(1), REGIONAL)


@pytest.mark.slow
def test_a_cache_is_made_only_where_it_is_asked_for() -> None:
    model: Any = made("gpt2", layers=2).eval()
    compile_model(model, CompileOptions(backend="eager", regional=True))
    ids = batch()["input_ids"]
    assert model(input_ids=ids).past_key_values is None
    assert model(input_ids=ids, use_cache=True).past_key_values is not None
    compiled = Strategy().device_info.compilations()
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = made("gpt2", layers=2).eval().generate(ids, **settings)  # type: ignore[operator]
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(model.generate(ids, **settings), theirs)
    assert Strategy().device_info.compilations() == compiled
    assert torch.equal(model.generate(ids, **settings), theirs)


class Stop(Callback):
    """Ends a training after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, run: Run) -> None:
        run.requests.stop = run.state.step == self.steps


def weights_after(folder: Path, steps: int, setting: dict[str, Any], resume: bool = False) -> dict[str, torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Repeated()
    options = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.1}
    data = [{"x": torch.full((4,), float(index))} for index in range(8)]
    args = arguments(folder, torch_compile=setting, **options)
    Trainer(model, args, data, callbacks=[Stop(steps)]).train(resume)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("regional", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_resume_repeats_the_dropout_of_each_step(tmp_path: Path, regional: bool) -> None:
    setting = {"backend": "aot_eager", "regional": regional}
    expected = weights_after(tmp_path / "whole", 4, setting)
    weights_after(tmp_path / "parts", 2, setting)
    torch.testing.assert_close(weights_after(tmp_path / "parts", 4, setting, True), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_resume_repeats_the_dropout_of_generated_code(tmp_path: Path) -> None:
    setting = {"mode": "reduce-overhead"}  # CUDA graphs where there are any
    expected = weights_after(tmp_path / "whole", 4, setting)
    weights_after(tmp_path / "parts", 2, setting)
    torch.testing.assert_close(weights_after(tmp_path / "parts", 4, setting, True), expected, rtol=0, atol=0)


class Encoder(nn.Module):
    """A transformer of torch's own classes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 3)
        self.double()

    def forward(self, input_ids: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(self.embedding(input_ids)).sin().mean()}


def gradients(strategy: str, name: str, regional: bool, checkpointed: bool, rows: int) -> dict[str, torch.Tensor]:
    """The gradients of this process's rows of a batch of 4; those of all processes under DDP and FSDP."""
    torch.compiler.reset()
    warnings.filterwarnings("ignore", NO_LEAF)
    chosen: Any = {"ddp": DDP, "fsdp": FSDP, "single": SingleDevice}[strategy](device="cpu")
    chosen.setup()
    torch.manual_seed(0)
    model = chosen.prepare(Encoder() if name == "torch" else made(name).train())
    if checkpointed:
        chosen.enable_activation_checkpointing(model)
    if strategy != "single":
        chosen.compile(model, REGIONAL if regional else WHOLE)
    mine = {key: value[chosen.rank * rows : (chosen.rank + 1) * rows] for key, value in batch().items()}
    with chosen.autocast():
        loss = model(**mine)["loss"] * rows / 4
    chosen.backward(loss)
    found = {key: value.grad for key, value in chosen.unwrap(model).named_parameters()}
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in found.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_of_several_processes_are_those_of_one(strategy: str, regional: bool, checkpointed: bool) -> None:
    alone = gradients("single", "gpt2", regional, checkpointed, 4)
    for each in on_ranks(2, gradients, strategy, "gpt2", regional, checkpointed, 2):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_of_torchs_own_blocks_are_those_of_one_process(strategy: str) -> None:
    alone = gradients("single", "torch", True, False, 4)
    for each in on_ranks(2, gradients, strategy, "torch", True, False, 2):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)


def refused() -> None:
    strategy = FSDP(device="cpu")
    strategy.setup()
    strategy.compile(strategy.prepare(Repeated()), CompileOptions(fullgraph=True))


@pytest.mark.distributed
def test_a_full_graph_is_not_possible_with_fsdp() -> None:
    with pytest.raises(AssertionError, match="fullgraph=True, which is not possible with FSDP"):
        on_ranks(2, refused)
