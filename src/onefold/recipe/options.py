"""The options: each is declared once, as a field of `ZeroOptions` or, if a recipe keeps it as it is
given, of `EngineOptions`.

    field ─► the signature of `Recipe.zero`, and the fields of `Recipe`
          ─► the check of the value          `Recipe.zero`, a recipe made row by row, `Recipe.replace`
          ─► --option, with its help           `onefold train`, `onefold plan` (cli/options.py)
          ─► key of a configuration file       `onefold train --config` (train/config.py)
          ─► the tables of docs/options.md     `make options` (tests/recipe/test_options.py)

Single values are checked here, combinations in recipe/checks.py. This module does not import torch,
so that the command line can report a misspelt option at once.
"""

from __future__ import annotations

import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from onefold.recipe.rows import FLAT
from onefold.recipe.tiers import RowName, Tier, by_option
from onefold.wording import did_you_mean

Stage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16", "fp16"]
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
ReduceAt = Literal["micro-batch", "boundary"]
WireCodec = Literal["int8", "int4"]
FrozenCodec = Literal["int8", "nf4"]
Moments = Literal["fp32", "bf16", "int8", "fp8", "int4"]
Sums = Literal["ordered", "native"]
OffloadTier = Literal["cpu", "nvme"]
Group = int | Literal["node", "flat"]
ShardGroup = int | Literal["node"]
Folder = str | os.PathLike[str]
Folders = Folder | Sequence[Folder]

#: A budget in bytes that nothing exceeds.
UNLIMITED = 1 << 62
#: Offsets and lengths of direct reads and writes must be multiples of this many bytes. Lengths in
#: elements are multiples of the same number, which holds in bytes for every dtype.
SECTOR = 4096
#: The largest count of anything: products of two counts fit in 64 bits.
MOST = (1 << 31) - 1

_BYTES = (
    {"": 1, "B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    | {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
)


# -- checks: return the value as the recipe keeps it, or raise a ValueError with what was expected -


def _whole(least: float, most: float, expected: str) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"expected {expected}.")
        return value

    return check


def _one_of(kind: Any, expected: str = "") -> Callable[[Any], Any]:
    """Return a check for a Literal, alone or with None."""
    names, optional = choices_of(kind), type(None) in typing.get_args(kind)
    quoted = list(map(repr, names))
    if not expected:
        expected = (
            f"one of {', '.join(quoted)}, or None"
            if optional
            else f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        )

    def check(value: Any) -> Any:
        if not (value is None and optional) and not (
            isinstance(value, (str, int)) and not isinstance(value, bool) and value in names
        ):
            raise ValueError(f"expected {expected}.{_dtype_meant(value, names)}")
        return value

    return check


def _dtype_meant(value: Any, names: Collection[Any]) -> str:
    """Return "Did you mean ...?" for a dtype by torch's name; "" if there is nothing to suggest."""
    theirs = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    meant = theirs.get(str(value).removeprefix("torch."))
    return f" Did you mean {meant!r}?" if meant in names else ""


def _dtype(kind: Any, whose: str = "") -> Callable[[Any], Any]:
    names = ", ".join(choices_of(kind))
    optional = type(None) in typing.get_args(kind)
    return _one_of(kind, f"one of {names}" + (f", or None: {whose}" if optional else ""))


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected True or False.")
    return value


def _buffers(value: Any) -> Any:
    if not (isinstance(value, bool) or value == "norms"):
        raise ValueError("expected True (all, as DDP), 'norms' (running statistics) or False.")
    return value


def _word(value: Any) -> bool | None:
    if not (value is None or isinstance(value, bool)):
        raise ValueError("expected True, or None or False to try the optimizer.")
    return value


def _whole_groups(value: Any) -> bool | tuple[str, ...] | None:
    if value is None or isinstance(value, bool):
        return value
    if (
        isinstance(value, str)
        or not isinstance(value, (list, tuple))
        or not all(isinstance(pattern, str) for pattern in value)
    ):
        raise ValueError(
            "expected True, False, None, or a list of patterns of parameter names, such as"
            " ['*.q_proj.weight']."
        )
    return tuple(value)


