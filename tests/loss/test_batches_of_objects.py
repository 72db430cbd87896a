"""Batches whose first dimension is not the samples, and losses that call the model more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView
from typing import Any

import numpy as np
import pytest
import torch
from kit.static_shapes import Static
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit import XLA, Accelerator, ReadyBatches, SingleDevice, Trainer, TrainingArguments
from trainer_kit.loss.batch import count, samples_in, split
from trainer_kit.utils.pytree import move

SIZES = [2, 30, 5, 1, 12, 3, 7]


class Batch:
    """Graphs as one object, as torch_geometric has them: it is neither a dict nor a tensor."""

    def __init__(self, x: torch.Tensor, owner: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.owner, self.y = x, owner, y

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        return Batch(*(each.to(device) for each in (self.x, self.owner, self.y)))


class Table(dict[str, torch.Tensor]):
    """A mapping that `for` and `in` take for its rows, as a TensorDict is one."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Table({name: column[row] for name, column in self.items()}) for row in range(len(self))])

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError("ask its keys")

    def __len__(self) -> int:
        return len(next(iter(self.values())))

    def keys(self) -> KeysView[str]:
        return dict(self.items()).keys()


class GraphModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: Any, owner: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        if isinstance(x, Batch):
            x, owner, labels = x.x, x.owner, x.y
        graphs = torch.zeros(len(labels), dtype=x.dtype).index_add(0, owner, self.layer(x)[:, 0])
        return {"loss": F.mse_loss(graphs, labels), "logits": graphs}


def graphs() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(size, 3, dtype=torch.float64, generator=generator), "y": float(number)}
        for number, size in enumerate(SIZES)
    ]


def parts(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nodes = torch.cat([sample["x"] for sample in samples])
    owner = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(each["x"]) for each in samples]))
    return nodes, owner, torch.tensor([sample["y"] for sample in samples], dtype=torch.float64)


def as_dict(samples: list[Any]) -> dict[str, torch.Tensor]:
    return dict(zip(("x", "owner", "labels"), parts(samples), strict=True))


def as_object(samples: list[Any]) -> Batch:
    return Batch(*parts(samples))


def as_table(samples: list[Any]) -> Table:
    return Table(as_dict(samples))


def with_names(samples: list[Any]) -> dict[str, Any]:
    return {"names": ["a"] * len(samples)} | as_dict(samples)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(graphs())


def trainer(tmp_path: Any, model: nn.Module, dataset: Any = None, **given: Any) -> Trainer:
    values = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 1,
        "log_level": "error", "save_strategy": "no", "per_device_train_batch_size": 2, "optim": "sgd",
        "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 0.0, "max_grad_norm": 0.0,
    }  # fmt: skip
    strategy = given.pop("strategy", None)
    arguments = {name: given.pop(name) for name in list(given) if name in TrainingArguments().to_dict()}
    args = TrainingArguments(**{**values, **arguments})
    return Trainer(model, args, dataset, strategy=strategy, **given)


def whole_loss() -> torch.Tensor:
    model = GraphModel()
    loss: torch.Tensor = model(**as_dict(graphs()))["loss"]
    loss.backward()
    grad = model.layer.weight.grad
    assert grad is not None
    return torch.cat([loss.detach()[None], grad.flatten()])


@pytest.mark.parametrize("collate", [as_dict, as_object, as_table])
@pytest.mark.parametrize("dataset", [graphs(), Stream()], ids=["map", "stream"])
@pytest.mark.parametrize("static", [False, True])
def test_graphs_are_weighed_by_graphs(tmp_path: Any, collate: Callable[..., Any], dataset: Any, static: bool) -> None:
    model, seen = GraphModel(), list[torch.Tensor]()
    model.layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))  # type: ignore[union-attr]
    strategy = Static() if static else SingleDevice("cpu")
    one = trainer(tmp_path, model, dataset, data_collator=collate, strategy=strategy)
    result = one.train()
    expected = whole_loss()
    torch.testing.assert_close(result.training_loss, expected[0].item(), rtol=1e-12, atol=0)
    torch.testing.assert_close(seen[-1].flatten(), expected[1:], rtol=1e-12, atol=1e-12)
    assert one.run.state.samples == len(SIZES)
    evaluated = one.evaluate(dataset)
    torch.testing.assert_close(evaluated["eval_loss"], expected[0].item(), rtol=1e-12, atol=0)
    predicted = one.predict(dataset)
    assert predicted.predictions.shape == predicted.label_ids.shape == (len(SIZES),)
    np.testing.assert_array_equal(predicted.label_ids, np.arange(len(SIZES)))


