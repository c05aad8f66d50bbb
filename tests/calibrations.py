"""A calibration made by hand, with figures that are easy to check."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from onefold.machine.calibration import Calibration
from onefold.machine.fit import Costs
from onefold.machine.identity import this_machine
from onefold.machine.kernels import Kernels
from onefold.machine.measured import (
    AtRanks,
    BlockPoint,
    Disk,
    MatrixPoint,
    Overlap,
    PassPoint,
    StepPoint,
)

LATENCY, BANDWIDTH = 1e-4, 2e9
SIZES = (1e5, 1e6, 1e7)


def line(latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> tuple[tuple[float, float], ...]:
    """Moves that take exactly latency + bytes/bandwidth."""
    return tuple((size, latency + size / bandwidth) for size in SIZES)


def at_ranks(ranks: int, speed: float = 1.0) -> AtRanks:
    """Ranks whose every rate is `speed` times the first's."""
    several = ranks > 1
    return AtRanks(
        ranks=ranks,
        threads=1,
        matrices=tuple(
            MatrixPoint("float32", s, s, s, speed * rate)
            for s, rate in ((64, 1e10), (256, 4e10), (1024, 9e10))
        ),
        blocks=(
            BlockPoint("float32", 64, 64, speed * 5e9),
            BlockPoint("float32", 256, 256, speed * 2e10),
        ),
        copies=((1e6, 1e-4 / speed), (1e8, 1e-2 / speed)),
        optimizer=((28e5, 1e-3 / speed), (28e6, 1e-2 / speed)),
        moves=(
            {
                m: line(bandwidth=BANDWIDTH * speed)
                for m in ("all-gather", "reduce-scatter", "all-reduce")
            }
            if several
            else {}
        ),
        overlap=(
            Overlap(compute=1.0, gather=0.8, together=1.4, compute_beside=1.2) if several else None
        ),
        passes=passes(speed),
        steps=(a_step(several),),
    )


def a_step(several: bool) -> StepPoint:
    """A reference step at stage 0."""
    sent, calls = ({"all-reduce": 8e6}, {"all-reduce": 4}) if several else ({}, {})
    ran = Kernels(10**9, 60, 10**6, 200, 10**6)
    return StepPoint("float32", 0, 64, 64, 2, 1e9, ran, 10**6, 10**6, sent, calls, 1.0)


#: What one FLOP, product, product's byte, other operation and its byte cost on one rank.
COSTS = Costs(2e-11, 1e-5, 1e-10, 1e-6, 1e-10)


def passes(speed: float = 1.0) -> tuple[PassPoint, ...]:
    """Passes that cost exactly `COSTS` ÷ speed."""
    ran = (
        Kernels(10**8, 10, 10**5, 50, 10**5),
        Kernels(10**7, 40, 10**5, 20, 10**6),
        Kernels(10**6, 10, 10**7, 80, 10**5),
        Kernels(0, 0, 0, 200, 10**4),
        Kernels(0, 0, 0, 20, 10**7),
    )
    return tuple(PassPoint("float32", k, COSTS.seconds(k) / speed) for k in ran)


def calibration(*counts: int) -> Calibration:
    """This machine, as if measured now with these numbers of ranks: N are each 1/N as fast as one."""
    return Calibration(
        identity=this_machine(),
        device="cpu",
        device_name="a processor",
        backend="gloo",
        device_bytes=1 << 34,
        host_bytes=1 << 34,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        took_s=1.0,
        quick=False,
        at=tuple(at_ranks(c, 1 / c) for c in counts or (1, 2, 4)),
        disk=Disk("/data", write=1e8, read=2e8),
    )


def elsewhere(found: Calibration) -> Calibration:
    """The same figures from a machine with another processor."""
    return replace(found, identity=replace(found.identity, cpu="Abacus 3000"))
