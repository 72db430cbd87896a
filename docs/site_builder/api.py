"""Which public name is on which page of the reference, and the directives that show it there."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Annotated, Any, NamedTuple, get_origin

from site_builder.tables import first_sentence
from trainer_kit import Accelerator, Callback, Precision, Strategy, Trainer, TrainingArguments

_ACCELERATOR = "trainer_kit.accelerator"
_OF_ACCELERATE = ("utils", "state", "logging", "tracking", "data_loader", "local_sgd", "big_modeling")
_UTILS = f"{_ACCELERATOR}.utils"  # names of its modules, which it imports when a name is used
_REFUSED = f"{_ACCELERATOR}.unavailable"
MODULES = (
    *("trainer_kit", "trainer_kit.callbacks", "trainer_kit.memory", "trainer_kit.trackers", "trainer_kit.errors"),
    _ACCELERATOR,
    *(f"{_ACCELERATOR}.{name}" for name in _OF_ACCELERATE),
)
"""The modules whose public names the reference has; where several have a name, the first counts."""

_OTHERS = {
    "trainer_kit.report.write_report": "trainer",
    "trainer_kit.optim.make_optimizer": "arguments",
    "trainer_kit.optim.make_scheduler": "arguments",
    "trainer_kit.config.compile_options.CompileOptions": "arguments",
    "trainer_kit.config.checkpointing_options.CheckpointingOptions": "arguments",
}
"""The page of what docstrings and other pages name, outside of those modules."""

_PAGES = {
    "trainer_kit.callbacks": "callbacks",
    "trainer_kit.memory": "memory",
    "trainer_kit.trackers": "trackers",
    "trainer_kit.errors": "exceptions",
    _UTILS: "accelerator-utils",
}


_PLAIN = (type(None), bool, int, float, str, list, dict)
_FIRST = (Trainer, Accelerator, Strategy, Callback, TrainingArguments)


class Entry(NamedTuple):
    """A public name.

    Attributes:
        path: Its dotted path, as a user imports it.
        page: The page of the reference that shows it, without a suffix.
        value: What it names.
    """

    path: str
    page: str
    value: Any

    @property
    def is_made(self) -> bool:
        """Whether the name is made when it is used, so that the source does not define it."""
        return inspect.isfunction(self.value) and self.value.__code__.co_name != self.value.__name__


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module: those of `__all__`, or else its own classes and functions."""
    if hasattr(module, "__all__"):
        names = [name for name in module.__all__ if name != "__version__"]
    elif "__dir__" in vars(module):
        names = dir(module)
    else:
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(module, name))]


@functools.cache
def entries() -> dict[str, Entry]:
    """Return all public names by their first path, one entry for each thing."""
    found: dict[str, Entry] = {}
    seen: set[int] = set()
    for module in map(importlib.import_module, MODULES):
        for name in public_names(module):
            value = getattr(module, name)
            if id(value) in seen:
                continue
            if callable(value):
                seen.add(id(value))
            path = f"{_home(name, value, module)}.{name}"
            found[path] = Entry(path, page_of(value, module), value)
    for path, page in _OTHERS.items():
        module_name, _, name = path.rpartition(".")
        found[path] = Entry(path, page, getattr(importlib.import_module(module_name), name))
    return found