def test_graphs_are_estimated_by_graphs(tmp_path: Any) -> None:
    one = trainer(tmp_path, GraphModel(), graphs(), data_collator=as_dict)
    estimate = one.estimate("24GiB")
    assert (estimate.anatomy.batch_size, estimate.largest_batch_size) == (2, None)
    assert "is unknown: the batch's tensors do not begin with its samples" in estimate.table()
    assert not any("per_device_train_batch_size" in option.changes for option in estimate.options)


def test_the_work_of_a_step_is_planned_by_graphs(tmp_path: Any) -> None:
    alike = [sample for sample in graphs() if len(sample["x"]) == 12] * 4
    found = [
        trainer(tmp_path, GraphModel(), alike, data_collator=as_dict, gradient_accumulation_steps=number).plan().compute
        for number in (1, 2)
    ]
    assert all(each is not None for each in found)
    assert found[0].step == 2 * 12 * 2 * 3 * 2  # type: ignore[union-attr]
    assert found[1].step == 2 * found[0].step  # type: ignore[union-attr]


def test_lists_of_images_and_targets_are_counted(tmp_path: Any) -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
            return torch.stack([self.scale * each["boxes"].sum() for each in targets]).mean()

    samples = [
        (torch.zeros(3, 4, 4), {"boxes": torch.full((n, 4), float(n), dtype=torch.float64)}) for n in (1, 2, 5, 9, 4)
    ]

    def collate(batch: list[Any]) -> tuple[list[Any], list[Any]]:
        return [image for image, _ in batch], [target for _, target in batch]

    one = trainer(tmp_path, Detector(), samples, data_collator=collate, gradient_accumulation_steps=3)
    expected = float(torch.stack([target["boxes"].sum() for _, target in samples]).mean())
    torch.testing.assert_close(one.train().training_loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(one.evaluate(samples)["eval_loss"], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dataset", [graphs(), Stream()], ids=["map", "stream"])
def test_an_accelerators_loader_counts_graphs(dataset: Any) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2, collate_fn=with_names))
    labels = list[Any]()
    for batch in loader:
        assert loader.rows == loader.real == len(batch["labels"])
        labels += accelerator.gather_for_metrics(batch["labels"]).tolist()
    assert labels == list(range(len(SIZES)))


class Filtering(DataLoader[Any]):
    """As torch_geometric's NeighborLoader: its batches are made of what the collator gave, in the main process."""

    def _get_iterator(self) -> Any:
        return (batch["labels"] + 100 for batch in super()._get_iterator())


def test_an_accelerator_leaves_a_loader_its_own_iterator() -> None:
    loader = Accelerator(cpu=True).prepare(Filtering(graphs(), batch_size=2, collate_fn=as_dict))
    assert torch.cat(list(loader)).tolist() == [100 + number for number in range(len(SIZES))]


def test_xla_moves_objects_too() -> None:
    strategy = XLA.__new__(XLA)
    strategy.device, strategy._division = torch.device("meta"), None
    moved = strategy._sent([as_object(graphs())])
    assert moved[0].x.is_meta
    assert moved[0].y.is_meta


def test_objects_move_to_the_device_by_themselves() -> None:
    moved = move([as_object(graphs()), {"x": torch.zeros(2)}, "text"], torch.device("meta"))
    assert moved[0].x.is_meta
    assert moved[1]["x"].is_meta
    assert moved[2] == "text"


