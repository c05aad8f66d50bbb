"""The recipe: three rows that say where every byte of training state lives and how it travels.

| kind of state | placement              | tier                  | dtype it rests in       | dtype on the wire |
|---------------|------------------------|-----------------------|-------------------------|-------------------|
| parameters    | replicated / sharded   | device / host / NVMe  | compute dtype (*)       | compute dtype     |
| gradients     | replicated / sharded   | device / host / NVMe  | accumulation (fp32)     | compute dtype     |
| optimizer     | replicated / sharded   | device / host / NVMe  | master weights (fp32)   | never travels     |

(*) One that the recipe names (`precision`), or, with None, each parameter's own: the model computes
as it would without Onefold.

A ZeRO stage is a name for three placements (`PLACEMENTS_OF_STAGE`), nothing else: the runtime reads
the rows, never the stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Literal, ParamSpec

import torch

from onefold.recipe.checks import check_dtype, check_recipe, divided_among, remarks, without_effect
from onefold.recipe.moments import BLOCK, FORMATS
from onefold.recipe.options import (
    OPTIONS,
    UNLIMITED,
    Dtype,
    Folders,
    FrozenCodec,
    Group,
    Moments,
    OffloadTier,
    Precision,
    ReduceAt,
    Rounding,
    ShardGroup,
    Stage,
    Sums,
    WireCodec,
    refuse_unknown,
)
from onefold.recipe.rows import FLAT, GROUP, NATIVE, NODE, Placement, Tier

#: Bytes of small units that may be gathered ahead, and of small reductions that may be under way,
#: beyond the counts `prefetch` and
#: `in_flight`: so few bytes cost latency, and waiting for each in turn would hold the ranks in
#: lockstep.
SMALL_TRAFFIC = 256 << 10


@dataclass(frozen=True)
class Row:
    """One row of the recipe: placement, tier, the dtype at rest, the dtype on the wire (None: it
    does not travel).

    `dtype` None, in the row of parameters: each in its own. `wire` None, in the row of gradients:
        as the backward pass makes them.
    `over`: what a sharded row is divided among, "all" ranks or those of each "group". `codec`: how
    it is written on the wire; None is as it is.
    """

    placement: Placement
    dtype: torch.dtype | None
    wire: torch.dtype | None = None
    tier: Tier = Tier.DEVICE
    over: str = "all"
    codec: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise ValueError(
                f"placement={self.placement!r}: expected Placement.REPLICATED or Placement.SHARDED."
            )
        if not isinstance(self.tier, Tier):
            raise ValueError(f"tier={self.tier!r}: expected one of {', '.join(map(str, Tier))}.")
        check_dtype("dtype", self.dtype, optional=True)
        check_dtype("wire", self.wire, optional=True)


_R, _S = Placement.REPLICATED, Placement.SHARDED

# stage -> (parameters, gradients, optimizer states); gradients "replicated" means: whole until the
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
#: What an option about a dtype may say.
DTYPES: Mapping[str, torch.dtype] = {"fp64": torch.float64, **COMPUTE_DTYPES}

P = ParamSpec("P")


def _explained(
    make: Callable[Concatenate[type[Recipe], P], Recipe],
) -> Callable[Concatenate[type[Recipe], P], Recipe]:
    """A preset that says what it does not know, and notes which of the given options change
    nothing.
    """

    @functools.wraps(make)
    def explained(cls: type[Recipe], *stage: P.args, **given: P.kwargs) -> Recipe:
        refuse_unknown(f"Recipe.{make.__name__}", given, OPTIONS)
        recipe = make(cls, *stage, **given)
        told = {name: getattr(recipe, name) for name in given if name in _FIELDS}
        return replace(recipe, notes=(*without_effect(recipe, told), *remarks(recipe)))

    return explained


@dataclass(frozen=True)
class Recipe:
    """What `onefold.shard` executes. Build one with `Recipe.zero`, or row by row.

    Attributes:
        parameters: where parameters are stored, and how they are sent.
        gradients: the same of gradients.
        optimizer: the same of master weights and optimizer states.
        offload_share: share of the optimizer's states that is stored on their row's tier
            (`offload_optimizer=0.6` of `zero`). The last units of the model are offloaded first:
            their transfers overlap with the rest of the backward pass and the next forward pass.
        offload_bytes: the same as a budget: bytes of a rank (`offload_optimizer="6GB"`).
        offload_activations: bytes of host memory.
        tile: bytes of one gathered weight.
        prefetch: units gathered ahead, on each level of gathers: with groups there are two,
            inter-group and intra-group, so one unit is then on each of the two links. Unless it is
            0, small units do not count up to SMALL_TRAFFIC bytes; so with `in_flight`.
        reshard_after_forward: parameters are gathered again in backward (3Ψ on the wire, less those
            of the units that the forward pass uses last); False keeps them gathered (2Ψ).
        sync_buffers: sent where DDP would: in the first pass, and in each that follows one with
            gradients outside `no_sync`.
        moments: the format of Adam's moments. They are computed with in fp32; those of fp64
            parameters stay fp64.
        stochastic_rounding: random numbers depend on `rounding_seed`, the step and the element's
            index in its parameter, on nothing else.
        reduce: "ordered" sends gradients as they are and adds them in rank order in the
            accumulation dtype: stages have the same bits. "native" lets the backend (NCCL) add
            them, in the dtype of the wire and in its own order: stages agree within rounding.
        notes: sentences about options that have no effect; `shard` logs them once.

    The other fields are options of `Recipe.zero`: docs/options.md has a table.
    """

    parameters: Row
    gradients: Row
    optimizer: Row
    reduce_at: ReduceAt | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    in_flight: int = 2
    overlap: bool = True
    cast_inputs: bool = True
    sync_buffers: bool | Literal["norms"] = True
    stall_timeout: float = 300.0
    moments: Moments | None = None
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    elementwise_optimizer: bool | None = None
    offload_share: float = 1.0
    offload_bytes: int | None = None
    step_in_backward: bool = False
    offload_activations: int | None = None
    tile: int | None = None
    group: Group | None = None
    frozen: FrozenCodec | None = None
    error_feedback: bool = False
    wire_rounding: Rounding = "nearest"
    reduce: Sums = "ordered"
    nvme: tuple[str, ...] = ()
    nvme_threads: int = 4
    chunk: int = 1 << 21
    units: tuple[str | type, ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in _ROWS:
            if not isinstance(getattr(self, name), Row):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected a Row(placement, dtype, wire)."
                )
            if name != "parameters":
                check_dtype(f"{name}.dtype", getattr(self, name).dtype)
        for name in _FIELDS & OPTIONS.keys():
            value = getattr(self, name)
            none = name == "nvme" and not value  # () of a recipe, but for `zero` a list of nothing
            object.__setattr__(self, name, OPTIONS[name].read(None if none else value))
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
    @_explained
    def zero(
        cls,
        stage: Stage | int,
        *,
        precision: Precision | None = None,
        reduce_at: ReduceAt | None = None,
        wire: Dtype | None = None,
        master_dtype: Dtype = "fp32",
        accumulate_dtype: Dtype = "fp32",
        units: Sequence[str | type] | None = None,
        group: Group | None = None,
        shard_group: ShardGroup | None = None,
        optimizer_over: Literal["all"] | None = None,
        second_copy: bool = False,
        gather_codec: WireCodec | None = None,
        reduce_codec: WireCodec | None = None,
        error_feedback: bool = False,
        wire_rounding: Rounding = "nearest",
        reduce: Sums = "ordered",
        frozen: FrozenCodec | None = None,
        offload_optimizer: str | float | None = None,
        offload_gradients: OffloadTier | None = None,
        offload_param: OffloadTier | None = None,
        offload_activations: str | int | None = None,
        nvme: Folders | None = None,
        nvme_threads: int = 4,
        chunk: int = 1 << 21,
        tile: str | int | None = None,
        moments: Moments | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        step_in_backward: bool = False,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        in_flight: int = 2,
        overlap: bool = True,
        cast_inputs: bool = True,
        sync_buffers: bool | Literal["norms"] = True,
        elementwise_optimizer: bool | None = None,
        stall_timeout: float = 300.0,
    ) -> Recipe:
        """A ZeRO stage by its number (Rajbhandari et al. 2020, section 5). docs/options.md has a table of
        all options.

        Raises:
            ValueError: an unknown option, a value that it cannot have, or options that cannot go
                together; the sentence says what to write.
        """
        asked = {name: value for name, value in locals().items() if name != "cls"}
        given = {name: OPTIONS[name].read(value) for name, value in asked.items()}
        optimizer_tier, share, budget = given["offload_optimizer"]
        gradients_tier = given["offload_gradients"] if offload_gradients else optimizer_tier
        over, given["group"] = divided_among(given)
        compute = DTYPES[precision] if precision is not None else None
        p, g, o = PLACEMENTS_OF_STAGE[stage]
        return cls(
            parameters=Row(
                p,
                compute,
                compute if p is _S or o is _S else None,
                given["offload_param"],
                over["parameters"],
                gather_codec,
            ),
            gradients=Row(
                g,
                DTYPES[accumulate_dtype],
                DTYPES[wire] if wire is not None else compute,
                gradients_tier,
                over["gradients"],
                reduce_codec,
            ),
            optimizer=Row(o, DTYPES[master_dtype], tier=optimizer_tier, over=over["optimizer"]),
            offload_share=share,
            offload_bytes=budget,
            **{name: value for name, value in given.items() if name in _FIELDS},
        )

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed, checked again.

        Raises:
            ValueError: an unknown field, or one of a value it cannot have.
        """
        refuse_unknown("a recipe", changes, self.__dataclass_fields__)
        if "reduce_at" not in changes and self.reduce_at == _usual_time(self.gradients.placement):
            changes["reduce_at"] = None  # what is usual for the gradient row as it will be
        if "notes" not in changes:
            # Found anew
            changes["notes"] = tuple(n for n in self.notes if " has no effect " not in n)
            given = {name: value for name, value in changes.items() if name in _FIELDS}
            copy = replace(self, **changes)
            return replace(copy, notes=(*copy.notes, *without_effect(copy, given)))
        return replace(self, **changes)

    # -- what it says ------------------------------------------------------------------------------

    def units_ahead(self, two_levels: bool) -> int:
        """How many units are gathered ahead of use. `two_levels`: the ranks stand in groups,
        several of several.
        """
        levels = 2 if two_levels and self.parameters.over != GROUP else 1
        return levels * self.prefetch if self.overlap else 0

    @property
    def stage(self) -> int | None:
        """The ZeRO stage whose placements these are (for display; nothing in the runtime asks), or
        None.
        """
        rows = (self.parameters.placement, self.gradients.placement, self.optimizer.placement)
        return next(
            (s for s, placements in PLACEMENTS_OF_STAGE.items() if placements == rows), None
        )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What parameters and inputs are converted to; None computes in each parameter's own
        dtype.
        """
        return self.parameters.dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """What the optimizer steps."""
        assert self.optimizer.dtype is not None
        return self.optimizer.dtype

    @property
    def sums_dtype(self) -> torch.dtype:
        """What gradients are added up in."""
        assert self.gradients.dtype is not None
        return self.gradients.dtype

    @property
    def block(self) -> int:
        """Elements that must not be divided among ranks or tiles; 0 where any may be."""
        return BLOCK if self.moments is not None and FORMATS[self.moments].packed else 0

    def describe(self) -> str:
        """The recipe as the table of this module's docstring, filled in."""
        lines = [f"{'':12}{'placement':12}{'tier':8}{'at rest':10}{'wire':10}"]
        for name in ("parameters", "gradients", "optimizer"):
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
        """What a row rests in and travels in, as a table shows it: dtypes by name, "model's" for
        each parameter's own, "" for no travel.
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
        """What the recipe says about groups and codecs besides the rows."""
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
        if self.gradients.codec:
            tail += ["what encoding loses is fed back"] if self.error_feedback else []
            tail += ["rounded stochastically"] if self.wire_rounding == "stochastic" else []
        if self.reduce == NATIVE:
            tail.append("gradients added by the backend, in the dtype of the wire")
        return tail

    def _tails(self) -> list[str]:
        """What the recipe says about tiers besides the rows."""
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
        if self.tile is not None:
            tail.append(f"weights above {self.tile:,} bytes computed in tiles")
        if self.nvme:
            tail.append(f"NVMe: {', '.join(self.nvme)}")
        return tail


#: How a table names each parameter's own dtype.
MODELS = "model's"
_ROWS = ("parameters", "gradients", "optimizer")
_FIELDS = frozenset(Recipe.__dataclass_fields__) - {*_ROWS, "notes"}


def _usual_time(gradients: Placement) -> ReduceAt:
    return "boundary" if gradients is _R else "micro-batch"


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
