"""Loops as accelerate's guides teach them, in other words, with nothing but the import changed."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer_kit.accelerator import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    PartialState,
    ProjectConfiguration,
    set_seed,
)


def points(length: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(length, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] > 0).long())


def quick_tour() -> dict[str, Any]:
    """Training, distributed evaluation, gathering, clipping, saving."""
    set_seed(0)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    train_dataloader = DataLoader(points(), batch_size=8, shuffle=True)
    validation_dataloader = DataLoader(points(19), batch_size=4)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    lr_scheduler = StepLR(optimizer, 1, gamma=0.95)  # of the prepared optimizer
    lr_scheduler, validation_dataloader = accelerator.prepare(lr_scheduler, validation_dataloader)
    for _ in range(6):
        for inputs, targets in train_dataloader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            if not accelerator.optimizer_step_was_skipped:
                lr_scheduler.step()
    right = seen = 0
    model.eval()
    for inputs, targets in validation_dataloader:
        with torch.no_grad():
            predictions = model(inputs).argmax(-1)
        all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
        right += int((all_predictions == all_targets).sum())
        seen += len(all_targets)
    rate = lr_scheduler.get_last_lr()[0]
    steps = accelerator.flow.steps * accelerator.num_processes  # of the schedule
    return {"seen": seen, "accuracy": right / seen, "rate": rate, "steps": steps}


@pytest.mark.scenario
def test_quick_tour() -> None:
    alone = quick_tour()
    for result in [alone, *on_ranks(2, quick_tour)]:
        assert result["seen"] == 19
        assert result["accuracy"] > 0.8
        assert result["rate"] == pytest.approx(0.02 * 0.95 ** result["steps"])
    assert alone["steps"] == 36


def test_quick_tour_saves_and_loads_a_model(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 2))
    file = tmp_path / "weights.bin"
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), file)
    other = accelerator.prepare(nn.Linear(3, 2))
    accelerator.unwrap_model(other).load_state_dict(torch.load(file))
    assert torch.equal(other.weight, model.weight)
    accelerator.save_model(model, tmp_path / "model", max_shard_size="1GB", safe_serialization=True)
    assert (tmp_path / "model" / "model.safetensors").exists()
    if accelerator.distributed_type == DistributedType.TPU:
        pytest.fail("no TPU here")


@pytest.mark.parametrize(
    "options", [{"split_batches": True}, {"dataloader_config": DataLoaderConfiguration(split_batches=True)}]
)
def test_quick_tour_options(options: dict[str, Any]) -> None:
    accelerator = Accelerator(device_placement=False, **options)
    loader = accelerator.prepare(DataLoader(points(8), batch_size=4))
    assert accelerator.split_batches
    assert len(loader) == 2
    assert loader.total_batch_size == 4


def test_add_accelerate_to_your_code() -> None:
    """The migration tutorial's loop does what the plain loop does."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model: Any = copy.deepcopy(plain)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain_scheduler = StepLR(plain_optimizer, 2, gamma=0.5)
    for inputs, targets in DataLoader(points(), batch_size=8):
        plain_optimizer.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        plain_optimizer.step()
        plain_scheduler.step()

    accelerator = Accelerator()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = StepLR(optimizer, 2, gamma=0.5)
    training_dataloader: Any = DataLoader(points(), batch_size=8)
    model.to(accelerator.device)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == plain_scheduler.get_last_lr()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.full((3, 4, 4), index / 37) + 0.1 * torch.rand(3, 4, 4)  # an augmentation
        return {"image": image, "label": int(index > 18)}


