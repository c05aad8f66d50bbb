"""The recipe: three rows that say where every byte of training state lives and how it travels.

| kind of state | placement              | tier                  | dtype it rests in       | dtype on the wire |
|---------------|------------------------|-----------------------|-------------------------|-------------------|
| parameters    | replicated / sharded   | device / host / NVMe  | compute dtype (*)       | compute dtype     |
| gradients     | replicated / sharded   | device / host / NVMe  | accumulation (fp32)     | compute dtype     |
| optimizer     | replicated / sharded   | device / host / NVMe  | master weights (fp32)   | never travels     |

(*) One that the recipe names (`precision`), or, with None, each parameter's own: the model computes as it would without Onefold.

A ZeRO stage is a name for three placements (`PLACEMENTS_OF_STAGE`), nothing else: the runtime reads the rows, never the stage.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from onefold.recipe.checks import check_dtype, check_options, did_you_mean, without_effect
from onefold.recipe.groups import FLAT, GROUP, NATIVE, NODE, check_groups, read_groups
from onefold.recipe.groups import OPTIONS as GROUP_OPTIONS
from onefold.recipe.moments import BLOCK, FORMATS
from onefold.recipe.tiers import OPTIONS, UNLIMITED, check_tiers, of_tiers, read_folders, read_tiers


class Placement(enum.Enum):
    """Where one kind of state lives on the data-parallel axis.

    REPLICATED: every rank holds all of it. SHARDED: each rank holds one interval of each unit's flat address space.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(enum.Enum):
    """Which memory holds it: the one that the module computes from, the host's, or files on a disk."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


#: Bytes of small units that may be gathered ahead, and of small reductions that may be under way, beyond the counts `prefetch` and
#: `in_flight`: so few bytes cost latency, and waiting for each in turn would hold the ranks in lockstep.
SMALL_TRAFFIC = 256 << 10


@dataclass(frozen=True)
class Row:
    """One row of the recipe: placement, tier, the dtype at rest, the dtype on the wire (None: it does not travel).

    `dtype` None, in the row of parameters: each in its own. `wire` None, in the row of gradients: as the backward pass makes them.
    `over`: what a sharded row is divided among, "all" ranks or those of each "group". `codec`: how it is written on the wire; None is as it
    is. See recipe/groups.py.
    """

    placement: Placement
    dtype: torch.dtype | None
    wire: torch.dtype | None = None
    tier: Tier = Tier.DEVICE
    over: str = "all"
    codec: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise ValueError(f"placement={self.placement!r}: expected Placement.REPLICATED or Placement.SHARDED.")
        if not isinstance(self.tier, Tier):
            raise ValueError(f"tier={self.tier!r}: expected one of {', '.join(map(str, Tier))}.")
        check_dtype("dtype", self.dtype, optional=True)
        check_dtype("wire", self.wire, optional=True)


_R, _S = Placement.REPLICATED, Placement.SHARDED

# stage -> (parameters, gradients, optimizer states); gradients "replicated" means: whole until the boundary.
PLACEMENTS_OF_STAGE: Mapping[int, tuple[Placement, Placement, Placement]] = {
    0: (_R, _R, _R),
    1: (_R, _R, _S),
    2: (_R, _S, _S),
    3: (_S, _S, _S),
}

COMPUTE_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ReduceAt = Literal["micro-batch", "boundary"]


@dataclass(frozen=True)
class Recipe:
    """What `onefold.shard` executes. Build one with `Recipe.zero`, `Recipe.from_deepspeed`, or row by row.

    Attributes:
        parameters, gradients, optimizer: the three rows.
        reduce_at: "micro-batch" reduces gradients in every backward pass; "boundary" keeps them whole under
            `onefold.no_sync` and reduces once an optimizer step (more memory, less traffic). None becomes "boundary" for replicated
            gradients, else "micro-batch".
        reshard_after_forward: sharded parameters are dropped after the forward pass and gathered again in backward (3Ψ on the wire, less
            those of the units at the turn, which the forward pass uses last); False keeps them in between (2Ψ).
        prefetch: units gathered ahead of use, for each level that gathers go over (two where they go across groups, then inside: one
            unit is then on each of the two links); 0 gathers on demand. Unless it is 0, small units do not count up to SMALL_TRAFFIC bytes.
        in_flight: reductions that may be under way behind the backward pass; 0 waits for each at once. Small ones as with prefetch.
        overlap: False turns prefetch and in_flight to 0 (same bits, for debugging).
        cast_inputs: floating-point inputs of the forward pass are cast to the compute dtype, where the recipe names one.
        sync_buffers: which buffers become rank 0's before a forward pass, whenever DDP would send them (the first pass, and each that
            follows one with gradients outside `no_sync`): True all, "norms" the running statistics of normalization layers, False none.
        stall_timeout: seconds that a rank waits for the others before every rank gets a `StallError`.
        moments: what Adam's moments rest in, on whatever tier: "fp32", "bf16", "int8", "fp8" or "int4" (recipe/moments.py); None: in the
            dtype of the master weights, as torch's optimizers make them. They are computed with in fp32; parameters of 64 bits keep theirs.
        stochastic_rounding: fp32 is rounded to bf16, in moments and in master weights of that dtype, up or down by chance, so that it is
            right on average. Chance depends on `rounding_seed`, the step and the element's place in its parameter, on nothing else.
        elementwise_optimizer: None or False tries the optimizer before its first step; True is your word for it.
        offload_share, offload_bytes: how much of the optimizer's states rests on their row's tier: a share, or bytes of a rank.
            The last units of the model go first: their transfers hide behind the rest of the backward pass and the next forward.
        step_in_backward: your word that nothing looks at gradients between backward() and step(): offloaded units are stepped
            behind the rest of the backward pass.
        activations: bytes of host memory for tensors that autograd keeps between forward and backward; None keeps them on the device.
        tile: bytes of one gathered weight above which linear and embedding layers are computed in tiles; None: never.
        group: ranks of a group, inside which and across which everything moves. None: those of a node, where the launcher says that there
            are several with as many ranks each; "node": the same, and says so where it cannot be; "flat": every rank to every other.
        frozen: the codec in which frozen weights rest and are gathered, "int8", "nf4", "int4" or "fp8"; None: in the compute dtype.
        error_feedback: what encoding a gradient lost is added to the next one. wire_rounding: of encoded gradients.
        reduce: "ordered" moves gradients as they are and adds them in rank order in the accumulation dtype: stages have the same bits.
            "native" lets the backend (NCCL) add them, in the dtype of the wire and in its own order: stages agree within rounding.
        nvme: folders on the disks that hold what rests on NVMe, striped. nvme_threads: transfers under way at a time.
        chunk: elements stepped at a time of states on NVMe.
        notes: sentences about options that have no effect; `shard` logs them once.
        units: names or classes of the modules that become units; None finds the repeated block.
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
    moments: str | None = None
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    elementwise_optimizer: bool | None = None
    offload_share: float = 1.0
    offload_bytes: int | None = None
    step_in_backward: bool = False
    activations: int | None = None
    tile: int | None = None
    group: int | Literal["node", "flat"] | None = None
    frozen: str | None = None
    error_feedback: bool = False
    wire_rounding: str = "nearest"
    reduce: Literal["ordered", "native"] = "ordered"
    nvme: tuple[str, ...] = ()
    nvme_threads: int = 4
    chunk: int = 1 << 21
    units: tuple[str | type, ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in _ROWS:
            if not isinstance(getattr(self, name), Row):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a Row(placement, dtype, wire).")
            if name != "parameters":
                check_dtype(f"{name}.dtype", getattr(self, name).dtype)
        p, g, o = self.parameters.placement, self.gradients.placement, self.optimizer.placement
        if o is _R and (g is _S or p is _S):
            raise ValueError(
                "the recipe shards gradients or parameters but replicates the optimizer states: each rank would own states for "
                "gradients it does not have. Shard the optimizer row too (stage 1, 2 or 3), or replicate all three (stage 0)."
            )
        if p is _S and g is _R:
            raise ValueError(
                "the recipe shards parameters but keeps gradients replicated, which would cost the memory that sharding the "
                "parameters saves. Shard the gradient row (stage 3); reduce_at='boundary' keeps them whole until the boundary."
            )
        check_options(self)
        object.__setattr__(self, "nvme", read_folders(self.nvme or None))
        check_tiers(self)
        check_groups(self)
        if isinstance(self.units, list):
            object.__setattr__(self, "units", tuple(self.units))
        if self.reduce_at is None:
            object.__setattr__(self, "reduce_at", _usual_time(g))
        if self.reduce_at not in ("micro-batch", "boundary"):
            raise ValueError(f"reduce_at={self.reduce_at!r}: expected 'micro-batch' or 'boundary'.")
        if g is _R and self.reduce_at == "micro-batch":
            raise ValueError(
                f"stage {self.stage} keeps gradients whole until the boundary, so reduce_at='micro-batch' cannot apply: "
                "use stage 2 or 3, or leave reduce_at out."
            )
        given = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name) != self.__dataclass_fields__[name].default}
        object.__setattr__(self, "notes", tuple(dict.fromkeys([*self.notes, *without_effect(self, given), *of_tiers(self)])))

    # -- presets ---------------------------------------------------------------------------------------------------------------

    @classmethod
    def zero(
        cls,
        stage: int,
        *,
        precision: str | None = None,
        reduce_at: ReduceAt | None = None,
        wire: torch.dtype | None = None,
        master_dtype: torch.dtype = torch.float32,
        accumulate_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Recipe:
        """A ZeRO stage by its number (Rajbhandari et al. 2020, section 5).

        Args:
            stage: 0 (DDP), 1 (optimizer states sharded), 2 (+ gradients), 3 (+ parameters).
            precision: None computes as the model is: each parameter in its own dtype, inputs as they come. "fp32", "bf16" or "fp16"
                converts parameters and floating-point inputs. Master weights and sums are fp32 either way.
            reduce_at: stages 0 and 1 reduce at the boundary; stages 2 and 3 every micro-batch unless told "boundary".
            wire: dtype of gradients on the wire; None sends them as the backward pass makes them (the compute dtype). They are
                summed in `accumulate_dtype` whatever travels.
            options: where state rests (`offload_optimizer`, `offload_gradients`, `offload_param`, `offload_activations`, `nvme`,
                `tile`: see the table of recipe/tiers.py), groups and codecs (`shard_group`, `optimizer_over`, `second_copy`,
                `gather_codec`, `reduce_codec`: see recipe/groups.py), and every other field of `Recipe`.

        Raises:
            ValueError: an unknown stage, precision or option, or rows that cannot be combined.
        """
        if not isinstance(stage, int) or isinstance(stage, bool) or stage not in PLACEMENTS_OF_STAGE:
            raise ValueError(f"stage={stage!r}: expected 0, 1, 2 or 3.")
        if precision is not None and (not isinstance(precision, str) or precision not in COMPUTE_DTYPES):
            meant = str(precision).removeprefix("torch.")
            hint = next((f" Did you mean {name!r}?" for name, dtype in COMPUTE_DTYPES.items() if _short(dtype) == meant), "")
            raise ValueError(f"precision={precision!r}: expected one of {', '.join(COMPUTE_DTYPES)}, or None: as the model is.{hint}")
        tiers, fields = read_tiers(options)
        over, codecs, more = read_groups(options)
        options |= fields | more
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            hint = did_you_mean(unknown[0], _OPTIONS | OPTIONS | GROUP_OPTIONS)
            raise ValueError(f"Recipe.zero does not know {', '.join(unknown)}. {hint}")
        compute = COMPUTE_DTYPES[precision] if precision is not None else None
        p, g, o = PLACEMENTS_OF_STAGE[stage]
        check_dtype("wire", wire, optional=True)
        check_dtype("master_dtype", master_dtype)
        check_dtype("accumulate_dtype", accumulate_dtype)
        recipe = cls(
            parameters=Row(
                p, compute, compute if p is _S or o is _S else None, tiers["parameters"], over["parameters"], codecs["parameters"]
            ),
            gradients=Row(g, accumulate_dtype, wire or compute, tiers["gradients"], over["gradients"], codecs["gradients"]),
            optimizer=Row(o, master_dtype, tier=tiers["optimizer"], over=over["optimizer"]),
            reduce_at=reduce_at,
            **options,
        )
        return replace(recipe, notes=(*without_effect(recipe, options), *of_tiers(recipe)))

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any] | str, world_size: int | None = None) -> Recipe:
        """The recipe that a DeepSpeed configuration (a dict or the path of its JSON file) asks for.

        `notes` lists the keys that have no effect here. Batch sizes are checked against `world_size` if it is given.

        Raises:
            ValueError: the configuration contradicts itself, or says "auto" where it decides the recipe. NotImplementedError: it asks for
                what is not built.
        """
        from onefold.recipe.deepspeed import OF_RECIPES, read_deepspeed, refuse_auto

        read = read_deepspeed(config, world_size)
        refuse_auto([path for path in read.undecided() if path.startswith(("zero_optimization.", *OF_RECIPES))])
        return cls.zero(**read.recipe_arguments).replace(notes=tuple(read.recipe_notes))

    @classmethod
    def auto(cls, model: Any, **job: Any) -> Recipe:
        """The lowest stage whose peak fits this machine, from a plan of `model`. Collective; see `onefold.plan.auto.recipe_for`."""
        from onefold.plan.auto import recipe_for  # a room below this one: looked up only when it is asked for

        return recipe_for(model, **job)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed, checked again.

        Raises:
            ValueError: an unknown field, or one of a value it cannot have.
        """
        unknown = sorted(set(changes) - set(self.__dataclass_fields__))
        if unknown:
            raise ValueError(f"a recipe has no {', '.join(unknown)}. {did_you_mean(unknown[0], set(self.__dataclass_fields__))}")
        if "reduce_at" not in changes and self.reduce_at == _usual_time(self.gradients.placement):
            changes["reduce_at"] = None  # what is usual for the gradient row as it will be
        if "notes" not in changes:
            changes["notes"] = tuple(n for n in self.notes if " has no effect " not in n)  # found anew
            given = {name: value for name, value in changes.items() if name in _OPTIONS}
            copy = replace(self, **changes)
            return replace(copy, notes=(*copy.notes, *without_effect(copy, given)))
        return replace(self, **changes)

    # -- what it says ----------------------------------------------------------------------------------------------------------

    def units_ahead(self, two_levels: bool) -> int:
        """How many units are gathered ahead of use. `two_levels`: the ranks stand in groups, several of several."""
        levels = 2 if two_levels and self.parameters.over != GROUP else 1
        return levels * self.prefetch if self.overlap else 0

    @property
    def stage(self) -> int | None:
        """The ZeRO stage whose placements these are (for display; nothing in the runtime asks), or None."""
        rows = (self.parameters.placement, self.gradients.placement, self.optimizer.placement)
        return next((s for s, placements in PLACEMENTS_OF_STAGE.items() if placements == rows), None)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What parameters and inputs are converted to; None computes in each parameter's own dtype."""
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
            rests, wire = self.in_words(name)
            lines.append(f"{name:12}{row.placement.value:12}{row.tier.value:8}{rests:10}{wire or '-':10}")
        again = "gathered again in backward" if self.reshard_after_forward else "kept from forward to backward"
        tail = [f"gradients reduced at the {self.reduce_at}"]
        if self.parameters.placement is _S:
            tail.append(f"parameters {again}")
        tail += self._tails() + self._levels()
        return "\n".join([*lines, "; ".join(tail), *self.notes])

    def in_words(self, name: str) -> tuple[str, str]:
        """What a row rests in and travels in, as a table shows it: dtypes by name, "model's" for each parameter's own, "" for no travel."""
        row: Row = getattr(self, name)
        rests = _short(row.dtype) if row.dtype is not None else MODELS
        if row.wire is not None:
            return rests, _short(row.wire)
        if name == "gradients":  # as the backward pass makes them
            return rests, _short(self.compute_dtype) if self.compute_dtype is not None else MODELS
        travels = name == "parameters" and row.dtype is None and _S in (row.placement, self.optimizer.placement)
        return rests, MODELS if travels else ""

    def _levels(self) -> list[str]:
        """What the recipe says about groups and codecs besides the rows."""
        rows = {"parameters": self.parameters, "gradients": self.gradients, "optimizer states": self.optimizer}
        tail = []
        inside = [name for name, row in rows.items() if row.over == GROUP]
        what = f"{', '.join(inside)} divided inside each" if inside else "moves go inside and across"
        if self.group is None:
            tail.append("moves go inside nodes and across, where there are several")
        elif self.group == FLAT:
            tail.append("moves go from every rank to every other")
        else:
            tail.append(f"groups: {'nodes' if self.group == NODE else f'of {self.group} ranks'}, {what}")
        tail += [f"{name} travel as {row.codec}" for name, row in rows.items() if row.codec]
        if self.frozen:
            tail.append(f"frozen weights rest as {self.frozen}")
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
            tail.append("offloaded units stepped behind the backward pass")
        if self.activations is not None:
            tail.append("activations on the host" + ("" if self.activations >= UNLIMITED else f" up to {self.activations:,} bytes"))
        if self.tile is not None:
            tail.append(f"weights above {self.tile:,} bytes computed in tiles")
        if self.nvme:
            tail.append(f"NVMe: {', '.join(self.nvme)}")
        return tail


#: How a table names each parameter's own dtype.
MODELS = "model's"
_ROWS = ("parameters", "gradients", "optimizer")
_OPTIONS = {f for f in Recipe.__dataclass_fields__ if f not in (*_ROWS, "reduce_at", "notes")}


def _usual_time(gradients: Placement) -> ReduceAt:
    return "boundary" if gradients is _R else "micro-batch"


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
