"""Figures as people read them, and the colours that go with them on every chart."""

from __future__ import annotations

from collections.abc import Iterable

from onefold.memory import STAGING
from onefold.offload.activations import ACTIVATIONS_MOVING
from onefold.offload.arena import IDLE_SLABS
from onefold.plan import schema

COLOURS = {
    schema.PARAMETERS: "#4269d0",
    schema.MASTERS: "#97bbf5",
    schema.GRADIENTS: "#efb118",
    schema.MOMENTS: "#a463f2",
    schema.GATHERED: "#6cc5b0",
    schema.REDUCTION: "#ff8ab7",
    schema.IDLE: "#9498a0",
    schema.ACTIVATIONS: "#3ca951",
    schema.LOGITS: "#9c6b4e",
    schema.TEMPORARY: "#c9b8a0",
    schema.FRAGMENTATION: "#b6bcc9",
    STAGING: "#ff725c",
    ACTIVATIONS_MOVING: "#86c98e",
    IDLE_SLABS: "#c5c8ce",
    "all-gather": "#6cc5b0",
    "reduce-scatter": "#ff8ab7",
    "all-reduce": "#a463f2",
    "forward": "#97bbf5",
    "backward": "#4269d0",
    "optimizer": "#efb118",
    "waiting": "#e5484d",
    "compute": "#4269d0",
    "other": "#b6bcc9",
}
UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def byte_unit(values: Iterable[float]) -> tuple[str, int]:
    """The binary unit in which the largest of `values` is at least 1: its name and its bytes."""
    largest = max((abs(v) for v in values), default=0)
    return next(((name, size) for name, size in UNITS if largest >= size), UNITS[-1])


def in_bytes(value: float) -> str:
    """ "1.52 GiB", "312 MiB", "0 B"."""
    name, size = byte_unit([value])
    return (
        f"{value / size:.0f} {name}"
        if name == "B" or abs(value / size) >= 100
        else f"{value / size:.3g} {name}"
    )


def in_seconds(value: float) -> str:
    """ "1.84 s", "312 ms", "45 µs"."""
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return (
                f"{value / size:.3g} {name}"
                if abs(value / size) < 100
                else f"{value / size:,.0f} {name}"
            )
    return f"{value * 1e6:.0f} µs"


def in_unit(value: float | None, unit: str) -> str:
    """A figure of an account: unit "bytes", "s", "1/s" or ""; an en dash where there is none."""
    if value is None:
        return "–"
    if unit == "bytes":
        return in_bytes(value)
    if unit == "s":
        return in_seconds(value)
    return f"{value:,.0f}" if unit == "1/s" else f"{value:.1%}"
