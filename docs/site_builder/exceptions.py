"""The tree of all exceptions."""

from __future__ import annotations

from collections.abc import Iterator

import trainer_kit
from site_builder import api
from site_builder.tables import first_sentence
from trainer_kit.errors import TrainerKitError


def tree(kind: type[BaseException] = TrainerKitError, depth: int = 0) -> Iterator[tuple[int, type[BaseException]]]:
    """Yield the exceptions with their depth, each before those that derive from it, in the order of their names."""
    yield depth, kind
    for each in sorted(kind.__subclasses__(), key=lambda each: each.__name__):
        if each.__module__ == TrainerKitError.__module__:
            yield from tree(each, depth + 1)


def exceptions() -> str:
    """Return the tree, and each exception."""
    lines = "\n".join(
        f"{'    ' * depth}- [`{kind.__name__}`](#trainer_kit.errors.{kind.__name__}){_built_in(kind)}: "
        f"{first_sentence(kind)}"
        for depth, kind in tree()
    )
    *names, last = (f"`{name}`" for name in trainer_kit.__all__ if _is_error(getattr(trainer_kit, name)))
    short = f"{', '.join(names)} and {last}"
    return (
        f"{lines}\n\nThey are in `trainer_kit.errors`; {short} can be imported from `trainer_kit` too.\n\n"
        f"{api.listing('exceptions')}"
    )


def _built_in(kind: type[BaseException]) -> str:
    names = [f"`{base.__name__}`" for base in kind.__bases__ if base.__module__ == "builtins"]
    return f" ({', '.join(names)})" if names and names != ["`Exception`"] else ""


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
