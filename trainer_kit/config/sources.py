"""`ArgumentSources`: arguments from dicts, files, command lines and other trainers' arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_kit.config.command_line import read_command_line
from trainer_kit.config.lightning_names import LIGHTNING_NAMES
from trainer_kit.config.other_names import attribute_sentence, in_force, translate
from trainer_kit.config.parser_hints import with_plain_hints
from trainer_kit.config.transformers_names import (
    ATTRIBUTES,
    FIELD_VALUES,
    TRANSFORMERS_NAMES,
    added_by_user,
    settings_of,
)
from trainer_kit.config.validation import load_fields, plain, save_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    _Base = DataclassInstance
else:
    _Base = object

T = TypeVar("T")
Arguments = TypeVar("Arguments", bound="ArgumentSources")

OTHER_NAMES = {**LIGHTNING_NAMES, **TRANSFORMERS_NAMES}
"""Translation of each name that another trainer has for a setting."""


def with_other_names(cls: type[T]) -> type[T]:
    """Make the constructor of a dataclass take names of other trainers, and its hints plain for parsers."""
    generated = cls.__init__

    @functools.wraps(generated)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        generated(self, *args, **translate(cls, kwargs, OTHER_NAMES, FIELD_VALUES))

    cls.__init__ = init  # type: ignore[method-assign]
    return with_plain_hints(cls)


@dataclasses.dataclass  # jsonargparse takes a dataclass for settings if all its bases are dataclasses
class ArgumentSources(_Base):
    """The methods of a dataclass of arguments that read and write its fields."""

    if not TYPE_CHECKING:  # a visible __setattr__ would let a type checker accept every attribute

        def __setattr__(self, name: str, value: Any) -> None:
            if name in OTHER_NAMES and name not in self.__dataclass_fields__ and not hasattr(type(self), name):
                raise AttributeError(
                    f"{type(self).__name__}.{name} is set, which is not read: "
                    f"{attribute_sentence(name, value, OTHER_NAMES, ATTRIBUTES)}"
                )
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            sentence = attribute_sentence(name, True, OTHER_NAMES, ATTRIBUTES)
            reason = f"has no attribute {name!r}" + (f": {sentence}" if sentence else "")
            raise AttributeError(f"{type(self).__name__!r} object {reason}", name=name)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, as strings, numbers, booleans, None, and lists and dicts of these."""
        return {name: plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls: type[Arguments], values: Mapping[str, Any]) -> Arguments:
        """Create arguments from values by field; missing fields have their defaults.

        Raises:
            TypeError: If a field is unknown or a value has the wrong type.
            ValueError: If a value is not allowed.
        """
        return cls(**translate(cls, values, OTHER_NAMES, FIELD_VALUES))

    @classmethod
    def from_args(cls: type[Arguments], argv: Sequence[str] | None = None) -> Arguments:
        """Create arguments from a command line such as `--config run.yaml --learning_rate 3e-4 --bf16`.

        Args:
            argv: The words of the command line; None: those of the program.

        Raises:
            SystemExit: After `--help`, which prints the fields.
            TypeError: If a name is unknown or a value has the wrong type.
            ValueError: If a word belongs to no name or a value is not allowed.
        """
        words = sys.argv[1:] if argv is None else argv
        if {"-h", "--help"} & {*words}:
            sys.stdout.write(f"{inspect.getdoc(cls)}\n")
            raise SystemExit(0)
        file, settings = read_command_line(cls, words)
        return cls.from_dict({**in_force(cls, file, settings, OTHER_NAMES, FIELD_VALUES), **settings})

    @classmethod
    def from_transformers(cls: type[Arguments], hf_args: Any) -> Arguments:
        """Create arguments that mean what transformers' `TrainingArguments` mean.

        What a subclass or a script adds becomes an attribute, unless there is one of its name.

        Args:
            hf_args: An instance of transformers' `TrainingArguments` or a subclass.

        Raises:
            TypeError: If settings that differ from transformers' defaults have no counterpart; names them all.
            ValueError: If a value is not allowed.
        """
        made = cls.from_dict(settings_of(hf_args, {field.name for field in dataclasses.fields(cls)}))
        added = {name: value for name, value in added_by_user(hf_args).items() if not hasattr(made, name)}
        vars(made).update(added)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all fields to a file with the suffix .json, .yaml or .yml.

        Raises:
            TypeError: If the value of a field that a subclass adds is not plain.
            ValueError: If the suffix is another one.
        """
        save_fields(path, self.to_dict())

    @classmethod
    def load(cls: type[Arguments], path: str | os.PathLike[str]) -> Arguments:
        """Read arguments from a file with the suffix .json, .yaml or .yml; missing fields have their defaults.

        In YAML, `no` is the string "no" and `5e-5` a number, as in YAML 1.2.

        Raises:
            FileNotFoundError: If the file does not exist.
            TypeError: If a field is unknown or a value has the wrong type; the message begins with the path.
            ValueError: If the suffix is another one, the content is invalid or a value is not allowed; the message
                begins with the path.
        """
        values = load_fields(path)
        try:
            return cls.from_dict(values)
        except TypeError as error:
            raise TypeError(f"{os.fspath(path)}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error
