"""Graphs of torch_geometric: its loaders and batches, with the losses of a plain loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments
from torch.nn import functional as F  # noqa: N812

pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader, DynamicBatchSampler, ImbalancedSampler
from torch_geometric.nn import MLP, GINConv, global_add_pool

from trainer_kit import Callback, ReadyBatches, Run, Trainer

pytestmark = [pytest.mark.ecosystem]


def graphs(number: int = 22) -> list[Data]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(number):
        nodes = 3 + index % 4
        edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
        x = torch.randn(nodes, 5, generator=generator, dtype=torch.float64)
        found.append(Data(x=x, edge_index=edges, y=torch.tensor([index % 3])))
    return found


class GIN(torch.nn.Module):
    """The network of torch_geometric's example mutag_gin.py, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = GINConv(MLP([5, 8, 8], norm=None), train_eps=False)
        self.mlp = MLP([8, 8, 3], norm=None, dropout=0.0)
        self.double()

    def forward(self, data: Any) -> dict[str, torch.Tensor]:
        nodes = self.convolution(data.x, data.edge_index).relu()
        scores = self.mlp(global_add_pool(nodes, data.batch, size=data.num_graphs))
        return {"loss": F.cross_entropy(scores, data.y), "logits": scores}


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, run: Run, record: Any) -> None:
        self.losses += [record["loss"]] if "loss" in record else []


def make_trainer(folder: Path, data: Any, **options: Any) -> tuple[Trainer, list[float]]:
    losses = Losses()
    defaults: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "optim": "sgd", "learning_rate": 0.1,
                                "lr_scheduler_type": "constant", "logging_steps": 1, "max_grad_norm": 0.0}  # fmt: skip
    own = {"data_collator": options.pop("data_collator", None)}
    args = arguments(folder, **(defaults | options))
    return Trainer(GIN(), args, data, DataLoader(graphs(9), batch_size=4), callbacks=[losses], **own), losses.losses


def plain_loop(loader: Any) -> list[float]:
    model, losses = GIN(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in loader:
            loss = model(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("is_ready", [False, True])
def test_losses_are_those_of_a_plain_loop(tmp_path: Path, is_ready: bool) -> None:
    loader = DataLoader(graphs(), batch_size=5)
    trainer, losses = make_trainer(tmp_path, ReadyBatches([*loader]) if is_ready else loader)
    trainer.train()
    assert losses == pytest.approx(plain_loop(loader), rel=1e-12)
    assert trainer.run.state.samples == 44
    metrics = trainer.evaluate()
    with torch.no_grad():
        model = trainer.run.model.eval()
        total = sum(float(model(batch)["loss"]) * batch.num_graphs for batch in DataLoader(graphs(9), batch_size=2))
    assert metrics["eval_loss"] == pytest.approx(total / 9, rel=1e-12)
    assert trainer.predict(DataLoader(graphs(9), batch_size=4)).predictions.shape == (9, 3)


def test_a_list_of_graphs_needs_their_collator(tmp_path: Path) -> None:
    trainer, losses = make_trainer(
        tmp_path, graphs(), data_collator=Batch.from_data_list, shuffle=False, per_device_train_batch_size=5
    )
    trainer.train()
    assert losses == pytest.approx(plain_loop(DataLoader(graphs(), batch_size=5)), rel=1e-12)
    without, _ = make_trainer(tmp_path, graphs())
    with pytest.raises(ValueError, match=r"graphs cannot be stacked into a batch; give data_collator=Batch\.from_d"):
        without.train()


def test_accumulation_does_not_change_the_loss(tmp_path: Path) -> None:
    whole, one = make_trainer(tmp_path, DataLoader(graphs(), batch_size=6))
    whole.train()
    parts, other = make_trainer(
        tmp_path, ReadyBatches(DataLoader(graphs(), batch_size=3)), gradient_accumulation_steps=2
    )
    parts.train()
    assert other == pytest.approx(one, rel=1e-12)
    assert len(one) == 8


def test_a_shuffled_loader_resumes_bit_for_bit(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(graphs(), batch_size=4, shuffle=True)

    whole, losses = make_trainer(tmp_path, make(), save_strategy="steps", save_steps=4)
    whole.train()
    rest, others = make_trainer(tmp_path, make(), save_strategy="steps", save_steps=4)
    rest.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-4")
    assert others[:-1] == losses[4:-1]
    for one, other in zip(whole.run.model.parameters(), rest.run.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_its_samplers(tmp_path: Path) -> None:
    data = graphs()
    trainer, losses = make_trainer(tmp_path, data)
    for sampler in (
        ImbalancedSampler(torch.tensor([int(graph.y) for graph in data])),
        DynamicBatchSampler(data, max_num=15, mode="node"),
    ):
        options: dict[str, Any] = (
            {"sampler": sampler, "batch_size": 4}
            if isinstance(sampler, ImbalancedSampler)
            else {"batch_sampler": sampler}
        )
        trainer, losses = make_trainer(tmp_path, DataLoader(data, **options))
        trainer.train()
        assert losses
        assert all(map(math.isfinite, losses))


def test_plan_and_estimate(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path, DataLoader(graphs(), batch_size=5, shuffle=True))
    plan = trainer.plan()
    assert plan.problems == ()
    assert plan.steps.last == 10
