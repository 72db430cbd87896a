from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from trainer_kit.accelerator.concat import spread


class Pair(NamedTuple):
    rows: Any
    names: Any


def batch(*rows: int) -> tuple[int, Any]:
    tensor = torch.tensor(rows)
    names = [str(row) for row in rows]
    return len(rows), {"pair": Pair(tensor, names), "list": [tensor[:, None], tensor], "scale": 2.0, "none": None}


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    first=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    shares=st.integers(2, 6),
    count=st.sampled_from([1, 2]),
)
def test_each_sample_is_real_in_one_share(sizes: list[int], first: list[int], shares: int, count: int) -> None:
    numbers = iter(range(100))
    batches = [batch(*(next(numbers) for _ in range(size))) for size in sizes]
    repeats = [batch(*(next(numbers) for _ in range(size))) for size in first]
    spread_out = spread(batches, shares * count, repeats)
    assert spread_out is not None
    parts = [spread_out.share(share * count, count) for share in range(shares)]
    assert len({rows for rows, _, _ in parts}) == 1
    assert parts[0][0] < sum(sizes) / shares + count
    seen = []
    for rows, real, part in parts:
        assert part["pair"].rows.tolist() == part["list"][1].tolist() == [int(name) for name in part["pair"].names]
        assert part["list"][0].shape == (rows, 1)
        assert (part["scale"], part["none"]) == (2.0, None)
        seen += part["pair"].rows.tolist()[:real]
    assert seen == list(range(sum(sizes)))


def test_a_share_has_the_batch_s_own_type() -> None:
    given_batch = BatchEncoding({"input_ids": torch.arange(3)[:, None]})
    spread_out = spread([(3, given_batch)], 2, [(3, given_batch)])
    assert spread_out is not None
    rows, real, part = spread_out.share(1, 1)
    assert (rows, real, type(part)) == (2, 1, BatchEncoding)
    assert part["input_ids"].tolist() == [[2], [0]]


@pytest.mark.parametrize(
    "batches",
    [
        [(2, torch.zeros(2, 3)), (1, torch.zeros(1, 4))],
        [(2, {"x": torch.zeros(2), "edges": torch.zeros(2, 7).T})],
        [(2, {"x": torch.zeros(2), "loss": torch.tensor(1.0)})],
        [(2, {"x": torch.zeros(2), "names": ["one"]})],
        [(2, {"x": torch.zeros(2), "graph": object()})],
        [(2, ["one", "two"])],
        [(0, torch.zeros(0))],
    ],
)
def test_batches_that_cannot_be_cut(batches: list[tuple[int, Any]]) -> None:
    assert spread(batches, 2, batches[:1]) is None