def _seconds(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < 1e9  # NaN is neither; 30 years
    ):
        raise ValueError("expected a finite number of seconds above 0, and below 1e9.")
    return value


def _units(value: Any) -> tuple[str | type, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, type)):
        raise ValueError(f"expected a list of module names or classes, such as [{value!r}].")
    if not isinstance(value, (list, tuple)):  # a set has no order, and the ranks must agree on one
        raise ValueError(
            "expected a list or tuple of module names or classes, in the same order on every rank."
        )
    wrong = [unit for unit in value if not isinstance(unit, (str, type))]
    if wrong:
        raise ValueError(f"expected module names or classes, and {wrong[0]!r} is neither.")
    return tuple(value)


def _group(value: Any) -> Any:
    if value in (None, "node", FLAT) or _is_size(value):
        return value
    raise ValueError(
        "expected None or 'node' (the launcher's nodes), 'flat' (no groups) or the number of ranks"
        " of a group, 1 or more."
    )


def _shard_group(value: Any) -> Any:
    if value in (None, "node") or _is_size(value):
        return value
    why = ", since state is divided inside each group" if value == FLAT else ""
    raise ValueError(f"expected 'node' or the number of ranks of a group, 1 or more{why}.")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST


def _tier_of(row: RowName) -> Callable[[Any], Tier]:
    """Return a check for the tier of a row."""
    return lambda value: _tier(row, value)


def _tier(row: RowName, value: Any) -> Tier:
    if value is None:
        return Tier.DEVICE
    known = by_option(row)
    if isinstance(value, str) and value in known:
        return known[value]
    raise ValueError(
        f"expected {', '.join(map(repr, known))}, or None to keep it on the"
        f" device.{_tier_meant(row, value)}"
    )


def _tier_meant(row: RowName, value: Any) -> str:
    """Return "Did you mean ...?" for a tier by another name; "" if there is nothing to suggest."""
    name = str(getattr(value, "value", value)).lower()
    meant: dict[str, str | None] = {"none": None}
    for tier in Tier:
        if row in tier.holds:
            meant |= {tier.value: tier.option, str(tier.option).lower(): tier.option}
    return f" Did you mean {meant[name]!r}?" if name in meant else ""


_STATES: RowName = "optimizer"


def _optimizer_tier(value: Any) -> tuple[Tier, float, int | None]:
    """Return `offload_optimizer` as (tier, share of the states, budget in bytes or None)."""
    known = list(by_option(_STATES))
    if value is None or (isinstance(value, str) and value in known) or _tier_meant(_STATES, value):
        return _tier(_STATES, value), 1.0, None
    if isinstance(value, (tuple, list)) and len(value) == 2:
        raise ValueError(f"expected a tier and an amount in one text: '{value[0]}:{value[1]}'.")
    if isinstance(value, Mapping):
        amount = value.get("share", value.get("bytes", 0.6))
        raise ValueError(
            "expected a tier, an amount, or both in one text:"
            f" '{value.get('device', 'cpu')}:{amount}'."
        )
    tier, amount = Tier.HOST, value
    if isinstance(value, str):
        name, colon, rest = value.partition(":")
        tier, amount = (_tier(_STATES, name.strip()), rest) if colon else (tier, value)
        amount = _number(amount.strip())
    if isinstance(amount, bool):
        raise ValueError(
            f"expected {', '.join(map(repr, known))}, a share such as 0.6, or a budget such as '6GB'."
        )
    if (isinstance(amount, float) and amount <= 1) or amount == 1:
        if not 0 < amount <= 1:
            raise ValueError("a share lies above 0 and is at most 1; None keeps all on the device.")
        return tier, float(amount), None
    if isinstance(amount, int | float) and 1 < amount < 1000:
        raise ValueError(
            f"{amount:g} is above 1, so it is no share, and it is too small for a number of bytes:"
            f" write the unit, such as '{amount:g}GB', or a share from 0 to 1."
        )
    try:
        return tier, 1.0, _size(amount)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; {_and(map(repr, known))} take all of it, a number from 0 to 1 a"
            " share."
        ) from None


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _number(text: str) -> Any:
    """Parse a number: 0.6 and 1 (shares) as floats, 6000000000 (bytes) as int. Other text (6GB) is
    returned unchanged.
    """
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number > 1 and number.is_integer() else number


