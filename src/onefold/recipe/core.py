"""The recipe: its options, and the three rows that they come to, which say where every byte of
training state is stored and how it is sent.

| kind of state | placement              | tier                  | dtype stored            | dtype on the wire |
|---------------|------------------------|-----------------------|-------------------------|-------------------|
| parameters    | replicated / sharded   | device / host / NVMe  | compute dtype (*)       | compute dtype     |
| gradients     | replicated / sharded   | device / host / NVMe  | accumulation (fp32)     | compute dtype     |
| optimizer     | replicated / sharded   | device / host / NVMe  | master weights (fp32)   | never sent        |

(*) The one that the recipe names (`precision`). With None it is each parameter's own, and the model
computes as it would without Onefold.

A ZeRO stage is only a name for three placements (`sharded_at`). The runtime reads the rows, not the
stage.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from onefold.recipe import options as of
from onefold.recipe.options import Dtype, Folder, OffloadTier, Option, number, one_of
from onefold.recipe.rows import (
    ALL,
    FLAT,
    GROUP,
    NATIVE,
    NODE,
    TIER_OF,
    Row,
    Tier,
    sharded_at,
)

if TYPE_CHECKING:
    import torch

#: The kinds of state that have a row.
ROWS = ("parameters", "gradients", "optimizer")
#: Bytes of small units that may be gathered ahead, and of small reductions that may be in flight,
#: beyond the counts `prefetch` and `in_flight`. For so few bytes latency dominates, and waiting for
#: each in turn would keep the ranks in lockstep.
SMALL_TRAFFIC = 256 << 10
#: Bytes that the units gathered ahead may have together, and that reductions in flight may have
#: together: what they send, and as much that they receive. Beyond them one unit is gathered ahead
#: and one reduction is in flight, whatever `prefetch` and `in_flight` say. For so many bytes
#: bandwidth dominates: one more would wait for the same link, and hold its buffers meanwhile.
LARGE_TRAFFIC = 1 << 30

DIVISION, NODES, TIERS, ENGINE = (
    "How it is divided among the ranks",
    "Between nodes, where links are slow",
    "Where state is stored",
    "How the engine works",
)
_BOTH, _TRAIN, _PLAN = ("train", "plan"), ("train",), ("plan",)


def _option(
    panel: str, default: Any, help: str, check: Any = None, commands: Any = _BOTH, kind: Any = None
) -> Any:
    """Return a field that is an option. Without `check` its type says which values it takes.
    `kind`: what a caller gives, where a recipe keeps something else.
    """
    row = {"panel": panel, "help": help, "check": check, "commands": commands, "kind": kind}
    return field(default=default, metadata=row)


_division, _nodes, _tiers, _engine = (
    functools.partial(_option, panel) for panel in (DIVISION, NODES, TIERS, ENGINE)
)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options of `onefold.shard`; docs/options.md has a table. Its rows are computed from them.

    Attributes:
        offload_amount: the last units of the model are offloaded first: their transfers overlap with
            the rest of the backward pass and the next forward pass.
        prefetch: units gathered ahead, on each level. With groups there are two levels, inter-group
            and intra-group, so that each link can carry a unit. Unless it is 0, small units of up
            to SMALL_TRAFFIC bytes together do not count; the same holds for `in_flight`. Units of
            more than LARGE_TRAFFIC bytes together are gathered one ahead; reductions of as many
            are in flight one at a time.
        reshard_after_forward: parameters are gathered again in backward (3Ψ on the wire, less those
            of the units that the forward pass uses last); False keeps them gathered (2Ψ).
        sync_buffers: which buffers rank 0 sends, at the same times as DDP: in the first pass, and
            in each pass after one with gradients outside `no_sync`.
        moments: steps compute in fp32. Moments of fp64 parameters stay fp64.
        remarks: sentences of who made the recipe.
        stochastic_rounding: random numbers depend only on the step and the element's index in its
            parameter.
        reduce: "ordered" sends gradients unchanged and adds them in rank order in the accumulation
            dtype: all stages have the same bits. "native" lets the backend (NCCL) add them, in the
            wire dtype and in its own order: stages agree within rounding. None decides: see
            `with_sums`.

    Raises:
        ValueError: an invalid value, or options that contradict each other; the message says what
            to write.
    """

    stage: of.Stage = field(kw_only=False, metadata={"panel": DIVISION, "help": "ZeRO stage: what is divided among the ranks; 0 is DDP.",
        "check": None, "commands": _BOTH, "kind": None})
    precision: of.Precision | None = _division(None,
        "Compute precision (default: as the model is). Master weights and sums are fp32 either way.")
    wire: Dtype | None = _division(None, "Dtype in which gradients are sent (default: as the backward pass makes them).", commands=())
    master_dtype: Dtype = _division("fp32", "Dtype of the weights that the optimizer steps.", commands=())
    accumulate_dtype: Dtype = _division("fp32", "Dtype in which gradients are summed and stored.", commands=_PLAN)
    reduce_op: Literal["mean", "sum"] = _division("mean",
        "What a gradient is of those that ranks with different data have: their mean, or their"
        " sum (for losses that are divided by the number of tokens on all ranks).", commands=())
    units: Any = _division(None,
        "Modules that become units, by name or class, comma separated (default: the repeated block).",
        of.unit_names, _TRAIN, Sequence[str | type] | None)
    reduce_at: Literal["micro-batch", "boundary"] | None = _division(None,
        "When stages 2 and 3 reduce gradients (default: every micro-batch).")

    shard_group: int | Literal["node"] | None = _nodes(None,
        "HSDP, MiCS: divide state within such groups only, and sum gradients over the groups once a step.")
    optimizer_over: Literal["all"] | None = _nodes(None,
        "With a shard group: divide optimizer states over all ranks nevertheless; stage 3.")
    second_copy: bool = _nodes(False,
        "ZeRO++ hpZ: a second copy of the parameters, sharded within each group, to gather from; renewed once a step; stage 3.")
    gather_codec: of.WireCodec | None = _nodes(None, "ZeRO++ qwZ: the format in which parameters are sent; stage 3.")
    reduce_codec: of.WireCodec | None = _nodes(None, "ZeRO++ qgZ: the format in which gradients are sent; they are summed in fp32.")
    group: int | Literal["node", "flat"] | None = _nodes(None,
        "Ranks of a group; gathers and reductions are intra-group, then inter-group: node (the launcher's),"
        " a number of ranks, or flat: no groups (default: node where there are several).")
    reduce: Literal["ordered", "native"] | None = _nodes(None,
        "Who adds gradients up: ordered, with the same bits at every stage; native, the backend (not gloo)"
        " (default: ordered; native where every rank sends to every other over nodes of several ranks).")
    frozen: of.FrozenCodec | None = _nodes(None,
        "Format in which frozen matrices are stored and sent (nf4 under adapters: QLoRA); stage 3.")

    offload_optimizer: OffloadTier | None = _tiers(None, "Where masters and moments are stored.")
    offload_amount: str | float | None = _tiers(None,
        "How much of them: a share (0.6), or a budget of each rank (6GB); default: all.", of.share_or_size)
    offload_gradients: OffloadTier | None = _tiers(None, "Where gradients wait for the step (default: with the optimizer).")
    offload_param: OffloadTier | None = _tiers(None, "Where parameters are stored between uses; stage 3 only.")
    offload_activations: Any = _tiers(None,
        "Host memory for activations between forward and backward: cpu for as much as it takes, or a budget (8GB).", of.room,
        kind=str | int | None)
    nvme: Any = _tiers(None,
        "Folder on the disk for state on NVMe; its regions are divided among several.", of.folders, kind=Folder | Sequence[Folder] | None)
    nvme_threads: int = _tiers(4, "Concurrent transfers to and from the disk.", number(1, 64, "a number of threads from 1 to 64"), ())
    chunk: int = _tiers(1 << 21, "With states on NVMe: elements stepped at a time.",
        number(16 * of.SECTOR, of.MOST, f"a number of elements, a multiple of {of.SECTOR} from {16 * of.SECTOR} up"), ())
    moments: of.Moments | None = _tiers(None, "Format in which Adam's moments are stored, on any tier (default: as torch makes them).")
    stochastic_rounding: bool = _tiers(False, "Round moments and masters to bf16 stochastically: unbiased.", commands=_TRAIN)
    step_in_backward: bool = _tiers(False, "Step offloaded units in the backward pass; nothing may look at gradients before the step.")

    reshard_after_forward: bool = _engine(True,
        "Drop sharded parameters after the forward pass and gather them again in backward.", commands=())
    prefetch: int = _engine(1,
        "Units gathered ahead of their use (above 1 GiB together: one).", number(0, math.inf, "a whole number of units, 0 or more"), ())
    in_flight: int = _engine(2, "Reductions under way while the backward pass goes on (above 1 GiB together, sent and received: one).",
        number(0, math.inf, "a whole number of units, 0 or more"), ())
    cast_inputs: bool = _engine(True, "Cast floating-point inputs to the precision that is named.", commands=())
    sync_buffers: bool | Literal["norms"] = _engine(True,
        "Buffers that become rank 0's before a forward pass, when DDP would send them: all, those of norms, or none.", commands=())
    whole: Any = _engine(None,
        "Which parameter groups are stepped as whole matrices, each by one owner: True for all, False for none (also where a trial"
        " cannot tell that the optimizer treats every element alike), or patterns of names for the groups of such parameters"
        " (default: those whose update looks at whole matrices, as a trial shows).",
        of.whole_groups, (), bool | Sequence[str] | None)
    stall_timeout: float = _engine(300.0, "Seconds a rank waits for the others before every rank gets an error.",
        number(1e-9, 1e9, "a finite number of seconds above 0, and below 1e9", whole=False), _TRAIN)
    # fmt: on
    remarks: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for option in OPTIONS.values():
            object.__setattr__(self, option.name, option.read(getattr(self, option.name)))
        check(self)

    @classmethod
    def zero(cls, stage: Any, **options: Any) -> Recipe:
        """Return the recipe of a ZeRO stage (Rajbhandari et al. 2020, section 5). It is `Recipe`
        itself with a word for a misspelt option.
        """
        of.refuse_unknown("Recipe.zero", options, OPTIONS)
        return cls(stage, **options)

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with some options changed, checked again.

        Raises:
            ValueError: an unknown option or an invalid value.
        """
        of.refuse_unknown("a recipe", changes, {*OPTIONS, "remarks"})
        return replace(self, **changes)

    def in_groups_of(self, ranks: Any) -> Recipe:
        """Return a copy whose groups have so many ranks, or are those that a word names."""
        return self.replace(**{"group" if self.shard_group is None else "shard_group": ranks})

    # -- what the options come to ------------------------------------------------------------------

    @functools.cached_property
    def rows(self) -> tuple[Row, Row, Row]:
        """The rows of `ROWS`, in this order."""
        from onefold.recipe.moments import DTYPES

        grouped, gradients = self.shard_group is not None, self.offload_gradients
        of_options = (
            (self.precision, self.precision if self.stage else None, self.offload_param,
             grouped or self.second_copy, self.gather_codec),
            (self.accumulate_dtype, self.wire or self.precision, gradients or self.offload_optimizer,
             grouped, self.reduce_codec),
            (self.master_dtype, None, self.offload_optimizer,
             grouped and self.optimizer_over is None, None),
        )  # fmt: skip
        first, second, third = (
            Row(sharded, DTYPES.get(at_rest), DTYPES.get(wire), TIER_OF[tier], GROUP if inner else ALL, codec)
            for sharded, (at_rest, wire, tier, inner, codec) in zip(
                sharded_at(self.stage), of_options, strict=True
            )
        )  # fmt: skip
        return first, second, third

    @property
    def parameters(self) -> Row:
        """Where parameters are stored, and how they are sent."""
        return self.rows[0]

    @property
    def gradients(self) -> Row:
        """The same for gradients."""
        return self.rows[1]

    @property
    def optimizer(self) -> Row:
        """The same for master weights and optimizer states."""
        return self.rows[2]

    @property
    def inner(self) -> Any:
        """The ranks of a group, if moves run inside groups and then between them: "node" or a
        number; "flat" or None as of the option `group`.
        """
        return self.shard_group or self.group or (NODE if self.second_copy else None)

    @property
    def reduces_at(self) -> str:
        """When gradients are reduced: "micro-batch" or "boundary"."""
        return self.reduce_at or ("boundary" if self.stage < 2 else "micro-batch")

    @property
    def offload_share(self) -> float:
        """The share of the optimizer's states that is stored on their row's tier."""
        return self.offload_amount if isinstance(self.offload_amount, float) else 1.0

    @property
    def offload_bytes(self) -> int | None:
        """The same as a budget, in bytes of each rank; None for no limit."""
        return self.offload_amount if isinstance(self.offload_amount, int) else None

    @property
    def on_disk(self) -> bool:
        """Whether some of the state is stored in files."""
        return any(row.tier.on_disk for row in self.rows)

    @property
    def block(self) -> int:
        """Elements in a block that ranks must not divide; 0 if there are no blocks."""
        from onefold.recipe.moments import BLOCK, FORMATS

        return BLOCK if self.moments is not None and FORMATS[self.moments].packed else 0

    def units_ahead(self, two_levels: bool) -> int:
        """Return how many units are gathered ahead of use."""
        levels = 2 if two_levels and self.parameters.over != GROUP else 1
        return levels * self.prefetch

    def with_sums(self, native: bool, flat_over_nodes: bool) -> Recipe:
        """Return the recipe with "native" for a `reduce` of None, where that is faster by far; else
        the recipe itself, which sums in order.

        It is where every rank sends to every other although several share a node. There, ordered
        sums send as many times the bytes between nodes as a node has ranks.

        Args:
            native: the backend has sums of its own (NCCL).
            flat_over_nodes: see above; `onefold.comm.communicators.flat_over`.
        """
        decides = self.reduce is None and self.reduce_codec is None
        return replace(self, reduce=NATIVE) if decides and native and flat_over_nodes else self

    # -- in words ----------------------------------------------------------------------------------

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each option that was given and has no effect, and the remarks of who made the
        recipe; `shard` logs them once.
        """
        return (*without_effect(self), *self.remarks)

    @property
    def given(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        every = {name: getattr(self, name) for name in OPTIONS if name != "stage"}
        return {n: v for n, v in every.items() if v != OPTIONS[n].default}

    def describe(self) -> str:
        """Return its rows as a table, the options that were given, and the notes."""
        lines = [f"{'':12}{'placement':12}{'tier':8}{'at rest':10}{'wire':10}"]
        for name, row, sent in zip(ROWS, self.rows, (self.stage > 0, True, False), strict=True):
            wire = _short(row.wire or self.parameters.dtype) if sent else "-"
            place, tier = "sharded" if row.sharded else "replicated", row.tier.value
            lines.append(f"{name:12}{place:12}{tier:8}{_short(row.dtype):10}{wire:10}")
        given = "; ".join(f"{name}={_said(value)}" for name, value in self.given.items())
        return "\n".join([*lines, *([given] if given else []), *self.notes])


def _short(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype, for a table; None: each parameter's own."""
    return str(dtype).removeprefix("torch.") if dtype is not None else "model's"


def _said(value: Any) -> str:
    return "'cpu'" if value == of.UNLIMITED else repr(value)


def _table() -> dict[str, Option]:
    """Return the options, panel by panel."""
    kinds, found = typing.get_type_hints(Recipe), []
    for one in (each for each in fields(Recipe) if each.metadata):
        row = dict(one.metadata)
        kind = row.pop("kind") or kinds[one.name]
        row["check"] = row["check"] or one_of(kind)
        found.append(Option(one.name, kind, ... if one.default is MISSING else one.default, **row))
    return {option.name: option for option in found}


OPTIONS: Mapping[str, Option] = _table()
Recipe.zero.__func__.__signature__ = inspect.signature(Recipe.__init__)  # type: ignore[attr-defined]


# -- the options together --------------------------------------------------------------------------


def check(r: Recipe) -> None:
    """Raise ValueError if no run can follow the recipe; the message says what to change."""
    p, g, o = (row.tier for row in r.rows)
    device = Tier.DEVICE
    sector = of.SECTOR
    if r.moments is not None and o.on_disk:
        from onefold.recipe.moments import FORMATS

        sector *= max(1, FORMATS[r.moments].block // 4)
    in_groups, divided = r.shard_group, r.stage > 2
    wrong: tuple[tuple[Any, str], ...] = (
        (r.stage < 2 and r.reduce_at == "micro-batch",
         f"stage {r.stage} keeps gradients whole until the boundary, so reduce_at='micro-batch' cannot apply: use stage 2 or 3, or leave"
         " reduce_at out."),
        (p is not device and not divided,
         f"offload_param={r.offload_param!r} at stage {r.stage}, where every rank computes from all parameters all the time: use stage 3,"
         " or leave offload_param out."),
        (p.on_disk and o is not p,
         f"parameters {p.where} with optimizer states elsewhere would keep three times as many bytes in the faster memory: give"
         f" offload_optimizer={r.offload_param!r} too."),
        ((o is device) != (g is device) or (g.on_disk and g is not o),
         f"gradients are stored on {g.value!r} and the optimizer's states on {o.value!r}: gradients go where the states are stepped,"
         f" or to the"
         " host for states on NVMe."),
        (r.on_disk and not r.nvme,
         "the recipe keeps state on NVMe but names no folder: give nvme='/path/on/the/disk', or a list of such."),
        (r.chunk % sector, f"chunk={r.chunk}: expected a multiple of {sector} elements, which fill whole sectors of {of.SECTOR} bytes."),
        (r.step_in_backward and o is device,
         "step_in_backward=True steps offloaded states in the backward pass; offload_optimizer says where they are."),
        (r.optimizer_over and not in_groups,
         f"optimizer_over={r.optimizer_over!r} needs a shard_group that parameters and gradients are divided in."),
        (in_groups and r.group is not None,
         f"shard_group={in_groups!r} and group={r.group!r}: they are the same groups; give one of them."),
        (in_groups and r.second_copy,
         "second_copy=True with a shard_group: parameters are divided inside the group already; leave one of them out."),
        (in_groups and r.stage < 1, "at stage 0 nothing is divided, over a shard_group neither: use stage 1, 2 or 3."),
        ((r.second_copy or r.optimizer_over) and not divided,
         "a second copy, or optimizer states over more ranks than the parameters, needs sharded parameters: stage 3."),
        (r.second_copy and r.group == FLAT,
         "second_copy=True is divided over a group, but the recipe says group='flat': give group='node' or a number of ranks."),
        (r.gather_codec and not divided,
         f"gather_codec={r.gather_codec!r}: parameters that are kept whole are gathered in full; use stage 3."),
        (r.frozen and not divided, f"frozen={r.frozen!r}: below stage 3 every rank keeps the whole weights to compute with; use stage 3."),
        (r.frozen and p is not device,
         f"frozen={r.frozen!r} with offload_param: frozen weights are stored encoded on the device; leave one of them out"
         f" (offload_optimizer"
         " may stay)."),
        (r.reduce_codec and r.stage < 1, f"reduce_codec={r.reduce_codec!r}: stage 0 reduces and gathers sums; use stage 1, 2 or 3."),
        (r.reduce_codec and r.accumulate_dtype != "fp32",
         f"reduce_codec={r.reduce_codec!r} with accumulate_dtype={r.accumulate_dtype!r}: encoded gradients are summed in fp32; leave"
         " accumulate_dtype out."),
        (r.reduce_codec and r.reduce == NATIVE,
         f"reduce='native' with reduce_codec={r.reduce_codec!r}: a backend cannot add encoded gradients; leave one of them out."),
    )  # fmt: skip
    for holds, sentence in wrong:
        if holds:
            raise ValueError(sentence)


def without_effect(r: Recipe) -> list[str]:
    """Return a sentence for each option that was given and has no effect."""
    below = f"at stage {r.stage}: it is about gathering sharded parameters (stage 3)"
    idle: tuple[tuple[Any, tuple[str, ...], str], ...] = (
        (r.stage < 3, ("prefetch", "reshard_after_forward"), below),
        (r.precision in (None, "fp32"), ("cast_inputs",), "where no 16-bit precision is named: inputs stay as they come"),
        (r.stage < 1, ("whole",), "at stage 0: every optimizer sees whole parameters"),
        ("bf16" not in (r.moments, r.master_dtype), ("stochastic_rounding",),
         "where nothing is rounded to bf16: give moments='bf16' or master_dtype='bf16'"),
        (r.optimizer.tier is Tier.DEVICE, ("offload_amount",), "where the optimizer's states stay on the device: give offload_optimizer"),
        (not r.on_disk, ("nvme", "chunk", "nvme_threads"), "where no state is stored on NVMe"),
        (r.optimizer.tier is Tier.DEVICE, ("offload_param",),
         "on parameters that train without offload_optimizer: they are gathered from their master weights on the device"),
    )  # fmt: skip
    said: dict[str, str] = {}
    for holds, names, why in idle:
        for name in names:
            if holds and name in r.given:
                said.setdefault(name, f"{name}={_said(getattr(r, name))} has no effect {why}.")
    return list(said.values())
