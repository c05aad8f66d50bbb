"""Onefold and its peers, measured alternately on one model, the same data and the same ranks.

    python -m benchmarks.peers --quick            # one setting, two minutes or so
    python -m benchmarks.peers --budget 60        # each respect varied by itself, as many rounds as an hour allows
    python -m benchmarks.peers --full --resume    # every combination: hours, in as many sittings as it takes

A *setting* is what all peers share: model, tokens a rank, precision, ranks, micro-batches a step.
For each setting the peers run in turn, round after round (A B C A B C ...), every one in its own
fresh processes, so that a drift of the machine falls on all of them and no peer inherits another's
memory.

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "models": {name: {"parameters": int}}, "notes": {peer: how it is set up},
    "comparisons": [{
      "setting": {...},      # settings.Setting, field by field
      "rows": [{...}],       # the table: `rows`
      "runs": [{"peer", "round", "status", "error", "wall_s", "ranks": [{...}]}]      # worker.measure, one a peer and round
    }]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmarks import harness, launch
from benchmarks.harness import Cell, Comparison, Panel, Row, Run, over_rounds, range_of, shown
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import (
    LOSSES_COMPARED,
    NOTES,
    PEERS,
    PRECISIONS,
    REFERENCE,
    SIZES,
    Setting,
    matrix,
)

SCHEMA = "onefold-peers/1"
LEGEND = (
    "step s: median of the timed steps of all rounds, a step lasting until its slowest rank is"
    " done. × DDP: median of the rounds' ratios, with their range. cpu"
    " s: processor time of a rank in a step, all threads. Memory: a rank's resident set beyond what"
    " the imported libraries take (the largest rank, the median round; the C library gives its free"
    " heap back before the first and after the last timed step); peak: in timed steps; set-up:"
    " while building and warming up; rest: between steps. sent: payload a rank gave its sockets in"
    " an optimizer step, as the kernel counts it; X: 4 bytes a parameter times (N-1)/N, so an fp32"
    " all-reduce is 2. ledger: what Onefold says it sent. loss diff: largest relative difference to"
    f" DDP's losses (means over ranks) in the first {LOSSES_COMPARED} steps."
)


def parser() -> argparse.ArgumentParser:
    """The options; with the defaults a round takes about 45 minutes on two cores."""
    return harness.parser(
        "peers",
        __doc__,
        rounds=3,
        steps=4,
        warmup=2,
        clip=0.0,
        threads=1,
        budget=None,
        timeout=900.0,
        resume=False,
        deepspeed_python=sys.executable,
        json=False,
        peers=(list(PEERS), f"which of {', '.join(PEERS)}; a family's name takes all of it"),
        full=(
            False,
            "every combination, hours; else those that differ from the first of each option in one"
            " respect",
        ),
        sizes=(list(SIZES), "what bounds a step", SIZES),
        precisions=(list(PRECISIONS), "what is computed in", PRECISIONS),
        ranks=([2, 4], "how many ranks"),
        accumulation=([1, 4], "micro-batches an optimizer step"),
        model=("gpt-110m", "which GPT", SHAPES),
        tokens=(None, "tokens a rank and micro-batch in place of the size's own", int),
        quick=(
            False,
            "communication-bound, fp32, 2 ranks, no accumulation, one round of 3 steps",
        ),
    )


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """The settings that the command line asks for."""
    if options.quick:
        vars(options).update(
            sizes=["communication"], precisions=["fp32"], ranks=[2], accumulation=[1], rounds=1,
            steps=3, warmup=1,
        )  # fmt: skip
    harness.check_at_least(options, 1, "ranks", "accumulation", "steps", "rounds")
    harness.check_at_least(options, 0, "warmup")
    shared = ("model", "warmup", "steps", "clip", "threads", "tokens", "full")
    return matrix(
        options.sizes,
        options.precisions,
        options.ranks,
        options.accumulation,
        **{name: getattr(options, name) for name in shared},
    )


def take(peer: str, setting: Setting, number: int, options: argparse.Namespace) -> Run:
    """Measure one peer once, in fresh processes."""
    found = launch.run_ranks(
        "benchmarks.peers.worker",
        {"peer": peer, "setting": setting.to_json()},
        setting.ranks,
        threads=setting.threads,
        python=launch.python_of(peer, options),
        timeout=options.timeout,
    )
    return Run(peer, number, **found)


def rows(setting: Setting, runs: Sequence[Run], missing: Sequence[str] = ()) -> list[Row]:
    """The rows of one setting. Memory is MiB of the largest rank, time and bytes are a rank's in an
    optimizer step; None: not measured, or the kernel does not say.
    """
    references = harness.by_round(runs, REFERENCE)

    def row(_: str, good: list[Run]) -> Row:
        step = median(second for run in good for second in harness.step_seconds(run))
        ratio, low, high = harness.spread(harness.ratios(good, references))
        of_a_step = {
            name: harness.scaled(over_rounds(good, name, fmean), setting.steps)
            for name in ("cpu_s", "sent_bytes", "ledger_bytes")
        }
        return {
            "step_s": step,
            "ratio": ratio,
            "ratio_low": low,
            "ratio_high": high,
            "tokens_a_second": setting.tokens_a_step / step,
            **{m: over_rounds(good, m) for m in ("peak_mib", "set_up_peak_mib", "rest_mib")},
            **of_a_step,
            "loss_difference": harness.loss_difference(good, references, LOSSES_COMPARED),
        }

    return harness.rows_of(runs, row, missing, "peer")


def columns(setting: Setting) -> dict[str, Cell]:
    """What the table shows of a row of this setting."""
    unit = 4 * count_parameters(setting.model) * (setting.ranks - 1) / setting.ranks
    return {
        "peer": shown("peer"),
        "step s": shown("step_s", "{:.3f}"),
        "× DDP": shown("ratio", "{:.2f}"),
        "range": range_of("ratio_low", "ratio_high"),
        "tokens/s": shown("tokens_a_second", "{:,.0f}"),
        "cpu s": shown("cpu_s", "{:.3f}"),
        "peak MiB": shown("peak_mib", "{:,.0f}"),
        "set-up MiB": shown("set_up_peak_mib", "{:,.0f}"),
        "rest MiB": shown("rest_mib", "{:,.0f}"),
        "sent MiB": shown("sent_bytes", "{:,.1f}", 2**20),
        "sent / X": shown("sent_bytes", "{:.3f}", unit) if unit else lambda row: harness.DASH,
        "ledger MiB": shown("ledger_bytes", "{:,.1f}", 2**20),
        "loss diff": shown("loss_difference", "{:.1e}"),
    }


def plain_table(setting: Setting, found: Sequence[Row]) -> str:
    """A table of aligned text, with a heading; failures are explained under it."""
    return f"{setting.title}\n\n{harness.text_table(columns(setting), found)}"


def write(
    options: argparse.Namespace, comparisons: Sequence[Comparison], *, finished: bool
) -> dict[str, Any]:
    """Results so far as JSON, Markdown and, at the end, PNG: step time and peak memory."""
    measured = [(c, rows(c.setting, c.runs, c.missing)) for c in comparisons if c.runs]
    result = {
        **harness.about(options, SCHEMA),
        "finished": finished,
        "models": {options.model: {"parameters": count_parameters(options.model)}},
        "notes": NOTES,
        "comparisons": [
            {
                "setting": c.setting.to_json(),
                "rows": found,
                "runs": [run.to_json("peer") for run in c.runs],
            }
            for c, found in measured
        ],
    }
    tables = [
        f"**{c.setting.title}**\n\n{harness.markdown_table(columns(c.setting), found)}"
        for c, found in measured
    ]
    page = harness.page(harness.where(result), *tables, LEGEND, *harness.notes(NOTES))
    harness.keep(options, result, page)
    if finished:
        charts = []
        for c, found in measured:
            good = [row for row in found if row["status"] == "ok"]
            ratio = {row["peer"]: row["ratio"] or 0.0 for row in good}
            peak = {row["peer"]: row["peak_mib"] or 0.0 for row in good}
            memory = Panel("peak memory of a rank, MiB", bars=peak, form="%.0f")
            charts.append([Panel("step time, × DDP", c.setting.title, ratio, levels=[1.0]), memory])
        harness.plot(options.output / f"{options.name}.png", charts)
    return result


@harness.command
def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every turn ended well, 1 when a peer failed, 2 for a wrong command line, 130 after
    Ctrl-C.
    """
    options = harness.parsed(parser(), arguments)
    comparisons = [Comparison(setting) for setting in settings_of(options)]
    peers = harness.chosen(options.peers, PEERS, "peers")
    old = (harness.earlier(options, SCHEMA) or {"comparisons": []})["comparisons"]
    known = [(Setting(**c["setting"]), c["runs"]) for c in old]
    kept = [*harness.take_over(comparisons, known, key="peer"), *comparisons]
    absent = launch.absent(peers, options)
    for comparison in comparisons:
        comparison.missing = [p for p in comparison.setting.those(peers) if p in absent]
    with harness.stoppable() as stop:
        for comparison, number, peer in harness.turns(
            options, comparisons, lambda setting: setting.those(peers), whole_rounds=True
        ):
            comparison.runs.append(take(peer, comparison.setting, number, options))
            harness.say_turn(comparison.runs[-1], comparison.setting.title)
            write(options, kept, finished=False)
    result = write(options, kept, finished=True)
    if options.json:
        print(json.dumps(result))
    else:
        for c in comparisons:
            print(plain_table(c.setting, rows(c.setting, c.runs, c.missing)))
        print("\n".join([LEGEND, *harness.notes(NOTES)]))
        print(f"\nwritten: {options.output / options.name}.json, .md, .png")
    failed = any(run.status != "ok" for c in comparisons for run in c.runs)
    return stop.status or int(failed)


if __name__ == "__main__":
    sys.exit(main())
