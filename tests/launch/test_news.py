"""What launchers announce to one another."""

from __future__ import annotations

import pytest

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.news import Change, News


@pytest.mark.parametrize(("goes_on", "is_loss"), [(True, True), (True, False), (False, False)])
def test_news_arrive_as_they_were_sent(goes_on: bool, is_loss: bool) -> None:
    sent = News(ProcessFailed("rank 1 failed", 1, 3, "Traceback: é", "tail"), goes_on, is_loss, "machine-b")
    read = News.from_json(sent.to_json().encode())
    assert (read.goes_on, read.is_loss, read.host) == (goes_on, is_loss, "machine-b")
    assert vars(read.failure) == vars(sent.failure)
    assert str(read.failure) == str(sent.failure)


def test_a_change_arrives_as_it_was_sent() -> None:
    for in_process in (True, False):
        sent = Change("machine-c joins", is_joining=True, in_process=in_process)
        assert Change.from_json(sent.to_json()) == sent
