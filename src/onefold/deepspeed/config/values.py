"""Check values of a DeepSpeed configuration against their rows in keys.py.

Errors say what to change.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from onefold.deepspeed.config.keys import Key, Section

AUTO = "auto"


def is_unset(value: Any) -> bool:
    """Whether nobody has chosen a value: it is None or "auto"."""
    return value is None or (isinstance(value, str) and value == AUTO)


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that `given` probably misspells, or None."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), list(by_lower), 1, cutoff=0.8)
    return by_lower[near[0]] if near else None


def check_value(path: str, value: Any, key: Key) -> Any:
    """Return `value` in the type of `key`: a flag as bool (0 and 1 are taken for false and true), a
    count as int (or `math.inf` if endless), a number as float, a text as str (in lower case if it
    has choices).

    Raises:
        ValueError: the value is of another type or out of bounds. The message says what was given
            and what was expected.
    """
    if key.kind == "any":
        return value
    if key.kind == "flag":
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
        raise ValueError(f"{path}={value!r}: expected true or false{_without_quotes(value)}.")
    if key.kind == "section":
        if isinstance(value, Mapping):
            return value
        raise ValueError(
            f"{path}={value!r}: expected an object with keys of its own, as in {{...}}."
        )
    if key.kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"{path}={value!r}: expected a text in quotes.")
        if key.choices and value.lower() not in key.choices:
            raise ValueError(
                f"{path}={value!r}: expected one of {', '.join(map(repr, key.choices))}."
            )
        return value.lower() if key.choices else value
    if key.kind == "numbers" and isinstance(value, (list, tuple)):
        return tuple(_number(f"{path}[{i}]", entry, key) for i, entry in enumerate(value))
    return _number(path, value, key)


def _number(path: str, value: Any, key: Key) -> int | float:
    wanted = _wanted(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{path}={value!r}: expected {wanted}{_without_quotes(value)}.")
    out_of_bounds = (
        (not abs(value) < 1 << 63 and not (key.endless and value == math.inf))
        or (key.low is not None and value < key.low)
        or (key.high is not None and value > key.high)
        or (key.above is not None and value <= key.above)
    )
    if out_of_bounds:
        raise ValueError(f"{path}={value!r}: expected {wanted}.")
    if key.kind != "count":
        return float(value)
    if math.isinf(value):
        return math.inf
    if value != int(value) and key.endless and (key.inert or key.becomes):
        return int(
            value
        )  # a size by which DeepSpeed tunes itself, often computed: 0.9 x hidden ** 2
    if value != int(value):
        raise ValueError(f"{path}={value!r}: expected {wanted}; did you mean {round(value)}?")
    return int(value)


def _wanted(key: Key) -> str:
    noun = "a whole number" if key.kind == "count" else "a number"
    if key.above is not None:
        noun += f" above {key.above:g}"
    elif key.low is not None and key.high is not None:
        noun += f" from {key.low:g} to {key.high:g}"
    elif key.low is not None:
        noun += f", {key.low:g} or more"
    return noun + (" (or inf)" if key.endless else "")


def _without_quotes(value: Any) -> str:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return f"; write {value.lower()} without quotes"
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return f"; write {value} without quotes"
    return ""


def asks(value: Any, key: Key) -> bool:
    """Whether the value of a `later` key asks for the capability.

    An empty section, "enabled": false, and a section of which no entry asks do not.
    """
    if is_unset(value):
        return False
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return value > key.quiet_up_to
    if isinstance(value, Mapping):
        if "enabled" in value:
            return not is_unset(value["enabled"]) and value["enabled"] not in (False, 0)
        return any(asks(inside, key) for inside in value.values())
    return bool(value)


def check_arguments(
    path: str, given: Mapping[str, Any], known: Section
) -> tuple[dict[str, Any], list[str]]:
    """Return the checked values of an optimizer's or a schedule's params, and the paths at "auto".

    Raises:
        ValueError: an unknown key, a wrong value, or a missing required key. An unknown key raises
            because the values are passed on as arguments.
    """
    values: dict[str, Any] = {}
    left_auto: list[str] = []
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(known)}."
            raise ValueError(f"{path}.{name}: there is no such key; {hint}")
        if is_unset(value):
            left_auto.extend([f"{path}.{name}"] if value == AUTO else [])
        else:
            values[name] = check_value(f"{path}.{name}", value, known[name])
    for name, key in known.items():
        if key.required and name not in values:
            why = " (nothing fills in auto here)" if name in given else ""
            raise ValueError(f"{path}.{name} is not set{why}: write a value.")
    return values, left_auto