def _size(value: Any) -> int:
    found = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kKmMgGtT]?[iI]?[bB]?)\s*", value)
        if isinstance(value, str)
        else None
    )
    if found is not None and found.group(2).upper() in _BYTES:
        number = int(min(float(found.group(1)) * _BYTES[found.group(2).upper()], float(UNLIMITED)))
    elif (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value == value
        and abs(value) <= UNLIMITED
    ):
        number = int(value)
    else:
        raise ValueError("expected a number of bytes, or a text such as '6GB' or '512MiB'.")
    if number <= 0:
        raise ValueError("expected more than 0 bytes.")
    return number


def _on_the_host(value: Any) -> int | None:
    if isinstance(value, bool):
        raise ValueError("expected 'cpu' for as much as it takes, a budget such as '8GB', or None.")
    if value is None:
        return None
    return UNLIMITED if value == "cpu" else _size(value)


def _folders(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return (os.fspath(value),)
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(v, (str, os.PathLike)) and os.fspath(v) for v in value)
    ):
        return tuple(os.fspath(v) for v in value)
    raise ValueError(
        "expected a folder on the disk to use, or a list of folders on different disks."
    )


def _chunk(value: Any) -> int:
    if not _is_size(value) or value < 16 * SECTOR or value % SECTOR:
        raise ValueError(
            f"expected a number of elements, a multiple of {SECTOR} from {16 * SECTOR} up."
        )
    return int(value)


def bytes_of(name: str, value: Any) -> int:
    """Return the bytes of a number or of a text such as "6GB" (10^9 each) or "6GiB" (2^30 each).
    `name` is for the message.

    Raises:
        ValueError: it is neither, or not above 0.
    """
    try:
        return _size(value)
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


# -- the table -------------------------------------------------------------------------------------


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the values of a Literal type, alone or with None; () for every other type."""
    parts = [kind]
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
    found = parts[0] if len(parts) == 1 else None
    return typing.get_args(found) if typing.get_origin(found) is Literal else ()


@dataclass(frozen=True)
class Option:
    """One row of the table.

    Attributes:
        name: the argument of `Recipe.zero`, and the key in a configuration file.
        type, default: as in the signature of `Recipe.zero`.
        check: returns a value as the recipe keeps it, or raises ValueError with what was expected.
        help: a sentence, for --help and docs/options.md.
        panel: the heading under which the option is shown.
        commands: the commands of `onefold` that have it.
    """

    name: str
    type: Any
    default: Any
    check: Callable[[Any], Any]
    help: str
    panel: str = ""
    commands: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def repeated(self) -> bool:
        """Whether the option may be given several times on the command line."""
        return self.check is _folders

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
        kinds = typing.get_args(self.type) or (self.type,)
        if isinstance(value, str):
            text = value.strip()
            if text == "none" and self.optional:
                value = None
            elif text.isdecimal() and (int in kinds or float in kinds):
                value = int(text)
            elif float in kinds:
                value = _number(text)
            elif self.repeated:
                value = (value,)
            elif self.check is _units:
                value = [part.strip() for part in text.split(",") if part.strip()]
        elif isinstance(value, (list, tuple)) and not value and self.optional:
            value = None
        try:
            self.check(value)
        except ValueError as error:
            raise ValueError(str(error).replace("None", "none")) from None
        return tuple(value) if isinstance(value, list) else value


_BOTH, _TRAIN, _PLAN = ("train", "plan"), ("train",), ("plan",)
DIVISION, NODES, TIERS, ENGINE = (
    "How it is divided among the ranks",
    "Between nodes, where links are slow",
    "Where state is stored",
    "How the engine works",
)


def _row(
    panel: str,
    help: str,
    commands: tuple[str, ...] = _BOTH,
    check: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Return what a field of the classes below says of its option. Without `check` its type says
    which values it takes.
    """
    return {"panel": panel, "help": help, "commands": commands, "check": check}


