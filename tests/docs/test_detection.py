"""The examples of docs/en/how-to/data.md evaluate a detector and a segmenter of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from kit.guides import Guide
from torchmetrics.detection.helpers import _input_validator
from transformers import (
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SwinConfig,
    YolosConfig,
    YolosForObjectDetection,
)

from trainer_kit import TrainingArguments

DETECTION, SEGMENTATION = (block for block in Guide("docs/en/how-to/data.md").python if "MeanAverage" in block)


class Checked:
    """Takes what torchmetrics' metric takes, which needs torchvision, and makes a number of all of it."""

    def __init__(self, iou_type: Any = "bbox", box_format: str = "xyxy") -> None:
        self.iou_type = iou_type
        self.reset()

    def reset(self) -> None:
        self.numbers: list[float] = []

    def update(self, found: Any, targets: Any) -> None:
        _input_validator(found, targets, self.iou_type)
        place = "boxes" if self.iou_type == "bbox" else "masks"
        for one, target in zip(found, targets, strict=True):
            assert one[place].shape[1:] == target[place].shape[1:]
            assert one[place].dtype == target[place].dtype
            expected = target[place].double().mean() + target["labels"].double().mean()
            self.numbers.append(float(expected * (one["scores"].double().mean() + one[place].double().mean())))

    def compute(self) -> dict[str, torch.Tensor]:
        weights = torch.arange(1.0, len(self.numbers) + 1, dtype=torch.float64)  # which the order of samples changes
        return {"map": torch.tensor(self.numbers, dtype=torch.float64) @ weights}


METRIC = getattr(torchmetrics.detection, "MeanAveragePrecision", Checked)


def detector() -> YolosForObjectDetection:
    return YolosForObjectDetection(
        YolosConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=[32, 32],
            patch_size=8, num_detection_tokens=5, num_labels=3,
        )
    )  # fmt: skip


def segmenter() -> Mask2FormerForUniversalSegmentation:
    backbone = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(
        Mask2FormerConfig(
            backbone_config=backbone, hidden_dim=32, feature_size=32, mask_feature_size=32, encoder_layers=1,
            decoder_layers=2, num_attention_heads=2, dim_feedforward=16, encoder_feedforward_dim=16, num_queries=4,
            num_labels=2, train_num_points=16,
        )
    )  # fmt: skip


def detections() -> list[dict[str, Any]]:
    return [
        {
            "pixel_values": torch.randn(3, 32, 32),
            "labels": {"class_labels": torch.arange(1 + i % 3), "boxes": 0.3 + 0.3 * torch.rand(1 + i % 3, 4)},
        }
        for i in range(7)
    ]


def masks() -> list[dict[str, Any]]:
    return [
        {
            "pixel_values": torch.randn(3, 64, 64),
            "mask_labels": (torch.rand(1 + i % 2, 64, 64) > 0.5).float(),
            "class_labels": torch.arange(1 + i % 2),
        }
        for i in range(7)
    ]


def run(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """Run an example with a few small batches; return its names."""
    options = {"max_steps": 1, "per_device_eval_batch_size": 3, "use_cpu": True, "report_to": "none",
               "disable_tqdm": True, "save_strategy": "no"}  # fmt: skip
    monkeypatch.setattr(torchmetrics.detection, "MeanAveragePrecision", METRIC, raising=False)
    monkeypatch.setattr(
        "trainer_kit.TrainingArguments", lambda *args, **own: TrainingArguments(*args, **own, **options)
    )
    monkeypatch.chdir(folder)
    names = given
    exec(example, names)
    return names


def test_a_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    data, expected = detections(), METRIC(box_format="cxcywh")
    names = run(DETECTION, tmp_path, monkeypatch, detector=detector(), train_ds=data, eval_ds=data)
    trainer, model = names["trainer"], names["detector"].eval()
    for sample in data:
        target = sample["labels"]
        with torch.no_grad():
            output = model(sample["pixel_values"][None])
        scores, classes = output.logits[0].softmax(-1)[:, :3].max(-1)
        expected.update(
            [{"scores": scores, "labels": classes, "boxes": output.pred_boxes[0]}],
            [{"labels": target["class_labels"], "boxes": target["boxes"]}],
        )
    assert evaluated(trainer) == pytest.approx(expected.compute()["map"].item(), rel=1e-5)


def test_a_segmenter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    data, expected = masks(), METRIC(iou_type="segm")
    names = run(SEGMENTATION, tmp_path, monkeypatch, segmenter=segmenter(), train_ds=data, eval_ds=data)
    trainer, model = names["trainer"], names["segmenter"].eval()
    for sample in data:
        with torch.no_grad():
            output = model(sample["pixel_values"][None])
        scores, classes = output.class_queries_logits[0].softmax(-1)[:, :2].max(-1)
        found = output.masks_queries_logits.repeat_interleave(4, -1).repeat_interleave(4, -2)[0] > 0
        expected.update(
            [{"scores": scores, "labels": classes, "masks": found}],
            [{"labels": sample["class_labels"], "masks": sample["mask_labels"].bool()}],
        )
    for _ in range(2):  # the metric is reset
        assert evaluated(trainer) == pytest.approx(expected.compute()["map"].item(), rel=1e-5)


def evaluated(trainer: Any) -> float:
    evaluate: Callable[[], dict[str, float]] = trainer.evaluate
    return evaluate()["eval_map"]
