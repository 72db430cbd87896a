"""A trained model leaves by torch.export and as ONNX, as docs/en/how-to/hub.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from kit.trainer import arguments

from trainer_kit import Trainer

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:# The axis name:UserWarning"),
]


def test_the_exports_compute_what_the_model_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    data = [{"input_ids": torch.randint(0, 50, (6,)), "labels": i % 2} for i in range(16)]
    trainer = Trainer(transformers.BertForSequenceClassification(config), arguments(tmp_path), data)
    trainer.train()

    model = trainer.run.model.eval().cpu()
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    program = torch.export.export(model, (), batch, dynamic_shapes=dict.fromkeys(batch, sizes))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.onnx.export(
        model, (), tmp_path / "model.onnx", kwargs=batch, dynamic_shapes=dict.fromkeys(batch, sizes), dynamo=True
    )

    other = {"input_ids": torch.randint(0, 50, (3, 5)), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    expected = model(**other).logits.detach()
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(**other).logits.detach(), expected)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    logits = session.run(None, {name: each.numpy() for name, each in other.items()})[0]
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-5, atol=1e-6)
