"""How a function is sent to fresh processes."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer_kit.launch.payload import Sent, name_of

LOCK = threading.Lock()
BOX = {"first": 1, "second": [2, LOCK]}


class Holder:
    def __init__(self) -> None:
        self.lock = LOCK

    def method(self) -> None: ...


def by_value(source: str, **names: Any) -> Callable[..., Any]:
    """A function as a cell makes it: of a module that no other process has."""
    names["__name__"] = "__main__"
    exec(source, names)
    function: Callable[..., Any] = names["train"]
    return function


def closure() -> Callable[..., Any]:
    inner = LOCK

    def train() -> None:
        inner.acquire()

    return train


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (by_value("def train(): return lock", lock=LOCK), (), "because the global `lock`, a _thread.lock,"),
        (
            by_value("def train(): return box", box=BOX),
            (),
            "because element 1 of the entry 'second' of the global `box`",
        ),
        (by_value("def train():\n def deep(): return lock", lock=LOCK), (), "because the global `lock`, a"),
        (
            by_value("def load(): return lock\ndef train(): return load()", lock=LOCK),
            (),
            "because the global `lock` of the global `load`, a _thread.lock",
        ),
        (by_value("def train(x=lock): pass", lock=LOCK), (), "because a default value, a _thread.lock,"),
        (by_value("def train(*, x=lock): pass", lock=LOCK), (), "because a default value, a _thread.lock,"),
        (closure(), (), "because the variable `inner`, a _thread.lock,"),
        (print, (1, Holder()), "because the attribute `lock` of argument 1, a _thread.lock,"),
        (functools.partial(print, LOCK), (), "because argument 0, a _thread.lock,"),
        (functools.partial(print, end=LOCK), (), "because argument `end`, a _thread.lock,"),
        (Holder().method, (), "because the attribute `lock` of its object, a _thread.lock,"),
        (print, (x for x in ()), "because argument 0, a builtins.generator,"),
    ],
)
def test_what_cannot_be_sent_is_named(function: Callable[..., Any], args: Any, words: str) -> None:
    args = args if isinstance(args, tuple) else (args,)
    with pytest.raises(TypeError) as caught:
        Sent(function, args, pickled=True)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{name_of(function)}() cannot be sent to other processes")


def test_a_circle_of_objects() -> None:
    circle: list[Any] = [LOCK]
    circle.insert(0, circle)
    with pytest.raises(TypeError, match=r"element 1 of argument 0, a _thread\.lock"):
        Sent(print, (circle,), pickled=True)


def test_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    train = by_value("class Value:\n n = 0\ndef train(n):\n v = Value()\n v.n = n\n return v")
    sent = Sent(train, (3,), pickled=True)
    returned = pickle.loads(pickle.dumps(sent))()
    assert sent.value(returned).n == 3
    assert isinstance(sent.value(returned), train.__globals__["Value"])


def test_other_ranks_send_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    sent = Sent(lambda: 5, (), pickled=False)
    assert sent() is None
    assert sent.value(None) is None


def test_a_process_computes_with_the_threads_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    try:
        assert Sent(torch.get_num_threads, (), pickled=False)() == 3
    finally:
        torch.set_num_threads(before)


def test_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        Sent(print, (), pickled=True)
    Sent(print, (), pickled=False)  # forked processes need none
