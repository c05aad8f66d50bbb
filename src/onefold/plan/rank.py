"""Which axes divide which parameters, and what that leaves on a rank: the usual plans of Megatron and
torchtitan (column- and row-wise linear layers, a vocabulary-parallel embedding and head).

| kind      | parameters                                   | tp                       | ep      | held by           |
|-----------|----------------------------------------------|--------------------------|---------|-------------------|
| embedding | rows of the vocabulary                       | rows                     | –       | dp × ep × cp      |
| head      | as embedding; tied: a copy on the last stage | rows                     | –       | dp × ep × cp      |
| attention | queries, keys, values; then the output       | columns; then rows       | –       | dp × ep × cp      |
| mlp       | up and gate, shared experts too; then down   | columns; then rows       | –       | dp × ep × cp      |
| experts   | those of a block, in one tensor              | as mlp                   | experts | dp × cp (× tp)    |
| router    | a row an expert                              | –                        | –       | all of the stage  |
| latent    | what compresses queries, keys and values     | –                        | –       | all of the stage  |
| norm      | norms, positions, biases behind a row-wise   | –                        | –       | all of the stage  |
|           | layer, and what no rule knows                |                          |         |                   |

"held by" is what `Mesh.holders` (layout/holders.py) says of the axes that divide the kind: the
runtime asks the same function. A flat buffer has the parameters of a unit that the same ranks hold,
and is a `ShardSpec` over that many ranks.

Sources: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2; Liang et
al. 2024 (torchtitan, arXiv:2410.06511), section 2.1; Zhang and Su 2025 (arXiv:2502.07846), section 3
(latent attention, experts).

Data parallelism alone is the mesh dp = N: all ranks hold everything.

A pipeline's stages are successive blocks, such that the largest stage has as few parameters as
possible. The embedding belongs to the first, the last norm and the head to the last. A tied matrix
exists on both.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod

from onefold.comm.communicators import flat_over, inner_of, nodes_of
from onefold.layout import LOW, Dtypes, ShardSpec, Slot, Tiers, Topology
from onefold.layout.holders import AxisCut, region_of
from onefold.memory import MASTERS, MOMENTS, PARAMETERS
from onefold.plan.degrees import AXES, Degrees, dims_of
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.quant.codecs import CODECS
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import FORMATS
from onefold.recipe.optimizers import PLANNED
from onefold.runtime.units import offloaded_units

#: What the last part of a parameter's path is if tensor parallelism cuts it. Conv1D of GPT-2 stores
#: (in, out), everything else (out, in).
_COLUMNS = r"(q|k|v|qkv|q_b|kv_b|gate|up|gate_up)_proj|query_key_value|dense_h_to_4h|fc1|w1|w3"
_ROWS = r"(o|out|down)_proj|dense|dense_4h_to_h|fc2|w2|wo"


@dataclass(frozen=True)
class Rule:
    """What divides the parameters whose path matches: {axis: dimension}."""

    kind: str
    path: re.Pattern[str]
    axes: Mapping[str, int] = field(default_factory=dict)


def _rule(kind: str, path: str, **axes: int) -> Rule:
    return Rule(kind, re.compile(rf"(^|\.)({path})$"), axes)


_ATTENTION = r"[^.]*att[^.]*"
#: The first rule that matches counts.
RULES: tuple[Rule, ...] = (
    _rule("experts", r"experts\.(.*\.)?(gate_up|gate|up)_proj(\.weight)?", ep=0, tp=1),
    _rule("experts", r"experts\.(.*\.)?down_proj(\.weight)?", ep=0, tp=2),
    _rule("router", r"(gate|router)(\.[^.]*)?"),
    _rule("latent", r"(q_a_proj|kv_a_proj[^.]*)\.(weight|bias)"),
    _rule("norm", r"[^.]*(norm|ln_[^.]*)\.(weight|bias)"),
    _rule("embedding", r"(wte|[^.]*embed[^.]*)\.weight", tp=0),
    _rule("head", r"(lm_head|head|output)\.(weight|bias)", tp=0),
    _rule("attention", rf"{_ATTENTION}\.c_attn\.weight", tp=1),
    _rule("attention", rf"{_ATTENTION}\.c_attn\.bias", tp=0),
    _rule("attention", rf"{_ATTENTION}\.c_proj\.weight", tp=0),
    _rule("attention", rf"{_ATTENTION}\.({_COLUMNS})\.(weight|bias)", tp=0),
    _rule("attention", rf"{_ATTENTION}\.({_ROWS})\.weight", tp=1),
    _rule("mlp", r"c_fc\.weight", tp=1),
    _rule("mlp", r"c_fc\.bias", tp=0),
    _rule("mlp", r"c_proj\.weight", tp=0),
    _rule("mlp", rf"({_COLUMNS})\.(weight|bias)", tp=0),
    _rule("mlp", rf"({_ROWS})\.weight", tp=1),
    _rule("norm", r".*"),
)


@lru_cache(maxsize=65536)
def rule_of(name: str) -> Rule:
    """Return the rule for a parameter of this name."""
    return next(rule for rule in RULES if rule.path.search(name))


def divided_along(p: Parameter, degrees: Degrees) -> tuple[str, ...]:
    """Return the axes of several ranks that divide a parameter."""
    rule, sizes = rule_of(p.name), degrees.sizes
    return tuple(axis for axis, dim in rule.axes.items() if sizes[axis] > 1 and dim < len(p.shape))


def local_shape(p: Parameter, degrees: Degrees, rank: int = 0) -> tuple[int, ...]:
    """Return the shape of the part of a parameter that a rank of the stage has; of rank 0, the
    largest part.
    """
    rule, sizes = rule_of(p.name), degrees.sizes
    cuts = [
        AxisCut(rule.axes[a], sizes[a], degrees.mesh.at[rank][AXES.index(a)])
        for a in divided_along(p, degrees)
    ]
    return region_of(p.shape, cuts).shape


def local_numel(p: Parameter, degrees: Degrees) -> int:
    return prod(local_shape(p, degrees))


# -- stages of a pipeline --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stage:
    """What one rank of a pipeline has: its units, with whole parameters. One object for each model
    and division, so that what is counted of it is counted once.

    Attributes:
        index: its number. chunks: the names of its blocks, by chunk.
        first, last: it has the embedding; it has the head.
    """

    index: int
    units: tuple[UnitShape, ...]
    chunks: tuple[tuple[str, ...], ...]
    first: bool
    last: bool

    @cached_property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its blocks."""
        return tuple(name for chunk in self.chunks for name in chunk)

    @property
    def blocks(self) -> int:
        return len(self.names)

    @property
    def crossings(self) -> int:
        """How often a micro-batch crosses to another stage: outputs and gradients of each chunk, but for
        the last output of the model and the gradient of its first input.
        """
        return 2 * len(self.chunks) - self.first - self.last

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(p for unit in self.units for p in unit.parameters)