def notebook_tutorial(mixed_precision: str = "fp16", seed: int = 42, batch_size: int = 8) -> dict[str, Any]:
    """A frozen backbone, one-cycle schedule and fp16, as notebook_launcher would start it."""
    set_seed(seed)
    PartialState._reset_state()  # of an earlier call in this process
    accelerator = Accelerator(mixed_precision=mixed_precision)
    train_dataloader = DataLoader(Images(), shuffle=True, batch_size=batch_size, num_workers=1)
    eval_dataloader = DataLoader(Images(), shuffle=False, batch_size=batch_size * 2)
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 2))
    for param in model.parameters():
        param.requires_grad = False
    for param in model[-1].parameters():
        param.requires_grad = True
    mean = torch.tensor([0.5, 0.5, 0.5])[None, :, None, None].to(accelerator.device)
    frozen = model[1].weight.clone()
    optimizer: Any = torch.optim.Adam(params=model.parameters(), lr=3e-2 / 25)
    lr_scheduler: Any = OneCycleLR(optimizer=optimizer, max_lr=3e-2, epochs=5, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    printed = []
    for epoch in range(5):
        model.train()
        for batch in train_dataloader:
            inputs = batch["image"] - mean
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate: Any = 0
        num_elems = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(batch["image"] - mean)
            predictions = outputs.argmax(dim=-1)
            accurate_preds = accelerator.gather(predictions) == accelerator.gather(batch["label"])
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        printed.append(accurate.item() / num_elems)
        accelerator.print(f"epoch {epoch}: {100 * printed[-1]:.2f}")
    assert torch.equal(accelerator.unwrap_model(model)[1].weight, frozen)
    rate = optimizer.param_groups[0]["lr"]
    return {"accuracy": printed[-1], "rate": rate, "steps": accelerator.flow.steps, "dtype": str(outputs.dtype)}


@pytest.mark.scenario
@pytest.mark.parametrize("mixed_precision", ["fp16", "bf16"])
def test_notebook_tutorial(mixed_precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = notebook_tutorial(mixed_precision)
    assert capsys.readouterr().out.count("epoch") == 5
    for result in [alone, *on_ranks(2, notebook_tutorial, mixed_precision)]:
        assert result["accuracy"] > 0.85
        assert result["dtype"] == "torch.float32"
        assert result["rate"] < 3e-2 / 100  # the schedule, made before prepare(), is at its end


def tpu_guide(downcast: bool = True) -> float:
    """A transformers model, bf16 with downcast_bf16, and a loop without a scheduler."""
    from transformers import BertConfig, BertForSequenceClassification

    PartialState._reset_state()  # of an earlier call in this process
    accelerator = Accelerator(mixed_precision="bf16", downcast_bf16=downcast)
    set_seed(1)
    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model: Any = BertForSequenceClassification(config)
    optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=0.01)
    rows = [
        {"input_ids": torch.tensor([2 + number % 2, 4, 5]), "labels": torch.tensor(number % 2)} for number in range(16)
    ]
    train_dataloader: Any = DataLoader(rows, shuffle=True, batch_size=4, drop_last=True)  # type: ignore[arg-type]
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    assert model.config.hidden_size == 16
    losses = []
    for _ in range(10):
        model.train()
        for _, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses[-1] / losses[0]


@pytest.mark.scenario
def test_tpu_guide() -> None:
    for ratio in [tpu_guide(), *on_ranks(2, tpu_guide)]:
        assert ratio < 0.6


def test_checkpointing_guide(tmp_path: Path) -> None:
    """A registered scheduler, a project folder, and a load of the starting state."""
    accelerator = Accelerator(project_dir=str(tmp_path))
    my_model: Any = nn.Linear(6, 2)
    my_optimizer: Any = torch.optim.Adam(my_model.parameters())
    my_training_dataloader: Any = DataLoader(points(), batch_size=8)
    my_scheduler = StepLR(my_optimizer, step_size=1, gamma=0.99)
    my_model, my_optimizer, my_training_dataloader = accelerator.prepare(my_model, my_optimizer, my_training_dataloader)
    accelerator.register_for_checkpointing(my_scheduler)
    accelerator.save_state()
    start = my_model.weight.detach().clone()
    device = accelerator.device
    my_model.to(device)
    for _ in range(2):
        for batch in my_training_dataloader:
            my_optimizer.zero_grad()
            inputs, targets = batch
            inputs = inputs.to(device)
            targets = targets.to(device)
            accelerator.backward(nn.functional.cross_entropy(my_model(inputs), targets))
            my_optimizer.step()
        my_scheduler.step()
    assert not torch.equal(my_model.weight, start)
    assert my_scheduler.last_epoch == 2
    accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert torch.equal(my_model.weight, start)
    assert my_scheduler.last_epoch == 0
    assert my_optimizer.state_dict()["state"] == {}


def test_checkpointing_guide_skips_batches(tmp_path: Path) -> None:
    set_seed(0)
    accelerator = Accelerator(project_dir=str(tmp_path))
    train_dataloader: Any = accelerator.prepare(DataLoader(torch.arange(30), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    first = []
    for number, batch in enumerate(train_dataloader, start=1):
        first.append(batch.tolist())
        if number == 10:
            accelerator.save_state(tmp_path / "my_state")
    second = [batch.tolist() for batch in train_dataloader]

    accelerator = Accelerator(project_dir=str(tmp_path))
    train_dataloader = accelerator.prepare(DataLoader(torch.arange(30), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    accelerator.load_state(tmp_path / "my_state")
    skipped_dataloader = accelerator.skip_first_batches(train_dataloader, 10)
    assert len(skipped_dataloader) == 5
    assert [batch.tolist() for batch in skipped_dataloader] == first[10:]
    assert [batch.tolist() for batch in train_dataloader] == second


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((1, 1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


@pytest.mark.parametrize("plugin", [False, True])
def test_gradient_accumulation_guide(plugin: bool) -> None:
    """The guide's figures: 2.04 with and without accumulation."""
    set_seed(0)
    x = torch.arange(1.0, 9.0)
    y = 2 * x
    model: Any = Line()
    clone = copy.deepcopy(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    if plugin:
        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
    else:
        accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, dataloader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x, y), batch_size=len(x) // 4)
    )
    synced = []
    for inputs, labels in dataloader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs.view(-1, 1)), labels.view(-1, 1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
    clone_optimizer = torch.optim.SGD(clone.parameters(), lr=0.02)
    nn.functional.mse_loss(x.view(-1, 1) @ clone.weight, y.view(-1, 1)).backward()
    clone_optimizer.step()
    assert synced == [False, False, False, True]
    assert model.weight.item() == pytest.approx(2.04, abs=1e-5)
    assert model.weight.item() == pytest.approx(clone.weight.item())


def tokens_of_variable_length() -> float:
    """The guide's loop over whole windows, whose loss is a sum over tokens."""
    steps = 2
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    torch.manual_seed(0)
    model: Any = nn.Linear(1, 2, bias=False).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.08)
    rows = [torch.arange(1.0, number + 2, dtype=torch.float64) for number in range(8)]
    batch_size = len(rows) // steps // accelerator.num_processes

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
        return {"input_ids": ids[..., None], "labels": torch.where(ids < 0, -100, ids % 2).long()}

    model, optimizer = accelerator.prepare(model, optimizer)
    dataloader = accelerator.prepare_data_loader(
        DataLoader(rows, batch_size=batch_size, collate_fn=collate),  # type: ignore[arg-type]
        device_placement=True,
    )
    iterator = iter(dataloader)
    remainder = len(dataloader) % steps or steps
    updates = math.ceil(len(dataloader) / steps)
    for update in range(updates):
        batches = [next(iterator) for _ in range(steps if update != updates - 1 else remainder)]
        items = sum((batch["labels"] != -100).sum() for batch in batches)
        items = accelerator.gather(items).sum().item()
        for number, batch in enumerate(batches):
            synchronizes = number == len(batches) - 1 or accelerator.num_processes == 1
            with contextlib.nullcontext() if synchronizes else model.no_sync():
                outputs = model(batch["input_ids"]).flatten(0, 1)
                loss = nn.functional.cross_entropy(outputs, batch["labels"].flatten(), reduction="sum")
                accelerator.backward(loss * steps * accelerator.num_processes / items)
        optimizer.step()
        optimizer.zero_grad()
    return float(accelerator.unwrap_model(model).weight.detach().flatten()[0])


@pytest.mark.scenario
def test_gradient_accumulation_guide_with_tokens() -> None:
    """One step over all tokens, however they are cut into batches and processes."""
    torch.manual_seed(0)
    model = nn.Linear(1, 2, bias=False).double()
    ids = torch.cat([torch.arange(1.0, number + 2, dtype=torch.float64) for number in range(8)])
    nn.functional.cross_entropy(model(ids[:, None]), (ids % 2).long()).backward()
    assert model.weight.grad is not None
    expected = float((model.weight.detach() - 0.08 * model.weight.grad).flatten()[0])
    for weight in [tokens_of_variable_length(), *on_ranks(2, tokens_of_variable_length)]:
        assert weight == pytest.approx(expected, rel=1e-6)


def gradient_synchronization() -> float:
    """`no_sync` for all batches but a loader's last."""
    accelerator = Accelerator()
    torch.manual_seed(3)
    model: Any = nn.Linear(6, 2).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(inputs.double(), target) for inputs, target in points(24)]
    model, dataloader, optimizer = accelerator.prepare(model, DataLoader(data, batch_size=4), optimizer)  # type: ignore[arg-type]
    for index, (inputs, targets) in enumerate(dataloader):
        last = index == len(dataloader) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets) / len(dataloader))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return float(accelerator.unwrap_model(model).weight.detach()[0, 0])


@pytest.mark.scenario
def test_gradient_synchronization_guide() -> None:
    alone = gradient_synchronization()
    assert on_ranks(2, gradient_synchronization) == pytest.approx([alone, alone], rel=1e-9)


class EarlyStopping:
    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def should_stop(self, loss: float) -> bool:
        return loss < self.threshold


def early_stopping() -> int:
    """Every process looks at its own loss; all stop at the same step."""
    set_seed(0)
    accelerator = Accelerator()
    model: Any = nn.Linear(6, 2)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(points(), batch_size=4, shuffle=True))
    callback = EarlyStopping(0.3)
    for epoch in range(30):
        for step, (inputs, targets) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if callback.should_stop(loss.item()):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                return epoch * len(loader) + step
    return -1


@pytest.mark.scenario
def test_early_stopping_example() -> None:
    stopped = on_ranks(2, early_stopping)
    assert stopped[0] == stopped[1] > 0
    assert early_stopping() > 0


def test_tracking_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_kit.accelerator import tracking
    from trainer_kit.callbacks import read_log

    monkeypatch.setattr(tracking, "installed_trackers", lambda: ["tensorboard", "jsonl"])  # others need a login
    config = ProjectConfiguration(project_dir=tmp_path, logging_dir=tmp_path / "logs")
    accelerator = Accelerator(log_with="all", project_config=config)
    accelerator.init_trackers("example_project", config={"num_iterations": 5, "loss_function": str(nn.MSELoss())})
    for step in range(3):
        accelerator.log({"training_loss": torch.tensor(1.5) / (step + 1), "lr": 0.1}, step=step)
    accelerator.end_training()
    folder = tmp_path / "logs" / "example_project"
    assert list(folder.glob("events.*"))
    records = read_log(folder / "log.jsonl")
    assert records[0]["arguments"]["num_iterations"] == 5
    assert [record["training_loss"] for record in records[1:]] == [1.5, 0.75, 0.5]
    assert [record["step"] for record in records[1:]] == [0, 1, 2]
