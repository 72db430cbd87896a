"""Validation of dataclass fields by their type hints, and their JSON and YAML files."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from trainer_kit.config.parser_hints import Accepts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


class Rule(NamedTuple):
    """Constraint on a field, as in `Annotated[int, Rule("a whole number above 0", lambda n: n > 0)]`.

    Attributes:
        text: Description of the allowed values, including the type; follows "it must be" in messages.
        holds: Test of a value of the right type.
        advice: Returns what the message adds to `text` for a value that is not allowed; None: nothing.
    """

    text: str
    holds: Callable[[Any], bool]
    advice: Callable[[Any], str] | None = None


def check_names(cls: type, names: Iterable[Any], synonyms: Mapping[str, str]) -> None:
    """Check that all names are fields of the dataclass `cls`.

    Args:
        cls: The dataclass.
        names: The names to check.
        synonyms: Field names by other names for them that are not similar in spelling.

    Raises:
        TypeError: If a name is unknown; the message has the first such name and the nearest known one.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in known:
            nearest = synonyms.get(name) or difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
            raise TypeError(f"{cls.__name__} has no field {name!r}; the nearest known name is {nearest!r}")


def read_options(cls: type[Options], field: str, setting: bool | Mapping[str, Any]) -> Options:
    """Return the options that a field gives, which is a bool or a dict of them.

    Args:
        cls: Dataclass of the options, which checks its values when it is made.
        field: Name of the field.
        setting: Value of the field; True and False give the defaults.

    Raises:
        TypeError: If a key is unknown, or a value has the wrong type; the message begins with the field.
        ValueError: If a value is not allowed; the message begins with the field.
    """
    given = {} if isinstance(setting, bool) else dict(setting)
    keys = [each.name for each in dataclasses.fields(cls)]
    for key in given:
        if key not in keys:
            raise TypeError(f"{field}={given!r} has the unknown key {key!r}; use {', '.join(keys)}")
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{field}={given!r}: {error}") from None


def check_values(instance: Any) -> None:
    """Check each field of a dataclass instance by its type hint, and convert it to plain Python types.

    Hints may be bool, int, float, str, list, tuple, dict, None, Path, an Enum, Literal, unions of them, and Annotated
    with a `Rule`; other hints are not checked. A float must be finite. An int is accepted for a float, a path for a
    str, a string for a path, a list for a tuple, and a member of an Enum of strings for a Literal or str.

    Raises:
        TypeError: If a value has another type; the message names the field, the value and the allowed values.
        ValueError: If a value has the right type but is not allowed, with the same message.
    """
    hints = get_type_hints(type(instance), include_extras=True)
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        try:
            setattr(instance, field.name, _read(value, hints[field.name]))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{field.name}={value!r} is not allowed; it must be {error}") from None


def _read(value: Any, hint: Any) -> Any:
    """Return `value` as the type in `hint`, or raise an error whose text is the allowed values."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *notes = get_args(hint)
        accepted = next((note.hint for note in notes if isinstance(note, Accepts)), None)
        if accepted is not None:
            return _read(value, accepted)
        return _read_ruled(value, base, [note for note in notes if isinstance(note, Rule)])
    if origin in (Union, types.UnionType):
        return _read_union(value, get_args(hint))
    if origin is Literal:
        return _read_choice(value, get_args(hint))
    if origin is list:
        return [_read(item, *get_args(hint)) for item in _read_list(value)]
    if origin is tuple and get_args(hint):  # not `Tuple` alone
        return _read_tuple(value, get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _read_enum(value, hint)
    reader = _READERS.get(origin or hint)
    return value if reader is None else reader(value)


def _read_ruled(value: Any, base: Any, rules: list[Rule]) -> Any:
    try:
        value = _read(value, base)
    except (TypeError, ValueError) as error:
        raise type(error)(rules[0].text if rules else str(error)) from None
    for rule in rules:
        if not rule.holds(value):
            raise ValueError(rule.text + ("" if rule.advice is None else rule.advice(value)))
    return value


def _read_union(value: Any, members: tuple[Any, ...]) -> Any:
    if value is None and type(None) in members:
        return None
    allowed: list[str] = []
    kind: type[Exception] = TypeError
    for member in members:
        try:
            return _read(value, member)
        except (TypeError, ValueError) as error:
            allowed.append(str(error))  # the error itself would keep the frames of all callers, and so their models
            kind = ValueError if isinstance(error, ValueError) else kind
    raise kind(", or ".join(allowed))


def _read_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    value = value.value if isinstance(value, Enum) else value
    if value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"one of {', '.join(map(repr, choices))}")
    return choices[choices.index(value)]


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("True or False")
    return value


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError("a whole number")
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError("a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def _read_str(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str):
        raise TypeError("a string")
    return str(value)


def _read_list(value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):  # such as OmegaConf's ListConfig
        raise TypeError("a list")
    return list(value)


def _read_tuple(value: Any, members: tuple[Any, ...]) -> tuple[Any, ...]:
    items = _read_list(value)
    if members[1:] == (...,):
        members = members[:1] * len(items)
    if len(items) != len(members):
        raise ValueError(f"a list of {len(members)}")
    return tuple(_read(item, member) for item, member in zip(items, members, strict=True))


def _read_enum(value: Any, kind: type[Enum]) -> Enum:
    if isinstance(value, kind):
        return value
    try:
        return next((member for member in kind if plain(member.value) == plain(value)), None) or kind(value)
    except Exception:  # of a `_missing_` of the user's
        raise ValueError(f"one of {', '.join(repr(member.value) for member in kind)}") from None


def _read_path(value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError("a path")
    return Path(value)


def _read_dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("a dict")
    return {key: _as_builtin(item) for key, item in value.items()}


def _as_builtin(value: Any) -> Any:
    """Return the dicts and lists of a value, which may be of OmegaConf, as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _as_builtin(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple)):
        return [_as_builtin(item) for item in value]
    return value


