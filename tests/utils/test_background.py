"""A call in a daemon thread."""

from __future__ import annotations

import threading

import pytest

from trainer_kit.utils.background import in_background


def test_a_value_comes_when_the_call_returns() -> None:
    ends = threading.Event()

    def call() -> str:
        assert ends.wait(60)
        thread = threading.current_thread()
        assert thread.daemon
        return thread.name

    value = in_background(call, "a name")
    assert not value.done()
    ends.set()
    assert value.result(timeout=60) == "a name"


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_exception_is_that_of_the_call(error: type[BaseException]) -> None:
    def call() -> None:
        raise error("boom")

    with pytest.raises(error, match="boom"):
        in_background(call, "a name").result(timeout=60)
