"""Read a configuration given as a dict, a JSON or Hjson file or base64, into one nested dict."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onefold.deepspeed.config.hjson import HjsonError, parsed
from onefold.deepspeed.config.values import is_unset
from onefold.reading import parse_json


def loaded(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(
            f"config is a {type(config).__name__}: expected a dict or the path of a JSON file."
        )
    path = Path(config)
    if _is_file(path):
        text, source = path.read_text(encoding="utf-8"), str(path)
    else:
        try:
            text, source = (
                base64.urlsafe_b64decode(os.fspath(config)).decode("utf-8"),
                "the base64 configuration",
            )
        except (binascii.Error, ValueError):
            raise FileNotFoundError(
                f"there is no DeepSpeed configuration at {os.fspath(config)!r}: expected a JSON"
                " file, or pass a dict."
            ) from None
    tree = _tree(text, source)
    if not isinstance(tree, dict):
        raise ValueError(
            f'{source} holds a {type(tree).__name__}: expected an object, such as {{"bf16":'
            ' {"enabled": true}}.'
        )
    return tree


def _tree(text: str, source: str) -> Any:
    """Parse JSON, or else Hjson, which is JSON with comments and fewer quotes."""
    try:
        return parse_json(text, _without_duplicates)
    except json.JSONDecodeError as error:
        said = f"{error.msg} in line {error.lineno}, column {error.colno}"
    try:
        return parsed(text, _without_duplicates)
    except (HjsonError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {said}. Nor is it Hjson: {error}.") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a base64 text may be longer than a file name can be
        return False


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"the configuration has {name!r} twice in one object: keep one.")
        tree[name] = value
    return tree


def nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which dotted keys of the top level ("zero_optimization.stage": 2) are moved
    into their section. An old file's "zero_optimization": true becomes a section, too.
    """
    nested: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(name, str):
            raise ValueError(f"the configuration has the key {name!r}: expected texts as keys.")
        if "." not in name:
            nested[name] = (
                {**value, **nested.get(name, {})}
                if isinstance(value, Mapping) and isinstance(nested.get(name), dict)
                else value
            )
    for name, value in tree.items():
        if "." in name:
            *outer, last = name.split(".")
            place = nested
            for part in outer:
                inner = place.get(part, {})
                if not isinstance(inner, Mapping):
                    raise ValueError(
                        f"{name}={value!r}: {part!r} is {inner!r} elsewhere, not an object that"
                        f" could hold {last!r}."
                    )
                place[part] = dict(inner)
                place = place[part]
            if not is_unset(place.get(last)) and place[last] != value:
                raise ValueError(
                    f"{name} is given twice, as {value!r} and as {place[last]!r}: keep one."
                )
            place[last] = value
    if isinstance(nested.get("zero_optimization"), bool):
        nested["zero_optimization"] = {"stage": int(nested["zero_optimization"])}
    return nested
