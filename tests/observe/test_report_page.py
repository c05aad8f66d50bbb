"""The report without a browser: what is on the page, what is said to be missing, and that nothing
of it can break out of its place.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import (
    BLOCK,
    BLOCKS,
    RANKS,
    account,
    beyond,
    planned,
    recorded,
    write_metrics,
    write_run,
)

from onefold.observe import Reconciliation, RunFileError, write_observed, write_report
from onefold.observe.report import build, figures
from onefold.observe.report.charts import planned_peak
from onefold.observe.report.figures import in_bytes, in_seconds, in_unit, thinned
from onefold.observe.report.tables import read_metrics
from onefold.plan.schema import ACTIVATIONS, ENGINE, LOGITS, MOMENTS, Account
from onefold.recipe import Recipe

pytest.importorskip("plotly", reason="plotly is not installed")
SECTIONS = {
    "loss",
    "throughput",
    "memory",
    "timeline",
    "traffic",
    "comparison",
    "recipe",
    "imbalance",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a-run")


class Outline(HTMLParser):
    """Headings, ids and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if re.fullmatch(r"h\d", tag):
            self.headings.append(tag)
        self.loads += [
            value
            for name, value in attrs
            if name in ("src", "href") and value and not value.startswith("data:")
        ]


def outline(path: Path) -> Outline:
    found = Outline()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def test_a_whole_run_has_every_section_and_misses_nothing(run: Path) -> None:
    report = build(run)
    assert report.missing == {}
    assert set(report.figures) | set(report.tables) == SECTIONS
    assert {tile.label for tile in report.tiles} >= {
        "Loss",
        "Tokens a second",
        "Peak memory a rank",
        "Sent in a step",
        "Waiting for the wire",
    }


def test_the_page_is_one_file_that_loads_nothing(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    page = outline(path)
    assert page.loads == [] and "link" in page.tags and "iframe" not in page.tags
    assert page.headings == ["h1"] + ["h2"] * len(SECTIONS), (
        "one title, and a heading for each section"
    )


def test_memory_over_the_step_is_the_recordings(run: Path) -> None:
    drawn: Any = build(run).figures["memory"]
    assert set(drawn) == {"0", "1", "2", "3"}
    for rank in range(4):
        times, levels = recorded(rank).levels()
        stacked = [t for t in drawn[str(rank)]["data"] if "stackgroup" in t]
        assert [t["name"] for t in stacked] == list(levels)
        tops = [sum(values) for values in zip(*(t["y"] for t in stacked), strict=True)]
        assert max(tops) == pytest.approx(sum(recorded(rank).peak().values()) / 2**20)
        assert len(tops) == len(times)
        lines = {t["name"]: t["y"][0] for t in drawn[str(rank)]["data"] if "stackgroup" not in t}
        assert lines["plan's peak"] == pytest.approx(planned().peak_bytes / 2**20)
        assert lines["plan's bound"] == pytest.approx(planned().bound / 2**20)


def test_without_activations_the_plans_line_leaves_them_out_too() -> None:
    step, plan = recorded(), planned()
    step.activations_watched = False
    name, nbytes = planned_peak(plan, step)
    assert "without activations" in name
    assert nbytes == sum(step.peak(ENGINE).values()) + plan.peak[MOMENTS] < plan.peak_bytes
    older = replace(plan, ledger={})
    assert planned_peak(older, step)[1] == plan.peak_bytes - plan.peak.get(
        ACTIVATIONS, 0
    ) - plan.peak.get(LOGITS, 0)


def test_the_timeline_draws_every_move_and_its_exposed_part(run: Path) -> None:
    drawn: Any = build(run).figures["timeline"]
    step = recorded(0)
    bars: dict[str, list[dict[str, Any]]] = {}
    for trace in drawn["0"]["data"]:
        bars.setdefault(trace["name"], []).append(trace)
    assert sum(len(t["x"]) for t in bars["all-gather"]) == 2 * (BLOCKS + 1)
    assert sum(len(t["x"]) for t in bars["reduce-scatter"]) == BLOCKS + 1
    assert (
        sum(len(t["x"]) for t in bars["forward"])
        == sum(len(t["x"]) for t in bars["backward"])
        == BLOCKS
    )
    waiting = [x for t in bars["waiting (exposed)"] for x in t["x"]]
    assert sum(waiting) == pytest.approx(1000 * step.exposed, abs=0.01)
    shaded = drawn["0"]["layout"]["shapes"]
    assert len(shaded) == len(waiting) and all(s["fillcolor"] == "#e5484d" for s in shaded)


def test_traffic_by_unit_adds_up_to_the_wire(run: Path) -> None:
    drawn: Any = build(run).figures["traffic"]
    assert sum(sum(t["x"]) for t in drawn["data"]) == pytest.approx(
        recorded().wire()["all-gather"] / 2**20 * 1.5
    )
    assert drawn["data"][0]["y"][0] == "(root)" and len(drawn["data"][0]["y"]) == BLOCKS + 1


def test_predicted_stands_beside_measured_with_a_verdict(run: Path) -> None:
    lines = {line.name: line for line in build(run).tables["comparison"]}
    assert lines["at rest: all"].verdict == "close" and lines["at rest: all"].ratio == "1.000"
    assert lines["time: exposed communication"].verdict == "far"
    assert lines["bound of the peak"].measured == "–" and lines["bound of the peak"].verdict == ""
    assert lines["MFU"].predicted == "43.0%"


def test_imbalance_names_the_slow_rank(run: Path) -> None:
    spreads = {s.name: s for s in build(run).tables["imbalance"]}
    assert spreads["compute"].most_rank == 2 and spreads["compute"].imbalance > 1.05
    assert spreads["sent in a step"].imbalance == 1 and not spreads["sent in a step"].differs


def test_a_run_of_many_ranks_shows_a_few_that_matter(tmp_path: Path) -> None:
    for rank in range(20):
        step = recorded(rank)
        if rank == 7:
            step.held["moments"] *= 2
        write_observed(tmp_path, rank, 20, account(step), step=step, recipe=Recipe.zero(3))
    report = build(tmp_path)
    shown = set(report.figures["memory"])
    assert {"0", "7", "19", "2"} >= shown >= {"0", "7", "19"}
    assert "of 20 ranks" in report.said["choice"]
    assert "rank 7" not in report.said.get("comparison", ""), "there was no plan"


@pytest.mark.parametrize("kept", ["metrics", "observed", "observed without ranks", "bare"])
def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path, kept: str) -> None:
    if kept == "metrics":
        write_metrics(tmp_path, steps=3)
        expected = SECTIONS - {"loss", "throughput"}
    elif kept == "observed":
        write_run(tmp_path)
        (tmp_path / "metrics.jsonl").unlink()
        expected = {"loss", "throughput"}
    elif kept == "observed without ranks":
        write_run(tmp_path)
        for path in tmp_path.glob("observed-rank*"):
            path.unlink()
        expected = SECTIONS - {"loss", "throughput", "recipe"}
    else:
        write_observed(tmp_path, 0, 1, Account())
        expected = SECTIONS
    report = build(tmp_path)
    assert set(report.missing) == expected
    assert all(re.search(r"[a-z].*\.$", said) for said in report.missing.values()), report.missing
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count('class="missing"') == len(expected)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (
            Reconciliation("cpu", 1 << 30, 2 << 30, resident=3 << 30, resident_peak=4 << 30),
            "for 2 GiB at peak; the process had 4 GiB resident",
        ),
        (
            Reconciliation("cuda", 1 << 30, 2 << 30, 1 << 30, 3 << 30, 4 << 30, 5 << 30),
            "3 GiB allocated and 5 GiB reserved, a fragmentation of 2 GiB",
        ),
    ],
)
def test_the_machines_own_books_stand_beside_the_ledgers(
    tmp_path: Path, machine: Reconciliation, said: str
) -> None:
    step = recorded()
    write_observed(tmp_path, 0, 4, account(step), step=step, machine=machine)
    assert said in build(tmp_path).said["memory"]