@lru_cache(maxsize=1024)
def stages_of(model: ModelShape, degrees: Degrees) -> tuple[Stage, ...]:
    """Divide a model among the stages of a pipeline; one stage is the model as it is."""
    names, pp, chunks = [b.name for b in model.blocks], degrees.pp, degrees.chunks
    if pp == 1:
        return (Stage(0, model.units, (tuple(names),), True, True),)
    tied, sizes = _tied(model), Counter[str]()
    for unit in model.units:
        for p in unit.parameters:
            sizes[model.block_of[unit.name] or names[0 if _leads(p) else -1]] += p.numel
    sizes[names[-1]] += sum(p.numel for p in tied)
    cuts = [0, *accumulate(_counts([sizes[name] for name in names], pp * chunks))]
    parts = [tuple(names[begin:end]) for begin, end in pairwise(cuts)]
    out = []
    for index in range(pp):
        own, first, last, units = parts[index::pp], index == 0, index == pp - 1, []
        for unit in model.units:
            if block := model.block_of[unit.name]:
                kept = unit.parameters if any(block in part for part in own) else ()
            else:
                kept = tuple(p for p in unit.parameters if (first if _leads(p) else last))
            kept += tied if last and unit.name == "(root)" else ()
            if kept or unit.name == "(root)":
                units.append(replace(unit, parameters=kept))
        out.append(Stage(index, tuple(units), tuple(own), first, last))
    return tuple(out)


