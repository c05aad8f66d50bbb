"""Charts over the whole run: loss and throughput."""

from __future__ import annotations

from typing import Any

from onefold.observe.report.figures import Figure, figure, plotly
from onefold.observe.report.metrics import Metrics

#: From this many steps on, a running mean is drawn over the loss.
SMOOTHED_FROM = 40


def loss(metrics: Metrics) -> Figure | None:
    """Loss by step, with its running mean on long runs and the held-out loss as points."""
    go = plotly()
    steps, values = metrics.series("loss")
    if not steps:
        return None
    many = len(steps) >= SMOOTHED_FROM
    pale: dict[str, Any] = {"opacity": 0.35} if many else {}
    line = {"color": "#4269d0", "width": 1.5}
    mode = "lines" if len(steps) > 1 else "markers"
    traces = [
        go.Scatter(
            x=steps, y=values, name="loss", mode=mode, line=line, hovertemplate="%{y:.4f}", **pale
        )
    ]
    if many:
        mean = _running_mean(values, max(5, len(values) // 25))
        traces.append(
            go.Scatter(
                x=steps,
                y=mean,
                name="running mean",
                line={"color": "#4269d0", "width": 2.5},
                hovertemplate="%{y:.4f}",
            )
        )
    at, held_out = metrics.series("eval_loss")
    if at:
        style = {"color": "#efb118", "size": 8, "line": {"color": "#8a6400", "width": 1}}
        traces.append(
            go.Scatter(x=at, y=held_out, name="held out", mode="lines+markers", marker=style, line={"color": "#efb118", "dash": "dot"},
                       hovertemplate="%{y:.4f}")
        )  # fmt: skip
    return figure(
        traces, height=320, x="step", y="loss", hovermode="x unified", showlegend=len(traces) > 1
    )


def throughput(metrics: Metrics) -> Figure | None:
    """Tokens a second by step, and their median."""
    go = plotly()
    steps, values = metrics.series("tokens_per_s")
    if not steps:
        return None
    style = {"color": "#3ca951", "width": 1.5}
    mode = "lines" if len(steps) > 1 else "markers"
    traces = [
        go.Scatter(
            x=steps,
            y=values,
            name="tokens/s",
            mode=mode,
            line=style,
            hovertemplate="%{y:,.0f} tokens/s",
        )
    ]
    typical = metrics.typical("tokens_per_s")
    if typical is not None and len(steps) > 1:
        dashed = {"color": "#3ca951", "width": 1.5, "dash": "dash"}
        ends = [steps[0], steps[-1]]
        traces.append(
            go.Scatter(
                x=ends,
                y=[typical, typical],
                name=f"median {typical:,.0f}",
                mode="lines",
                line=dashed,
                hoverinfo="skip",
            )
        )
    return figure(
        traces,
        height=320,
        x="step",
        y="tokens/s",
        yaxis={"rangemode": "tozero"},
        hovermode="x unified",
        showlegend=True,
    )


def _running_mean(values: list[float], window: int) -> list[float]:
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out
