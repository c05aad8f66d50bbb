"""Explain what Onefold does with each key of a DeepSpeed configuration, as a table for people.

| class   | means                                                                             |
|---------|-----------------------------------------------------------------------------------|
| served  | it changes the recipe or the engine                                               |
| auto    | it is left to the caller; transformers' Trainer fills it in                       |
| inert   | it has no effect here; the reason says why                                        |
| unknown | neither DeepSpeed nor Onefold knows it                                            |
| refused | `initialize` raises; the reason is the error message                              |
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from onefold.deepspeed.config.file import loaded, nested
from onefold.deepspeed.config.keys import (
    AIO_ALIASES,
    PLACES,
    TOP_ALIASES,
    ZERO_ALIASES,
    Section,
)
from onefold.deepspeed.config.reader import read_deepspeed
from onefold.deepspeed.config.reading import Reading
from onefold.deepspeed.config.values import AUTO, is_unset

Class = Literal["served", "auto", "inert", "unknown", "refused"]
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "": TOP_ALIASES,
    "zero_optimization": ZERO_ALIASES,
    "aio": AIO_ALIASES,
}
_DECIDES = "decides {} of Recipe.zero"


@dataclass(frozen=True)
class KeyOutcome:
    """The outcome for one key: its path, value and class, and a reason or what it decides."""

    path: str
    value: Any
    outcome: Class
    why: str = ""


@dataclass(frozen=True)
class Explanation:
    """The outcome for a whole configuration.

    Attributes:
        keys: every key, in the order of the file.
        refusal: the error message of `initialize` for this file; None if it can be read.
        remarks: other sentences about the file.
    """

    keys: tuple[KeyOutcome, ...]
    refusal: str | None
    remarks: tuple[str, ...] = ()


def explain(
    config: Mapping[str, Any] | str | os.PathLike[str], world_size: int | None = None
) -> Explanation:
    """Explain each key of a configuration.

    Args:
        config: a dict, or the path of a JSON file.
        world_size: number of data-parallel ranks, to check the batch sizes; None does not check.

    Raises:
        ValueError: the file is not JSON, or not an object.
        FileNotFoundError: there is no such file.
    """
    tree = nested(loaded(config))
    rows = list(_rows("", tree))
    try:
        read = read_deepspeed(tree, world_size)
    except (ValueError, NotImplementedError) as error:
        return Explanation(tuple(rows), str(error))
    reasons = dict(read.without_effect)
    rows = [
        replace(row, outcome="inert", why=why)
        if row.outcome == "served" and (why := _reason(row.path, reasons)) is not None
        else row
        for row in rows
    ]
    return Explanation(tuple(rows), None, read.remarks)


def _reason(path: str, reasons: Mapping[str, str]) -> str | None:
    return next((why for p, why in reasons.items() if path == p or path.startswith(f"{p}.")), None)


def _rows(prefix: str, section: Mapping[str, Any]) -> Iterator[KeyOutcome]:
    known, aliases = PLACES[prefix], _ALIASES.get(prefix, {})
    for given, value in section.items():
        name = aliases.get(given, given)
        path = f"{prefix}.{name}" if prefix else name
        if path in PLACES and isinstance(value, Mapping):
            yield from _rows(path, value)
        elif path in ("optimizer.params", "scheduler.params") and isinstance(value, Mapping):
            for option, chosen in value.items():
                kind: Class = "auto" if is_unset(chosen) else "served"
                yield KeyOutcome(f"{path}.{option}", chosen, kind)
        else:
            yield _outcome(path, given, value, prefix, known, aliases)


def _outcome(
    path: str, given: str, value: Any, prefix: str, known: Section, aliases: Mapping[str, str]
) -> KeyOutcome:
    reading = Reading()
    alone = {name: replace(key, required=False) for name, key in known.items()}
    try:
        reading.section(prefix, {given: value}, alone, aliases)
    except (ValueError, NotImplementedError) as error:
        return KeyOutcome(path, value, "refused", str(error))
    if reading.unknown:
        return KeyOutcome(path, value, "unknown", "no DeepSpeed key that is known here")
    if reading.without_effect:
        return KeyOutcome(path, value, "inert", reading.without_effect[0][1])
    if is_unset(value):
        why = "counts as not set" if value != AUTO else ""
        return KeyOutcome(path, value, "auto", why)
    key = alone[aliases.get(given, given)]
    if key.later is not None:
        return KeyOutcome(path, value, "inert", "it asks for nothing with this value")
    return KeyOutcome(
        path, value, "served", _DECIDES.format(", ".join(key.becomes)) if key.becomes else ""
    )
