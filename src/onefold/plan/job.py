"""The questions of a plan: what is to be trained (`Job`), and how it may be divided (`Scheme`).

What a plan may choose between nodes (`COMMUNICATION`): groups of a node, copies inside it and
codecs, as arguments of `Recipe.zero`.

| name         | what it is                                                            | changes numbers          |
|--------------|-----------------------------------------------------------------------|--------------------------|
| (none)       | two legs, inside nodes and between: each byte enters a node once       |                          |
| flat         | every rank sends to every other                                        | the order of sums only   |
| hpZ          | a second copy of the parameters in each node (ZeRO++)                  | the order of sums only   |
| HSDP         | state divided in each node, replicated across (FSDP, MiCS)             | the order of sums only   |
| hybrid       | the same, with optimizer states over all ranks                         | the order of sums only   |
| qwZ          | parameters travel in 8 bits (ZeRO++)                                   | rounds weights           |
| qgZ          | gradients travel in 4 bits (ZeRO++)                                    | rounds gradients         |
| ZeRO++       | hpZ, qwZ and qgZ                                                       | rounds both              |

Ways that round are lossy: a plan says what they would save and how to ask for them, and never takes
them unasked. Sources: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), Zhang et al. 2022 (MiCS,
arXiv:2205.00119), Zhao et al. 2023 (PyTorch FSDP, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from onefold.plan.degrees import ALONE, Degrees
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.recipe.core import NODES, OPTIONS
from onefold.recipe.moments import FORMATS
from onefold.recipe.optimizers import PLANNED, WHOLE
from onefold.recipe.options import MOST, Dtype, Precision, refuse_unknown

#: Arguments of `Recipe.zero` about groups, codecs and frozen weights.
COMMUNICATION_OPTIONS = {name for name, option in OPTIONS.items() if option.panel == NODES} - {
    "reduce"
}


@dataclass(frozen=True)
class Way:
    """A choice that a plan may make: arguments of `Recipe.zero`, and the words for them in a
    sentence.

    Attributes:
        lossy: values are rounded on the wire.
        in_part: a share of the units may take it.
    """

    words: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lossy: bool = False
    in_part: bool = False

    @property
    def on_disk(self) -> bool:
        """Whether optimizer states go to a disk."""
        return self.options.get("offload_optimizer") == "nvme"


COMMUNICATION: Mapping[str, Way] = {
    "": Way(""),
    # A plan rounds nothing by itself: native sums, the default of flat exchanges on NCCL, would
    "flat": Way("every rank to every other", {"group": "flat", "reduce": "ordered"}),
    "qwZ": Way("weights in 8 bits", {"gather_codec": "int8"}, lossy=True),
    "hpZ": Way("a second copy in each node", {"second_copy": True}),
    "qgZ": Way("gradients in 4 bits", {"reduce_codec": "int4"}, lossy=True),
    "ZeRO++": Way(
        "hpZ, qwZ and qgZ",
        {"second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"},
        lossy=True,
    ),
    "HSDP": Way("divided in each node", {"shard_group": "node"}),
    "hybrid": Way(
        "divided in each node, optimizer over all", {"shard_group": "node", "optimizer_over": "all"}
    ),
}
_HOST, _DISK = {"offload_optimizer": "cpu"}, {"offload_optimizer": "nvme"}
#: Where the plan may store states besides the device, in the order of least slowdown.
OFFLOAD: Mapping[str, Way] = {
    "none": Way(""),
    "optimizer": Way("optimizer on the host", _HOST, in_part=True),
    "parameters": Way("all states on the host", _HOST | {"offload_param": "cpu"}),
    "optimizer-nvme": Way("optimizer on NVMe", _DISK, in_part=True),
    "parameters-nvme": Way(
        "optimizer on NVMe, parameters on the host", _DISK | {"offload_param": "cpu"}
    ),
    "nvme": Way("states on NVMe", _DISK | {"offload_param": "nvme"}),
}
#: The share of blocks whose forward pass runs again.
CHECKPOINTING = {"none": 0.0, "selective": 0.5, "full": 1.0}
#: The shares of the optimizer that may leave where a part is enough.
PARTS = (0.25, 0.5, 0.75, 1.0)
#: Options of a recipe that a job may set; stage and dtypes have fields of their own.
RECIPE_OPTIONS = set(OPTIONS) - {"stage", "precision", "accumulate_dtype"}
#: Options that say where states are stored. If a job sets one, the plan offloads nothing more.
PLACES = {"offload_optimizer", "offload_gradients", "offload_param"}
#: A placeholder for the folders on a disk while a plan knows none.
SOMEWHERE = "(a folder on NVMe)"


def as_recipe(stage: int, options: Mapping[str, Any]) -> str:
    """Return the line of Python that asks for these options."""
    given = (f"{name}={value!r}" for name, value in options.items())
    return f"Recipe.zero({', '.join([str(stage), *given])})"


@dataclass(frozen=True)
class Convention:
    """Bytes per parameter of each kind of state. `optimizer` is ZeRO's K: it includes fp32 master
    weights.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Job:
    """One optimizer step.

    Attributes:
        seq: tokens of a sample; 0: 2,048, or as many as the model has positions if those are fewer.
        micro_batch: samples that one rank computes at once; 0: the largest that fits.
        global_batch: samples of a step over all ranks; 0: one micro-batch a rank.
        precision: "fp32", "bf16" or "fp16"; None: the model's own.
        accumulate_dtype: the dtype in which gradients are summed and kept.
        checkpointing: "none", "selective" (every second block) or "full"; "": the plan escalates as
            needed.
        optimizer: one of `recipe.optimizers.PLANNED`.
        lora_rank: adapters of this rank on every matrix of the blocks, the rest frozen; 0: all
            parameters are trained.
        offload: "none": no states leave the device but those of `options`; "": the plan escalates as
            needed, unless `options` already say where states are stored.
        options: further arguments of `Recipe.zero` by name (reduce_at, units, wire,
            offload_optimizer, nvme, shard_group, gather_codec, ...), which the plan follows
            as the run would.
        model_dtype: the precision of most of the model's weights, which a plan finds out if
            `precision` is None.
    """

    seq: int = 0
    micro_batch: int = 1
    global_batch: int = 0
    precision: Precision | None = "bf16"
    accumulate_dtype: Dtype = "fp32"
    checkpointing: str = ""
    optimizer: str = "adamw"
    lora_rank: int = 0
    offload: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    model_dtype: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("seq", "micro_batch", "global_batch", "lora_rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
                raise ValueError(f"{name}={value!r}: expected a whole number from 0 to {MOST}.")
        for name, known in (
            ("checkpointing", CHECKPOINTING),
            ("optimizer", PLANNED),
        ):
            value = getattr(self, name)
            if value not in known and (value or name == "optimizer"):
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}.")
        if self.offload not in ("", "none"):
            raise ValueError(
                f"offload={self.offload!r}: expected 'none' or nothing; offload_optimizer='cpu' or"
                " 'nvme', and offload_param= beside it, say where states are stored."
            )
        if self.places:
            object.__setattr__(self, "offload", "none")
        # Refuse now what no stage's recipe can have
        found = self.recipe(3)
        if found.moments is not None and self.optimizer not in ("adam", "adamw", "adam-amsgrad"):
            raise ValueError(
                f"moments={found.moments!r} is about Adam's moments, and"
                f" optimizer={self.optimizer!r} keeps others: leave it out."
            )
        low = found.stochastic_rounding and found.optimizer.dtype.itemsize < 4
        in_pieces = found.optimizer.tier.on_disk or low or found.step_in_backward
        if PLANNED[self.optimizer].update == WHOLE and in_pieces:
            raise ValueError(
                f"optimizer={self.optimizer!r} steps whole matrices, and states on NVMe,"
                " step_in_backward=True and stochastic_rounding=True step pieces of them: leave one of the"
                " two out."
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], asker: str) -> Job:
        """Make a job from one dictionary of its fields and the arguments of `Recipe.zero`. Raises
        ValueError: an unknown name, with the nearest known one (`asker` is the function to name);
        an impossible value.
        """
        own = {f.name for f in fields(cls)} - {"options", "model_dtype"}
        refuse_unknown(asker, given, own | RECIPE_OPTIONS)
        options = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in given.items()
            if k in RECIPE_OPTIONS and v is not None
        }
        return cls(**{k: v for k, v in given.items() if k in own}, options=tuple(options.items()))

    def recipe(self, stage: int, **places: Any) -> Recipe:
        """Return the recipe at a stage. `reduce_at` only has an effect from stage 2 on: stages 0
        and 1 reduce at the boundary.

        Args:
            places: options of `OFFLOAD` and `COMMUNICATION`, which override the job's own.

        Raises:
            ValueError: this stage cannot have such a recipe.
        """
        given = {k: v for k, v in self.options if k != "reduce_at" or stage >= 2} | places
        asked = str([given.get(name) for name in PLACES]).lower()
        folders = given.pop("nvme", None)
        if "nvme" in asked:
            given["nvme"] = folders or SOMEWHERE
        return Recipe.zero(
            stage, precision=self.precision, accumulate_dtype=self.accumulate_dtype, **given
        )

    @property
    def computes(self) -> str:
        """The precision of the matrix products: the asked one, or the model's own."""
        return self.precision or self.model_dtype

    @property
    def places(self) -> set[str]:
        """The given options that say where states are stored."""
        return {k for k, v in self.options if k in PLACES and v is not None}

    @property
    def communication(self) -> dict[str, Any]:
        """The given options about groups, codecs and frozen weights. If there are any, the plan
        chooses no way to communicate.
        """
        return {
            k: v for k, v in self.options if k in COMMUNICATION_OPTIONS and v not in (None, False)
        }

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders on a disk that were given."""
        folders: tuple[str, ...] | None = OPTIONS["nvme"].read(dict(self.options).get("nvme"))
        return folders or ()

    @property
    def convention(self) -> Convention:
        """Bytes of a trained parameter by kind of state, by the recipe's rows."""
        rows, computed = self.recipe(3), COMPUTE_DTYPES[self.computes]
        copy = rows.optimizer.dtype.itemsize if computed != rows.optimizer.dtype else 0
        return Convention(
            computed.itemsize, rows.gradients.dtype.itemsize, copy + self.moment_bytes
        )

    @property
    def moment_bytes(self) -> float:
        """Bytes of the optimizer's states of one trained element, on average."""
        rows, count = self.recipe(3), PLANNED[self.optimizer].elementwise_states
        if rows.moments is None:
            return count * rows.optimizer.dtype.itemsize
        return round(count * FORMATS[rows.moments].each, 3)

    @property
    def units(self) -> tuple[str | type, ...] | None:
        """The modules that become units; None: Onefold finds them."""
        return dict(self.options).get("units")

    def accumulation(self, ranks: int, micro_batch: int = 0) -> int:
        """Return the micro-batches of one rank in a step. Raises ValueError: the global batch does
        not divide, with the nearest that does.
        """
        micro = micro_batch or self.micro_batch or 1
        if not self.global_batch:
            return 1
        each = micro * ranks
        if self.global_batch % each:
            near = max(each, round(self.global_batch / each) * each)
            raise ValueError(
                f"a global batch of {self.global_batch} does not divide into micro-batches of"
                f" {micro} on {ranks} ranks ({each} samples at once): use {near}, or another"
                " micro-batch."
            )
        return self.global_batch // each