def _read_none(value: Any) -> None:
    if value is not None:
        raise TypeError("None")


_READERS: dict[Any, Callable[[Any], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    list: _read_list,
    tuple: lambda value: tuple(_read_list(value)),
    Path: _read_path,
    dict: _read_dict,
    type(None): _read_none,
}


class _Format(NamedTuple):
    read: Callable[[Path], Any]
    write: Callable[[Path, dict[str, Any]], None]


def save_fields(path: str | os.PathLike[str], values: dict[str, Any]) -> None:
    """Write fields and their plain values to a file with the suffix .json, .yaml or .yml.

    Args:
        path: The file.
        values: Plain values by field.

    Raises:
        TypeError: If a value is not plain; the message names the field.
        ValueError: If the suffix is another one.
    """
    form = _format(path)
    for name, value in values.items():
        if not _is_plain(value):
            raise TypeError(
                f"{os.fspath(path)}: cannot hold {name}={value!r}; give strings, numbers, True, False, None, and lists "
                "and dicts of these"
            )
    form.write(Path(path), values)


def plain(value: Any) -> Any:
    """Return the paths, tuples and members of enumerations in a value as strings, lists and their values."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(map(_is_plain, value)) and (not isinstance(value, dict) or all(map(_is_plain, value.values())))
    return value is None or isinstance(value, (str, bool, int, float))


def load_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read fields and their values from a file with the suffix .json, .yaml or .yml.

    In YAML, `no` is a string and `5e-5` a number, as in YAML 1.2.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the suffix is another one or the content is invalid; the message begins with the path.
    """
    values = _format(path).read(Path(path))
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ValueError(f"{os.fspath(path)}: holds a {kind}, but must hold fields and their values")
    return values


def _format(path: str | os.PathLike[str]) -> _Format:
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise ValueError(f"{os.fspath(path)}: cannot tell the format by its ending; use .json, .yaml or .yml")
    return _FORMATS[suffix]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no valid JSON: {error}") from error


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _read_yaml(path: Path) -> Any:
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no valid YAML: {error}") from error


_YAML_FLOAT = r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
_YAML_FLOAT_BEGINS = list("-+.0123456789")


def parse_yaml(text: str) -> Any:
    """Return the content of YAML text, in which `no` is a string and `5e-5` a number, as in YAML 1.2.

    Raises:
        ValueError: If the text is no valid YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2 scalars: only true and false are booleans, and `5e-5` is a number."""

    bool_tag, float_tag = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (bool_tag, float_tag)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(bool_tag, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    Loader.add_implicit_resolver(float_tag, re.compile(_YAML_FLOAT), _YAML_FLOAT_BEGINS)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _write_yaml(path: Path, values: dict[str, Any]) -> None:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes strings such as "1e5" too, which `parse_yaml` reads as numbers."""

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_YAML_FLOAT), _YAML_FLOAT_BEGINS)
    path.write_text(yaml.dump(values, Dumper=Dumper, sort_keys=False), encoding="utf-8")


_FORMATS = {
    ".json": _Format(_read_json, _write_json),
    ".yaml": _Format(_read_yaml, _write_yaml),
    ".yml": _Format(_read_yaml, _write_yaml),
}