class Fields:
    """Columns in a dict, as in recbole's Interaction, whose `to` takes the device alone."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns, self.length = columns, len(columns["x"])

    def __len__(self) -> int:
        return self.length

    def to(self, device: Any, selected: Any = None) -> Fields:
        return Fields({name: column.to(device) for name, column in self.columns.items()})


@pytest.mark.parametrize("is_ready", [False, True])
def test_objects_whose_to_takes_the_device_alone(tmp_path: Any, is_ready: bool) -> None:
    assert move(Fields({"x": torch.zeros(2)}), torch.device("meta")).columns["x"].is_meta
    rows = [torch.full((3,), float(number)) for number in range(10)]
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, report_to="none")
    given: dict[str, Any] = {"train_dataset": rows, "data_collator": lambda each: Fields({"x": torch.stack(each)})}
    if is_ready:
        batches = [Fields({"x": torch.stack(rows[place : place + 4])}) for place in (0, 4, 8)]
        given = {"train_dataset": ReadyBatches(batches)}
    given["compute_loss"] = lambda model, batch: model(batch.columns["x"]).square().mean()
    trainer = Trainer(nn.Linear(3, 1), args, strategy=SingleDevice("cpu"), **given)
    trainer.train()
    assert (trainer.run.state.step, trainer.run.state.samples) == (3, 10)


# A loss that calls the model more than once


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


def points(length: int = 19) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(5, generator=generator), "labels": torch.tensor(n % 4)} for n in range(length)]


def in_pieces(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = [model(piece)["logits"] for piece in batch["x"].split(3)]
    return F.cross_entropy(torch.cat(logits), batch["labels"])


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    one, two = model(batch["x"])["logits"], model(batch["x"] + 0.1)["logits"]
    return F.cross_entropy(one @ two.T, torch.arange(len(one)))


def with_outputs(model: nn.Module, batch: Any) -> Any:
    one = model(batch["x"])
    return contrastive(model, batch), one


def with_sum_and_outputs(model: nn.Module, batch: Any) -> Any:
    one = model(batch["x"])["logits"]
    return contrastive(model, batch) * len(one), len(one), one


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("compute_loss", [in_pieces, with_outputs, with_sum_and_outputs])
def test_all_that_a_loss_computed_is_predicted(tmp_path: Any, compute_loss: Any, static: bool) -> None:
    model, dataset = Points(), points()
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"rows": float(len(prediction.predictions))}

    one = trainer(
        tmp_path, model, compute_loss=compute_loss, compute_metrics=metrics, per_device_eval_batch_size=8,
        strategy=Static() if static else SingleDevice("cpu"),
    )  # fmt: skip
    expected = model(torch.stack([each["x"] for each in dataset]))["logits"].detach().numpy()
    assert one.evaluate(dataset)["eval_rows"] == len(dataset)
    np.testing.assert_allclose(seen[-1].predictions, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(seen[-1].label_ids, [int(each["labels"]) for each in dataset])
    predicted = one.predict(dataset)
    np.testing.assert_allclose(predicted.predictions, expected, rtol=1e-6, atol=1e-6)


def test_outputs_that_are_no_parts_of_one_prediction_are_asked_for(tmp_path: Any) -> None:
    one = trainer(tmp_path, Points(), compute_loss=contrastive, compute_metrics=lambda prediction: {})
    with pytest.raises(ValueError, match=r"called the model 2 times on a batch of 2 rows.*return .*\(loss, outputs\)"):
        one.evaluate(points())
    without = trainer(tmp_path, Points(), points(), compute_loss=contrastive)
    assert without.evaluate(points())["eval_loss"] > 0  # nobody asks for predictions
    without.train()


def test_a_loss_that_does_not_call_the_model_itself_is_told_to_return_outputs(tmp_path: Any) -> None:
    def inside(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model.layer(batch["x"]), batch["labels"])

    one = trainer(tmp_path, Points(), compute_loss=inside, compute_metrics=lambda prediction: {})
    with pytest.raises(ValueError, match=r"return \(loss, outputs\) from compute_loss"):
        one.evaluate(points())


def test_training_keeps_no_outputs(tmp_path: Any) -> None:
    one = trainer(tmp_path, Points(), points(), compute_loss=with_outputs, max_steps=2)
    one.train()
    assert one._probe.loss.outputs is None


# Ready batches


class Detector(nn.Module):
    """Takes images and targets of different sizes, and returns a dict of losses, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = torch.stack([self.layer(image.mean((1, 2))) for image in images])
        boxes = [(box - target["boxes"]).abs().mean() for box, target in zip(found, targets, strict=True)]
        labels = [(box[0] - target["labels"].sum()).square() for box, target in zip(found, targets, strict=True)]
        return {"loss_box": torch.stack(boxes).mean(), "loss_label": torch.stack(labels).mean()}