@dataclass(frozen=True)
class Scheme:
    """One way to divide a job: a ZeRO stage, what is recomputed and offloaded, and how much is
    computed at once.

    Attributes:
        offload: one of `OFFLOAD`.
        share: the share of states that leave the device; below 1 only if `offload` may be in part.
        communication: one of `COMMUNICATION`, in addition to the job's own options.
        degrees: the mesh. Data ranks are all that the other axes leave of a machine.
    """

    stage: int
    checkpointing: str = "none"
    offload: str = "none"
    micro_batch: int = 1
    share: float = 1.0
    communication: str = ""
    degrees: Degrees = ALONE

    @property
    def way(self) -> Way:
        """The way that `communication` names."""
        return COMMUNICATION[self.communication]

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of `Recipe.zero` beside the job's own."""
        places = dict(OFFLOAD[self.offload].options)
        if self.share < 1:
            places["offload_amount"] = self.share
        return places | dict(self.way.options)

    def recipe(self, job: Job) -> Recipe:
        """Return the recipe for `onefold.shard`. `SOMEWHERE` stands for folders on NVMe that the
        job does not name. Raises ValueError: this stage cannot have the job's own options.
        """
        asked = self.asked
        if dict(job.options).get("reduce") is not None:
            asked.pop("reduce", None)
        return job.recipe(self.stage, **asked)

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if not self.degrees.data_only:
            parts = [str(self.degrees), f"ZeRO stage {self.stage}"]
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} checkpointing")
        if self.offload != "none":
            part = f"{self.share:.3g} of the " if self.share < 1 else ""
            parts.append(part + OFFLOAD[self.offload].words)
        if self.communication:
            parts.append(self.way.words)
        return ", ".join(parts)
