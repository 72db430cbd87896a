"""`Precision`: autocast, fp16 gradient scaling, and fp8's linear layers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from trainer_kit.strategies import float8

_NO_AUTOCAST = contextlib.nullcontext()
_DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


class Precision:
    """Autocast and gradient scaler of one run.

    Args:
        mode: "no" (the model's own dtype), "bf16", "fp16" (with a gradient scaler, see
            https://docs.pytorch.org/docs/stable/amp.html), or "fp8" (as "bf16", hidden linear layers in 8 bits, see
            https://docs.pytorch.org/ao/stable/workflows/training.html).
        float32_matmul: Precision of matrix products of float32 tensors, which `setup` sets for the whole process; see
            `torch.set_float32_matmul_precision`. None: as it is set.
        emulate_fp8: Whether devices without fp8 compute as those that have it, slowly, for tests.

    Attributes:
        scaler_options: Arguments of the gradient scaler that `setup` makes.

    Raises:
        ValueError: If `mode` is another value.
    """

    def __init__(self, mode: str = "no", float32_matmul: str | None = None, emulate_fp8: bool = False) -> None:
        if mode not in _DTYPES:
            raise ValueError(f"mixed_precision={mode!r} is not known; use one of 'no', 'fp16', 'bf16', 'fp8'")
        self.mode = mode
        self.float32_matmul = float32_matmul
        self.emulate_fp8 = emulate_fp8
        self.dtype = _DTYPES[mode]
        self.scaler_options: dict[str, Any] = {}
        self.scaler: torch.amp.GradScaler | None = None
        self._unscaled: list[torch.optim.Optimizer] = []
        self._has_stepped = False

    def setup(self, device: torch.device) -> None:
        """Reset the state, and create a gradient scaler for "fp16".

        Raises:
            ImportError: If `mode` is "fp8", and torchao is missing.
            ValueError: If `mode` is "fp8", which the device lacks.
        """
        if self.mode == "fp8":
            if not self.emulate_fp8:
                float8.check_device(device)
            float8.package()
        if self.float32_matmul is not None:
            torch.set_float32_matmul_precision(self.float32_matmul)
        self._unscaled, self._has_stepped = [], False
        self.scaler = torch.amp.GradScaler(device.type, **self.scaler_options) if self.mode == "fp16" else None

    def convert(self, model: torch.nn.Module) -> None:
        """Replace the layers of a model, on its device, that compute in "fp8".

        Raises:
            ValueError: If `mode` is "fp8", and the model has no such layer.
        """
        if self.mode == "fp8":
            float8.convert_linear_layers(model, self.emulate_fp8)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of a forward pass and its loss."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(device.type, dtype=self.dtype)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to backpropagate: scaled with "fp16", else the loss itself."""
        if self.scaler is None:
            return loss
        self._update()
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale; further calls in the same step have no effect.

        Raises:
            ValueError: If the weights are float16, whose gradients cannot be scaled.
        """
        if self.scaler is not None and not any(each is optimizer for each in self._unscaled):
            try:
                self.scaler.unscale_(optimizer)
            except ValueError as error:
                if "FP16 gradients" not in str(error):
                    raise
                raise ValueError(
                    "mixed_precision='fp16' scales gradients, which needs weights in float32, and some here are "
                    "float16; call model.float(), or set mixed_precision='no'"
                ) from error
            self._unscaled.append(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer through the gradient scaler, which skips steps whose gradients have overflowed."""
        assert self.scaler is not None
        self.scaler.step(optimizer)
        self._has_stepped = True

    def overflows(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return a scalar for each device, not 0 if the last step was skipped because gradients overflowed there."""
        found = {} if self.scaler is None else self.scaler._found_inf_per_device(optimizer)
        return [each.clone() for each in found.values()]  # the scaler adds those of other optimizers to its own

    def _update(self) -> None:
        """Update the scale for the next step, once all optimizers have stepped."""
        if self.scaler is not None and self._has_stepped:
            self.scaler.update()
            self._unscaled, self._has_stepped = [], False

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's scale and growth counter; empty without a scaler."""
        self._update()
        return self.scaler.state_dict() if self.scaler else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._unscaled, self._has_stepped = [], False
        if self.scaler and state_dict:
            self.scaler.load_state_dict(state_dict)
