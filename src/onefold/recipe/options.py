"""An option of a recipe, and the checks of single values. The options themselves are the fields of
`Recipe` (recipe/core.py), where combinations are checked.

    field ─► argument of `Recipe` and `Recipe.zero`, with the check of its value
          ─► --option, with its help           `onefold train`, `onefold plan` (cli/options.py)
          ─► key of a configuration file       `onefold train --config` (train/config.py)
          ─► the tables of docs/options.md     `make options` (tests/recipe/test_options.py)

Neither module imports torch, so that the command line can report a misspelt option at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from onefold.wording import did_you_mean

Stage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16", "fp16"]
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
WireCodec = Literal["int8", "int4"]
FrozenCodec = Literal["int8", "nf4"]
Moments = Literal["fp32", "bf16", "int8", "int4"]
OffloadTier = Literal["cpu", "nvme"]
Folder = str | os.PathLike[str]
Check = Callable[[Any], Any]

#: A budget in bytes that nothing exceeds.
UNLIMITED = 1 << 62
#: Offsets and lengths of direct reads and writes must be multiples of this many bytes. Lengths in
#: elements are multiples of the same number, which holds in bytes for every dtype.
SECTOR = 4096
#: The largest count of anything: products of two counts fit in 64 bits.
MOST = (1 << 31) - 1

_BYTES = {
    f"{letter}{i}": base**n
    for i, base in (("", 1000), ("I", 1024))
    for n, letter in enumerate("KMGT", 1)
}
#: What people write for a value.
_MEANT = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "host": "cpu",
}

# -- checks: return the value as the recipe keeps it, or raise a ValueError with what was expected.
# What a recipe keeps is taken again as it is.


def number(least: float, most: float, what: str, whole: bool = True) -> Check:
    """A check for a number from `least` to `most`; `what` says so."""

    def check(value: Any) -> Any:
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise ValueError(f"expected {what}.")
        return value

    return check


def one_of(kind: Any) -> Check:
    """A check by type: a Literal, bool, None, or int (a number of ranks), alone or in a union."""
    parts = _parts(kind)
    names = [name for part in parts for name in typing.get_args(part)]
    kinds = {part for part in parts if isinstance(part, type)}
    words = list(map(repr, names))
    words += ["a number of ranks"] if int in kinds else []
    words += ["True", "False"] if bool in kinds else []
    words += ["None"] if type(None) in kinds else []

    def check(value: Any) -> Any:
        named = type(value) in (str, int) and value in names
        if named or (type(value) in kinds and (type(value) is not int or 0 < value <= MOST)):
            return value
        word, colon, _ = str(value).removeprefix("torch.").lower().partition(":")
        meant = _MEANT.get(word, word)
        hint = f" Did you mean {meant!r}?" if meant in names else ""
        hint += " How much of it is offload_amount." if colon else ""
        raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}.{hint}")

    return check


def _parts(kind: Any) -> tuple[Any, ...]:
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if union else (kind,)


def size(value: Any) -> int:
    """Bytes: a number, or a text such as "6GB" (10^9 each) or "6GiB" (2^30 each)."""
    amount = value
    if isinstance(value, str):
        text = r"([0-9]+(?:\.[0-9]+)?(?:E[0-9]+)?)\s*(?:([KMGT]I?)?B)?"
        found = re.fullmatch(text, value.strip().upper())
        amount = float(found[1]) * _BYTES.get(found[2], 1) if found is not None else None
    if (
        isinstance(amount, bool)
        or not isinstance(amount, (int, float))
        or not 1 <= amount < math.inf
        or (amount > UNLIMITED and not isinstance(value, str))
    ):
        raise ValueError("expected a number of bytes above 0, or a text such as '6GB' or '512MiB'.")
    return int(min(amount, UNLIMITED))


def share_or_size(value: Any) -> float | int | None:
    """A share of the states (a float of at most 1), or bytes of each rank."""
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and 0 < value <= 1:
        return float(value)
    if (size(value) if isinstance(value, str) else number and value) >= 1000:
        return size(value)
    raise ValueError("expected a share above 0 and at most 1, or a budget such as '6GB'.")


def room(value: Any) -> int | None:
    """Bytes, "cpu" for as much as there is, or None."""
    if value is None or value == "cpu":
        return None if value is None else UNLIMITED
    return size(value)


def listed(kinds: tuple[type, ...], expected: str, *others: bool, alone: bool = False) -> Check:
    """A check for a list of such values, kept as a tuple; for one of them, if it may stand `alone`; for
    None; and for `others`. `expected` says so. A set has no order, and the ranks must agree on one.
    """

    def check(value: Any) -> Any:
        if value is None or any(value is other for other in others):
            return value
        some = (value,) if alone and isinstance(value, kinds) else value
        if not isinstance(some, (list, tuple)) or (not some and alone):
            raise ValueError(f"expected {expected}.")
        if not all(isinstance(one, kinds) and one for one in some):
            raise ValueError(f"expected {expected}.")
        return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in some)

    return check


unit_names = listed(
    (str, type), "a list of module names or classes, in the same order on every rank"
)
folders = listed(
    (str, os.PathLike),
    "a folder on the disk to use, or a list of folders on different disks",
    alone=True,
)
whole_groups = listed(
    (str,),
    "True, False, None, or a list of patterns of parameter names, such as ['*.q_proj.weight']",
    *(True, False),
)


def bytes_of(name: str, value: Any) -> int:
    """Return the bytes of a number or of a text such as "6GB" (10^9 each) or "6GiB" (2^30 each).
    `name` is for the message.

    Raises:
        ValueError: it is neither, or not above 0.
    """
    try:
        return size(value)
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


# -- an option -------------------------------------------------------------------------------------


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the values of a Literal type, alone or with None; () for every other type."""
    parts = [part for part in _parts(kind) if part is not type(None)]
    found = parts[0] if len(parts) == 1 else None
    return typing.get_args(found) if typing.get_origin(found) is Literal else ()


