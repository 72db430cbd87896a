from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit.models import Linear
from kit.trainer import arguments
from safetensors.torch import load_file
from torch import nn

from trainer_kit import Callback, Run, Trainer
from trainer_kit.strategies.memory_format import in_channels_last, use_channels_last

LAST = torch.channels_last


def is_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=LAST) and not tensor.is_contiguous()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, bias=False)  # a norm follows
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 3)
        self.seen: set[tuple[bool, bool]] = set()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.norm(self.convolution(x)))
        self.seen.add((is_last(x), is_last(hidden)))
        logits = self.head(self.dropout(hidden.mean((2, 3))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def images() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(32, 3, 8, 8, generator=generator)
    return [{"x": each, "labels": torch.tensor(number % 3)} for number, each in enumerate(pictures)]


def test_only_what_convolutions_read_changes() -> None:
    batch = {
        "pictures": torch.randn(2, 3, 4, 4),
        "film": torch.randn(2, 3, 4, 4, 4),
        "mask": torch.ones(2, 3, 4, 4, dtype=torch.bool),
        "text": torch.ones(2, 3, 4),
    }
    found = in_channels_last(batch)
    assert is_last(found["pictures"])
    assert found["film"].is_contiguous(memory_format=torch.channels_last_3d)
    assert found["mask"] is batch["mask"]
    assert found["text"] is batch["text"]
    assert all(torch.equal(found[name], each) for name, each in batch.items())


def test_parameters_stay_the_same_objects() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3), nn.Linear(3, 3))
    before = [*model.parameters()]
    assert use_channels_last(model)
    assert [id(each) for each in model.parameters()] == [id(each) for each in before]
    assert is_last(model[0].weight)  # type: ignore[arg-type]
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last_3d)  # type: ignore[union-attr]
    assert not use_channels_last(nn.Linear(2, 2))


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            run.requests.stop = True


def trainer(folder: Path, *callbacks: Callback, is_last: bool = True, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    given: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "channels_last": is_last}
    return Trainer(Net(), arguments(folder, **(given | changes)), images(), images(), callbacks=callbacks)


def test_training_evaluation_and_prediction_compute_in_it(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_strategy="epoch", save_strategy="no")
    made.train()
    made.evaluate()
    made.predict(images())
    assert made.run.model.seen == {(True, True)}
    assert is_last(made.run.model.convolution.weight)  # type: ignore[union-attr,arg-type]
    plain = trainer(tmp_path / "plain", is_last=False, save_strategy="no")
    plain.train()
    assert plain.run.model.seen == {(False, False)}
    for one, two in zip(made.run.model.parameters(), plain.run.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


OPTIMIZERS = {"adamw_torch": {}, "sgd": {"optim_args": "momentum=0.9", "learning_rate": 0.1}, "muon": {}}


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_run_resumes_with_the_same_bits(tmp_path: Path, optim: str) -> None:
    changes = {"optim": optim, **OPTIMIZERS[optim]}
    straight = trainer(tmp_path / "straight", **changes)
    straight.train()
    trainer(tmp_path / "resumed", StopAt(4), **changes).train()
    resumed = trainer(tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=True)
    pairs = zip(straight.run.model.state_dict().items(), resumed.run.model.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)
    assert is_last(resumed.run.model.convolution.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_checkpoint_does_not_depend_on_the_format(tmp_path: Path, before: bool, after: bool) -> None:
    first = trainer(tmp_path, StopAt(4), is_last=before)
    first.train()
    weights = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(weights[name], each) for name, each in first.run.model.state_dict().items())
    second = trainer(tmp_path, is_last=after)
    second.train(resume_from_checkpoint=True)
    weight = second.run.model.convolution.weight
    moments = second.run.optimizer.state[weight]  # type: ignore[union-attr,index]
    assert is_last(weight) == after  # type: ignore[arg-type]
    assert is_last(moments["exp_avg"]) == after
    straight = trainer(tmp_path / "straight", is_last=before)
    straight.train()
    for one, two in zip(straight.run.model.parameters(), second.run.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_a_model_without_convolutions_is_a_warning(tmp_path: Path) -> None:
    data = [{"x": torch.ones(4), "labels": torch.tensor(1)}] * 8
    sentence = "channels_last=True, but Linear has no weight of 4 or 5 dimensions: remove it"
    with pytest.warns(UserWarning, match=sentence):
        Trainer(Linear(), arguments(tmp_path, channels_last=True), data).train()


def test_a_transformers_model_trains_in_it(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    seen = set()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, inputs, output: seen.add(is_last(output)))
    data = [{"pixel_values": each["x"].repeat(1, 4, 4), "labels": each["labels"]} for each in images()]
    Trainer(model, arguments(tmp_path, channels_last=True), data).train()
    assert True in seen
    assert is_last(model.resnet.embedder.embedder.convolution.weight)
