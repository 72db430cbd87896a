"""Small datasets."""

from __future__ import annotations

import torch


def points(length: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.tensor(index % 3)) for index in range(length)]