def handed_on(
    model: ModelShape, degrees: Degrees, micro_batch: int, seq: int
) -> tuple[int, int, int]:
    """Return the shape of what a stage hands to the next in a micro-batch: samples, a rank's tokens of
    each, and their width.
    """
    width = dims_of(model).hidden // (degrees.tp if degrees.sequence_divided else 1)
    return micro_batch, seq // degrees.cp, width


def _leads(p: Parameter) -> bool:
    """Return whether a parameter outside the blocks is the first stage's, and not the last's."""
    return any(word in p.name for word in ("embed", "wte", "wpe"))


def _tied(model: ModelShape) -> tuple[Parameter, ...]:
    """Return the matrix that is both embedding and head, as the last stage has it."""
    every = (p for u in model.units for p in u.parameters if rule_of(p.name).kind == "embedding")
    found = next(every, None) if dims_of(model).tied else None
    return (replace(found, name=f"tied.{found.name}"),) if found is not None else ()


def _counts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return how many successive blocks each part gets, at least one: the largest part is as small as
    possible, and earlier parts are full.
    """
    ends = list(accumulate(sizes))

    def filled(most: int) -> list[int]:
        """Fill each part up to `most`, with a block left for each one behind it."""
        counts, at = [], 0
        for behind in reversed(range(parts)):
            full = bisect_right(ends, most + (ends[at - 1] if at else 0))
            counts.append(min(full, len(sizes) - behind) - at)
            at += counts[-1]
        return counts

    def fits(most: int) -> bool:
        return sum(filled(most)) == len(sizes)

    return filled(bisect_left(range(ends[-1]), True, max(sizes), key=fits))


# -- flat buffers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat(ShardSpec):
    """A flat buffer of one rank. `held`: the ranks of the stage that hold it."""

    held: Sequence[int] = ()


@dataclass(eq=False)
class UnitPlan:
    """A unit's flat buffers on one rank."""

    name: str
    flats: tuple[Flat, ...]
    looks_up_only: bool

    @property
    def path(self) -> str:
        """The module's path; "" of the root."""
        return "" if self.name == "(root)" else self.name

    @property
    def resident(self) -> bool:
        return all(f.resident for f in self.flats)

    def encloses(self, other: UnitPlan) -> bool:
        return self is not other and (self.path == "" or other.path.startswith(self.path + "."))


def units_of(
    model: ModelShape | Stage,
    recipe: Recipe,
    ranks: int | Degrees,
    rank: int = 0,
    per_node: int | None = None,
    nccl: bool = False,
) -> list[UnitPlan]:
    """Lay out the units as the engine does on one rank: a flat buffer for each kind of parameters that
    the same ranks hold.

    Args:
        model: a model, or what a stage of a pipeline has of it.
        ranks: data-parallel ranks, or a mesh.
        rank: its number among the ranks of the stage.
        per_node: ranks of a node, as a launcher would say; None: all ranks.
        nccl: collectives are NCCL's, on the device; otherwise they are gloo's messages.

    Raises:
        ValueError: groups that do not divide the ranks.
    """
    degrees = ranks if isinstance(ranks, Degrees) else Degrees(dp=ranks)
    whole = exchanges(holding(degrees, ()), recipe, per_node, nccl, degrees.dp * degrees.cp)[0]
    away = offloaded_units([u.trainable for u in model.units], recipe, whole)

    def unit_plan(unit: UnitShape, offloaded: bool) -> UnitPlan:
        kinds: dict[tuple[Dtypes, bool, bool, tuple[str, ...]], list[Parameter]] = {}
        for p in unit.parameters:
            like = (
                p.dtypes(recipe),
                p.trainable,
                rests_encoded(p, recipe),
                divided_along(p, degrees),
            )
            kinds.setdefault(like, []).append(p)
        flats = []
        for (_, trainable, stored, divided), of_kind in kinds.items():
            held = holding(degrees, divided, rank)
            topology, decided = exchanges(held, recipe, per_node, nccl, degrees.dp * degrees.cp)
            dtypes = of_kind[0].dtypes(decided)
            flats.append(
                Flat(
                    tuple((p.name, local_shape(p, degrees, rank)) for p in of_kind),
                    dtypes,
                    decided,
                    topology,
                    topology.position_of(held.index(rank)),
                    CODECS.__getitem__,
                    trainable=trainable,
                    stored=stored,
                    tiers=Tiers.of(trainable, decided) if offloaded and not stored else None,
                    in_place=all(p.dtype == dtypes.compute for p in of_kind),
                    native=nccl,
                    rooms=tuple(local_numel(p, degrees) for p in of_kind) if divided else None,
                    held=held,
                )
            )
        return UnitPlan(unit.name, tuple(flats), unit.looks_up_only)

    return [unit_plan(u, index in away) for index, u in enumerate(model.units)]


