"""What the sources do not say to griffe, which reads them without running them; `api.py` finds it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from griffe import Extension, Module


class RunTimeFacts(Extension):
    """Shows what code makes by its value, and functions in place of modules of the same name.

    Args:
        defaults: Default values as code, by field, for each dataclass by its path in the source.
        functions: Paths of functions that a package has imported from its modules of the same name.
        values: Values of attributes as code, by path.
    """

    def __init__(
        self, defaults: Mapping[str, Mapping[str, str]], functions: Sequence[str], values: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.values = values
        self.defaults = defaults
        self.functions = functions

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Change what griffe has read of a package, after its own extension for dataclasses."""
        inside = f"{pkg.path}."
        for path, values in self.defaults.items():
            if path.startswith(inside):
                parameters = pkg[path.removeprefix(inside)].members["__init__"].parameters
                for name, value in values.items():
                    parameters[name].default = value
        for path, value in self.values.items():
            if path.startswith(inside):
                attribute = pkg[path.removeprefix(inside)]
                (attribute.final_target if attribute.is_alias else attribute).value = value
        for path in self.functions:
            if path.startswith(inside):
                package, _, name = path.removeprefix(inside).rpartition(".")
                pkg[package].set_member(name, pkg[package].members[name].members[name])
