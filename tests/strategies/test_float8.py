"""fp8 by torchao, computed as a GPU would by the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.models import Linear
from kit.trainer import arguments
from torch import nn

from trainer_kit import Accelerator, Callback, Precision, Run, SingleDevice, Trainer
from trainer_kit.checkpoint import load_checkpoint_in_model
from trainer_kit.strategies import float8

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def package() -> Any:
    return pytest.importorskip("torchao.float8", reason="needs torchao", exc_type=ImportError)


class Layers(nn.Module):
    """Linear layers that can compute in fp8 (the first two), and that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32, bias=False)
        self.odd = nn.Linear(32, 24)
        self.head = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.odd(torch.relu(self.second(torch.relu(self.first(x)))))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_hidden_layers_of_fitting_sizes_are_converted_in_place() -> None:
    model = Layers()
    before = dict(model.named_parameters())
    float8.convert_linear_layers(model, emulate=True)
    assert converted(model) == ["first", "second"]
    assert [(name, id(each)) for name, each in model.named_parameters()] == [(n, id(p)) for n, p in before.items()]
    modules = [*model.modules()]
    float8.convert_linear_layers(model, emulate=True)
    assert [*model.modules()] == modules


def test_a_transformers_model_keeps_embeddings_and_head() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    names = [*model.state_dict()]
    float8.convert_linear_layers(model, emulate=True)
    assert len(converted(model)) == 2 * 7
    assert "lm_head" not in converted(model)
    assert [*model.state_dict()] == names
    ids = torch.arange(12).view(1, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    "model", [Linear(), nn.Linear(16, 16), nn.Conv2d(16, 16, 1)], ids=lambda model: str(type(model))
)
def test_a_model_without_such_layers_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"dimensions are multiples of 16, and \w+ has none; use 'bf16'"):
        float8.convert_linear_layers(model)


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    sentence = (
        "mixed_precision='fp8' needs an NVIDIA GPU of compute capability 8.9 or later, and this run uses cpu; use"
    )
    with pytest.raises(ValueError, match=sentence):
        Trainer(Layers(), arguments(tmp_path, mixed_precision="fp8"), samples()).train()
    with pytest.raises(ValueError, match=sentence):
        Accelerator(mixed_precision="fp8", cpu=True)


@pytest.mark.parametrize(
    ("capability", "is_allowed"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_a_gpu_is_judged_by_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_allowed: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if is_allowed:
        float8.check_device(torch.device("cuda", 0))
    else:
        with pytest.raises(ValueError, match=r"this run uses a GPU of 8\.0; use 'bf16'"):
            float8.check_device(torch.device("cuda", 0))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"mixed_precision='fp8' needs torchao .*; run `pip install torchao`"):
        Precision("fp8", emulate_fp8=True).setup(CPU)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 32, generator=generator)
    return [{"x": row, "labels": (row[0] > 0).long()} for row in rows]


class Watch(Callback):
    def __init__(self, stop: int = 0) -> None:
        self.stop = stop
        self.losses: list[float] = []

    def on_step_end(self, run: Run) -> None:
        assert run.local_loss is not None
        self.losses.append(run.local_loss.item())
        if run.state.step == self.stop:
            run.requests.stop = True


def trained(folder: Path, stop: int = 0, resume: bool = False, mode: str = "fp8") -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    watch = Watch(stop)
    args = arguments(
        folder, max_steps=24, learning_rate=0.01, save_strategy="steps", save_steps=8, mixed_precision=mode
    )
    strategy = SingleDevice("cpu", Precision(mode, emulate_fp8=True))
    trainer = Trainer(Layers(), args, samples(), strategy=strategy, callbacks=[watch])
    trainer.train(resume_from_checkpoint=resume)
    return trainer.run.model, watch.losses


@pytest.fixture
def straight(tmp_path: Path) -> tuple[nn.Module, list[float]]:
    return trained(tmp_path / "straight")


def test_a_run_learns_and_resumes_with_the_same_bits(tmp_path: Path, straight: Any) -> None:
    model, losses = straight
    assert converted(model) == ["first", "second"]
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    trained(tmp_path / "resumed", stop=8)
    again, rest = trained(tmp_path / "resumed", resume=True)
    assert rest == losses[8:]
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
    _, in_bf16 = trained(tmp_path / "bf16", mode="bf16")
    assert in_bf16 != losses
    assert in_bf16 == pytest.approx(losses, abs=0.2)


def test_a_checkpoint_is_read_without_fp8(tmp_path: Path, straight: Any) -> None:
    plain = Layers()
    load_checkpoint_in_model(plain, tmp_path / "straight" / "run" / "checkpoint-24")
    assert converted(plain) == []
    theirs = straight[0].state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in plain.state_dict().items())
