"""A model in float64 whose layers are split over processes by a plan of one's own, and its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kit.token_training import Gradients, padded, texts, whole
from trainer_kit import Trainer, TrainingArguments
from trainer_kit.callbacks import EMA, Freezing
from trainer_kit.strategies.fsdp.strategy import FSDP

PLAN = {
    "blocks.*.query": "colwise", "blocks.*.key": "colwise", "blocks.*.value": "colwise", "blocks.*.out": "rowwise",
    "blocks.*.norm": "replicated_with_grad_allreduce", "blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise",
    "head": "colwise_gather_output",
}  # fmt: skip


class Attention(nn.Module):
    """Attention with two heads of three features, whose queries are normed by head, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(3)
        self.wide, self.narrow = nn.Linear(6, 10), nn.Linear(10, 6)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.split(each(x)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(self.norm(query), key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(torch.tanh(self.wide(x)))


class OneHead(Attention):
    """Views parts of heads as heads: a number that a split changes without an error."""

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], 3, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.split(each(x)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Normed(Attention):
    """Norms over the features that a split divides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        return x + self.narrow(nn.functional.layer_norm(wide, wide.shape[-1:]))


class Small(Normed):
    """Norms over the features that a split divides, and adds little or nothing of it at first."""

    std = 2e-3

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.narrow.weight, std=self.std)


class Zero(Small):
    std = 0.0


class Late(Attention):
    """Norms over the features that a split divides, in training mode only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        wide = nn.functional.layer_norm(wide, wide.shape[-1:]) if self.training else wide
        return x + self.narrow(torch.tanh(wide))


class Dropped(Attention):
    """Dropout between the layers, and a buffer that counts the passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        wide = nn.functional.dropout(torch.tanh(self.wide(x)), 0.5, self.training)
        return x + self.narrow(wide)


class Mlp(nn.Module):
    """Two layers that `run` uses; a block calls it instead of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


class NormedMlp(Mlp):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        return self.narrow(nn.functional.layer_norm(wide, wide.shape[-1:]))


class ByMethod(Attention):
    mlp_class: type[Mlp] = NormedMlp

    def __init__(self) -> None:
        super().__init__()
        self.mlp = self.mlp_class()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp.run(x)


class RightByMethod(ByMethod):
    mlp_class = Mlp


class Scaled(Attention):
    """Uses a parameter of its own between two layers, for the part of each process."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x) * self.scale))


class Gate(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


class Gated(Attention):
    """Uses a gate between two layers, for the part of each process."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.gate(torch.tanh(self.wide(x))))


class Viewed(Attention):
    """Views the features by a number that a split changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x).view(*x.shape[:2], 10))


class Tower(nn.Module):
    def __init__(self, block: type[Attention] = Attention, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([block(), block()])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 12)
        self.double()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = self.dropout(block(hidden))
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def train_tower(
    folder: str, batch_size: int, mesh: dict[str, int] | None, block: type[Attention] = Attention,
    plan: dict[str, str] | None = None, frozen: tuple[str, ...] = (), optim: str = "adamw_torch", dropout: float = 0.0,
    arguments: dict[str, Any] | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    torch.manual_seed(0)
    gradients, ema = Gradients(), EMA(decay=0.5)
    args = TrainingArguments(
        **{
            "output_dir": folder, "num_train_epochs": 2, "per_device_train_batch_size": batch_size, "use_cpu": True,
            "gradient_accumulation_steps": 2, "learning_rate": 0.01, "optim": optim, "report_to": "none",
            "disable_tqdm": True, "log_level": "error", "save_strategy": "no", "logging_steps": 1,
            "max_grad_norm": 0.1, **(arguments or {}),
        }
    )  # fmt: skip
    strategy = None
    if mesh is not None:
        strategy = FSDP(device="cpu", mesh=mesh, tensor_parallel=PLAN if plan is None else plan, **options)
    callbacks = [gradients, ema, *([Freezing(frozen)] if frozen else [])]
    trainer = Trainer(
        Tower(block, dropout), args, texts(13), texts(5), data_collator=padded, callbacks=callbacks, strategy=strategy
    )
    output = trainer.train()
    state, run = trainer.run.state, trainer.run
    assert run.last_norms is not None
    states = {name: whole(each).detach().clone() for name, each in run.model.state_dict().items()}
    return {
        "gradients": gradients.seen, "loss": output.training_loss, "counts": (state.step, state.samples, state.tokens),
        "weights": states, "norm": float(run.last_norms.total), "eval_loss": trainer.evaluate()["eval_loss"],
        "averages": [whole(each).clone() for each in ema.state_dict()["averages"].values()],
        "predictions": trainer.predict(texts(5)).predictions,
    }  # fmt: skip
