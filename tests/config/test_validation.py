from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainer_kit.config.validation import Rule, check_names, check_values, load_fields, save_fields

Even = Annotated[int, Rule("an even number", lambda value: value % 2 == 0)]


@dataclasses.dataclass
class Example:
    even: Even | None = None
    digits: Annotated[list[int], "a note", Rule("not empty", bool), Rule("short", lambda value: len(value) < 4)] = (
        dataclasses.field(default_factory=lambda: [1])
    )
    noted: Annotated[float, "a note"] = 1.0
    level: Literal[0, 1, "auto"] = "auto"
    size: int | str = 1
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    other: complex = 0j

    def __post_init__(self) -> None:
        check_values(self)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("even", 4, 4),
        ("even", None, None),
        ("digits", (1, 2), [1, 2]),
        ("noted", 2, 2.0),
        ("level", 1, 1),
        ("level", "auto", "auto"),
        ("size", 3, 3),
        ("size", "3", "3"),
        ("table", {"a": 1.0}, {"a": 1.0}),
        ("other", "not checked", "not checked"),
    ],
)
def test_values_that_fit_are_kept(name: str, value: Any, kept: Any) -> None:
    settings: dict[str, Any] = {name: value}
    read = getattr(Example(**settings), name)
    assert read == kept
    assert type(read) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "error", "allowed"),
    [
        ("even", 3, ValueError, "an even number, or None"),
        ("even", "4", TypeError, "an even number, or None"),
        ("digits", [], ValueError, "not empty"),
        ("digits", [1, 2, 3, 4], ValueError, "short"),
        ("digits", ["1"], TypeError, "not empty"),
        ("noted", "1", TypeError, "a finite number"),
        ("level", 2, TypeError, "one of 0, 1, 'auto'"),
        ("level", "manual", ValueError, "one of 0, 1, 'auto'"),
        ("size", None, TypeError, "a whole number, or a string"),
        ("table", [], TypeError, "a dict"),
    ],
)
def test_other_values_are_refused(name: str, value: Any, error: type[Exception], allowed: str) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(error) as raised:
        Example(**settings)
    assert str(raised.value) == f"{name}={value!r} is not allowed; it must be {allowed}"


def test_unknown_names() -> None:
    check_names(Example, ["even", "size"], {})
    with pytest.raises(TypeError, match=r"^Example has no field 'evn'; the nearest known name is 'even'$"):
        check_names(Example, ["size", "evn"], {})
    with pytest.raises(TypeError, match=r"^Example has no field 'zzz'; the nearest known name is 'size'$"):
        check_names(Example, ["zzz"], {"zzz": "size"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("5e-5", 5e-5), ("5E+5", 5e5), ("1.e3", 1e3), (".5", 0.5), ("-.5e1", -5.0), ("+1.5", 1.5), ("0.1", 0.1)],
        *[("12", 12), ("-3", -3), ("1_000", 1000), (".inf", float("inf")), ("-.inf", float("-inf"))],
        *[("true", True), ("False", False), ("no", "no"), ("on", "on"), ("Yes", "Yes"), ("n", "n"), ("off", "off")],
        *[("null", None), ("~", None), ("e5", "e5"), ("1e", "1e"), ("5GB", "5GB"), ("'5e-5'", "5e-5"), (".", ".")],
    ],
)
def test_yaml_scalars(tmp_path: Path, text: str, value: Any) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {text}\n")
    read = load_fields(path)["key"]
    assert read == value
    assert type(read) is type(value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.text(), VALUES, max_size=4), suffix=st.sampled_from([".json", ".yaml"]))
@example(values={"0E0": "1e5", "5e-5": [1e5, 12, "12", ".5e1", "1."]}, suffix=".yaml")
def test_what_is_saved_is_loaded(tmp_path: Path, values: dict[str, Any], suffix: str) -> None:
    save_fields(tmp_path / f"a{suffix}", values)
    assert repr(load_fields(tmp_path / f"a{suffix}")) == repr(values)


def test_the_frames_of_callers_are_not_kept() -> None:
    class Big:
        pass

    def caller() -> weakref.ref[Big]:
        big = Big()
        Example(even=None, size="many")
        with pytest.raises(TypeError, match="a whole number, or a string"):
            Example(size=1.5)  # type: ignore[arg-type]
        return weakref.ref(big)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
