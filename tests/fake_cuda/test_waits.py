"""Each wait of the host for the device is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.fake_cuda import Gpus
from torch import nn

WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0]),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "index": lambda x: range(3)[x.long()[0]],
    "comparison": lambda x: x[0] > 0 and True,
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "assignment to a mask": lambda x: x.__setitem__(x > 0, torch.ones(3, device="cuda")),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.sum()),
    "indices on the host": lambda x: x[torch.tensor([0, 1])],
    "tensor": lambda x: torch.tensor(1.0, device="cuda"),
    "copy from the host": lambda x: torch.ones(3).to("cuda"),
    "copy_ from the host": lambda x: x.copy_(torch.ones(3).pin_memory()),
    "copy to memory that is not pinned": lambda x: torch.ones(3).copy_(x, non_blocking=True),
    "format": lambda x: f"{x[0]}",
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "device": lambda x: torch.cuda.synchronize(),
    "clipping": lambda x: nn.utils.clip_grad_norm_([weight(x)], 1.0, error_if_nonfinite=True),
}
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "indices": lambda x: x[torch.zeros(2, dtype=torch.long, device="cuda")],
    "slice": lambda x: x[1:],
    "full": lambda x: torch.full((), 1.0, device="cuda"),
    "scalar of the host": lambda x: x + torch.tensor(1.0),
    "copy from page-locked memory": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "copy to page-locked memory": lambda x: x.to("cpu", non_blocking=True),
    "event": lambda x: torch.cuda.current_stream().record_event().query(),
    "the host's own": lambda x: torch.ones(3)[0].item(),
    "clipping": lambda x: nn.utils.clip_grad_norm_([weight(x)], 1.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "empty": lambda x: torch.tensor([], device="cuda"),
}


def weight(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


@pytest.mark.parametrize("name", WAITING)
def test_what_waits(gpus: Gpus, name: str) -> None:
    tensor = torch.full((3,), 1.0, device="cuda")
    assert gpus.waits == []
    WAITING[name](tensor)
    assert len(gpus.waits) == 1
    assert "test_waits.py" in gpus.waits[0].where
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        WAITING[name](tensor)
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="synchronizing CUDA operation"):
        WAITING[name](tensor)


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait(gpus: Gpus, name: str) -> None:
    tensor = torch.full((3,), 1.0, device="cuda")
    FREE[name](tensor)
    assert gpus.waits == []
