"""Mixed precision: which dtype a forward pass computes in, and the scaling of fp16 gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """Autocast and gradient scaler of one run.

    Args:
        mode: "no" (the model's own dtype), "bf16", or "fp16" (with a gradient scaler, see
            https://docs.pytorch.org/docs/stable/amp.html).

    Raises:
        ValueError: If `mode` is none of the three.
    """

    def __init__(self, mode: str = "no") -> None:
        if mode not in _DTYPES:
            raise ValueError(f"mixed_precision={mode!r} is not known; use one of 'no', 'fp16', 'bf16'")
        self.mode = mode
        self.dtype = _DTYPES[mode]
        self.scaler: torch.amp.GradScaler | None = None

    def setup(self, device: torch.device) -> None:
        """Makes the gradient scaler where the mode needs one."""
        self.scaler = torch.amp.GradScaler(device.type) if self.mode == "fp16" else None

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context in which a forward pass and its loss are computed."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's scale and growth counter (empty without a scaler)."""
        return self.scaler.state_dict() if self.scaler else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler and state_dict:
            self.scaler.load_state_dict(state_dict)
