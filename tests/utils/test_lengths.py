from __future__ import annotations

import pytest

from trainer_kit.utils.lengths import known_length


class Unknown:
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        raise self.error("not known")


def test_a_length_that_is_known() -> None:
    assert known_length([1, 2]) == 2


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, ValueError])
def test_a_length_that_is_not_known(error: type[Exception]) -> None:
    assert known_length(Unknown(error)) is None
    assert known_length(iter([1])) is None


def test_another_error_is_one() -> None:
    with pytest.raises(OSError, match="not known"):
        known_length(Unknown(OSError))
