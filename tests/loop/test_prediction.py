"""`EvalPrediction` unpacks as that of transformers."""

from __future__ import annotations

import pytest

from trainer_kit import EvalPrediction


def test_it_unpacks_into_what_it_holds() -> None:
    predictions, labels = EvalPrediction([1], None)
    assert (predictions, labels) == ([1], None)
    assert [*EvalPrediction([1], [2], inputs=[3])] == [[1], [2], [3]]
    assert [*EvalPrediction([1], [2], losses=[4])] == [[1], [2], [4]]
    assert EvalPrediction([1], [2], [3], [4])[3] == [4]
    with pytest.raises(IndexError):
        EvalPrediction([1], [2])[2]
