"""Build the report page from a run's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from onefold.observe.report import charts, tables
from onefold.observe.report.figures import Figure, plotly_source
from onefold.observe.report.tables import (
    METRICS,
    Metrics,
    Tile,
    between_tiers,
    comparison,
    fullest,
    headline,
    outside_view,
    read_metrics,
    readable_facts,
    tiles,
)
from onefold.observe.runfile import RUN_FILE, Observed, RunFileError, read_observed
from onefold.plan.schema import LOGITS
from onefold.recipe.rows import OFF_DEVICE

#: The sentence that explains why the ratio of logits is far from 1 in every run.
OF_LOGITS = (
    "At peak the plan counts logits with their fp32 copy and their gradient; the ledger sees what"
    " is saved for backward, so its figure is lower there."
)
OWN_LOOP = "onefold.observe.write_observed()"


@dataclass
class Report:
    """The contents of the page.

    Attributes:
        figures: {name: figure}.
        said: {section: sentences}. missing: {section: why it is missing}.
        window: how much was recorded.
    """

    title: str
    tiles: list[Tile] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    window: str = "one step"


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of the run in a folder and return its path.

    Args:
        run: the output folder of `onefold train`, or one that `write_observed` wrote to.
        out: the file to write; None is `report.html` in the folder.

    Raises:
        RunFileError: the folder does not exist, has nothing to report, or has a file that cannot be
            read.
        ModuleNotFoundError: plotly or jinja2 is not installed.
    """
    return save(build(Path(run)), Path(out) if out is not None else Path(run) / "report.html")