def pictures() -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(7):
        image = torch.randn(3, 4 + number, 5, generator=generator, dtype=torch.float64)
        objects = 1 + number % 3
        boxes = torch.randn(objects, 4, generator=generator, dtype=torch.float64)
        found.append((image, {"boxes": boxes, "labels": torch.arange(objects)}))
    return found


def in_lists(samples: list[Any]) -> Any:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.stack([*model(*batch).values()]).sum()


@pytest.mark.parametrize("is_ready", [False, True])
def test_detection_targets_of_any_size(tmp_path: Any, is_ready: bool) -> None:
    data: Any = pictures()
    if is_ready:
        data = ReadyBatches([in_lists(data[:2]), in_lists(data[2:4]), in_lists(data[4:6]), in_lists(data[6:])])
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, shuffle=False,
        learning_rate=0.0, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, log_level="error",
    )  # fmt: skip
    trainer = Trainer(Detector(), args, data, data_collator=in_lists, compute_loss=losses_of)
    output = trainer.train()
    expected = losses_of(Detector(), in_lists(pictures()))
    assert output.training_loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert trainer.run.state.samples == 7


class Namespace:
    """A batch as an object with attributes and a method `to`."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.__dict__.update(columns)

    def to(self, device: Any, non_blocking: bool = False) -> Namespace:
        return Namespace(**{name: value.to(device) for name, value in vars(self).items()})


def test_how_many_samples_a_ready_batch_has() -> None:
    labels, many = torch.arange(4), torch.ones(9, 2)
    assert samples_in({"x": many, "labels": labels}) == 4
    assert samples_in((many, labels)) == 4
    assert samples_in(Namespace(x=many, labels=labels)) == 4
    assert samples_in(in_lists(pictures())) == 7
    assert samples_in({"x": many}) == 9
    assert samples_in(pack_sequence([many, many[:2]])) == 2
    graphs = Namespace(x=many, y=labels)
    vars(graphs)["num_graphs"] = 3
    assert samples_in(graphs) == 3
    with pytest.raises(ValueError, match="its samples cannot be counted"):
        samples_in({"x": 3})


def test_only_the_nodes_that_are_trained_on_are_counted() -> None:
    """As torch_geometric's NeighborLoader: the sampled neighbors follow them."""
    batch = Namespace(x=torch.ones(9, 2), y=torch.arange(9), input_id=torch.arange(4))
    vars(batch)["batch_size"] = 4
    assert samples_in(batch) == 4
    assert count(batch, 4).labels == 4


def test_a_ready_batch_is_split_by_its_first_dimension() -> None:
    cuts = [(0, 2), (2, 3)]
    columns = {"x": torch.arange(6).reshape(3, 2), "names": ["a", "b", "c"], "scale": 2.0}
    first, last = split(columns, cuts)
    assert (first["names"], last["names"], last["scale"]) == (["a", "b"], ["c"], 2.0)
    assert last["x"].tolist() == [[4, 5]]
    images, targets = split(in_lists(pictures()[:3]), cuts)[1]
    assert len(images) == len(targets) == 1
    assert split(columns, [(0, 3)])[0] is columns
    with pytest.raises(ValueError, match="split a ready batch of 3 samples, but it holds a Namespace"):
        split(Namespace(x=torch.ones(3)), cuts)
