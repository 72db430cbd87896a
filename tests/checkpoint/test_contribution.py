"""What a process gives to a checkpoint, where some tensors are sharded."""

from __future__ import annotations

import torch

from trainer_kit.checkpoint.contribution import Contribution
from trainer_kit.checkpoint.format.snapshot import take_snapshot
from trainer_kit.strategies.sharding import Sharding


class Halves(Sharding):
    """Tensors with two dimensions are sharded; this process has the first rows."""

    is_active = True

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        return tensor.ndim == 2

    def own_parts(self, tensors: object) -> list[torch.Tensor]:
        return [tensor[:1] if self.is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def test_parts_of_sharded_tensors_and_own_whole_tensors_are_copied() -> None:
    matrix, vector = torch.ones(2, 2), torch.ones(3)
    model = {"matrix": matrix, "tied": matrix, "vector": vector}
    snapshot = take_snapshot(1, model, {}, arguments={})
    share = snapshot._replace(division=snapshot.divide([], 2, "5GB"))
    contribution = Contribution.of(share, [0, 1], Halves())
    assert [*contribution.sharded] == [matrix]
    assert contribution.owners == [0]
    taken: list[torch.Size] = []

    def copy(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        taken.extend(tensor.shape for tensor in tensors)
        return [tensor.clone() for tensor in tensors]

    copied = contribution.copied(copy, lambda: None)
    assert taken == [(1, 2), (3,)]
    matrix.zero_()
    vector.zero_()
    assert copied.parts[0].tolist() == [[1, 1]]
    assert copied.snapshot.model["matrix"] is copied.snapshot.model["tied"] is matrix
    assert copied.snapshot.model["vector"].tolist() == [1, 1, 1]
    assert contribution.parts[0].tolist() == [[0, 0]]
