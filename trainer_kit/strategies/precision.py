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
        self._unscaled: list[torch.optim.Optimizer] = []
        self._has_stepped = False

    def setup(self, device: torch.device) -> None:
        """Makes the gradient scaler where the mode needs one."""
        self._unscaled, self._has_stepped = [], False
        self.scaler = torch.amp.GradScaler(device.type) if self.mode == "fp16" else None

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context in which a forward pass and its loss are computed."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to backpropagate."""
        if self.scaler is None:
            return loss
        self._update()
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the scale out of an optimizer's gradients; once, however often it is asked for."""
        if self.scaler is not None and not any(each is optimizer for each in self._unscaled):
            self.scaler.unscale_(optimizer)
            self._unscaled.append(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps with a scaler, unless the gradients have overflowed."""
        assert self.scaler is not None
        self.scaler.step(optimizer)
        self._has_stepped = True

    def has_overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step just taken was left out because the gradients had overflowed; waits for the device."""
        if self.scaler is None:
            return False
        return any(found.item() for found in self.scaler._found_inf_per_device(optimizer).values())

    def _update(self) -> None:
        """Finds the scale of the next step, after all optimizers have taken this one."""
        if self.scaler is not None and self._has_stepped:
            self.scaler.update()
            self._unscaled, self._has_stepped = [], False

    def state_dict(self) -> dict[str, Any]:
        """The scaler's scale and growth counter (empty without a scaler)."""
        self._update()
        return self.scaler.state_dict() if self.scaler else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._unscaled, self._has_stepped = [], False
        if self.scaler and state_dict:
            self.scaler.load_state_dict(state_dict)
