"""Format figures for people, and make charts: the layout that all charts share, with plotly."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

from onefold.memory import STAGING
from onefold.offload.activations import ACTIVATIONS_MOVING
from onefold.offload.arena import IDLE_SLABS
from onefold.plan import schema

COLOURS = {
    schema.PARAMETERS: "#4269d0",
    schema.MASTERS: "#97bbf5",
    schema.GRADIENTS: "#efb118",
    schema.MOMENTS: "#a463f2",
    schema.OWNED: "#d98cc2",
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
    "owners": "#efb118",
    "forward": "#97bbf5",
    "backward": "#4269d0",
    "optimizer": "#efb118",
    "waiting": "#e5484d",
    "compute": "#4269d0",
    "other": "#b6bcc9",
}
UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def byte_unit(values: Iterable[float]) -> tuple[str, int]:
    """Return the name and bytes of the binary unit in which the largest value is at least 1."""
    largest = max((abs(v) for v in values), default=0)
    return next(((name, size) for name, size in UNITS if largest >= size), UNITS[-1])


def in_bytes(value: float) -> str:
    """Format bytes: "1.52 GiB", "312 MiB", "0 B"."""
    name, size = byte_unit([value])
    return (
        f"{value / size:.0f} {name}"
        if name == "B" or abs(value / size) >= 100
        else f"{value / size:.3g} {name}"
    )


def in_seconds(value: float) -> str:
    """Format seconds: "1.84 s", "312 ms", "45 µs"."""
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return (
                f"{value / size:.3g} {name}"
                if abs(value / size) < 100
                else f"{value / size:,.0f} {name}"
            )
    return f"{value * 1e6:.0f} µs"


def in_unit(value: float | None, unit: str) -> str:
    """Format a figure of an account, of unit "bytes", "s", "1/s" or ""; an en dash for None."""
    if value is None:
        return "–"
    if unit == "bytes":
        return in_bytes(value)
    if unit == "s":
        return in_seconds(value)
    return f"{value:,.0f}" if unit == "1/s" else f"{value:.1%}"


Figure = Any  # plotly.graph_objects.Figure


@cache
def plotly() -> Any:
    """Return the module `plotly.graph_objects`.

    Raises:
        ModuleNotFoundError: plotly is not installed; the message says how to install it.
    """
    try:
        return import_module("plotly.graph_objects")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the report needs plotly, which is not installed: pip install plotly", name="plotly"
        ) from error


def plotly_source() -> str:
    """Return the source of plotly.js, for the page."""
    plotly()
    source: str = import_module("plotly.offline").get_plotlyjs()
    return source


def figure(traces: list[Any], *, height: int, x: str, y: str, **layout: Any) -> Figure:
    """Return the figure. `height`: pixels. `x`, `y`: titles."""
    axes = {
        name: {"title": {"text": title}, "automargin": True, **layout.pop(name, {})}
        for name, title in (("xaxis", x), ("yaxis", y))
    }
    shared = {
        "template": "plotly_white",
        "height": height,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"namelength": -1},
    }
    return plotly().Figure(data=traces, layout={**shared, **axes, **layout})


def thinned(
    times: list[float], series: dict[str, list[int]], limit: int
) -> tuple[list[float], dict[str, list[int]]]:
    """Thin out a series to about `limit` points for drawing. Each interval of time keeps its
    highest sum and its last level.
    """
    if len(times) <= limit:
        return times, series
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    span = (times[-1] - times[0]) or 1.0
    buckets: dict[int, tuple[int, int]] = {}  # {interval: (index of its highest, of its last)}
    for i, at in enumerate(times):
        number = int((at - times[0]) / span * (limit // 2))
        highest = buckets[number][0] if number in buckets else i
        buckets[number] = (i if totals[i] > totals[highest] else highest, i)
    keep = sorted({0, len(times) - 1} | {i for pair in buckets.values() for i in pair})
    return [times[i] for i in keep], {
        name: [values[i] for i in keep] for name, values in series.items()
    }
