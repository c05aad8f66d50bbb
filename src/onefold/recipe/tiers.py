"""Where state rests: the options of `Recipe.zero` that name tiers, read into the recipe's fields.

| option                | may be                                                                     | becomes                            |
|-----------------------|----------------------------------------------------------------------------|------------------------------------|
| offload_optimizer     | "cpu", "nvme", a share (0.6), a budget ("6GB", bytes), ("nvme", of those)  | the optimizer row's tier, the share|
| offload_gradients     | "cpu", "nvme"; None follows the optimizer                                  | the gradient row's tier            |
| offload_param         | "cpu", "nvme"                                                              | the parameter row's tier           |
| offload_activations   | True or "cpu", a budget ("8GB", bytes)                                     | `activations`, bytes               |
| nvme                  | a folder on the disk, or several to stripe over                            | `nvme`                             |
| tile                  | a budget for one gathered weight ("256MB", bytes)                          | `tile`, bytes                      |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onefold.recipe.moments import FORMATS
from onefold.recipe.rows import Placement, Tier

if TYPE_CHECKING:
    from onefold.recipe.core import Recipe

#: The options of the table that are no fields of a recipe.
OPTIONS = frozenset(
    ("offload_optimizer", "offload_gradients", "offload_param", "offload_activations")
)
#: A budget that nothing exceeds, in bytes.
UNLIMITED = 1 << 62
#: Offsets and lengths of direct reads and writes are multiples of this many bytes; so are they in
#: elements, whatever the dtype.
SECTOR = 4096

_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    | {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
)
_NAMES = {"cpu": "host", "host": "host", "nvme": "nvme", "none": "device", "device": "device"}


def bytes_of(name: str, value: Any) -> int:
    """A number of bytes, or a text such as "6GB" (10^9 each) or "6GiB" (2^30 each).

    Raises:
        ValueError: it is neither, or not above 0.
    """
    found = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kKmMgGtT]?[iI]?[bB]?)\s*", value)
        if isinstance(value, str)
        else None
    )
    if found is not None and found.group(2).upper() in _UNITS:
        number = int(min(float(found.group(1)) * _UNITS[found.group(2).upper()], float(UNLIMITED)))
    elif (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value == value
        and abs(value) < UNLIMITED
    ):
        number = int(value)
    else:
        raise ValueError(
            f"{name}={value!r}: expected a number of bytes, or a text such as '6GB' or '512MiB'."
        )
    if number <= 0:
        raise ValueError(f"{name}={value!r}: expected more than 0 bytes.")
    return number


def tier_of(name: str, value: Any) -> Tier:
    """The tier that a text names.

    Raises:
        ValueError: it names none.
    """
    if value is None:
        return Tier.DEVICE
    if isinstance(value, Tier):
        return value
    if isinstance(value, str) and value.lower() in _NAMES:
        return Tier(_NAMES[value.lower()])
    raise ValueError(f"{name}={value!r}: expected 'cpu', 'nvme', or None to keep it on the device.")


def read_optimizer(value: Any) -> tuple[Tier, dict[str, Any]]:
    """`offload_optimizer` as a tier and the recipe's fields for how much of the states goes
    there.
    """
    name = "offload_optimizer"
    if (
        value is None
        or isinstance(value, Tier)
        or (isinstance(value, str) and value.lower() in _NAMES)
    ):
        return tier_of(name, value), {}
    tier, amount = Tier.HOST, value
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"device", "share", "bytes"})
        if unknown or ("share" in value and "bytes" in value):
            raise ValueError(
                f"{name}={value!r}: expected the keys 'device' and either 'share' or 'bytes'."
            )
        tier = tier_of(f"{name}['device']", value.get("device", "cpu"))
        amount = value.get("share", value.get("bytes"))
        if amount is None:
            return tier, {}
    elif isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(
                f"{name}={value!r}: expected a tier and a share or a budget, such as ('nvme', 0.6)."
            )
        tier, amount = tier_of(name, value[0]), value[1]
    if isinstance(amount, str) and re.fullmatch(r"0?\.[0-9]+|1\.0+", amount):
        amount = float(amount)  # a share, as text
    if isinstance(amount, bool):
        raise ValueError(
            f"{name}={value!r}: expected 'cpu', 'nvme', a share such as 0.6, or a budget such as"
            " '6GB'."
        )
    if (isinstance(amount, float) and amount <= 1) or amount == 1:
        if not 0 < amount <= 1:
            raise ValueError(
                f"{name}={value!r}: a share lies above 0 and is at most 1; None keeps all on the"
                " device."
            )
        return tier, {"offload_share": float(amount)}
    try:
        return tier, {"offload_bytes": bytes_of(name, amount)}
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}; 'cpu' and 'nvme' take all of it, a number from 0 to 1 a"
            " share."
        ) from None


def read_activations(value: Any) -> int | None:
    """`offload_activations` as bytes of host memory; None is off."""
    if value is None or value is False:
        return None
    if value is True or (isinstance(value, str) and value.lower() in ("cpu", "host")):
        return UNLIMITED
    return bytes_of("offload_activations", value)


def read_folders(value: Any) -> tuple[str, ...]:
    """`nvme` as a tuple of folders."""
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
        f"nvme={value!r}: expected a folder on the disk to use, or a list of folders on different"
        " disks."
    )


def read_tiers(options: dict[str, Any]) -> tuple[dict[str, Tier], dict[str, Any]]:
    """Take the options of this module's table out of `options`: the rows' tiers, and other fields
    of the recipe.

    Raises:
        ValueError: one has a value that it cannot have.
    """
    optimizer, fields = read_optimizer(options.pop("offload_optimizer", None))
    gradients, parameters = (
        options.pop("offload_gradients", None),
        options.pop("offload_param", None),
    )
    rows = {
        "parameters": tier_of("offload_param", parameters),
        "gradients": optimizer if gradients is None else tier_of("offload_gradients", gradients),
        "optimizer": optimizer,
    }
    if "offload_activations" in options:
        fields["activations"] = read_activations(options.pop("offload_activations"))
    if "nvme" in options:
        fields["nvme"] = read_folders(options.pop("nvme"))
    if options.get("tile") is not None:
        fields["tile"] = bytes_of("tile", options.pop("tile"))
    return rows, fields


def check_tiers(recipe: Recipe) -> None:
    """Raise ValueError for rows whose tiers cannot go together, or for options of tiers with a
    value they cannot have.
    """
    p, g, o = recipe.parameters.tier, recipe.gradients.tier, recipe.optimizer.tier
    if p is not Tier.DEVICE and recipe.parameters.placement is not Placement.SHARDED:
        raise ValueError(
            f"the parameters row rests on {p.value!r} but is replicated: every rank computes from"
            " all of it all the time. Shard the parameters (stage 3), or leave offload_param out."
        )
    if p is Tier.NVME and o is not Tier.NVME:
        raise ValueError(
            "parameters on NVMe with optimizer states elsewhere would keep three times as many"
            " bytes in the faster memory: give offload_optimizer='nvme' too."
        )
    if (o is Tier.DEVICE) != (g is Tier.DEVICE) or (g is Tier.NVME and o is not Tier.NVME):
        raise ValueError(
            f"gradients rest on {g.value!r} and the optimizer's states on {o.value!r}: gradients go"
            " where the states are stepped (both 'device', both 'host'; states on 'nvme' take"
            " gradients on 'nvme' or 'host')."
        )
    if Tier.NVME in (p, g, o) and not recipe.nvme:
        raise ValueError(
            "the recipe keeps state on NVMe but names no folder: give nvme='/path/on/the/disk', or"
            " a list of such."
        )
    share, budget = recipe.offload_share, recipe.offload_bytes
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"offload_share={share!r}: expected a share above 0, at most 1.")
    if budget is not None and (
        isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0
    ):
        raise ValueError(f"offload_bytes={budget!r}: expected a number of bytes above 0, or None.")
    for name in ("activations", "tile"):
        value = getattr(recipe, name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value <= 0
        ):
            raise ValueError(f"{name}={value!r}: expected a number of bytes above 0, or None.")
    if (
        isinstance(recipe.chunk, bool)
        or not isinstance(recipe.chunk, int)
        or recipe.chunk < 16 * SECTOR
        or recipe.chunk % SECTOR
    ):
        raise ValueError(
            f"chunk={recipe.chunk!r}: expected a number of elements, a multiple of {SECTOR} from"
            f" {16 * SECTOR} up."
        )
    if (
        o is Tier.NVME
        and recipe.moments is not None
        and (most := FORMATS[recipe.moments].block * SECTOR // 4)
        and recipe.chunk % most
    ):
        raise ValueError(
            f"chunk={recipe.chunk}: with moments={recipe.moments!r} on NVMe it has to be a multiple"
            f" of {most} elements, whose scales fill whole sectors of {SECTOR} bytes."
        )
    threads = recipe.nvme_threads
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 64:
        raise ValueError(f"nvme_threads={threads!r}: expected a number of threads from 1 to 64.")
    if recipe.step_in_backward and o is Tier.DEVICE:
        raise ValueError(
            "step_in_backward=True steps offloaded states behind the backward pass;"
            " offload_optimizer says where they are."
        )


def of_tiers(recipe: Recipe) -> list[str]:
    """What a user should know about where the recipe's rows rest."""
    if recipe.parameters.tier is not Tier.DEVICE and recipe.optimizer.tier is Tier.DEVICE:
        return [
            f"offload_param={recipe.parameters.tier.value!r} without offload_optimizer moves frozen"
            " parameters only: trained ones are gathered from their master weights, which stay on"
            " the device."
        ]
    return []


def without_tiers(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, str]:
    """Why an option of `given` that is about tiers changes nothing in this recipe."""
    p, o = recipe.parameters.tier, recipe.optimizer.tier
    said = {}
    if o is Tier.DEVICE:
        said = {
            name: "without offload_optimizer"
            for name in ("offload_share", "offload_bytes")
            if given.get(name) not in (None, 1.0)
        }
    if Tier.NVME not in (p, o):
        said |= {
            name: "where no state rests on NVMe"
            for name in ("nvme", "chunk", "nvme_threads")
            if given.get(name)
        }
    return said