def test_ranks_that_left_no_file_are_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "observed-rank2.json").unlink()
    assert "Without rank 2" in build(tmp_path).said["imbalance"]


def test_names_of_a_run_are_text_on_the_page_and_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>"
    step = recorded()
    step.moves = [
        type(m)(m.move, evil, m.nbytes, m.dtype, m.phase, m.launched, m.landed, m.exposed)
        for m in step.moves
    ]
    write_observed(
        tmp_path, 0, 4, account(step), step=step, facts={evil: evil}, recipe=Recipe.zero(3)
    )
    before = outline(write_report(write_run(tmp_path / "plain"))).tags.count("script")
    path = write_report(tmp_path)
    assert outline(path).tags.count("script") == before
    assert "<script>alert" not in path.read_text(encoding="utf-8")


def test_an_interrupted_metrics_file_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    write_metrics(tmp_path, steps=5)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + '\n{"step": 5, "lo')
    found = read_metrics(tmp_path)
    assert (
        found is not None
        and [row["step"] for row in found.rows] == [1, 2, 3, 4]
        and found.summary == {}
    )
    path.write_text("\n".join([lines[0], "{broken", lines[1]]))
    with pytest.raises(RunFileError, match=r"metrics\.jsonl, line 2, is not JSON"):
        read_metrics(tmp_path)


