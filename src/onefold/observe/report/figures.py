"""What every chart has in common: plotly, transparent grounds, and colours that the page sets for
light and dark.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from typing import Any

Figure = dict[str, Any]


@cache
def plotly() -> Any:
    """The module `plotly.graph_objects`.

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
    """plotly.js, whole, to be put into the page."""
    plotly()
    source: str = import_module("plotly.offline").get_plotlyjs()
    return source


def figure(traces: list[Any], *, height: int, x: str, y: str, **layout: Any) -> Figure:
    """Checked traces and layout as plain JSON. `height` in pixels; `x`, `y` are titles of the
    axes.
    """
    go = plotly()
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for name in axes:
        own = {
            "automargin": True,
            "zeroline": False,
            "fixedrange": name == "yaxis",
            **layout.pop(name, {}),
        }
        axes[name] = {**axes[name], **own}
    drawn = go.Figure(
        data=traces,
        layout={
            "template": go.layout.Template(),
            "height": height,
            "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12},
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
                "font": {"size": 12},
                "traceorder": "normal",
            },
            "hoverlabel": {"namelength": -1},
            **axes,
            **layout,
        },
    )
    plain: Figure = json.loads(drawn.to_json())
    return plain


def thinned(
    times: list[float], series: dict[str, list[int]], limit: int
) -> tuple[list[float], dict[str, list[int]]]:
    """Steps for drawing: at most some `limit` of them, in which every stretch of time keeps its
    highest sum and its last level.
    """
    if len(times) <= limit:
        return times, series
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    span = (times[-1] - times[0]) or 1.0
    buckets: dict[int, tuple[int, int]] = {}  # stretch -> (its highest, its last)
    for i, at in enumerate(times):
        number = int((at - times[0]) / span * (limit // 2))
        highest = buckets[number][0] if number in buckets else i
        buckets[number] = (i if totals[i] > totals[highest] else highest, i)
    keep = sorted({0, len(times) - 1} | {i for pair in buckets.values() for i in pair})
    return [times[i] for i in keep], {
        name: [values[i] for i in keep] for name, values in series.items()
    }