def _option(panel: str, default: Any, *of_row: Any, **more: Any) -> Any:
    """Return such a field with a default."""
    return field(default=default, metadata=_row(panel, *of_row, **more))


_division, _nodes, _tiers, _engine = (
    functools.partial(_option, panel) for panel in (DIVISION, NODES, TIERS, ENGINE)
)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options that a recipe keeps as they are given: they are fields of `Recipe` too."""

    reduce_at: ReduceAt | None = _division(None, "When stages 2 and 3 reduce gradients (default: every micro-batch).")

    group: Group | None = _nodes(None, "Ranks of a group; gathers and reductions are intra-group, then inter-group: node (the launcher's),"
        " a number of ranks, or flat: no groups (default: node where there are several).", check=_group)
    reduce: Sums | None = _nodes(None, "Who adds gradients up: ordered, with the same bits at every stage; native, the backend (not gloo)"
        " (default: ordered; native where every rank sends to every other over nodes of several ranks).",
        check=_one_of(Sums | None, "'ordered' or 'native'"))
    frozen: FrozenCodec | None = _nodes(None, "Format in which frozen matrices are stored and sent (nf4 under adapters: QLoRA); stage 3.")

    nvme_threads: int = _tiers(4, "Concurrent transfers to and from the disk.", (), _whole(1, 64, "a number of threads from 1 to 64"))
    chunk: int = _tiers(1 << 21, "With states on NVMe: elements stepped at a time.", (), _chunk)
    moments: Moments | None = _tiers(None, "Format in which Adam's moments are stored, on any tier (default: as torch makes them);"
        " int8, fp8 and int4 need torchao.")
    stochastic_rounding: bool = _tiers(False, "Round moments and masters to bf16 stochastically: unbiased.", _TRAIN)
    step_in_backward: bool = _tiers(False, "Step offloaded units in the backward pass; nothing may look at gradients before the step.")

    reshard_after_forward: bool = _engine(True, "Drop sharded parameters after the forward pass and gather them again in backward.", ())
    prefetch: int = _engine(1, "Units gathered ahead of their use (above 1 GiB together: one).", (),
        _whole(0, math.inf, "a whole number of units, 0 or more"))
    in_flight: int = _engine(2, "Reductions under way while the backward pass goes on (above 1 GiB together, sent and received: one).", (),
        _whole(0, math.inf, "a whole number of units, 0 or more"))
    overlap: bool = _engine(True, "False: no prefetch and nothing in flight, for debugging; the same bits.", ())
    cast_inputs: bool = _engine(True, "Cast floating-point inputs to the precision that is named.", ())
    sync_buffers: bool | Literal["norms"] = _engine(True,
        "Buffers that become rank 0's before a forward pass, when DDP would send them: all, those of norms, or none.", (), _buffers)
    elementwise_optimizer: bool | None = _engine(None,
        "Assert that the optimizer treats every element alike, where a trial cannot tell (default: it is tried).", (), _word)
    whole: bool | Sequence[str] | None = _engine(None,
        "Which parameter groups are stepped as whole matrices, each by one owner: True for all, False for none, or patterns of"
        " names for the groups of such parameters (default: those of Muon, Adafactor, LAMB, LARS, SOAP, Shampoo and their like).",
        (), _whole_groups)
    stall_timeout: float = _engine(300.0, "Seconds a rank waits for the others before every rank gets an error.", _TRAIN, _seconds)


@dataclass(frozen=True, kw_only=True)
class ZeroOptions(EngineOptions):
    """All arguments of `Recipe.zero`. From those of this class it makes rows and other fields."""

    stage: Stage | int = field(kw_only=False, metadata=_row(DIVISION, "ZeRO stage: what is divided among the ranks; 0 is DDP.",
        check=_one_of(Stage, "0, 1, 2 or 3")))
    precision: Precision | None = _division(None,
        "Compute precision (default: as the model is). Master weights and sums are fp32 either way.",
        check=_dtype(Precision | None, "as the model is"))
    wire: Dtype | None = _division(None, "Dtype in which gradients are sent (default: as the backward pass makes them).", (),
        _dtype(Dtype | None, "as the backward pass makes them"))
    master_dtype: Dtype = _division("fp32", "Dtype of the weights that the optimizer steps.", (), _dtype(Dtype))
    accumulate_dtype: Dtype = _division("fp32", "Dtype in which gradients are summed and stored.", _PLAN, _dtype(Dtype))
    gradients: Literal["mean", "sum"] = _division("mean",
        "What a gradient is of those that ranks with different data have: their mean, or their sum (for losses that are"
        " divided by the number of tokens on all ranks).", (), _one_of(Literal["mean", "sum"], "'mean' or 'sum'"))
    units: Sequence[str | type] | None = _division(None,
        "Modules that become units, by name or class, comma separated (default: the repeated block).", _TRAIN, _units)

    shard_group: ShardGroup | None = _nodes(None,
        "HSDP, MiCS: divide state within such groups only, and sum gradients over the groups once a step.", check=_shard_group)
    optimizer_over: Literal["all"] | None = _nodes(None,
        "With a shard group: divide optimizer states over all ranks nevertheless; stage 3.",
        check=_one_of(Literal["all"] | None, "'all', or None for the shard_group"))
    second_copy: bool = _nodes(False,
        "ZeRO++ hpZ: a second copy of the parameters, sharded within each group, to gather from; renewed once a step; stage 3.")
    gather_codec: WireCodec | None = _nodes(None, "ZeRO++ qwZ: the format in which parameters are sent; stage 3.")
    reduce_codec: WireCodec | None = _nodes(None, "ZeRO++ qgZ: the format in which gradients are sent; they are summed in fp32.")

    offload_optimizer: str | float | None = _tiers(None,
        f"Where masters and moments are stored: {', '.join(by_option(_STATES))}, a share on the host (0.6), a budget there (6GB),"
        " or both: nvme:0.6.",
        check=_optimizer_tier)
    offload_gradients: OffloadTier | None = _tiers(None, "Where gradients wait for the step (default: with the optimizer).",
        check=_tier_of("gradients"))
    offload_param: OffloadTier | None = _tiers(None, "Where parameters are stored between uses; stage 3 only.",
        check=_tier_of("parameters"))
    offload_activations: str | int | None = _tiers(None,
        "Host memory for activations between forward and backward: cpu for as much as it takes, or a budget (8GB).", check=_on_the_host)
    nvme: Folders | None = _tiers(None, "Folder on the disk for state on NVMe; data is striped over several.", check=_folders)
# fmt: on


def _table() -> dict[str, Option]:
    """Return the rows of the table, panel by panel; in each, what makes rows of a recipe first."""
    kinds, found = typing.get_type_hints(ZeroOptions), []
    for one in fields(ZeroOptions):
        row, kind = dict(one.metadata), Stage if one.name == "stage" else kinds[one.name]
        row["check"] = row["check"] or (_switch if kind is bool else _one_of(kind))
        default = ... if one.default is MISSING else one.default
        found.append(Option(one.name, kind, default, **row))
    kept, panels = EngineOptions.__dataclass_fields__, (DIVISION, NODES, TIERS, ENGINE)
    found.sort(key=lambda option: (panels.index(option.panel), option.name in kept))
    return {option.name: option for option in found}


OPTIONS: Mapping[str, Option] = _table()

#: Former names of options, and what to write instead.
FORMER: Mapping[str, str] = {
    "activations": "offload_activations",
    "offload_share": "offload_optimizer=0.6",
    "offload_bytes": "offload_optimizer='6GB'",
}


def refuse_unknown(asker: str, given: Collection[str], known: Collection[str]) -> None:
    """Raise ValueError if a name in `given` is unknown, with the one that was probably meant."""
    for name in sorted(set(given) & set(FORMER) - set(known)):
        raise ValueError(f"{asker}: {name} is now {FORMER[name]}.")
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"{asker} does not know {', '.join(unknown)}. {did_you_mean(unknown[0], known)}"
        )
