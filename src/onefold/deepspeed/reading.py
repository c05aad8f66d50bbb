"""Read a DeepSpeed configuration: a dict, or a JSON or Hjson file.

    config -> one dict -> `Root` of schema.py -> `DeepSpeedConfig` of meaning.py
                          each key has one `Outcome`

| outcome | means                                                                             |
|---------|-----------------------------------------------------------------------------------|
| served  | it changes the recipe or the engine                                               |
| auto    | it is left to the caller; transformers' Trainer fills it in                       |
| inert   | it has no effect here; the reason says why                                        |
| unknown | neither DeepSpeed nor Onefold knows it                                            |
| refused | `initialize` raises; the reason is the error message                              |
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import AliasChoices, ValidationError
from pydantic.fields import FieldInfo

from onefold.deepspeed.schema import Inert, Later, Params, Root, Section
from onefold.reading import parse_json, short

__all__ = ["DeepSpeedConfigError"]


class DeepSpeedConfigError(ValueError, AssertionError):
    """The configuration, or the arguments beside it, cannot be used. DeepSpeed raises one of the
    three, by what is wrong.
    """


@dataclass(frozen=True)
class Outcome:
    """What became of one key: its path and value as they are in the file.

    Attributes:
        why: the reason, for what is inert or refused.
        later: what it asks for is not built.
    """

    path: str
    value: Any
    outcome: Literal["served", "auto", "inert", "unknown", "refused"]
    why: str = ""
    later: bool = False


@dataclass(frozen=True)
class Read:
    """A configuration, its values by the schema, and the outcome of each key in the file's order."""

    given: dict[str, Any]
    root: Root
    outcomes: list[Outcome]

    def refuse(self) -> None:
        """Raise the first refusal: NotImplementedError for what is not built, else
        DeepSpeedConfigError.
        """
        for outcome in self.outcomes:
            if outcome.outcome == "refused":
                error = NotImplementedError if outcome.later else DeepSpeedConfigError
                raise error(f"{outcome.path}={short(outcome.value)}: {outcome.why}")


def load(config: Any) -> dict[str, Any]:
    """Return a configuration as a dict of its own.

    Raises:
        DeepSpeedConfigError: it is not JSON, no object, or has a key twice.
        FileNotFoundError: there is no such file.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, (str, os.PathLike)):
        raise DeepSpeedConfigError(
            f"config is a {type(config).__name__}: expected a dict or the path of a JSON file."
        )
    if not Path(config).is_file():
        raise FileNotFoundError(
            f"there is no DeepSpeed configuration at {os.fspath(config)!r}: expected a JSON file, or"
            " a dict."
        )
    text = Path(config).read_text(encoding="utf-8")
    try:
        tree = parse_json(text, _once)
    except json.JSONDecodeError as error:
        tree = _hjson(text, f"{config} is not JSON: {error}")
    if not isinstance(tree, dict):
        raise DeepSpeedConfigError(
            f'{config} holds a {type(tree).__name__}: expected an object, such as {{"bf16":'
            ' {"enabled": true}}.'
        )
    return tree


def _hjson(text: str, said: str) -> Any:
    """Parse JSON as people write it, with comments and without quotes."""
    try:
        import hjson
    except ImportError:
        raise DeepSpeedConfigError(f"{said}. To read it as Hjson: pip install hjson.") from None
    try:
        return hjson.loads(text, object_pairs_hook=_once)
    except (hjson.HjsonDecodeError, RecursionError) as error:
        raise DeepSpeedConfigError(f"{said}. Nor is it Hjson: {error}.") from None


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise DeepSpeedConfigError(f"the configuration has {name!r} twice in one object.")
        tree[name] = value
    return tree


def read(config: Any) -> Read:
    """Read a configuration. What is wrong with it is among the outcomes: see `Read.refuse`."""
    given = load(config)
    chosen, wrong = _chosen(given), dict[str, str]()
    while True:
        try:
            root = Root.model_validate(chosen)
            return Read(given, root, list(_outcomes(Root, given, "", wrong)))
        except ValidationError as errors:  # take out what is wrong, and read the rest
            error = errors.errors()[0]
            path = [part for part in error["loc"] if isinstance(part, str)]
            said = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
            if error["type"] == "missing":
                said = f"expected an object with {path.pop()!r}"
            if not path:  # a key that is no text
                raise DeepSpeedConfigError(f"a key of the configuration: {said}.") from None
            place = chosen
            for part in path[:-1]:
                place = place[part]
            del place[path[-1]]
            wrong[".".join(path)] = f"{said}."


def _chosen(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without what nobody has chosen."""
    return {
        key: _chosen(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if not is_unset(value)
    }


def is_unset(value: Any) -> bool:
    """Whether nobody has chosen a value: it is None or "auto"."""
    return value in (None, "auto")


def _keys(section: type[Section]) -> dict[str, FieldInfo | Inert | Later]:
    """Return the fields of a section by every name that a file may give them, and the marks of keys
    that nothing reads.
    """
    found: dict[str, FieldInfo | Inert | Later] = {
        key: mark for mark, names in section.unread.items() for key in names.split()
    }
    for name, field in section.model_fields.items():
        alias = field.validation_alias
        for key in alias.choices if isinstance(alias, AliasChoices) else (name,):
            found[str(key)] = field
    return found


def _inside(field: Any) -> type[Section] | None:
    """Return the section that is the value of a field, or None."""
    kind = getattr(field, "annotation", None)
    kinds = (kind, *get_args(kind))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def _outcomes(
    section: type[Section], tree: Mapping[str, Any], prefix: str, wrong: Mapping[str, str]
) -> Iterator[Outcome]:
    fields = _keys(section)
    for key, value in tree.items():
        path, field = f"{prefix}{key}", fields.get(key)
        inner = _inside(field)
        marks = field.metadata if isinstance(field, FieldInfo) else [field]
        mark = next((m for m in marks if isinstance(m, (Inert, Later))), None)
        why = "" if mark is None else mark.why
        if path in wrong:
            yield Outcome(path, value, "refused", wrong[path])
        elif isinstance(value, Mapping) and inner is not None:
            yield from _outcomes(inner, value, f"{path}.", wrong)
        elif field is None and section is not Params:
            hint = _meant(key, fields)
            yield Outcome(path, value, "refused" if hint else "unknown", hint)
        elif is_unset(value):
            yield Outcome(path, value, "auto", why)
        elif isinstance(mark, Later) and _asks(value, mark.upto):
            why = f"it asks for something that Onefold does not do: {why}."
            yield Outcome(path, value, "refused", why, later=True)
        else:
            yield Outcome(path, value, "served" if mark is None else "inert", why)


def _meant(key: str, fields: Iterable[str]) -> str:
    """Return which key of a section an unknown one misspells; "" if none, or for a comment."""
    if key.startswith(("_", "#", "/")) or key.lower() in ("comment", "comments"):
        return ""
    near = difflib.get_close_matches(key.lower(), fields, 1, cutoff=0.8)
    return f"there is no such key; did you mean {near[0]!r}?" if near else ""


def _asks(value: Any, upto: float) -> bool:
    """Whether the value of a `Later` key asks for something. An empty section, "enabled": false, and
    a section of which no entry asks do not.
    """
    if isinstance(value, Mapping):
        if "enabled" in value:
            return _asks(value["enabled"], 0)
        return any(_asks(inner, upto) for inner in value.values())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value > upto
    return bool(value) and not is_unset(value)
