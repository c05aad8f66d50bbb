"""Charts and tables across units and ranks: traffic, imbalance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onefold.observe.report.figures import Figure, figure, plotly
from onefold.observe.report.wires import borders_of
from onefold.observe.report.words import COLOURS, byte_unit, in_bytes, in_seconds, in_unit
from onefold.observe.runfile import RankObserved
from onefold.plan.schema import MOVES

#: From this many bars on, bars have no labels of their own.
CROWDED = 40


def traffic(by_unit: Mapping[str, Mapping[str, int]]) -> Figure | None:
    """Payload bytes that a rank sends in a step, by unit, stacked by move; in the order of the
    run.
    """
    go = plotly()
    if not by_unit:
        return None
    units = list(by_unit)
    unit, size = byte_unit([sum(moves.values()) for moves in by_unit.values()])
    present = [m for m in MOVES if any(by_unit[u].get(m) for u in units)]
    traces = [
        go.Bar(
            orientation="h", y=units, x=[by_unit[u].get(m, 0) / size for u in units], name=m, marker={"color": COLOURS[m]},
            customdata=[in_bytes(by_unit[u].get(m, 0)) for u in units], hovertemplate=f"%{{y}}<br>{m}: %{{customdata}}<extra></extra>",
        )
        for m in present
    ]  # fmt: skip
    crowded = len(units) > CROWDED
    axis = {
        "autorange": "reversed",
        "type": "category",
        "title": {"text": ""},
        **({"nticks": 20} if crowded else {"dtick": 1}),
    }
    height = 700 if crowded else 110 + 26 * len(units)
    return figure(
        traces,
        height=height,
        x=f"{unit} a step",
        y="",
        yaxis=axis,
        barmode="stack",
        bargap=0.05 if crowded else 0.3,
    )


def step_times(ranks: Sequence[RankObserved]) -> Figure | None:
    """What each rank's step was made of."""
    go = plotly()
    timed = [
        r for r in ranks if r.measured.seconds.get("step") and r.measured.seconds.get("compute")
    ]
    if not timed:
        return None
    names = [f"rank {r.rank}" for r in timed]
    parts = {
        "compute": "compute",
        "waiting (exposed)": "exposed communication",
        "optimizer": "optimizer",
    }
    colours = {
        "compute": COLOURS["compute"],
        "waiting (exposed)": COLOURS["waiting"],
        "optimizer": COLOURS["optimizer"],
    }
    values = {
        label: [r.measured.seconds.get(key, 0.0) for r in timed] for label, key in parts.items()
    }
    rest = [
        max(0.0, r.measured.seconds["step"] - sum(v[i] for v in values.values()))
        for i, r in enumerate(timed)
    ]
    values["other"] = rest
    traces = [
        go.Bar(
            orientation="h", y=names, x=[1000 * s for s in seconds], name=label, marker={"color": colours.get(label, COLOURS["other"])},
            customdata=[in_seconds(s) for s in seconds], hovertemplate=f"%{{y}}<br>{label}: %{{customdata}}<extra></extra>",
        )
        for label, seconds in values.items()
    ]  # fmt: skip
    crowded = len(names) > CROWDED
    axis = {
        "autorange": "reversed",
        "type": "category",
        "title": {"text": ""},
        **({"nticks": 20} if crowded else {"dtick": 1}),
    }
    height = 700 if crowded else 110 + 30 * len(names)
    return figure(
        traces,
        height=height,
        x="ms of a step",
        y="",
        yaxis=axis,
        barmode="stack",
        bargap=0.05 if crowded else 0.3,
    )


@dataclass(frozen=True)
class Spread:
    """One figure over the ranks, ready to be read. `imbalance` is the largest ÷ the mean."""

    name: str
    least: str
    mean: str
    most: str
    least_rank: int
    most_rank: int
    imbalance: float

    @property
    def differs(self) -> bool:
        """Whether naming a rank says anything."""
        return self.least != self.most


def spreads(ranks: Sequence[RankObserved]) -> list[Spread]:
    """How far the ranks are apart, figure by figure; those that no rank has are left out."""

    def seconds(key: str) -> Callable[[RankObserved], float]:
        return lambda r: r.measured.seconds.get(key, 0.0)

    wanted: list[tuple[str, str, Callable[[RankObserved], float]]] = [
        ("peak memory", "bytes", lambda r: r.measured.peak_bytes),
        ("memory between steps", "bytes", lambda r: r.measured.rest_bytes),
        ("sent in a step", "bytes", lambda r: r.measured.wire_bytes),
        (
            f"sent between {borders_of(ranks)}",
            "bytes",
            lambda r: sum(sent.between for sent in r.wire.values()),
        ),
        ("step", "s", seconds("step")),
        ("compute", "s", seconds("compute")),
        ("waiting (exposed)", "s", seconds("exposed communication")),
        ("optimizer", "s", seconds("optimizer")),
    ]
    out = []
    for name, unit, value in wanted:
        found = [(value(r), r.rank) for r in ranks]
        if not found or not any(v for v, _ in found):
            continue
        mean = sum(v for v, _ in found) / len(found)
        (least, least_rank), (most, most_rank) = min(found), max(found)
        out.append(
            Spread(
                name,
                in_unit(least, unit),
                in_unit(mean, unit),
                in_unit(most, unit),
                least_rank,
                most_rank,
                most / mean,
            )
        )
    return out
