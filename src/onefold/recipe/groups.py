"""Which ranks a row is divided among, and how its bytes are written on the wire.

Ranks stand in groups, as a rule the ranks of a node, whose links are faster than those between
nodes. Where the launcher tells of several nodes, everything moves over two levels, inside nodes and
across them: each byte enters a node once. Between every rank and every other ("flat") it would
enter as often as the node has ranks. A row's `over` says what it is divided among: "all" ranks, or
those of each "group", which then has a replica of the row to itself.

| recipe                       | parameters | gradients | optimizer | between groups, a step of m micro-batches          |
|------------------------------|------------|-----------|-----------|----------------------------------------------------|
| ZeRO-3                       | all        | all       | all       | 3mΨ                                                |
| HSDP, MiCS                   | group      | group     | group     | 2Ψ/G, once: gradients reduced                      |
| hybrid optimizer sharding    | group      | group     | all       | 2Ψ/G, once: gradients reduced, parameters gathered |
| second copy (ZeRO++ hpZ)     | group      | all       | all       | Ψ once, and mΨ: gradients                          |

Parameters over a group with an optimizer over all ranks are a second copy: each rank keeps 1/G of
the parameters to gather from, renewed once after each optimizer step.

Options of `Recipe.zero`:

| option           | values                              | what it does                                                                  |
|------------------|-------------------------------------|-------------------------------------------------------------------------------|
| `group`          | None, "node", "flat", ranks of one  | where groups end; None and "node": as the launcher says; "flat": no groups     |
| `shard_group`    | None, "node", ranks of a group      | HSDP and MiCS: all three rows over the group                                   |
| `optimizer_over` | None, "all"                         | with shard_group: the optimizer's states over all ranks                        |
| `second_copy`    | False, True                         | parameters over the group too (stage 3)                                        |
| `gather_codec`   | None, "int8", "fp8", "int4"         | parameters travel encoded (ZeRO++ qwZ)                                        |
| `reduce_codec`   | None, "int8", "fp8", "int4"         | gradients travel encoded, in two hops (ZeRO++ qgZ)                            |
| `frozen`         | None, "int8", "nf4", "int4", "fp8"  | frozen weights rest encoded, and are gathered so (as in QLoRA)                |
| `error_feedback` | False, True                         | what encoding a gradient lost is added to the next one                         |
| `wire_rounding`  | "nearest", "stochastic"             | of encoded gradients                                                           |
| `reduce`         | "ordered", "native"                 | who adds gradients up: Onefold, in rank order and fp32, so that stages agree   |
|                  |                                     | to the bit; or the backend (NCCL), in the dtype of the wire and its own order  |

Sources: Zhao et al. 2023 (PyTorch FSDP, hybrid sharding), Zhang et al. 2022 (MiCS), Wang et al.
2023 (ZeRO++).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.recipe.core import Recipe

#: Arguments of `Recipe.zero` that are columns of its rows; the others of the table are fields.
OPTIONS = frozenset(
    ("shard_group", "optimizer_over", "second_copy", "gather_codec", "reduce_codec")
)
ALL, GROUP = "all", "group"
#: What `group` may say besides a number of ranks.
NODE, FLAT = "node", "flat"
CODECS = ("int8", "fp8", "int4", "nf4")
ROUNDINGS = ("nearest", "stochastic")
ORDERED, NATIVE = "ordered", "native"


def read_groups(
    options: dict[str, Any],
) -> tuple[dict[str, str], dict[str, str | None], dict[str, Any]]:
    """Take the options of this module's table out of those of `Recipe.zero`.

    Returns: (what each row is divided among, the codecs of rows, fields of `Recipe`).

    Raises:
        ValueError: options that contradict each other.
    """
    shard_group, optimizer_over = (
        options.pop("shard_group", None),
        options.pop("optimizer_over", None),
    )
    second_copy = options.pop("second_copy", False)
    codecs = {
        "parameters": options.pop("gather_codec", None),
        "gradients": options.pop("reduce_codec", None),
    }
    fields: dict[str, Any] = {}
    over = {"parameters": ALL, "gradients": ALL, "optimizer": ALL}
    if not isinstance(second_copy, bool):
        raise ValueError(f"second_copy={second_copy!r}: expected True or False.")
    if optimizer_over not in (None, ALL, GROUP):
        raise ValueError(
            f"optimizer_over={optimizer_over!r}: expected 'all', or None for the shard_group."
        )
    if shard_group is not None:
        if shard_group == FLAT:
            raise ValueError(
                "shard_group='flat': state is divided inside each group; expected 'node' or the"
                " number of ranks of a group."
            )
        if options.get("group") not in (None, shard_group):
            raise ValueError(
                f"shard_group={shard_group!r} and group={options['group']!r}: they are the same"
                " groups; give one of them."
            )
        if second_copy:
            raise ValueError(
                "second_copy=True with a shard_group: parameters are divided inside the group"
                " already; leave one of them out."
            )
        over = dict.fromkeys(over, GROUP)
        fields["group"] = shard_group
        if optimizer_over == ALL:
            over["optimizer"] = ALL
    elif optimizer_over is not None:
        raise ValueError(
            f"optimizer_over={optimizer_over!r} needs a shard_group that parameters and gradients"
            " are divided in."
        )
    if second_copy:
        over["parameters"] = GROUP
        if options.get("group") is None:
            fields["group"] = NODE
    return over, codecs, fields


def check_groups(recipe: Recipe) -> None:
    """Raise ValueError for groups and codecs that cannot be, in a sentence that says what to
    change.
    """
    group = recipe.group
    if not (
        group in (None, NODE, FLAT)
        or (isinstance(group, int) and not isinstance(group, bool) and group > 0)
    ):
        raise ValueError(
            f"group={group!r}: expected None or 'node' (the launcher's nodes), 'flat' (no groups)"
            " or the number of ranks of a group."
        )
    rows = {
        "parameters": recipe.parameters,
        "gradients": recipe.gradients,
        "optimizer": recipe.optimizer,
    }
    for name, row in rows.items():
        if row.over not in (ALL, GROUP):
            raise ValueError(f"{name} over={row.over!r}: expected 'all' or 'group'.")
    inside = {name for name, row in rows.items() if row.over == GROUP}
    if inside and group in (None, FLAT):
        has = "has none" if group is None else f"says group={FLAT!r}"
        raise ValueError(
            f"{_and(inside)} divided over a group, but the recipe {has}: give group='node' or a"
            " number of ranks."
        )
    if inside and recipe.optimizer.placement.value == "replicated":
        raise ValueError(
            "at stage 0 nothing is divided, over a group neither: use stage 1, 2 or 3."
        )
    if inside not in (set(), {"parameters"}, {"parameters", "gradients"}, set(rows)):
        raise ValueError(
            f"{_and(inside)} divided over a group and the rest over all ranks: expected all three"
            " rows over the group (HSDP), parameters and gradients (optimizer states over all"
            " ranks), or parameters alone (a second copy)."
        )
    if inside and inside != set(rows) and recipe.parameters.placement.value != "sharded":
        raise ValueError(
            "a second copy, or optimizer states over more ranks than the parameters, needs sharded"
            " parameters: stage 3."
        )
    if recipe.parameters.codec and recipe.parameters.placement.value != "sharded":
        raise ValueError(
            f"gather_codec={recipe.parameters.codec!r}: parameters that are kept whole are gathered"
            " in full; use stage 3."
        )
    for name, codec in (
        ("gather_codec", recipe.parameters.codec),
        ("reduce_codec", recipe.gradients.codec),
        ("frozen", recipe.frozen),
    ):
        known = [c for c in CODECS if name == "frozen" or c != "nf4"]
        if codec is not None and codec not in known:
            raise ValueError(
                f"{name}={codec!r}: expected one of {', '.join(map(repr, known))}, or None."
            )
    if recipe.frozen and recipe.parameters.placement.value != "sharded":
        raise ValueError(
            f"frozen={recipe.frozen!r}: below stage 3 every rank keeps the whole weights to compute"
            " with; use stage 3."
        )
    if recipe.gradients.codec and recipe.optimizer.placement.value == "replicated":
        raise ValueError(
            f"reduce_codec={recipe.gradients.codec!r}: stage 0 reduces and gathers sums; use stage"
            " 1, 2 or 3."
        )
    if recipe.gradients.codec and recipe.sums_dtype.itemsize != 4:
        raise ValueError(
            f"reduce_codec={recipe.gradients.codec!r} with"
            f" accumulate_dtype={recipe.gradients.dtype}: encoded gradients are summed in fp32;"
            " leave accumulate_dtype out."
        )
    if recipe.frozen and recipe.parameters.tier.value != "device":
        raise ValueError(
            f"frozen={recipe.frozen!r} with offload_param: frozen weights rest encoded on the"
            " device, and nowhere else yet; leave one of them out (offload_optimizer may stay)."
        )
    if recipe.optimizer.codec:
        raise ValueError("the optimizer's states do not travel: they have no codec.")
    if recipe.wire_rounding not in ROUNDINGS:
        raise ValueError(
            f"wire_rounding={recipe.wire_rounding!r}: expected 'nearest' or 'stochastic'."
        )
    if recipe.reduce not in (ORDERED, NATIVE):
        raise ValueError(f"reduce={recipe.reduce!r}: expected 'ordered' or 'native'.")
    if recipe.reduce == NATIVE and recipe.gradients.codec:
        raise ValueError(
            f"reduce='native' with reduce_codec={recipe.gradients.codec!r}: a backend adds numbers,"
            " and encoded gradients must be decoded before they are added; leave one of them out."
        )
    if not isinstance(recipe.error_feedback, bool):
        raise ValueError(f"error_feedback={recipe.error_feedback!r}: expected True or False.")


def without_codec(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, str]:
    """Options of `given` that change nothing, with the reason."""
    said: dict[str, str] = {}
    if recipe.gradients.codec is None:
        why = "where gradients travel as they are: reduce_codec encodes them"
        said |= {name: why for name in ("error_feedback", "wire_rounding") if name in given}
    return said


def _and(names: set[str]) -> str:
    *first, last = sorted(names)
    return (
        f"{', '.join(first)} and {last} are"
        if first
        else f"{last} {'is' if last == 'optimizer' else 'are'}"
    )
