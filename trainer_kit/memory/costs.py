"""Known memory costs of training in bytes per parameter, each with its source."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Cost(NamedTuple):
    """Memory cost of one part of training.

    Attributes:
        name: Name of the part.
        nbytes: Bytes per parameter, for a matrix with many rows and columns.
        component: Component of an `Anatomy` that contains the part.
        source: Source of the figure.
    """

    name: str
    nbytes: float
    component: str
    source: str


_MIXED = "Micikevicius et al. 2018, Mixed Precision Training, section 3.1"
_ZERO = "Rajbhandari et al. 2020, ZeRO, section 3.1"

COSTS = (
    Cost("float32 weights", 4, "weights", "IEEE 754: 32 bits"),
    Cost("bfloat16 or float16 weights", 2, "weights", "16 bits"),
    Cost("mixed precision with a float32 master copy", 6, "weights", f"4 + 2, kept all the time: {_MIXED}"),
    Cost(
        "autocast's copies of float32 weights", 2, "casts",
        "in addition to the 4 of the weights, for those of matrix products and convolutions alone, from their use in "
        "a forward pass to that in the backward pass: documentation of torch.autocast (cache_enabled); frozen ones are "
        "cast at each use and not kept by the cache",
    ),
    Cost("float32 gradients", 4, "gradients", f"one number a trainable parameter, in its dtype: {_ZERO}"),
    Cost("AdamW", 8, "optimizer", f"two moments in float32: Kingma and Ba 2015, Adam, algorithm 1; {_ZERO}"),
    Cost(
        "8-bit AdamW", 2 + 2 * 4 / 256, "optimizer",
        "two moments in a byte each, and a float32 scale for every 256: Dettmers et al. 2022, 8-bit Optimizers via "
        "Block-wise Quantization; documentation of bitsandbytes and torchao",
    ),
    Cost("SGD", 0, "optimizer", "no state: documentation of torch.optim.SGD"),
    Cost("SGD with momentum", 4, "optimizer", "one buffer in the weight's dtype: documentation of torch.optim.SGD"),
    Cost(
        "Muon", 4, "optimizer",
        "one buffer in the weight's dtype, of hidden matrices; the other parameters have AdamW's: documentation of "
        "torch.optim.Muon",
    ),
    Cost(
        "Adafactor", 0, "optimizer",
        "of a matrix a number for each row and each column alone: Shazeer and Stern 2018, Adafactor, section 3",
    ),
)  # fmt: skip
"""The known costs. An estimate counts tensors instead; where the two differ, the estimate is right."""


class EightBitAdam(torch.optim.Optimizer):
    """Optimizer that allocates the state of 8-bit AdamW and computes nothing: the packages' kernels need real values.

    Both moments take one byte per element, and a float32 scale per block of 256 elements. A parameter of fewer than
    4096 elements keeps float32 (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; bitsandbytes'
    `min_8bit_size`, torchao's `AdamW8bit`).
    """

    block = 256
    smallest = 4096

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Allocate the state, at the first call.

        Args:
            closure: Without effect.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter in self.state:
                    continue
                for moment in ("exp_avg", "exp_avg_sq"):
                    if parameter.numel() < self.smallest:
                        self.state[parameter][moment] = torch.zeros_like(parameter, dtype=torch.float32)
                        continue
                    self.state[parameter][moment] = torch.zeros_like(parameter, dtype=torch.uint8)
                    blocks = -(-parameter.numel() // self.block)
                    self.state[parameter][f"{moment}_scale"] = parameter.new_zeros(blocks, dtype=torch.float32)