def _home(name: str, value: Any, module: ModuleType) -> str:
    """Return the module by which the reference names a thing: the public one, unless its source does not name it."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return str(value.__module__)
    if module.__name__ != _UTILS:
        return module.__name__
    homes = (importlib.import_module(f"{_UTILS}.{home}") for home in module._HOMES)
    return next(home.__name__ for home in homes if name in home.__all__)


def made_defaults() -> dict[str, dict[str, str]]:
    """Return the defaults that functions make, as code by field, of public dataclasses by their path in the source.

    A default that is an object of a class is left out: its call in the source says more.
    """
    made: dict[str, dict[str, str]] = {}
    for value in (entry.value for entry in entries().values() if inspect.isclass(entry.value)):
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        factories = {
            field.name: field.default_factory
            for field in fields
            if field.init and field.default_factory is not dataclasses.MISSING
        }
        values = {name: factory() for name, factory in factories.items()}
        defaults = {name: repr(default) for name, default in values.items() if isinstance(default, _PLAIN)}
        if defaults:
            made[f"{value.__module__}.{value.__qualname__}"] = defaults
    return made


def made_values() -> dict[str, str]:
    """Return the values of public tables that the source makes from other names, as code by path."""
    made = {}
    for path, value in ((path, entry.value) for path, entry in entries().items()):
        if isinstance(value, dict) and all(map(inspect.isclass, value.values())):
            made[path] = f"{{{', '.join(f'{name!r}: {each.__name__}' for name, each in value.items())}}}"
        elif isinstance(value, tuple) and all(hasattr(each, "_fields") for each in value):
            made[path] = repr(value)
    return made


def plain_hints() -> dict[str, dict[str, str]]:
    """Return the types that annotated names of fields stand for, as code by name, for each module of a dataclass."""
    made: dict[str, dict[str, str]] = {}
    for value in (entry.value for entry in entries().values() if dataclasses.is_dataclass(entry.value)):
        named = {
            name: each for name, each in vars(sys.modules[value.__module__]).items() if get_origin(each) is Annotated
        }
        hints = {name: inspect.formatannotation(each.__origin__) for name, each in named.items()}
        made[value.__module__] = {name: hint.replace("typing.", "") for name, hint in hints.items()}
    return {module: hints for module, hints in made.items() if hints}


def values_of_enums() -> dict[str, list[str]]:
    """Return the values of public enumerations, by their path in the source."""
    kinds = [entry.value for entry in entries().values() if isinstance(entry.value, enum.EnumMeta)]
    return {f"{kind.__module__}.{kind.__qualname__}": [str(each.value) for each in kind] for kind in kinds if len(kind)}


def names_of_modules() -> list[str]:
    """Return the paths of public names that modules have too: the source shows the module under such a path."""
    return [path for path in entries() if path in sys.modules]


def page_of(value: Any, module: ModuleType) -> str:
    """Return the page of the reference that shows a class or function of a public module."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "exceptions"
    if inspect.isclass(value) and (issubclass(value, Strategy) or value is Precision):
        return "strategies"
    if value is TrainingArguments:
        return "arguments"
    if value is Callback:
        return "callbacks"
    if getattr(value, "__module__", "").startswith(_ACCELERATOR) or module.__name__.startswith(_ACCELERATOR):
        return _PAGES.get(module.__name__, "accelerator")
    return _PAGES.get(module.__name__, "trainer")


def on_page(page: str) -> list[Entry]:
    """Return the entries of a page, in the order of the modules; what a page is about comes first."""
    found = [entry for entry in entries().values() if entry.page == page]
    return sorted(found, key=lambda entry: entry.value not in _FIRST)


def directives(shown: Iterable[Entry]) -> str:
    """Return the generator's directives for entries, and a list of those that no source defines by name."""
    by_name: list[Entry] = []
    made: list[Entry] = []
    for entry in shown:
        (made if entry.is_made else by_name).append(entry)
    lines = [f'- <span id="{each.path}"></span>`{each.path}()`: {first_sentence(each.value)}' for each in made]
    listed = ["## More functions", "\n".join(lines)] if lines else []
    return "\n\n".join([*map(_directive, by_name), *listed])


def _directive(entry: Entry) -> str:
    lines = [f"::: {entry.path}"]
    if inherited := inherited_members(entry.value):
        lines += ["    options:", f"      inherited_members: [{', '.join(inherited)}]"]
    return "\n".join(lines)


def inherited_members(value: Any) -> list[str]:
    """Return the public members that a class has from classes of trainer_kit without an entry of their own."""
    if not inspect.isclass(value):
        return []
    shown = {id(entry.value) for entry in entries().values()}
    hidden = [base for base in value.__mro__[1:] if base.__module__.startswith("trainer_kit") and id(base) not in shown]
    names = {name for base in hidden for name in vars(base) if not name.startswith("_")} - {*vars(value)}
    return sorted(name for name in names if _has_text(inspect.getattr_static(value, name)))


def _has_text(member: object) -> bool:
    """Return whether a member has a docstring; the one of a plain attribute stands in the source alone."""
    kinds = (property, classmethod, staticmethod)
    return bool(member.__doc__) if inspect.isfunction(member) or isinstance(member, kinds) else True


def listing(page: str) -> str:
    """Return the part of a page that shows its entries."""
    return directives(on_page(page))


def accelerator() -> str:
    """Return the names of `trainer_kit.accelerator`, with links to those that other pages show."""
    module = importlib.import_module(_ACCELERATOR)
    by_value = {id(entry.value): entry for entry in entries().values()}
    others = [by_value[id(getattr(module, name))] for name in public_names(module)]
    links = [f"[`{each.path}`]({each.page}.md#{each.path})" for each in others if each.page != "accelerator"]
    return (
        f"`{_ACCELERATOR}` has these names too: {', '.join(links)}.\n\n"
        f"accelerate's `utils` are on [a page of their own](accelerator-utils.md).\n\n{listing('accelerator')}"
    )


def accelerator_utils() -> str:
    """Return the names of `trainer_kit.accelerator.utils`, and those that are refused."""
    refused = importlib.import_module(_REFUSED)
    rows = [(name, first_sentence(getattr(refused, name))) for name in refused.__all__]
    lines = "\n".join(f"- `{name}`: {why.removeprefix('Not available: ')}" for name, why in rows)
    return (
        f"{listing('accelerator-utils')}\n\n## Names that are refused\n\n"
        f"They can be imported, so that scripts start; a use raises `ValueError` with this sentence.\n\n{lines}"
    )