@lru_cache(maxsize=1024)
def holding(degrees: Degrees, divided: tuple[str, ...], rank: int = 0) -> Sequence[int]:
    """Return the ranks of a stage that hold the same part as `rank` of a parameter that is divided
    along `divided`: as the runtime finds them.
    """
    if not divided:
        return range(degrees.dp * degrees.of_stage_without_dp)
    return degrees.mesh.holders(divided).group_of(rank)


def exchanges(
    ranks: Sequence[int], recipe: Recipe, per_node: int | None, nccl: bool, data: int
) -> tuple[Topology, Recipe]:
    """Return (the groups of a recipe among ranks that hold the same parameters, the recipe with
    `reduce` as the engine decides it where it is None).

    Args:
        data: data ranks of the stage. A recipe's number of ranks is one of data ranks: holders that
            have the same data are in one group, and experts divide what it leaves.
    """
    inner = recipe.inner
    mine = inner * len(ranks) // data if isinstance(inner, int) else inner
    topology, flat = _groups(ranks, max(1, mine) if isinstance(mine, int) else mine, per_node)
    return topology, recipe.with_sums(nccl, flat)


@lru_cache(maxsize=1024)
def _groups(
    ranks: Sequence[int], inner: int | str | None, per_node: int | None
) -> tuple[Topology, bool]:
    nodes = nodes_of(ranks, per_node)
    topology = Topology(len(ranks), inner_of(inner, nodes))
    return topology, flat_over(nodes, topology)


def rests_encoded(p: Parameter, recipe: Recipe) -> bool:
    """Return whether a frozen weight is stored encoded, by the rule of runtime/units.py."""
    frozen = recipe.frozen is not None and not p.trainable and len(p.shape) >= 2
    return frozen and p.dtype in LOW and not p.looked_up


# -- at rest ---------------------------------------------------------------------------------------
#
# What a rank holds on its device between steps.
#
# With P the bytes of a unit's flat buffer (padding included), N ranks, by placement of parameters /
# gradients / optimizer:
#
# | stage | parameters | master weights        | moments (AdamW) | wire of a step with m micro-batches, × (N−1)/N        |
# |-------|------------|-----------------------|-----------------|--------------------------------------------------------|
# | 0     | P          | P₃₂ if 16-bit         | 2·P₃₂           | all-reduce 2P                                          |
# | 1     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter P                         |
# | 2     | P          | P₃₂/N if 16-bit       | 2·P₃₂/N         | all-gather P, reduce-scatter m·P                       |
# | 3     | –          | P₃₂/N                 | 2·P₃₂/N         | all-gather 2m·P, m·P                                    |
#
# At stage 3 some units are gathered m times only: those that only look up, and the last units (the
# last unit of a forward pass and the units around it stay gathered until the backward pass). In fp32
# at stages 0 to 2 the masters are (a slice of) the parameters themselves. Frozen parameters have
# neither masters nor moments and are stored in the compute dtype. All of this follows from the
# recipe's rows; the code never asks for the stage.
#
# With groups of G of the N ranks (layout/spec.py; by default a group is a node), and a codec that
# leaves e bytes of each byte, × (G−1)/G intra-group and (N−G)/NG inter-group:
#
# | recipe (stage 3)          | beside the above at rest     | sent intra-group            | sent inter-group                |
# |---------------------------|------------------------------|-----------------------------|---------------------------------|
# | groups (all stages)       |                              | as above                    | as above                        |
# | `shard_group`             | masters, moments: 1/G        | 3m·P                        | 2P, once                        |
# | … `optimizer_over="all"`  | parameters (compute): P/G    | 3m·P                        | 2P, once                        |
# | `second_copy`             | parameters (compute): P/G    | 3m·P                        | P once, m·P                     |
# | `gather_codec`            | e·P/N (with the copy: e·P/G) | e·P for P of each gather    | e·P for P of each gather        |
# | `reduce_codec`            |                              | e·P for P of each reduction | e·P for P of each reduction     |
# | `frozen` (matrices)       | e·P/N instead of P/N         | e·P for P of each gather    | e·P for P of each gather        |
#
# Sources: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), section 4; Zhang et al. 2022 (MiCS,
# arXiv:2205.00119), section 3; Zhao et al. 2023 (PyTorch FSDP), section 3.2.2.
#
# Every size is that of a `ShardSpec` (layout/spec.py), by which the engine allocates and sends.
#
# If a flat buffer's state is offloaded (`ShardSpec.tiers`), the device holds only the values that the
# model computes with: the whole if it is resident, this rank's interval if it is gathered, nothing if
# parameters are offloaded too.
# What is off the device is in `plan/offloaded.py`.


