"""torch's compiler is imported where something compiles, and then finds torch as it made it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # processes in which no other test has imported the compiler

START = """
import sys
import torch
from torch import nn
from torch.optim import Optimizer

torch.manual_seed(0)
assert "torch._dynamo" not in sys.modules

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    def forward(self, x):
        logits = self.layers(x)
        return {"loss": logits.square().mean(), "logits": logits}

DATA = [{"x": torch.full((3,), float(index))} for index in range(16)]
"""


def run(code: str, folder: Path) -> None:
    program = textwrap.dedent(START) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_training_and_a_loop_of_ones_own_do_without(tmp_path: Path) -> None:
    code = """
    from trainer_kit import Trainer, TrainingArguments
    for optim in ("adamw_torch", "sgd", "adafactor", "muon"):
        for steps in (2, 4):
            args = TrainingArguments(
                optim, optim=optim, max_steps=steps, save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=1,
                use_cpu=True, log_level="error", disable_tqdm=True,
            )
            trainer = Trainer(Net(), args, DATA, DATA)
            assert trainer.train(resume_from_checkpoint=steps == 4).global_step == steps
        trainer.predict(DATA)
        trainer.save_model()
    assert "torch._dynamo" not in sys.modules

    from trainer_kit.accelerator import Accelerator
    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("state")
    accelerator.load_state("state")
    assert "torch._dynamo" not in sys.modules
    """
    run(code, tmp_path)


def test_replicas_do_without(tmp_path: Path) -> None:
    code = """
    from trainer_kit.strategies.ddp_buckets import FixedBuckets
    from trainer_kit.utils.late_compiler import ddp_without_compiler
    store = torch.distributed.FileStore("store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    made = FixedBuckets(Net())
    made(torch.ones(2, 3))["loss"].backward()
    assert all(each.grad is not None for each in made.parameters())
    assert not made._use_python_reducer
    with ddp_without_compiler():
        assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
        assert "torch._dynamo" not in sys.modules
        assert torch._dynamo.config.optimize_ddp is True  # all else imports it
        real = sys.modules["torch._dynamo"]
        assert torch._dynamo is real
    assert torch._dynamo is real
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
    with ddp_without_compiler():
        assert torch._dynamo is real
    torch._dynamo.config.optimize_ddp = "python_reducer"
    assert FixedBuckets(Net())._use_python_reducer
    """
    run(code, tmp_path)


def test_the_compiler_finds_torch_as_it_was(tmp_path: Path) -> None:
    code = """
    from trainer_kit.utils.late_compiler import call_as_is
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    versions = lambda: [vars(getattr(Optimizer, name).__wrapped__).get("__dynamo_disable") for name in names]
    assert versions() == [None] * 4
    from trainer_kit import Trainer
    call_as_is(*(getattr(Optimizer, name) for name in names))
    assert versions() == [getattr(Optimizer, name).__wrapped__ for name in names]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "torch._dynamo" not in sys.modules

    graphs = []
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def step(x):
        optimizer.zero_grad()
        return model(x)["loss"] * 2

    assert versions() == [None] * 4
    step(torch.ones(2, 3)).backward()
    assert graphs
    optimizer.state_dict()
    used = versions()
    assert used[0] is used[3] is None
    assert all(torch._dynamo.is_dynamo_supported() and hasattr(each, "_torchdynamo_disable") for each in used[1:3])
    call_as_is(*(getattr(Optimizer, name) for name in names))  # too late
    assert versions() == used
    """
    run(code, tmp_path)
