"""Dataclasses out of JSON, with the path of the key that does not fit: what `dataclasses.asdict`
wrote, and nothing else.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """`value`, as `json.load` gave it, as an instance of `kind`: a dataclass, a tuple, a dict, an
    optional or a plain type.

    Raises:
        ValueError: a key is missing, is not known, or holds something else; the message begins with
            the key's path.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _decode_record(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in arguments if a is not type(None))
        return None if value is None else decode(inner, value, where)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, Mapping), where, "keys and values", value)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float:
        _expect(
            isinstance(value, int | float) and not isinstance(value, bool), where, "a number", value
        )
        return float(value)
    if kind is int:
        _expect(
            isinstance(value, int) and not isinstance(value, bool), where, "a whole number", value
        )
        return value
    _expect(
        isinstance(value, kind),
        where,
        {str: "a text", bool: "true or false"}.get(kind, str(kind)),
        value,
    )
    return value


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, Mapping), where, "keys and values", value)
    known = {f.name: f for f in fields(kind)}
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ValueError(
            f"{_join(where, unknown[0])}: unknown key; known here are {', '.join(known)}."
        )
    missing = [
        n
        for n, f in known.items()
        if n not in value and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{_join(where, missing[0])}: this key is missing.")
    given = {name: decode(hints[name], item, _join(where, name)) for name, item in value.items()}
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where or 'the file'}: {error}") from None


def _decode_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list | tuple), where, "a list", value)
    if arguments[-1] is Ellipsis:
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    _expect(len(value) == len(arguments), where, f"a list of {len(arguments)}", value)
    return tuple(
        decode(a, item, f"{where}[{i}]")
        for i, (a, item) in enumerate(zip(arguments, value, strict=True))
    )


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _expect(fits: bool, where: str, expected: str, value: Any) -> None:
    if not fits:
        shown = repr(value)
        raise ValueError(
            f"{where or 'the file'}: expected {expected}, found"
            f" {shown if len(shown) < 60 else shown[:57] + '...'}."
        )
