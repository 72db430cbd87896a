"""A process asks its launcher for a new place, and the launcher answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer_kit.errors import CutOffError
from trainer_kit.utils import new_place
from trainer_kit.utils.new_place import (
    are_joining,
    ask_for_place,
    clear,
    give_place,
    open_for,
    set_joining,
    set_open,
    waiting,
)


@pytest.mark.parametrize("answer", [{"RANK": "1"}, None], ids=["a place", "none"])
def test_a_question_is_answered(tmp_path: Path, answer: dict[str, str] | None) -> None:
    give_place(tmp_path, 1, {"RANK": "of an earlier membership"})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_for_place, tmp_path, 1, "run/3", lambda: False)
        while not waiting(tmp_path):
            assert not asked.done()
        assert waiting(tmp_path) == {1: "run/3"}
        give_place(tmp_path, 1, answer)
        assert asked.result(timeout=10) == answer
    assert waiting(tmp_path) == {}


def test_a_process_that_the_others_have_left_behind_is_cut_off(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_for_place, tmp_path, 1, "run/3", lambda: False)
        while not waiting(tmp_path):
            assert not asked.done()
        give_place(tmp_path, 1, {})
        with pytest.raises(CutOffError, match="the other machines have continued without this one; new processes join"):
            asked.result(timeout=10)


def test_a_stopped_process_asks_no_longer(tmp_path: Path) -> None:
    assert ask_for_place(tmp_path, 0, "run/1", lambda: True) is None
    assert waiting(tmp_path) == {0: "run/1"}
    clear(tmp_path)
    assert waiting(tmp_path) == {}


def test_a_process_without_its_launcher_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([17, 17, 1])
    monkeypatch.setattr(new_place.os, "getppid", lambda: next(parents))
    assert ask_for_place(tmp_path, 0, "run/1", lambda: False) is None


def test_newcomers_join_an_open_training(tmp_path: Path) -> None:
    assert open_for(tmp_path) is None
    assert not are_joining(tmp_path)
    for forget in (lambda: set_open(tmp_path, None), lambda: clear(tmp_path)):
        set_open(tmp_path, "")
        assert open_for(tmp_path) == ""
        set_open(tmp_path, "a1b2")
        assert open_for(tmp_path) == "a1b2"
        forget()
        assert open_for(tmp_path) is None
    for forget in (lambda: set_joining(tmp_path, False), lambda: clear(tmp_path)):
        set_joining(tmp_path, True)
        assert are_joining(tmp_path)
        forget()
        assert not are_joining(tmp_path)
