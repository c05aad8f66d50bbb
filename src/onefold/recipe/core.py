"""The recipe: three rows that say where every byte of training state is stored and how it is sent.

| kind of state | placement              | tier                  | dtype stored            | dtype on the wire |
|---------------|------------------------|-----------------------|-------------------------|-------------------|
| parameters    | replicated / sharded   | device / host / NVMe  | compute dtype (*)       | compute dtype     |
| gradients     | replicated / sharded   | device / host / NVMe  | accumulation (fp32)     | compute dtype     |
| optimizer     | replicated / sharded   | device / host / NVMe  | master weights (fp32)   | never sent        |

(*) The one that the recipe names (`precision`). With None it is each parameter's own, and the model
computes as it would without Onefold.

A ZeRO stage is only a name for three placements (`PLACEMENTS_OF_STAGE`). The runtime reads the
rows, never the stage.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Literal, ParamSpec

import torch

from onefold.recipe.checks import check_dtype, check_recipe, divided_among, remarks, without_effect
from onefold.recipe.moments import BLOCK, FORMATS
from onefold.recipe.options import (
    OPTIONS,
    UNLIMITED,
    EngineOptions,
    ReduceAt,
    ZeroOptions,
    refuse_unknown,
)
from onefold.recipe.rows import FLAT, GROUP, NATIVE, NODE, Placement
from onefold.recipe.tiers import ROWS, Tier, disks

#: Bytes of small units that may be gathered ahead, and of small reductions that may be in flight,
#: beyond the counts `prefetch` and `in_flight`. For so few bytes latency dominates, and waiting for
#: each in turn would keep the ranks in lockstep.
SMALL_TRAFFIC = 256 << 10
#: Bytes that the units gathered ahead may have together, and that reductions in flight may have
#: together: what they send, and as much that they receive. Beyond them one unit is gathered ahead
#: and one reduction is in flight, whatever `prefetch` and `in_flight` say. For so many bytes
#: bandwidth dominates: one more would wait for the same link, and hold its buffers meanwhile.
LARGE_TRAFFIC = 1 << 30


@dataclass(frozen=True)
class Row:
    """One row of the recipe.

    Attributes:
        placement: replicated or sharded.
        dtype: the dtype stored. None, for parameters only: each parameter's own.
        wire: the dtype on the wire. None: not sent, or, for gradients, as the backward pass makes
            them.
        tier: where the row is stored.
        over: the ranks that a sharded row is divided among: "all", or those of each "group".
        codec: the codec on the wire; None sends plain values.
        total: for gradients only, what ranks with different data make of theirs: "mean" or "sum".
    """

    placement: Placement
    dtype: torch.dtype | None
    wire: torch.dtype | None = None
    tier: Tier = Tier.DEVICE
    over: str = "all"
    codec: str | None = None
    total: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.total not in ("mean", "sum"):
            raise ValueError(f"total={self.total!r}: expected 'mean' or 'sum'.")
        if not isinstance(self.placement, Placement):
            raise ValueError(
                f"placement={self.placement!r}: expected Placement.REPLICATED or Placement.SHARDED."
            )
        if not isinstance(self.tier, Tier):
            raise ValueError(f"tier={self.tier!r}: expected one of {', '.join(map(str, Tier))}.")
        check_dtype("dtype", self.dtype, optional=True)
        check_dtype("wire", self.wire, optional=True)


_R, _S = Placement.REPLICATED, Placement.SHARDED

# stage -> (parameters, gradients, optimizer states). "Replicated" gradients stay whole until the
# boundary.
PLACEMENTS_OF_STAGE: Mapping[int, tuple[Placement, Placement, Placement]] = {
    0: (_R, _R, _R),
    1: (_R, _R, _S),
    2: (_R, _S, _S),
    3: (_S, _S, _S),
}

COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
#: The values of options that name a dtype.
DTYPES: Mapping[str, torch.dtype] = {"fp64": torch.float64, **COMPUTE_DTYPES}

P = ParamSpec("P")
_Preset = Callable[[type["Recipe"], Mapping[str, Any]], "Recipe"]


def _takes(
    options: Callable[P, ZeroOptions],
) -> Callable[[_Preset], Callable[Concatenate[type[Recipe], P], Recipe]]:
    """Decorate a preset: it takes the options as arguments and is given all of them, checked. Its
    recipe has a note for each option that the caller gave and that has no effect.
    """

    def decorate(make: _Preset) -> Callable[Concatenate[type[Recipe], P], Recipe]:
        @functools.wraps(make)
        def preset(cls: type[Recipe], *stage: P.args, **given: P.kwargs) -> Recipe:
            refuse_unknown(f"Recipe.{make.__name__}", given, OPTIONS)
            asked = vars(options(*stage, **given))
            recipe = make(cls, {name: row.read(asked[name]) for name, row in OPTIONS.items()})
            told = {name: getattr(recipe, name) for name in given if name in _FIELDS}
            return replace(recipe, notes=(*without_effect(recipe, told), *remarks(recipe)))

        preset.__signature__ = _signature()  # type: ignore[attr-defined]
        return preset

    return decorate


def _signature() -> inspect.Signature:
    """Return the arguments of a preset: `stage`, and the other options by name."""
    found = [inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for option in OPTIONS.values():
        positional, nothing = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        kind = positional if option.default is ... else inspect.Parameter.KEYWORD_ONLY
        default = nothing if option.default is ... else option.default
        found.append(inspect.Parameter(option.name, kind, default=default, annotation=option.type))
    return inspect.Signature(found, return_annotation="Recipe")


@dataclass(frozen=True)
class Recipe(EngineOptions):
    """The options of `onefold.shard`. Build one with `Recipe.zero`, or row by row.

    Attributes:
        parameters: where parameters are stored, and how they are sent.
        gradients: the same for gradients.
        optimizer: the same for master weights and optimizer states.
        offload_share: the share of the optimizer's states that is stored on their row's tier
            (`offload_optimizer=0.6` of `zero`). The last units of the model are offloaded first:
            their transfers overlap with the rest of the backward pass and the next forward pass.
        offload_bytes: the same as a budget, in bytes of each rank (`offload_optimizer="6GB"`).
        offload_activations: bytes of host memory.
        prefetch: units gathered ahead, on each level. With groups there are two levels, inter-group
            and intra-group, so that each link can carry a unit. Unless it is 0, small units of up
            to SMALL_TRAFFIC bytes together do not count; the same holds for `in_flight`. Units of
            more than LARGE_TRAFFIC bytes together are gathered one ahead; reductions of as many
            are in flight one at a time.
        reshard_after_forward: parameters are gathered again in backward (3Ψ on the wire, less those
            of the units that the forward pass uses last); False keeps them gathered (2Ψ).
        sync_buffers: which buffers rank 0 sends, at the same times as DDP: in the first pass, and
            in each pass after one with gradients outside `no_sync`.
        moments: the format in which Adam's moments are stored. Steps compute in fp32. Moments of
            fp64 parameters stay fp64.
        stochastic_rounding: random numbers depend only on the step and the element's index in its
            parameter.
        reduce: "ordered" sends gradients unchanged and adds them in rank order in the accumulation
            dtype: all stages have the same bits. "native" lets the backend (NCCL) add them, in the
            wire dtype and in its own order: stages agree within rounding. None decides: see
            `with_sums`.
        notes: sentences about options that have no effect; `shard` logs them once.

    The other fields are options of `Recipe.zero`: docs/options.md has a table.
    """

    parameters: Row
    gradients: Row
    optimizer: Row
    offload_share: float = 1.0
    offload_bytes: int | None = None
    offload_activations: int | None = None
    nvme: tuple[str, ...] = ()
    units: tuple[str | type, ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ROWS:
            if not isinstance(getattr(self, name), Row):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected a Row(placement, dtype, wire)."
                )
            if name != "parameters":
                check_dtype(f"{name}.dtype", getattr(self, name).dtype)
        for option in (OPTIONS[name] for name in _FIELDS & OPTIONS.keys()):
            value = getattr(self, option.name)
            # A recipe has () for no folders, `zero` takes None
            none = option.repeated and not value
            object.__setattr__(self, option.name, option.read(None if none else value))
        if self.reduce_at is None:
            object.__setattr__(self, "reduce_at", _usual_time(self.gradients.placement))
        check_recipe(self)
        fields = self.__dataclass_fields__
        given = {
            name: getattr(self, name)
            for name in _FIELDS - {"reduce_at"}
            if getattr(self, name) != fields[name].default
        }
        found = [*self.notes, *without_effect(self, given), *remarks(self)]
        object.__setattr__(self, "notes", tuple(dict.fromkeys(found)))

    # -- presets -----------------------------------------------------------------------------------

    @classmethod
    @_takes(ZeroOptions)
    def zero(cls, given: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a ZeRO stage (Rajbhandari et al. 2020, section 5). Takes the fields
        of `ZeroOptions`; docs/options.md has a table of them.

        Raises:
            ValueError: an unknown option, an invalid value, or options that contradict each other;
                the message says what to write.
        """
        optimizer_tier, share, budget = given["offload_optimizer"]
        over, group = divided_among(given)
        compute = DTYPES[given["precision"]] if given["precision"] is not None else None
        gradients_tier = given["offload_gradients"]
        if gradients_tier is Tier.DEVICE:
            there = "gradients" in optimizer_tier.holds
            gradients_tier = optimizer_tier if there else Tier.HOST
        p, g, o = PLACEMENTS_OF_STAGE[given["stage"]]
        parameters = Row(
            p,
            compute,
            compute if p is _S or o is _S else None,
            given["offload_param"],
            over["parameters"],
            given["gather_codec"],
        )
        gradients = Row(
            g,
            DTYPES[given["accumulate_dtype"]],
            DTYPES[given["wire"]] if given["wire"] is not None else compute,
            gradients_tier,
            over["gradients"],
            given["reduce_codec"],
            given["gradients"],
        )
        optimizer = Row(
            o, DTYPES[given["master_dtype"]], tier=optimizer_tier, over=over["optimizer"]
        )
        kept = {name: value for name, value in given.items() if name in _FIELDS}
        kept["group"] = group
        return cls(
            parameters, gradients, optimizer, offload_share=share, offload_bytes=budget, **kept
        )

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with some fields changed, checked again.

        Raises:
            ValueError: an unknown field or an invalid value.
        """
        refuse_unknown("a recipe", changes, self.__dataclass_fields__)
        if "reduce_at" not in changes and self.reduce_at == _usual_time(self.gradients.placement):
            changes["reduce_at"] = None  # the default of the new gradient row
        if "notes" not in changes:
            # Drop notes about options without effect: they are made again for the copy
            changes["notes"] = tuple(n for n in self.notes if " has no effect " not in n)
            given = {name: value for name, value in changes.items() if name in _FIELDS}
            copy = replace(self, **changes)
            return replace(copy, notes=(*copy.notes, *without_effect(copy, given)))
        return replace(self, **changes)

    # -- derived values ----------------------------------------------------------------------------

    def units_ahead(self, two_levels: bool) -> int:
        """Return how many units are gathered ahead of use. `two_levels`: there are several groups
        of several ranks.
        """
        levels = 2 if two_levels and self.parameters.over != GROUP else 1
        return levels * self.prefetch if self.overlap else 0

    def with_sums(self, native: bool, flat_over_nodes: bool) -> Recipe:
        """Return the recipe with "native" for a `reduce` of None, where that is faster by far; else
        the recipe itself, which sums in order.

        It is where every rank sends to every other although several share a node. There, ordered
        sums send as many times the bytes between nodes as a node has ranks.

        Args:
            native: the backend has sums of its own (NCCL).
            flat_over_nodes: see above; `onefold.comm.communicators.flat_over`.
        """
        decides = self.reduce is None and self.gradients.codec is None
        return replace(self, reduce=NATIVE) if decides and native and flat_over_nodes else self

    @property
    def disk(self) -> Tier | None:
        """The tier of files that some of the state is stored on; None: all of it is in memory."""
        rows = self.parameters, self.gradients, self.optimizer
        return next((row.tier for row in rows if row.tier.on_disk), None)

    def folders_of(self, tier: Tier | None) -> tuple[str, ...]:
        """Return the folders that were named for a tier of files; () for memory and for None."""
        found: tuple[str, ...] = getattr(self, tier.folders) if tier and tier.folders else ()
        return found

    @property
    def stage(self) -> int | None:
        """The ZeRO stage with these placements, or None. For display only: the runtime does not
        read it.
        """
        rows = (self.parameters.placement, self.gradients.placement, self.optimizer.placement)
        return next(
            (s for s, placements in PLACEMENTS_OF_STAGE.items() if placements == rows), None
        )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that parameters and inputs are converted to; None computes in each parameter's
        own dtype.
        """
        return self.parameters.dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the weights that the optimizer steps."""
        assert self.optimizer.dtype is not None
        return self.optimizer.dtype

    @property
    def sums_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added up."""
        assert self.gradients.dtype is not None
        return self.gradients.dtype

    @property
    def block(self) -> int:
        """Elements in a block that ranks must not divide; 0 if there are no blocks."""
        return BLOCK if self.moments is not None and FORMATS[self.moments].packed else 0

    def describe(self) -> str:
        """Return the recipe as a table like the one in this module's docstring."""
        lines = [f"{'':12}{'placement':12}{'tier':8}{'at rest':10}{'wire':10}"]
        for name in ROWS:
            row: Row = getattr(self, name)
            at_rest, wire = self.in_words(name)
            lines.append(
                f"{name:12}{row.placement.value:12}{row.tier.value:8}{at_rest:10}{wire or '-':10}"
            )
        again = (
            "gathered again in backward"
            if self.reshard_after_forward
            else "kept from forward to backward"
        )
        tail = [f"gradients reduced at the {self.reduce_at}"]
        if self.parameters.placement is _S:
            tail.append(f"parameters {again}")
        tail += self._tails() + self._levels()
        return "\n".join([*lines, "; ".join(tail), *self.notes])

    def in_words(self, name: str) -> tuple[str, str]:
        """Return the dtypes of a row, stored and on the wire, as a table shows them: by name,
        "model's" for each parameter's own, "" if not sent.
        """
        row: Row = getattr(self, name)
        at_rest = _short(row.dtype) if row.dtype is not None else MODELS
        if row.wire is not None:
            return at_rest, _short(row.wire)
        if name == "gradients":  # as the backward pass makes them
            return at_rest, _short(self.compute_dtype) if self.compute_dtype is not None else MODELS
        travels = (
            name == "parameters"
            and row.dtype is None
            and _S in (row.placement, self.optimizer.placement)
        )
        return at_rest, MODELS if travels else ""

    def _levels(self) -> list[str]:
        """Return phrases about groups and codecs, for `describe`."""
        rows = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer states": self.optimizer,
        }
        tail = []
        in_group = [name for name, row in rows.items() if row.over == GROUP]
        what = (
            f"{', '.join(in_group)} divided inside each"
            if in_group
            else "moves are intra-group and inter-group"
        )
        if self.group is None:
            tail.append("moves are intra-node and inter-node, where there are several nodes")
        elif self.group == FLAT:
            tail.append("moves go from every rank to every other")
        else:
            tail.append(
                f"groups: {'nodes' if self.group == NODE else f'of {self.group} ranks'}, {what}"
            )
        tail += [f"{name} travel as {row.codec}" for name, row in rows.items() if row.codec]
        if self.frozen:
            tail.append(f"frozen weights are stored as {self.frozen}")
        if self.gradients.total == "sum":
            tail.append("gradients are summed over ranks, not averaged")
        if self.reduce == NATIVE:
            tail.append("gradients added by the backend, in the dtype of the wire")
        return tail

    def _tails(self) -> list[str]:
        """Return phrases about tiers and formats, for `describe`."""
        tail = []
        if self.moments is not None:
            tail.append(f"moments in {self.moments}")
        if self.stochastic_rounding:
            tail.append("stochastic rounding to bf16")
        if self.offload_bytes is not None or self.offload_share < 1:
            share, budget = f"{self.offload_share:.0%} of the states", self.offload_bytes
            amount = share if budget is None else f"{budget:,} bytes of states a rank"
            tail.append(f"{amount} off the device, the last units first")
        if self.step_in_backward:
            tail.append("offloaded units stepped in the backward pass")
        if (room := self.offload_activations) is not None:
            most = "" if room >= UNLIMITED else f" up to {room:,} bytes"
            tail.append(f"activations on the host{most}")
        for tier in disks():
            if folders := self.folders_of(tier):
                tail.append(f"{tier.title}: {', '.join(folders)}")
        return tail


#: The name of each parameter's own dtype in a table.
MODELS = "model's"
_FIELDS = frozenset(Recipe.__dataclass_fields__) - {*ROWS, "notes"}


def _usual_time(gradients: Placement) -> ReduceAt:
    return "boundary" if gradients is _R else "micro-batch"


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