def save(report: Report, path: Path) -> Path:
    """Write `report` as a page. Raises as `write_report`."""
    if path.is_dir():
        raise RunFileError(
            f"{path} is a folder: name the file to write, such as {path / 'report.html'}."
        )
    page = render(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def build(folder: Path) -> Report:
    """Read a run's folder and draw everything. Raises as `write_report`."""
    if not folder.is_dir():
        raise RunFileError(
            f"{folder} is not a folder: give the output folder of a run, the one that holds"
            f" {METRICS}."
        )
    metrics = read_metrics(folder)
    observed = read_observed(folder) if (folder / RUN_FILE).exists() else None
    if metrics is None and observed is None:
        raise RunFileError(
            f"{folder} holds neither {METRICS} nor {RUN_FILE}: it is not the output folder of a"
            f" run. `onefold train --output {folder}` writes them."
        )
    report = Report(title=folder.resolve().name)
    report.facts = readable_facts(observed.facts) if observed is not None else {}
    report.tiles = tiles(metrics, observed)
    report.said["headline"] = headline(observed)
    _training(report, metrics)
    _observed(report, observed)
    return report


def _training(report: Report, metrics: Metrics | None) -> None:
    for name, draw in (("loss", charts.loss), ("throughput", charts.throughput)):
        figure = draw(metrics) if metrics is not None else None
        if figure is not None:
            report.figures[name] = figure
        else:
            what = "has no step in it yet" if metrics is not None else "is not in the folder"
            report.missing[name] = (
                f"{METRICS} {what}. onefold train writes a line to it after each step."
            )


def _observed(report: Report, observed: Observed | None) -> None:
    sections = ("memory", "timeline", "traffic", "comparison", "recipe", "imbalance")
    if observed is None:
        for name in sections:
            report.missing[name] = (
                f"The run left no {RUN_FILE}. onefold train writes it, your own loop does with"
                f" {OWN_LOOP}."
            )
        return
    if observed.recipe:
        report.tables["recipe"] = {
            "rows": observed.recipe,
            "notes": observed.recipe_notes,
            "stage": observed.stage,
        }
    else:
        report.missing["recipe"] = (
            "The run did not say which recipe it ran: give write_observed() its recipe."
        )
    _steps(report, observed)
    _across(report, observed)
    if observed.plan is None:
        report.missing["comparison"] = (
            f"The run had no plan. Give what onefold.plan() said to {OWN_LOOP}."
        )
    elif not observed.ranks:
        report.missing["comparison"] = (
            "No rank has left its file, so there is nothing to hold against the plan."
        )
    else:
        rank = fullest(observed.ranks)
        report.tables["comparison"] = comparison(observed.plan, rank.measured)
        of = (
            f"rank {rank.rank}, the one that held most"
            if len(observed.ranks) > 1
            else "this run's rank"
        )
        report.said["comparison"] = f"Measured on {of}. The ratio is measured ÷ predicted."
        if observed.plan.peak.get(LOGITS):
            report.said["comparison"] += f" {OF_LOGITS}"


def _steps(report: Report, observed: Observed) -> None:
    """Draw memory and timeline of the recorded step, of the rank that held most."""
    recorded = [rank for rank in observed.ranks if rank.step is not None]
    if not recorded:
        for name in ("memory", "timeline"):
            report.missing[name] = (
                "No step was recorded: run one inside onefold.observe.record() and give it to"
                f" {OWN_LOOP}."
            )
        return
    rank = fullest(recorded)
    step = rank.step
    assert step is not None
    if step.levels()[1]:
        report.figures["memory"] = charts.memory(step, observed.plan)
    for tier in OFF_DEVICE:
        if tier.value in step.tiers:
            report.figures[tier.value] = charts.memory(step, observed.plan, tier.value)
    report.window = f"{step.steps} steps" if step.steps > 1 else "one step"
    notes = [
        f"Of rank {rank.rank}, which held most." if observed.world_size > 1 else "",
        outside_view(rank),
        between_tiers(rank, step),
    ]
    if not step.activations_watched:
        notes.append(
            "Activations were not watched in this run: record(..., activations=True) shows them"
            " too."
        )
    if observed.plan is None:
        notes.append("There was no plan to draw a line of.")
    if step.truncated:
        notes.append(
            "The recorded window was longer than the ledgers keep; its beginning is missing."
        )
    report.said["memory"] = " ".join(filter(None, notes))
    if step.moves or step.work:
        report.figures["timeline"] = charts.timeline(step)
        if not step.moves:
            report.said["timeline"] = "Nothing travelled: a lone rank has nobody to send to."
    else:
        report.missing["timeline"] = "The recorded step holds neither moves nor work of units."


def _across(report: Report, observed: Observed) -> None:
    """Show the traffic by unit, and the differences between ranks."""
    if not observed.ranks:
        report.missing["traffic"] = report.missing["imbalance"] = "No rank has left its file yet."
        return
    busiest = max(
        observed.ranks, key=lambda r: sum(sum(moves.values()) for moves in r.traffic.values())
    )
    figure = charts.traffic(busiest.traffic)
    if figure is not None:
        report.figures["traffic"] = figure
        report.said["traffic"] = (
            f"Payload bytes that rank {busiest.rank} sends in one optimizer step."
        )
        if lines := tables.wire_table(busiest):
            report.tables["wires"] = lines
            report.said["traffic"] += f" {tables.wire_sentence(busiest)}"
    elif observed.world_size == 1:
        report.missing["traffic"] = "A lone rank sends nothing."
    else:
        report.missing["traffic"] = (
            "No step was recorded, so bytes are not known by unit: use onefold.observe.record()."
        )
    if len(observed.ranks) > 1:
        report.tables["imbalance"] = tables.spreads(observed.ranks)
        if (times := charts.step_times(observed.ranks)) is not None:
            report.figures["imbalance"] = times
    else:
        one = (
            "The run had one rank."
            if observed.world_size == 1
            else "Only one rank has left its file."
        )
        report.missing["imbalance"] = f"{one} Imbalance shows between ranks."
    if observed.missing_ranks:
        names = ", ".join(map(str, observed.missing_ranks[:8])) + (
            " ..." if len(observed.missing_ranks) > 8 else ""
        )
        report.said["imbalance"] = (
            f"Without rank {names}: each rank writes its own file; on several machines use a folder"
            " that all share."
        )


def render(report: Report) -> str:
    """Return the page as text, with styles, plotly.js and data inside.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    try:
        jinja = import_module("jinja2")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the report needs jinja2, which is not installed: pip install jinja2", name="jinja2"
        ) from error
    here = files("onefold.observe.report")

    def read(name: str) -> str:
        return here.joinpath(name).read_text(encoding="utf-8")

    environment = jinja.Environment(
        autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Of this package and of plotly, which escapes what it is given
    safe = jinja.utils.markupsafe.Markup
    how = {
        "full_html": False,
        "include_plotlyjs": False,
        "config": {"displaylogo": False, "responsive": True},
    }
    drawn = {name: safe(figure.to_html(**how)) for name, figure in report.figures.items()}
    trusted = {"style": safe(read("page.css")), "plotly": safe(plotly_source()), "charts": drawn}
    places = [(tier.value, tier.where) for tier in OFF_DEVICE]
    template = environment.from_string(read("page.html"))
    page: str = template.render(report=report, places=places, **trusted)
    return page
