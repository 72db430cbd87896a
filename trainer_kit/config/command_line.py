"""Settings from a command line such as `--config run.yaml --learning_rate 3e-4`."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainer_kit.config.validation import load_fields, parse_yaml


def read_command_line(cls: type, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the file that a command line names, and those of its own.

    `--name value` and `--name=value` give one value, several words a list, and a name alone is True. Values are YAML,
    but a field that takes only text takes the words as they are. `--config` names a file.

    Args:
        cls: The dataclass of the settings.
        argv: The words of the command line, without the program.

    Raises:
        ValueError: If a word belongs to no name, a name is given twice, or the file is not valid.
    """
    words: dict[str, list[str]] = {}
    name = None
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in words:
                raise ValueError(f"--{name} is given twice; give it once")
            words[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"{word!r} belongs to no setting; give settings as --name value")
        else:
            words[name].append(word)
    file = words.pop("config", None)
    hints = get_type_hints(cls)
    settings = {name: _value(name, given, hints.get(name)) for name, given in words.items()}
    if file is None:
        return {}, settings
    if len(file) != 1:
        raise ValueError(f"--config takes one file, but got {len(file)}")
    return load_fields(file[0]), settings


def _value(name: str, words: Sequence[str], hint: Any) -> Any:
    if not words:
        return True
    try:
        values = [word if _is_text(hint) else parse_yaml(word) for word in words]
    except ValueError as error:
        raise ValueError(f"--{name} {' '.join(words)} is no valid YAML: {' '.join(str(error).split())}") from error
    return values if len(values) > 1 else values[0]


def _is_text(hint: Any) -> bool:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return set(members) <= {str, type(None)}