@dataclass(frozen=True)
class Option:
    """One row of the table.

    Attributes:
        name: the argument of `Recipe.zero`, and the key in a configuration file.
        type, default: as a caller gives it; a default of ... is none.
        check: returns a value as the recipe keeps it, or raises ValueError with what was expected.
        help: a sentence, for --help and docs/options.md.
        panel: the heading under which the option is shown.
        commands: the commands of `onefold` that have it.
    """

    name: str
    type: Any
    default: Any
    check: Check
    help: str
    panel: str
    commands: Sequence[str]

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def repeated(self) -> bool:
        """Whether the option may be given several times on the command line."""
        return self.check is folders

    @property
    def optional(self) -> bool:
        return type(None) in typing.get_args(self.type)

    def read(self, value: Any) -> Any:
        """Return the value as the recipe keeps it.

        Raises:
            ValueError: the value is invalid; the message has the option and what was expected.
        """
        try:
            return self.check(value)
        except ValueError as error:
            raise ValueError(f"{self.name}={value!r}: {error}") from None

    def of_text(self, value: Any) -> Any:
        """Convert a value from a command line or a configuration file to one that `Recipe.zero`
        takes.

        "none" becomes None. Values that are not text stay as they are.

        Raises:
            ValueError: the value is invalid; the message has what was expected.
        """
        if isinstance(value, str):
            text, kinds = value.strip(), _parts(self.type)
            if text == "none" and self.optional:
                value = None
            elif {int, float} & set(kinds):
                with contextlib.suppress(ValueError):
                    value = json.loads(text)  # a number; a check refuses all else
            elif self.repeated:
                value = (value,)
            elif self.check is unit_names:
                value = [part.strip() for part in text.split(",") if part.strip()]
        elif isinstance(value, (list, tuple)) and not value and self.optional:
            value = None
        try:
            self.check(value)
        except ValueError as error:
            raise ValueError(str(error).replace("None", "none")) from None
        return tuple(value) if isinstance(value, list) else value


#: Options that are gone, and what to write instead.
GONE = {
    "error_feedback": "leave it out",
    "wire_rounding": "leave it out: encoded gradients are rounded to the nearest value",
    "rounding_seed": "leave it out: random bits depend on the step and the element",
    "borders": "leave it out",
    "tile": "call onefold.tiling.tile_linears(model, size) before shard()",
    "gradients": "write reduce_op",
    "overlap": "write prefetch=0, in_flight=0",
    "elementwise_optimizer": "write whole=False",
}


def refuse_unknown(asker: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError if a name in `given` is unknown, with the one that was probably meant."""
    if unknown := sorted(set(given) - set(known)):
        if unknown[0] in GONE:
            raise ValueError(f"{asker} has no {unknown[0]} any more: {GONE[unknown[0]]}.")
        raise ValueError(
            f"{asker} does not know {', '.join(unknown)}. {did_you_mean(unknown[0], known)}"
        )
