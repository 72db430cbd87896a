"""Tables of names on pages of the documentation: what they name, and whether a package has it."""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import inspect
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "en" / "coming-from"
_SPAN = re.compile(r"`([^`]+)`")


class Row(typing.NamedTuple):
    """A row of a table whose first column is the peer's, and the second ours."""

    theirs: str
    ours: str


def rows(page: str) -> list[Row]:
    """Return the rows of all name tables of a page: those whose second column is headed `trainer_kit`."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\|[^|\n]*\| trainer_kit \|.*\n\|[-| ]+\n((?:\|.*\n?)+)", text, re.MULTILINE)
    found = [re.split(r" \| ", line.strip("| ")) for each in tables for line in each.splitlines()]
    return [Row(cells[0], cells[1]) for cells in found]


def spans(cell: str) -> list[str]:
    """Return the inline code of a cell."""
    return _SPAN.findall(cell)


class Names:
    """The names of a package, and of what it is used with.

    Args:
        roots: What a name at the beginning of an expression stands for: `{"run": Run, "torch": torch}`.
        scopes: Modules and classes whose attributes are named without them.
        functions: What takes arguments that are named without it.
        commands: The options of each command, by its words.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        scopes: Sequence[Any],
        functions: Sequence[Callable[..., Any]],
        commands: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.roots, self.scopes = roots, scopes
        self.arguments = {name for function in functions for name in inspect.signature(function).parameters}
        self.commands = {name: set(options) for name, options in (commands or {}).items()}

    def unknown(self, span: str) -> list[str]:
        """Return what inline code names, and the package lacks: names, attributes, keywords, options."""
        program = span.partition(" ")[0]
        if program in {command.partition(" ")[0] for command in self.commands} and not re.search(r"[(=]", program):
            return self._unknown_options(span)
        if span.startswith(("from ", "import ")):
            return list(self._missing_imports(span))
        text = re.sub(r"=(?=\s*(?:[,)}\]]|$))", "=...", span).replace("…", "...")
        try:
            call = ast.parse(f"_({text})", mode="eval").body
        except SyntaxError:
            return [f"no Python: {span}"]
        assert isinstance(call, ast.Call)
        found = [word.arg for word in call.keywords if word.arg is not None and word.arg not in self.arguments]
        for each in call.args:
            if isinstance(each, (ast.Name, ast.Attribute)):
                found += self._missing(each)
        found += [name for each in ast.walk(call) if each is not call for name in self._missing_of_call(each)]
        return list(dict.fromkeys(found))

    def _unknown_options(self, span: str) -> list[str]:
        words = shlex.split(span)
        command = next((each for each in self.commands if words[: len(each.split())] == each.split()), None)
        if command is None:
            return [span]
        return [word for word in words if word.startswith("--") and word not in self.commands[command]]

    def _missing_imports(self, span: str) -> Iterator[str]:
        for statement in ast.parse(span).body:
            if isinstance(statement, ast.ImportFrom):
                module = import_module(str(statement.module))
                yield from (each.name for each in statement.names if not hasattr(module, each.name))

    def _missing_of_call(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.roots:
            return self._missing(node)
        if not isinstance(node, ast.Call):
            return []
        found = self._missing(node.func)
        function = None if found else self._value(node.func)
        if not callable(function) or hasattr(builtins, getattr(function, "__name__", "")):
            return found
        try:
            known = inspect.signature(function).parameters
        except ValueError:  # of a class in C
            return found
        if any(each.kind is each.VAR_KEYWORD for each in known.values()):
            return found
        return found + [str(word.arg) for word in node.keywords if word.arg not in known]

    def _missing(self, node: ast.expr) -> list[str]:
        try:
            self._value(node)
        except LookupError as error:
            return [str(error.args[0])]
        return []

    def _value(self, node: ast.expr) -> Any:
        """Return what an expression of names and dots stands for; `...` if only its name is known."""
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            return self.roots[text] if text in self.roots else _member(self._value(node.value), node.attr)
        if not isinstance(node, ast.Name):
            return ...
        if node.id in self.roots:
            return self.roots[node.id]
        for scope in self.scopes:
            try:
                return _member(scope, node.id)
            except LookupError:
                continue
        if node.id in self.arguments:
            return ...
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise LookupError(node.id)


def _member(owner: Any, name: str) -> Any:
    if owner is ...:
        return ...
    hints = typing.get_type_hints(owner) if isinstance(owner, type) and name in _annotations(owner) else {}
    if name in hints:
        return hints[name] if isinstance(hints[name], type) else ...
    if hasattr(owner, name):
        value = getattr(owner, name)
        return ... if isinstance(value, property) else value
    if isinstance(owner, type) and name in attributes(owner):
        return ...
    if isinstance(owner, ModuleType):
        try:
            return import_module(f"{owner.__name__}.{name}")
        except ImportError:
            pass
    raise LookupError(f"{getattr(owner, '__name__', owner)} has no {name}")


def _annotations(owner: type) -> set[str]:
    return {name for kind in owner.__mro__ for name in vars(kind).get("__annotations__", {})}


def attributes(owner: type) -> set[str]:
    """Return the attributes that the methods of a class set."""
    kinds = [kind for kind in owner.__mro__ if kind.__module__.partition(".")[0] not in ("builtins", "typing", "torch")]
    sources = [inspect.getsource(kind) for kind in kinds]
    return {name for source in sources for name in re.findall(r"\bself\.(\w+)\b[^=\n]*(?<![=!<>])=(?!=)", source)}


def public(owner: Any) -> set[str]:
    """Return the public names of a module's `__all__` or of a class."""
    return {name for name in getattr(owner, "__all__", None) or dir(owner) if not name.startswith("_")}


def named(page: str) -> set[str]:
    """Return every identifier in the first columns of a page's name tables."""
    return {name for row in rows(page) for span in spans(row.theirs) for name in re.findall(r"[A-Za-z_]\w*", span)}


def ours() -> Names:
    """Return the names of trainer_kit, and of what its users have anyway."""
    import datetime

    import torch

    import trainer_kit
    from trainer_kit import Accelerator, Callback, Run, Trainer, TrainingArguments, callbacks
    from trainer_kit.cli.main import make_parser

    roots = {
        "trainer": Trainer, "trainer.run": Run, "run": Run, "args": TrainingArguments, "accelerator": Accelerator,
        "torch": torch, "datetime": datetime, "trainer_kit": trainer_kit,
    }  # fmt: skip
    scopes = (callbacks, trainer_kit, trainer_kit.accelerator, Trainer, Callback, Accelerator)
    commands = {"python": set(), **_options("trainer-kit", make_parser())}
    return Names(roots, scopes, (Trainer, TrainingArguments, Accelerator), commands)


def _options(words: str, parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Return the options of a parser, or of each command below it, by the command's words."""
    below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return {words: {option for action in parser._actions for option in action.option_strings}}
    return {
        command: options
        for name, inner in below[0].items()
        for command, options in _options(f"{words} {name}", inner).items()
    }


def problems(page: str, theirs: Names) -> list[str]:
    """Return what the tables of a page name, and the peer or trainer_kit lacks."""
    found, own = [], ours()
    for row in rows(page):
        lacking = [f"theirs: {name}" for span in spans(row.theirs) for name in theirs.unknown(span)]
        cells = [row.ours, row.theirs] if row.ours.startswith("the same") else [row.ours]
        lacking += [f"ours: {name}" for cell in cells for span in spans(cell) for name in own.unknown(span)]
        found += [f"{row.theirs}: {each}" for each in lacking]
    return found


def example(name: str) -> Callable[..., dict[str, float]]:
    """Return the function `main` of a script in examples/coming_from."""
    path = Path(__file__).parents[2] / "examples" / "coming_from" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"coming_from_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[..., dict[str, float]] = module.main
    return main


def version(page: str) -> str:
    """Return the package and the version that a page names, such as "keras 3.15"."""
    found = re.search(r"^Checked against ([\w ]+[\d.]+\d)", (PAGES / f"{page}.md").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]
