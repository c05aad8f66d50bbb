"""What is to be trained, and how it may be divided: the questions of a plan.

What a plan may put between nodes (`COMMUNICATION`), by name: groups of a node, copies inside it,
codecs; as arguments of `Recipe.zero`.

| name         | what it is                                                            | changes numbers          |
|--------------|-----------------------------------------------------------------------|--------------------------|
| (none)       | moves inside nodes and across: each byte enters a node once            |                          |
| flat         | every rank to every other                                              | the order of sums only   |
| hpZ          | a second copy of the parameters in each node (ZeRO++)                  | the order of sums only   |
| HSDP         | state divided in each node, replicated across (FSDP, MiCS)             | the order of sums only   |
| hybrid       | the same, with optimizer states over all ranks                         | the order of sums only   |
| qwZ          | parameters travel in 8 bits (ZeRO++)                                   | rounds weights           |
| qgZ          | gradients travel in 4 bits (ZeRO++)                                    | rounds gradients         |
| ZeRO++       | hpZ, qwZ and qgZ                                                       | rounds both              |

What rounds is lossy: a plan says what it would save and how to ask for it, and never takes it by
itself. Sources: Wang et al. 2023 (ZeRO++, arXiv:2306.10209), Zhang et al. 2022 (MiCS,
arXiv:2205.00119), Zhao et al. 2023 (PyTorch FSDP, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from onefold.plan.formulas import Convention
from onefold.recipe import COMPUTE_DTYPES, PLACEMENTS_OF_STAGE, Recipe
from onefold.recipe.moments import bytes_an_element
from onefold.recipe.options import NODES, OPTIONS, Dtype, Precision, refuse_unknown

#: Arguments of `Recipe.zero` about groups, codecs and frozen weights.
COMMUNICATION_OPTIONS = {name for name, option in OPTIONS.items() if option.panel == NODES} - {
    "reduce"
}


@dataclass(frozen=True)
class Communication:
    """One way to divide and send between nodes.

    Attributes:
        words: for a sentence. lossy: values are rounded on the wire. from_stage: the lowest at
            which it can be.
    """

    words: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lossy: bool = False
    from_stage: int = 3


COMMUNICATION: Mapping[str, Communication] = {
    "": Communication("", from_stage=0),
    "flat": Communication("every rank to every other", {"group": "flat"}, from_stage=0),
    "qwZ": Communication("weights in 8 bits", {"gather_codec": "int8"}, lossy=True),
    "hpZ": Communication("a second copy in each node", {"second_copy": True}),
    "qgZ": Communication("gradients in 4 bits", {"reduce_codec": "int4"}, lossy=True, from_stage=1),
    "ZeRO++": Communication(
        "hpZ, qwZ and qgZ",
        {"second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"},
        lossy=True,
    ),
    "HSDP": Communication("divided in each node", {"shard_group": "node"}, from_stage=1),
    "hybrid": Communication(
        "divided in each node, optimizer over all", {"shard_group": "node", "optimizer_over": "all"}
    ),
}


def as_recipe(stage: int, options: Mapping[str, Any]) -> str:
    """The line of Python that asks for a way."""
    return f"Recipe.zero({', '.join([str(stage), *(f'{name}={value!r}' for name, value in options.items())])})"


def as_options(stage: int, options: Mapping[str, Any]) -> str:
    """The same in the words of `onefold train` and `onefold plan`."""
    words = [f"--stage {stage}"]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join(words)


CHECKPOINTING = ("none", "selective", "full")
#: Where the plan may put states besides the device, as arguments of `Recipe.zero`, in the order of
#: least slowdown.
OFFLOAD: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": "cpu"},
    "parameters": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "optimizer-nvme": {"offload_optimizer": "nvme"},
    "parameters-nvme": {"offload_optimizer": "nvme", "offload_param": "cpu"},
    "nvme": {"offload_optimizer": "nvme", "offload_param": "nvme"},
}
#: Of these a share may go.
IN_PART = ("optimizer", "optimizer-nvme")
_IN_WORDS = {
    "optimizer": "optimizer on the host",
    "parameters": "all states on the host",
    "optimizer-nvme": "optimizer on NVMe",
    "parameters-nvme": "optimizer on NVMe, parameters on the host",
    "nvme": "states on NVMe",
}
#: What may be said of a recipe beside the stage and the precision.
RECIPE_OPTIONS = set(OPTIONS) - {"stage", "precision", "accumulate_dtype"}
#: Options that say where states rest. With one of them given, the plan moves nothing more.
PLACES = {"offload_optimizer", "offload_gradients", "offload_param"}
#: What stands for the folders on NVMe while a plan knows none.
SOMEWHERE = "(a folder on NVMe)"


@dataclass(frozen=True)
class Job:
    """One optimizer step.

    Attributes:
        seq: tokens of a sample. micro_batch: samples that one rank computes at once; 0 lets the
            plan take the largest that fits.
        global_batch: samples of a step over all ranks; 0 is one micro-batch a rank.
        precision: "fp32", "bf16" or "fp16"; None computes as the model is.
        model_dtype: what most of the model's weights are in, which a plan finds out where
            `precision` is None.
        checkpointing: "none", "selective" (every second block) or "full"; "" lets the plan escalate
            to it.
        accumulate_dtype: dtype in which gradients are summed and rest, "fp32" unless told otherwise.
        optimizer: as in `plan.states.MOMENTS_OF`.
        lora_rank: 0 trains all parameters; else adapters of this rank on every matrix of the
            blocks, the rest frozen.
        offload: one of `OFFLOAD`; "" lets the plan escalate to it ("none" where `options` say
            themselves where states rest).
        options: further arguments of `Recipe.zero` by name (reduce_at, units, wire,
            offload_optimizer, nvme, tile, shard_group, gather_codec, ...), which the plan follows
            as the run would.
    """

    seq: int = 1024
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
        from onefold.plan.states import MOMENTS_OF

        for name, least in (("seq", 1), ("micro_batch", 0), ("global_batch", 0), ("lora_rank", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number, {least} or more.")
        for name, known in (
            ("precision", (None, *COMPUTE_DTYPES)),
            ("model_dtype", tuple(COMPUTE_DTYPES)),
            ("accumulate_dtype", tuple(COMPUTE_DTYPES)),
            ("checkpointing", ("", *CHECKPOINTING)),
            ("offload", ("", *OFFLOAD)),
            ("optimizer", tuple(MOMENTS_OF)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: expected one of"
                    f" {', '.join(filter(None, known))}."
                )
        if self.places:
            if self.offload not in ("", "none"):
                given = ", ".join(sorted(self.places))
                raise ValueError(
                    f"offload={self.offload!r} beside {given}: both say where states are stored; leave"
                    " one of the two out."
                )
            object.__setattr__(self, "offload", "none")
        # What no recipe can be is said now, whatever stage is taken in the end
        found = self.recipe(3)
        if found.moments is not None and self.optimizer not in ("adam", "adamw"):
            raise ValueError(
                f"moments={found.moments!r} is about Adam's moments, and"
                f" optimizer={self.optimizer!r} keeps others: leave it out."
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], asker: str) -> Job:
        """A job from its own fields and the arguments of `Recipe.zero`, by name in one dictionary.

        Raises:
            ValueError: a name that is neither's, said of `asker` with the nearest known one; a
                value that cannot be.
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
        """The recipe at a stage; `reduce_at` is taken where there is a choice (stages 0 and 1
        reduce at the boundary).

        Args:
            places: where states rest, as `OFFLOAD` has it, and what `COMMUNICATION` has; the job's own
                options say it where none is given.

        Raises:
            ValueError: no recipe can be so at this stage.
        """
        given = {k: v for k, v in self.options if k != "reduce_at" or stage >= 2} | places
        on_disk = "nvme" in str([given.get(name) for name in PLACES]).lower()
        folders = given.pop("nvme", None)
        if on_disk:
            given["nvme"] = folders or SOMEWHERE
        return Recipe.zero(
            stage, precision=self.precision, accumulate_dtype=self.accumulate_dtype, **given
        )

    @property
    def computes(self) -> str:
        """The precision of the matrix products: the one asked for, or that of most of the model's
        weights.
        """
        return self.precision or self.model_dtype

    @property
    def places(self) -> set[str]:
        """The options that say where states rest."""
        return {k for k, v in self.options if k in PLACES and v is not None}

    @property
    def communication(self) -> dict[str, Any]:
        """What was said of groups, codecs and frozen weights. With any of it given, the plan adds
        nothing of the kind.
        """
        unsaid = (None, False, "nearest")
        return {k: v for k, v in self.options if k in COMMUNICATION_OPTIONS and v not in unsaid}

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders on NVMe that were given."""
        folders: tuple[str, ...] = OPTIONS["nvme"].read(dict(self.options).get("nvme"))
        return folders

    @property
    def convention(self) -> Convention:
        """Bytes of a trained parameter by kind of state, as the recipe's rows have them."""
        rows, computed = self.recipe(3), COMPUTE_DTYPES[self.computes]
        copy = rows.master_dtype.itemsize if computed != rows.master_dtype else 0
        return Convention(computed.itemsize, rows.sums_dtype.itemsize, copy + self.moment_bytes)

    @property
    def moment_bytes(self) -> float:
        """Bytes of the optimizer's states of one trained element, on average."""
        from onefold.plan.states import MOMENTS_OF

        rows, count = self.recipe(3), MOMENTS_OF[self.optimizer]
        if rows.moments is None:
            return count * rows.master_dtype.itemsize
        return round(bytes_an_element(rows.moments, count), 3)

    @property
    def units(self) -> tuple[str | type, ...] | None:
        """The modules that become units, None for those that are found."""
        return dict(self.options).get("units")

    def accumulation(self, ranks: int, micro_batch: int = 0) -> int:
        """Micro-batches of one rank in a step.

        Raises:
            ValueError: the global batch does not divide, with the nearest that does.
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
    """One way to divide a job: a ZeRO stage, what is recomputed, what leaves the device, how much
    is computed at once.

    Attributes:
        offload: one of `OFFLOAD`. share: of the units whose states leave, below 1 with `IN_PART`
            only.
        communication: one of `COMMUNICATION`, what is done about links between nodes beside what
            the job says.
    """

    stage: int
    checkpointing: str = "none"
    offload: str = "none"
    micro_batch: int = 1
    share: float = 1.0
    communication: str = ""

    def __post_init__(self) -> None:
        if self.communication not in COMMUNICATION:
            raise ValueError(
                f"communication {self.communication!r}: expected one of"
                f" {', '.join(map(repr, COMMUNICATION))}."
            )
        if self.stage not in PLACEMENTS_OF_STAGE:
            raise ValueError(f"stage {self.stage!r}: expected 0, 1, 2 or 3.")
        if self.offload not in OFFLOAD:
            raise ValueError(f"offload {self.offload!r}: expected one of {', '.join(OFFLOAD)}.")
        if self.offload != "none" and self.stage == 0:
            raise ValueError("offload needs divided optimizer states: use stage 1, 2 or 3.")
        if "offload_param" in OFFLOAD[self.offload] and self.stage != 3:
            raise ValueError(
                f"offload={self.offload!r} moves parameters off the device, which needs them"
                " divided: use stage 3."
            )
        if not 0 < self.share <= 1 or (self.share < 1 and self.offload not in IN_PART):
            raise ValueError(
                f"share={self.share!r} with offload={self.offload!r}: expected 1, or a share with"
                f" {' or '.join(IN_PART)}."
            )

    def with_(self, **changes: Any) -> Scheme:
        return replace(self, **changes)

    @property
    def way(self) -> Communication:
        """What `communication` names."""
        return COMMUNICATION[self.communication]

    @property
    def places(self) -> dict[str, Any]:
        """Where states rest, as arguments of `Recipe.zero` beside the job's own."""
        whole = dict(OFFLOAD[self.offload])
        if self.share == 1:
            return whole
        return {"offload_optimizer": f"{whole['offload_optimizer']}:{self.share!r}"}

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of `Recipe.zero` beside the job's own."""
        return self.places | dict(self.way.options)

    def recipe(self, job: Job) -> Recipe:
        """What `onefold.shard` executes; `SOMEWHERE` stands for folders on NVMe that the job does
        not name.

        Raises:
            ValueError: no recipe can keep states where the job's own options say, at this stage.
        """
        return job.recipe(self.stage, **self.asked)

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} checkpointing")
        if self.offload != "none":
            part = f"{self.share:.3g} of the " if self.share < 1 else ""
            parts.append(part + _IN_WORDS[self.offload])
        if self.communication:
            parts.append(self.way.words)
        return ", ".join(parts)