def test_a_loss_that_is_no_number_leaves_a_gap_and_no_error(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "loss": None},
        {"step": 4, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = read_metrics(tmp_path)
    assert found is not None and found.series("loss") == ([1, 4], [2.0, 1.0])
    drawn: Any = build(tmp_path).figures["loss"]
    assert drawn["data"][0]["x"] == [1, 4]


def test_thinning_keeps_every_peak_and_the_last_level() -> None:
    times = [float(i) for i in range(10_000)]
    series = {
        "a": [i % 7 for i in range(10_000)],
        "b": [10_000 if i == 4321 else 0 for i in range(10_000)],
    }
    kept, levels = thinned(times, series, 500)
    assert len(kept) <= 504 and max(levels["b"]) == 10_000
    assert (kept[0], kept[-1]) == (0.0, 9999.0) and levels["a"][-1] == 9999 % 7
    assert thinned(times[:10], {"a": list(range(10))}, 500) == (times[:10], {"a": list(range(10))})


def test_figures_read_well() -> None:
    assert [in_bytes(n) for n in (0, 512, 1536, 327_155_712, 1_632_087_572)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "312 MiB",
        "1.52 GiB",
    ]
    assert [in_seconds(s) for s in (1.84, 0.312, 0.000045, 1234.5)] == [
        "1.84 s",
        "312 ms",
        "45 µs",
        "1,234 s",
    ]
    assert [in_unit(None, "s"), in_unit(0.4123, ""), in_unit(5120.4, "1/s")] == [
        "–",
        "41.2%",
        "5,120",
    ]


def test_what_is_no_run_is_refused_with_a_sentence(tmp_path: Path, run: Path) -> None:
    with pytest.raises(RunFileError, match="is not a folder: give the output folder of a run"):
        write_report(tmp_path / "nothing")
    with pytest.raises(RunFileError, match=r"holds neither metrics\.jsonl nor observed\.json"):
        write_report(tmp_path)
    with pytest.raises(RunFileError, match="is a folder: name the file to write"):
        write_report(run, tmp_path)


@pytest.mark.parametrize(
    ("module", "said"),
    [("plotly.graph_objects", "pip install plotly"), ("jinja2", "pip install jinja2")],
)
def test_a_missing_library_is_named(
    module: str, said: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onefold.observe.report import page

    copy = shutil.copytree(run, tmp_path / "copy")

    def find(name: str) -> Any:
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.import_module(name)

    figures.plotly.cache_clear()
    monkeypatch.setattr(figures, "import_module", find)
    monkeypatch.setattr(page, "import_module", find)
    try:
        with pytest.raises(ModuleNotFoundError, match=said):
            write_report(copy)
    finally:
        figures.plotly.cache_clear()


def test_what_a_reader_sees_of_facts_windows_and_logits_is_in_words(tmp_path: Path) -> None:
    step = recorded(0)
    told, seen = planned(), account(step)
    told = replace(
        told,
        peak={**told.peak, LOGITS: 3 * seen.peak.get(LOGITS, 1 << 20)},
        seconds={**told.seconds, "io": 0.0},
    )
    facts = {
        "available": 10653308928,
        "epochs": 0.15737704918,
        "held_out": 16,
        "parameters": 110976,
        "model": "a_name",
    }
    write_observed(
        tmp_path,
        0,
        1,
        seen,
        plan=told,
        step=replace(step, steps=2),
        facts=facts,
        recipe=Recipe.zero(3),
    )
    report = build(tmp_path)
    assert report.facts == {
        "available": "9.92 GiB",
        "epochs": "0.157",
        "held out": "16",
        "parameters": "110,976",
        "model": "a_name",
    }
    assert report.window == "2 steps" and "logits with their fp32 copy" in report.said["comparison"]
    assert not [line for line in report.tables["comparison"] if line.name == "time: io"]
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert (
        "Memory over 2 steps" in text
        and "Timeline of 2 steps" in text
        and "one step" not in text.split("<main>")[1].split("<script")[0]
    )


def test_what_lies_off_the_device_has_charts_of_its_own_and_a_sentence(tmp_path: Path) -> None:
    step = beyond(recorded(0))
    seen = replace(
        account(step),
        host=sum(step.peak(tier="host").values()),
        offloaded={t: step.peak(tier=t) for t in ("host", "nvme")},
    )
    write_observed(tmp_path, 0, RANKS, seen, step=step, plan=replace(planned(), host=1 << 30))
    report = build(tmp_path)
    drawn: Any = report.figures["host"]
    stacked = {t["name"]: t["y"] for t in drawn["0"]["data"] if "stackgroup" in t}
    assert set(stacked) == {MOMENTS, "staging buffers"} and max(
        stacked["staging buffers"]
    ) == pytest.approx(BLOCK / RANKS / 2**30)
    assert next(t["y"] for t in drawn["0"]["data"] if t["name"] == "plan") == [1, 1]
    assert set(report.figures["nvme"]) == {"0"}  # type: ignore[arg-type]
    device: Any = report.figures["memory"]
    assert MOMENTS not in {t["name"] for t in device["0"]["data"]}, (
        "states on the host are not on the device"
    )
    moved = in_bytes(BLOCKS * BLOCK / RANKS)
    assert (
        f"rank 0 moved {moved} to the host, {moved} written to NVMe, for which it waited 12 ms"
        in report.said["memory"]
    )
    timeline: Any = report.figures["timeline"]
    assert not {"down", "written"} & {t["name"] for t in timeline["0"]["data"]}
    lines = {line.name: line for line in report.tables["comparison"]}
    assert lines["host: all"].predicted == "1 GiB" and lines["host: moments"].measured == in_bytes(
        step.tiers["host"].held[MOMENTS]
    )
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Held on the host over the same time." in text and 'data-figure="nvme"' in text
    assert "Held on the host" not in write_report(write_run(tmp_path / "plain")).read_text(
        encoding="utf-8"
    )