def filled(held: Mapping[str, int]) -> dict[str, int]:
    """Leave zeros out."""
    return {k: v for k, v in held.items() if v}


def at_rest(
    units: Sequence[UnitPlan], optimizer: str = "adamw", held: int | None = None
) -> dict[str, int]:
    """Return the bytes that a rank holds on its device between steps, by category, after gradients
    are dropped.

    Args:
        held: its bytes of moments, if it steps matrices whole (`onefold.plan.owned`).
    """
    out = Counter({MOMENTS: held or 0})
    for flat in (f for u in units for f in u.flats):
        out.update({PARAMETERS: flat.parameter_bytes, MASTERS: flat.master_bytes})
        if held is None:
            out[MOMENTS] += moments(flat, optimizer).get(Tier.DEVICE, 0)
    return filled(out)


def moments(flat: ShardSpec, optimizer: str) -> dict[Tier, int]:
    """Return the bytes of optimizer states for the part of `flat` that this rank steps, by tier. Some
    optimizers also keep a number for each parameter of which the rank steps any element: Adam's
    count of steps has 4 bytes. Adagrad makes it for every parameter, when it is made.

    In files moments have room for padding too. Memory keeps such numbers, and moments too small to be
    packed.
    """
    kept, tier = PLANNED[optimizer], flat.tiers.optimizer if flat.tiers else Tier.DEVICE
    if not flat.trainable:
        return {}
    of = {slot: flat.moment_bytes(slot, kept.elementwise_states) for slot in flat.layout.slots}
    every = sum(
        nbytes + kept.number_bytes
        for slot, nbytes in of.items()
        if kept.at_once or flat.local(slot)
    )
    if not tier.on_disk:
        return {tier: every}
    packed = sum(nbytes for slot, nbytes in of.items() if not stays_in_memory(flat, slot))
    return {tier: states_on_disk(flat, flat.own, optimizer), Tier.HOST: every - packed}


def stays_in_memory(flat: ShardSpec, slot: Slot) -> bool:
    """Return whether a parameter's moments are too small to be packed, and stay in memory while the
    others are on NVMe.
    """
    return (
        flat.moments is not None
        and FORMATS[flat.moments].packed
        and not FORMATS[flat.moments].of(slot.numel).packed
    )


def states_on_disk(flat: ShardSpec, numel: int, optimizer: str) -> int:
    """Return the bytes on NVMe of the moments of `numel` elements of a flat buffer."""
    if all(stays_in_memory(flat, slot) for slot in flat.layout.slots if flat.local(slot)):
        return 0
    each = numel * flat.dtypes.master.itemsize
    if flat.moments is not None:
        each = FORMATS[flat.moments].nbytes(numel)
    return PLANNED[optimizer].elementwise_states * each
