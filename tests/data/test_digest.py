"""Digests of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trainer_kit.data.digest import digest


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to_dict(self) -> dict[str, Any]:
        return {"x": self.x}


DIFFERENT = [
    1, 1.5, "a", b"a", None, True, [1, 2], [1, 3], (1, 2), {"a": 1}, {"b": 1}, {"a": [1]}, {"a": torch.tensor(1)},
    torch.tensor(1), torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(0),
    torch.ones(2, 3).bfloat16(),
    np.arange(3), np.arange(4), np.float32(2), [torch.tensor(1)], [torch.tensor(1), 2], Graph(torch.ones(2)),
    Graph(torch.zeros(2)), {"a": np.ones(2), "b": "text"}, ["a", "b"], ["ab"],
]  # fmt: skip


def test_what_differs_has_another_digest_and_what_is_equal_the_same() -> None:
    import copy

    found = [digest([value]) for value in DIFFERENT]
    assert None not in found
    assert len(set(found)) == len(found)
    assert [digest([copy.deepcopy(value)]) for value in DIFFERENT] == found
    assert digest([torch.zeros(1, device="meta")]) is None
    assert digest([lambda: None]) is None
    text = "".join(["long", "er"])
    assert digest([[text, text]]) == digest([["longer", "".join(["lo", "nger"])]])  # one object or two
    assert digest([torch.arange(6).reshape(2, 3).T]) == digest([torch.arange(6).reshape(2, 3).T.contiguous()])
