"""Checks of a recipe as a whole: values that contradict each other, and options without effect. The
messages say what to write. Checks of single values are in recipe/options.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from onefold.recipe.moments import FORMATS
from onefold.recipe.options import SECTOR, FrozenCodec, WireCodec, choices_of
from onefold.recipe.rows import ALL, FLAT, GROUP, NATIVE, NODE, Placement
from onefold.recipe.tiers import Tier, disks

if TYPE_CHECKING:
    from onefold.recipe.core import Recipe

#: Codecs of rows on the wire, and of stored frozen weights.
_WIRE_CODECS, _FROZEN_CODECS = choices_of(WireCodec), choices_of(FrozenCodec)


def check_dtype(name: str, dtype: Any, optional: bool = False) -> None:
    """Raise ValueError unless `dtype` is a floating-point dtype (or None, if `optional`)."""
    if not (dtype is None and optional) and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        raise ValueError(
            f"{name}={dtype!r}: expected a floating-point"
            f" torch.dtype{' or None' if optional else ''}."
        )


def divided_among(given: Mapping[str, Any]) -> tuple[dict[str, str], Any]:
    """Return (`over` of each row, the recipe's `group`) from the options of `Recipe.zero`.

    Raises:
        ValueError: options that contradict each other.
    """
    group, shard_group = given["group"], given["shard_group"]
    over = {"parameters": ALL, "gradients": ALL, "optimizer": ALL}
    if shard_group is None:
        if given["optimizer_over"] is not None:
            raise ValueError(
                f"optimizer_over={given['optimizer_over']!r} needs a shard_group that parameters"
                " and gradients are divided in."
            )
        if given["second_copy"]:
            over["parameters"] = GROUP
            group = NODE if group is None else group
        return over, group
    if group is not None:
        raise ValueError(
            f"shard_group={shard_group!r} and group={group!r}: they are the same groups; give one"
            " of them."
        )
    if given["second_copy"]:
        raise ValueError(
            "second_copy=True with a shard_group: parameters are divided inside the group already;"
            " leave one of them out."
        )
    over = dict.fromkeys(over, GROUP)
    if given["optimizer_over"] == ALL:
        over["optimizer"] = ALL
    return over, shard_group


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError if no run can follow the recipe; the message says what to change."""
    _check_placements(recipe)
    _check_tiers(recipe)
    _check_groups(recipe)
    _check_codecs(recipe)


def _check_placements(recipe: Recipe) -> None:
    replicated, sharded = Placement.REPLICATED, Placement.SHARDED
    p, g = recipe.parameters.placement, recipe.gradients.placement
    if recipe.optimizer.placement is replicated and sharded in (g, p):
        raise ValueError(
            "the recipe shards gradients or parameters but replicates the optimizer states: each"
            " rank would own states for gradients it does not have. Shard the optimizer row too"
            " (stage 1, 2 or 3), or replicate all three (stage 0)."
        )
    if p is sharded and g is replicated:
        raise ValueError(
            "the recipe shards parameters but keeps gradients replicated, which would cost the"
            " memory that sharding the parameters saves. Shard the gradient row (stage 3);"
            " reduce_at='boundary' keeps them whole until the boundary."
        )
    if g is replicated and recipe.reduce_at == "micro-batch":
        raise ValueError(
            f"stage {recipe.stage} keeps gradients whole until the boundary, so"
            " reduce_at='micro-batch' cannot apply: use stage 2 or 3, or leave reduce_at out."
        )


def _check_tiers(recipe: Recipe) -> None:
    p, g, o = recipe.parameters.tier, recipe.gradients.tier, recipe.optimizer.tier
    if p is not Tier.DEVICE and recipe.parameters.placement is not Placement.SHARDED:
        raise ValueError(
            f"the parameters row is stored on {p.value!r} but is replicated: every rank computes from"
            " all of it all the time. Shard the parameters (stage 3), or leave offload_param out."
        )
    for name, row in _rows(recipe).items():
        if name not in row.tier.holds:
            raise ValueError(
                f"the {name} row is stored on {row.tier.value!r}, which holds {_list(row.tier.holds)} only."
            )
    if p.on_disk and o is not p:
        raise ValueError(
            f"parameters {p.where} with optimizer states elsewhere would keep three times as many"
            f" bytes in the faster memory: give offload_optimizer={p.option!r} too."
        )
    if (o is Tier.DEVICE) != (g is Tier.DEVICE) or (g.on_disk and g is not o):
        raise ValueError(
            f"gradients are stored on {g.value!r} and the optimizer's states on {o.value!r}: gradients go"
            f" where the states are stepped (both 'device', both 'host'; {_beside_disks()})."
        )
    if (disk := recipe.disk) is not None and not recipe.folders_of(disk):
        raise ValueError(
            f"the recipe keeps state {disk.where} but names no folder: give"
            f" {disk.folders}='/path/on/the/disk', or a list of such."
        )
    share, budget = recipe.offload_share, recipe.offload_bytes
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"offload_share={share!r}: expected a share above 0, at most 1.")
    if budget is not None and (
        isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0
    ):
        raise ValueError(f"offload_bytes={budget!r}: expected a number of bytes above 0, or None.")
    if (
        o.on_disk
        and recipe.moments is not None
        and (most := FORMATS[recipe.moments].block * SECTOR // 4)
        and recipe.chunk % most
    ):
        raise ValueError(
            f"chunk={recipe.chunk}: with moments={recipe.moments!r} {o.where} it has to be a"
            f" multiple of {most} elements, whose scales fill whole sectors of {SECTOR} bytes."
        )
    if recipe.step_in_backward and o is Tier.DEVICE:
        raise ValueError(
            "step_in_backward=True steps offloaded states in the backward pass;"
            " offload_optimizer says where they are."
        )


def _beside_disks() -> str:
    """Return which gradients states in files take."""
    return "; ".join(
        f"states on {tier.value!r} take gradients on"
        f" {repr(tier.value) + ' or ' if 'gradients' in tier.holds else ''}'host'"
        for tier in disks()
    )


def _list(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _rows(recipe: Recipe) -> dict[str, Any]:
    return {
        "parameters": recipe.parameters,
        "gradients": recipe.gradients,
        "optimizer": recipe.optimizer,
    }


def _check_groups(recipe: Recipe) -> None:
    rows = _rows(recipe)
    for name, row in rows.items():
        if row.over not in (ALL, GROUP):
            raise ValueError(f"{name} over={row.over!r}: expected 'all' or 'group'.")
    in_group = {name for name, row in rows.items() if row.over == GROUP}
    if not in_group:
        return
    if recipe.group in (None, FLAT):
        has = "has none" if recipe.group is None else f"says group={FLAT!r}"
        raise ValueError(
            f"{_and(in_group)} divided over a group, but the recipe {has}: give group='node' or a"
            " number of ranks."
        )
    if recipe.optimizer.placement is Placement.REPLICATED:
        raise ValueError(
            "at stage 0 nothing is divided, over a group neither: use stage 1, 2 or 3."
        )
    if in_group not in ({"parameters"}, {"parameters", "gradients"}, set(rows)):
        raise ValueError(
            f"{_and(in_group)} divided over a group and the rest over all ranks: expected all three"
            " rows over the group (HSDP), parameters and gradients (optimizer states over all"
            " ranks), or parameters alone (a second copy)."
        )
    if in_group != set(rows) and recipe.parameters.placement is not Placement.SHARDED:
        raise ValueError(
            "a second copy, or optimizer states over more ranks than the parameters, needs sharded"
            " parameters: stage 3."
        )


def _check_codecs(recipe: Recipe) -> None:
    gather, reduce = recipe.parameters.codec, recipe.gradients.codec
    whole = recipe.parameters.placement is not Placement.SHARDED
    if gather and whole:
        raise ValueError(
            f"gather_codec={gather!r}: parameters that are kept whole are gathered in full; use"
            " stage 3."
        )
    for name, codec, known in (
        ("gather_codec", gather, _WIRE_CODECS),
        ("reduce_codec", reduce, _WIRE_CODECS),
        ("frozen", recipe.frozen, _FROZEN_CODECS),
    ):
        if codec is not None and codec not in known:
            raise ValueError(
                f"{name}={codec!r}: expected one of {', '.join(map(repr, known))}, or None."
            )
    if recipe.frozen and whole:
        raise ValueError(
            f"frozen={recipe.frozen!r}: below stage 3 every rank keeps the whole weights to compute"
            " with; use stage 3."
        )
    if recipe.frozen and recipe.parameters.tier is not Tier.DEVICE:
        raise ValueError(
            f"frozen={recipe.frozen!r} with offload_param: frozen weights are stored encoded on the"
            " device, and nowhere else yet; leave one of them out (offload_optimizer may stay)."
        )
    if recipe.optimizer.codec:
        raise ValueError("the optimizer's states do not travel: they have no codec.")
    if not reduce:
        return
    if recipe.optimizer.placement is Placement.REPLICATED:
        raise ValueError(
            f"reduce_codec={reduce!r}: stage 0 reduces and gathers sums; use stage 1, 2 or 3."
        )
    if recipe.sums_dtype.itemsize != 4:
        raise ValueError(
            f"reduce_codec={reduce!r} with accumulate_dtype={recipe.gradients.dtype}: encoded"
            " gradients are summed in fp32; leave accumulate_dtype out."
        )
    if recipe.reduce == NATIVE:
        raise ValueError(
            f"reduce='native' with reduce_codec={reduce!r}: a backend adds numbers, and encoded"
            " gradients must be decoded before they are added; leave one of them out."
        )


def without_effect(recipe: Recipe, given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each option of `given` that has no effect in this recipe: no option is
    silently ignored.
    """
    said = {}
    if recipe.parameters.placement is not Placement.SHARDED:
        what = (
            "with parameters that are replicated"
            if recipe.stage is None
            else f"at stage {recipe.stage}"
        )
        for name in ("prefetch", "reshard_after_forward"):
            if name in given:
                said[name] = f"{what}: it is about gathering sharded parameters (stage 3)"
    if not recipe.overlap:
        for name in ("prefetch", "in_flight"):
            if given.get(name):
                said.setdefault(name, "under overlap=False")
    if "cast_inputs" in given and recipe.parameters.dtype is None:
        said["cast_inputs"] = (
            "with precision=None: the model computes as it is and inputs stay as they come. Name a"
            " precision to cast"
        )
    elif given.get("cast_inputs") is False and recipe.parameters.dtype == torch.float32:
        said["cast_inputs"] = "in fp32: inputs are cast in the 16-bit precisions only"
    for name in ("elementwise_optimizer", "whole"):
        if given.get(name) is not None and recipe.optimizer.placement is Placement.REPLICATED:
            said[name] = (
                "where optimizer states are replicated (stage 0): every optimizer sees whole"
                " parameters"
            )
    if (
        given.get("stochastic_rounding")
        and recipe.moments != "bf16"
        and recipe.optimizer.dtype != torch.bfloat16
    ):
        said["stochastic_rounding"] = (
            "where nothing is rounded to bf16: give moments='bf16' or master_dtype='bf16'"
        )
    if recipe.optimizer.tier is Tier.DEVICE:
        for name in ("offload_share", "offload_bytes"):
            if given.get(name) not in (None, 1.0):
                said[name] = "where the optimizer's states stay on the device"
    for tier in disks():
        if tier is not recipe.disk and given.get(tier.folders):
            said[tier.folders] = f"where no state is stored {tier.where}"
    if recipe.disk is None:
        for name in ("chunk", "nvme_threads"):
            if given.get(name):
                said[name] = "where no state is stored on NVMe"
    return [f"{name}={given[name]!r} has no effect {why}." for name, why in said.items()]


def remarks(recipe: Recipe) -> list[str]:
    """Return what a user should know about the tiers of the recipe's rows."""
    if recipe.parameters.tier is not Tier.DEVICE and recipe.optimizer.tier is Tier.DEVICE:
        return [
            f"offload_param={recipe.parameters.tier.value!r} without offload_optimizer moves frozen"
            " parameters only: trained ones are gathered from their master weights, which stay on"
            " the device."
        ]
    return []


def _and(names: set[str]) -> str:
    *first, last = sorted(names)
    return (
        f"{', '.join(first)} and {last} are"
        if first
        else f"{last} {'is' if last == 'optimizer' else 'are'}"
    )
