"""One pass over a DeepSpeed configuration, section by section, by the tables of keys.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.deepspeed.config.keys import PLACES, Section
from onefold.deepspeed.config.values import AUTO, asks, check_value, is_unset, nearest

#: Keys that too many sections have to say where a misplaced one belongs.
_ANYWHERE = ("type", "params", "enabled", "device")


class Reading:
    """Checks sections, and collects what has to be listed.

    Attributes:
        without_effect, unknown, left_auto, remarks: see `DeepSpeedConfig`.
    """

    def __init__(self) -> None:
        self.without_effect: list[tuple[str, str]] = []
        self.unknown: list[str] = []
        self.left_auto: list[str] = []
        self.remarks: list[str] = []

    def section(
        self, prefix: str, given: Mapping[str, Any], known: Section, aliases: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the checked values of a section's keys, and list keys without effect.

        Raises:
            ValueError: a misspelt or misplaced key, a wrong value, or a missing required key.
            NotImplementedError: a key of class `later` asks for something.
        """
        values: dict[str, Any] = {}
        for raw, value in given.items():
            name = aliases.get(raw, raw)
            path = f"{prefix}.{name}" if prefix else name
            if name not in known:
                self._unknown(prefix, raw, known, aliases)
                continue
            key = known[name]
            if name in values:
                raise ValueError(
                    f"{path} is set twice, as {raw!r} and under its other name: keep one."
                )
            if is_unset(value):
                if value == AUTO and not (key.inert or key.later or key.own_auto):
                    self.left_auto.append(path)
            elif key.later is not None:
                if asks(value, key):
                    raise NotImplementedError(
                        f"{path}={_shortened(value)} asks for something that Onefold does not do:"
                        f" {key.later}."
                    )
            else:
                values[name] = check_value(path, value, key)
                if key.inert is not None:
                    self.without_effect.append((path, key.inert))
        for name, key in known.items():
            if key.required and name not in values:
                raise ValueError(
                    f'{prefix} has no {name!r}: write "{prefix}": {{"{name}": ..., "params":'
                    " {...}}, or remove it."
                )
        return values

    def _unknown(self, prefix: str, name: str, known: Section, aliases: Mapping[str, str]) -> None:
        path = f"{prefix}.{name}" if prefix else name
        if not name.startswith(("_", "#", "/")) and name.lower() not in ("comment", "comments"):
            for other, keys in PLACES.items():
                if other != prefix and name in keys and name not in _ANYWHERE:
                    where = f'inside "{other}"' if other else "at the top level"
                    raise ValueError(f"{path}: this key belongs {where}; move it there.")
            near = nearest(name, [*known, *aliases])
            if near:
                raise ValueError(f"{path}: there is no such key; did you mean {near!r}?")
        self.unknown.append(path)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
