"""What the sources do not say to griffe, which reads them without running them; `api.py` finds it out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from griffe import Alias, Attribute, Class, Docstring, Extension, Module, Object


class RunTimeFacts(Extension):
    """Shows what code makes by its value, and functions in place of modules of the same name.

    Args:
        defaults: Default values as code, by field, for each dataclass by its path in the source.
        functions: Paths of functions that a package has imported from its modules of the same name.
        values: Values of attributes as code, by path.
        hints: Types as code that names of a module's annotations stand for, by name, for each module.
        enums: Values of enumerations, by path.
    """

    def __init__(
        self,
        defaults: Mapping[str, Mapping[str, str]],
        functions: Sequence[str],
        values: Mapping[str, str],
        hints: Mapping[str, Mapping[str, str]],
        enums: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__()
        self.hints = hints
        self.enums = enums
        self.values = values
        self.defaults = defaults
        self.functions = functions

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Change what griffe has read of a package, after its own extension for dataclasses."""
        for path, values in _inside(pkg, self.defaults):
            parameters = pkg[path].members["__init__"].parameters
            for name, value in values.items():
                parameters[name].default = value
        for path, value in _inside(pkg, self.values):
            attribute = pkg[path]
            (attribute.final_target if attribute.is_alias else attribute).value = value
        for path, hints in _inside(pkg, self.hints):
            _write_out_types(pkg[path], hints)
        for path, listed in _inside(pkg, self.enums):
            _list_values(pkg[path], listed)
        for path, _ in _inside(pkg, dict.fromkeys(self.functions)):
            package, _, name = path.rpartition(".")
            pkg[package].set_member(name, pkg[package].members[name].members[name])
        _skip_private_bases(pkg)


def _inside(package: Module, facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the facts of a package, by their path inside of it."""
    start = f"{package.path}."
    for path, fact in facts.items():
        if path.startswith(start):
            yield path.removeprefix(start), fact


def _write_out_types(module: Module, hints: Mapping[str, str]) -> None:
    """Replace the names of annotated types in the parameters of a module's classes by the types."""
    names = re.compile(rf"\b({'|'.join(map(re.escape, hints))})\b")
    for cls in module.classes.values():
        if not cls.is_alias and "__init__" in cls.members:
            for parameter in cls.members["__init__"].parameters:
                annotation = str(parameter.annotation)
                if names.search(annotation):
                    parameter.annotation = names.sub(lambda found: hints[found[0]], annotation)


def _list_values(cls: Class, values: Sequence[str]) -> None:
    """Add the values of an enumeration to its docstring."""
    text = cls.docstring.value if cls.docstring else ""
    cls.docstring = Docstring(f"{text}\n\nValues: {', '.join(f'`{value}`' for value in values)}.", parent=cls)


def _skip_private_bases(package: Module) -> None:
    """Show the bases of a private base in its place."""
    for module in package.modules.values():
        if module.is_alias:
            continue
        _skip_private_bases(module)
        for cls in module.classes.values():
            if not cls.is_alias:
                private = {name: each for name, each in module.members.items() if name.startswith("_")}
                cls.bases = [
                    shown
                    for base in cls.bases
                    for shown in (_bases(private[str(base)]) if str(base) in private else [base])
                ]


def _bases(private: Object | Alias) -> list[Any]:
    """Return the bases of a private class, or the class that a private name stands for."""
    return [private.value] if isinstance(private, Attribute) else list(private.bases)
