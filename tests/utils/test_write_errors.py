from __future__ import annotations

import errno

import pytest

from trainer_kit.utils.write_errors import WriteErrors


def test_one_warning_until_a_write_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    resets: list[int] = []

    def reset() -> None:
        resets.append(step)
        raise OSError(errno.EIO, "as broken as before")

    errors = WriteErrors("the log could not be written", reset)
    for step in range(7):
        with errors.warned():
            if step not in (0, 3):
                raise OSError(errno.ENOSPC, "No space left on device")
        assert errors.is_failing == (step not in (0, 3))
    assert caplog.messages == ["the log could not be written: No space left on device; training continues"] * 2
    assert resets == [1, 2, 4, 5, 6]


def test_other_errors_are_raised() -> None:
    errors = WriteErrors("")
    with pytest.raises(TypeError, match="not a number"), errors.warned():
        raise TypeError("not a number")
    assert not errors.is_failing
