"""The account of one rank over one optimizer step: one schema for predictions and measurements.

    onefold.plan(...)  ──►  Account  ◄──  the ledgers of a run
                              │
                           lines()       in a report: predicted, measured, ratio

Bytes are those of one rank, seconds are wall-clock, and a step has all its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onefold.comm import STEP_MOVES
from onefold.memory import (
    GATHERED,
    GRADIENTS,
    IDLE,
    LEAVING,
    MASTERS,
    MOMENTS,
    OWNED,
    PARAMETERS,
    REDUCTION,
    STAGING,
)
from onefold.recipe.rows import OFF_DEVICE, Tier

ACTIVATIONS = "activations"
LOGITS = "logits"
TEMPORARY = "temporary"
FRAGMENTATION = "fragmentation"

#: Every category of memory, in the order in which tables list them.
CATEGORIES = (
    PARAMETERS, MASTERS, GRADIENTS, LEAVING, MOMENTS, GATHERED, REDUCTION, IDLE, OWNED,
    ACTIVATIONS, LOGITS, TEMPORARY, FRAGMENTATION,
)  # fmt: skip
#: What the engine allocates and enters in its ledger. The optimizer holds the moments, autograd and
#: the model the rest.
ENGINE = (PARAMETERS, MASTERS, GRADIENTS, LEAVING, GATHERED, REDUCTION, IDLE, OWNED)
#: The title of what `ENGINE` held at most.
ENGINES_PEAK = "engine at its peak"
_NO_BYTES = dict.fromkeys((*CATEGORIES, STAGING), 0)
#: The moves between tiers: to the device and from it, from NVMe and to it.
MOVED = ("up", "down", "read", "written")
#: The parts of a step's seconds, and their sum. What overlaps counts once.
SECONDS = ("compute", "exposed communication", "optimizer", "io", "step")
#: Of a mesh: what layers send along an axis, which nothing hides, and the pipeline.
IN_LAYERS = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel"}
OF_AXES = (*IN_LAYERS.values(), "bubble", "pipeline sends")
_AXES = {"data": "among holders (ZeRO)", **IN_LAYERS, "pp": "pipeline"}
#: Seconds in which the host link, the disks and the update on the host are busy in a step.
TIER_SECONDS = ("link", "disk", "host update")


@dataclass(frozen=True)
class Account:
    """What one rank holds, sends and spends.

    Attributes:
        rest: bytes between steps, by category.
        peak: bytes at the moment when their sum is largest, by category.
        ledger: bytes of the engine itself (`ENGINE`) at the moment when their sum is largest, by
            category.
        offloaded: bytes of offloaded state with data on its way, at most, by tier ("host", "nvme", ...)
            and category.
        moved: bytes of a step between tiers, by `MOVED`.
        wire: payload bytes sent in a step to ranks that hold the same parameters, by move.
        sent: of a mesh, all bytes sent by axis; "data" is the wire.
        links: the same bytes by link, "inside" a node and "between" nodes, as the traffic ledger
            counts them, with one exception: a gather over all ranks on NCCL is planned as a ring,
            and the ledger, which only knows peers, counts more bytes between nodes.
        sent_between: bytes that all ranks of a node send to other nodes.
        seconds: of a step, by `SECONDS`; "io" is the wait for tiers.
        tiers: seconds of a step by `TIER_SECONDS`; {} if nothing is offloaded, and in a
        measurement.
        tokens_per_s: of all ranks together.
        mfu: model FLOPs a second as a share of the machine's peak; None if the peak is not known.
    """

    rest: Mapping[str, int] = field(default_factory=dict)
    peak: Mapping[str, int] = field(default_factory=dict)
    ledger: Mapping[str, int] = field(default_factory=dict)
    offloaded: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    wire: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[str, int] = field(default_factory=dict)
    sent_between: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    tiers: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: float = 0.0
    mfu: float | None = None

    @property
    def by_tier(self) -> dict[Tier, int]:
        """Bytes off the device by tier, the fastest first."""
        return {tier: sum(self.offloaded.get(tier.value, {}).values()) for tier in OFF_DEVICE}

    @property
    def host(self) -> int:
        return self.by_tier[Tier.HOST]

    @property
    def rest_bytes(self) -> int:
        return sum(self.rest.values())

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def wire_bytes(self) -> int:
        return sum(self.wire.values())

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary: the arguments of an account."""
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield (title, part, unit, value) of every figure that an account may have, in the order in
        which tables list them. The whole comes first, with "" for its part. What it lacks is 0.
        """
        held = {"at rest": self.rest, "at peak": self.peak, ENGINES_PEAK: self.ledger}
        for tier in OFF_DEVICE:
            held[f"{tier.title}, at peak"] = self.offloaded.get(tier.value, {})
        rows: dict[str, tuple[str, float, Mapping[str, float]]] = {
            title: ("bytes", sum(table.values()), _NO_BYTES | dict(table))
            for title, table in held.items()
        }
        rows["sent in a step"] = "bytes", sum(self.sent.values()) or self.wire_bytes, {
            **dict.fromkeys(STEP_MOVES, 0), **self.wire,
            **{words: self.sent.get(axis, 0) for axis, words in _AXES.items()},
            "within a node": self.links.get("inside", 0),
            "between nodes": self.links.get("between", 0),
            "of a node, to others": self.sent_between,
        }  # fmt: skip
        moved = dict.fromkeys(MOVED, 0) | dict(self.moved)
        rows["moved between tiers in a step"] = "bytes", sum(moved.values()), moved
        seconds = dict.fromkeys((*SECONDS[:-1], *OF_AXES), 0.0) | dict(self.seconds)
        busy = {f"busy: {name}": self.tiers.get(name, 0.0) for name in TIER_SECONDS}
        rows["a step takes"] = "s", seconds.pop("step", 0.0), seconds | busy
        rows |= {"tokens/s": ("1/s", self.tokens_per_s, {}), "MFU": ("", self.mfu or 0.0, {})}
        for title, (unit, whole, parts) in rows.items():
            yield title, "", unit, whole
            yield from ((title, part, unit, value) for part, value in parts.items())
