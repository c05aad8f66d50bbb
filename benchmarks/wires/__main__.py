"""Two hosts with a slow link between them, on one machine: what crosses the link in a step, and how
long the step takes.

    python -m benchmarks.wires                                  # 100 Mbit/s, 1 Gbit/s and 10 Gbit/s, every side
    python -m benchmarks.wires --rates 1G --sides onefold-3 fsdp2 --rounds 1
    python -m benchmarks.wires --rates 1G --delay 5             # and 5 ms each way, where the kernel has netem

A *host* is a network and a process namespace of its own; two are joined by a pair of virtual
Ethernet devices whose sending queues the kernel holds to the rate (`tc`). On each, torchrun starts
two ranks that find each other through its own rendezvous across the link. A turn (one side, one
link) has fresh hosts, and they go with it, however it ends. Needs root (or
`unshare --map-root-user`), iproute2 and util-linux; where that is not to be had the command says
what is missing.

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "skipped": str | null,       # why there can be no hosts here; then nothing below was measured
    "models": {name: {"parameters": int}}, "hosts": 2, "ranks_a_host": int, "notes": {side: how it is set up},
    "setting": {...},                              # benchmarks.peers.settings.Setting, field by field
    "links": [{
      "link": {"rate": bit/s, "delay_ms"},
      "measured": {"bit_s", "round_trip_ms"},      # of one plain stream, payload
      "rows": [{...}],                             # the table: `rows`
      "runs": [{"side", "round", "status", "error", "wall_s",             # one a side and round
        "ranks": [{"rank", "losses", "step_s",
                   "inside_bytes", "between_bytes",                       # payload of its sockets, over all timed steps
                   "ledger_inside", "ledger_between", "control_bytes",    # Onefold only
                   "interface_bytes", "queue_bytes", "dropped"}]          # a host's first rank only
      }]
    }]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.harness import DASH, Cell, Comparison, Panel, Row, Run, range_of, shown
from benchmarks.launch import absent, python_of
from benchmarks.peers.model import SHAPES, count_at_the_turn, count_parameters
from benchmarks.peers.settings import Setting
from benchmarks.wires import hosts, launch
from benchmarks.wires.sides import (
    HOSTS,
    RANKS_A_HOST,
    REFERENCE,
    SIDES,
    Link,
    chosen_sides,
    read_rate,
)

SCHEMA = "onefold-wires/1"
COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "step s": shown("step_s", "{:.2f}"),
    "faster": shown("faster", "{:.2f}"),
    "range": range_of("faster_low", "faster_high"),
    "between MiB": shown("between_bytes", "{:,.1f}", 2**20),
    "in 2Ψ": shown("equivalents", "{:.3f}"),
    "formula": shown("expected", "{:.3f}"),
    "inside MiB": shown("inside_bytes", "{:,.1f}", 2**20),
    "interface MiB": shown("interface_bytes", "{:,.1f}", 2**20),
    "frames MiB": shown("queue_bytes", "{:,.1f}", 2**20),
    "headers": shown("headers", "{:+.1%}"),
    "ledger between MiB": shown("ledger_between", "{:,.1f}", 2**20),
    "ledger inside MiB": shown("ledger_inside", "{:,.1f}", 2**20),
    "link busy": shown("busy", "{:.0%}"),
    "ranks agree": lambda row: {None: DASH, True: "yes", False: "NO"}[row["agree"]],
    "loss diff": shown("loss_difference", "{:.1e}"),
}
LEGEND = (
    "Bytes are those that one host sends in an optimizer step, the mean of both, the median of the"
    " rounds. between, inside:"
    " payload of the ranks' sockets to the other host, and to their own. in 2Ψ: between, over 2"
    " bytes a parameter; formula: the closed form of it, for our recipes on two hosts of two"
    " ranks. interface: what the interface counted, one header a packet of up to 64 KiB; frames:"
    " the same with the headers of each frame of 1,500 bytes, which is what the rate is charged"
    " for; headers: frames beyond the payload, acknowledgements and the launchers' words included."
    " ledger: what Onefold says that it sent. step s: median of the timed steps, a step lasting"
    f" until its slowest rank is done; faster: {REFERENCE}'s step over this one's, median of the"
    " rounds, with their range. link busy: share of the step in which the link sends at its rate."
    " ranks agree: the last step's loss, of one batch on all ranks, was one number. loss diff:"
    f" largest relative difference to {REFERENCE}'s losses."
)


def parser() -> argparse.ArgumentParser:
    """The options."""
    return harness.parser(
        "wires",
        __doc__,
        rounds=1,
        steps=2,
        warmup=1,
        accumulation=1,
        threads=1,
        budget=None,
        timeout=1800.0,
        resume=False,
        deepspeed_python=sys.executable,
        json=False,
        rates=(["100M", "1G", "10G"], "bits a second of the link, each way"),
        delay=(0.0, "milliseconds one way, by netem"),
        sides=(list(SIDES), f"which of {', '.join(SIDES)}; or a family"),
        model=("gpt-110m", "which GPT", SHAPES),
        tokens=(256, "tokens a rank and micro-batch"),
        precision=("bf16", "what is computed in", ["fp32", "bf16"]),
    )


def setting_of(options: argparse.Namespace) -> Setting:
    """What all sides share."""
    harness.check_at_least(
        options, 1, "tokens", "accumulation", "rounds", "steps", "warmup", "threads"
    )
    harness.check_at_least(options, 0, "delay")
    names = ("model", "tokens", "precision", "accumulation", "steps", "warmup", "threads")
    return Setting(ranks=HOSTS * RANKS_A_HOST, **{name: getattr(options, name) for name in names})


# -- rows ------------------------------------------------------------------------------------------


def of_a_host(run: Run, name: str, steps: int) -> float | None:
    """Bytes of one host in a step, the mean of both; None if a rank that counts them did not."""
    found = [rank[name] for rank in run.ranks if name in rank]
    return sum(found) / HOSTS / steps if found and None not in found else None


def expected(side: str, setting: Setting) -> float | None:
    """Bytes between hosts as the closed form has them in 16-bit equivalents, one micro-batch a
    step. Twice as many where 32 bits travel, but for what is encoded.
    """
    between, encoded = SIDES[side].between, SIDES[side].encoded
    if between is None or setting.accumulation > 1:
        return None
    found = SIDES[side].again * count_at_the_turn(setting.model) / count_parameters(setting.model)
    between -= found
    encoded -= found if "gather_codec" in SIDES[side].arguments else 0
    return encoded + (between - encoded) * (1 if setting.precision == "bf16" else 2)


def rows(
    setting: Setting, link: Link, runs: Sequence[Run], missing: Sequence[str] = ()
) -> list[Row]:
    """The rows of one link; `LEGEND` says what they hold. None: not measured, or not known of this
    side.
    """
    references = harness.by_round(runs, REFERENCE)

    def row(side: str, good: list[Run]) -> Row:
        sent = {
            name: harness.middle(of_a_host(run, name, setting.steps) for run in good)
            for name in (
                "between_bytes", "inside_bytes", "interface_bytes", "queue_bytes", "ledger_between",
                "ledger_inside",
            )
        }  # fmt: skip
        step = median(second for run in good for second in harness.step_seconds(run))
        faster = harness.spread([1 / r for r in harness.ratios(good, references)])
        between, queue = sent["between_bytes"], sent["queue_bytes"]
        return {
            "step_s": step,
            **dict(zip(("faster", "faster_low", "faster_high"), faster, strict=True)),
            **sent,
            "equivalents": harness.scaled(between, 2 * count_parameters(setting.model)),
            "expected": expected(side, setting),
            "headers": queue / between - 1 if queue is not None and between else None,
            "dropped": sum(rank.get("dropped", 0) for run in good for rank in run.ranks),
            "busy": None if queue is None else 8 * queue / link.rate / step,
            "agree": all(len({rank["losses"][-1] for rank in run.ranks}) == 1 for run in good),
            "loss_difference": harness.loss_difference(good, references),
        }

    return harness.rows_of(runs, row, missing)


# -- pages -----------------------------------------------------------------------------------------


def title(link: dict[str, Any]) -> str:
    """The link in words, with what a plain stream got from it."""
    found, measured = Link(**link["link"]), link["measured"]
    if measured is None:
        return found.title
    return (
        f"{found.title} (one plain stream: {measured['bit_s'] / 1e6:,.1f} Mbit/s of payload, "
        f"{measured['round_trip_ms']:.2f} ms for a round trip)"
    )


def markdown_table(found: Sequence[Row]) -> str:
    """A Markdown table of the rows; failures are explained under it."""
    failed = "".join(f"\n{line}\n" for line in harness.failures(found))
    return harness.markdown_table(COLUMNS, found) + failed


def report(document: dict[str, Any], markdown: bool) -> str:
    """The whole report: for a page, or for a terminal."""
    setting, parts = Setting(**document["setting"]), [harness.where(document)]
    parts.append(f"{document['hosts']} hosts of {document['ranks_a_host']} ranks. {setting.title}.")
    for link in document["links"]:
        heading, found = title(link), link["rows"]
        if markdown:
            parts.append(f"**{heading}**\n\n{markdown_table(found)}")
        else:
            parts.append(f"{heading}\n\n{harness.text_table(COLUMNS, found)}")
    used = {row["side"] for link in document["links"] for row in link["rows"]}
    return harness.page(*parts, LEGEND, *harness.notes(document["notes"], used))


def charts(document: dict[str, Any]) -> list[list[Panel]]:
    """Step time a link, and bytes between hosts beside their closed form."""
    found = []
    for link in document["links"]:
        good = [row for row in link["rows"] if row["status"] == "ok"]
        seconds = {row["side"]: row["step_s"] or 0.0 for row in good}
        sent = {row["side"]: row["equivalents"] or 0.0 for row in good}
        formula = {row["side"]: row["expected"] for row in good if row["expected"] is not None}
        bytes_ = Panel("bytes between hosts, 16-bit Ψ", bars=sent, marks=formula)
        found.append([Panel("step time, s", Link(**link["link"]).title, seconds), bytes_])
    return found


# -- the command -----------------------------------------------------------------------------------


class Session:
    """One command: its links, and what was measured over them so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.setting = options, setting_of(options)
        self.sides = chosen_sides(options.sides)
        links = [Link(read_rate(rate), options.delay) for rate in options.rates]
        self.asked = [Comparison(link) for link in dict.fromkeys(links)]
        self.streams: dict[Link, Any] = {}
        self.skipped: str | None = None
        old = harness.earlier(options, SCHEMA, setting=self.setting.to_json()) or {"links": []}
        known = [(Link(**link["link"]), link["runs"]) for link in old["links"]]
        self.streams = {Link(**link["link"]): link["measured"] for link in old["links"]}
        self.links = [*harness.take_over(self.asked, known, self.sides), *self.asked]

    def measure(self, run_side: Callable[..., Run]) -> None:
        """All turns; raises HostError where there can be no hosts any more."""
        options = self.options
        for comparison, number, side in harness.turns(options, self.asked, lambda _: self.sides):
            link = comparison.setting
            self.streams[link] = self.streams.get(link) or launch.measured(link)
            python = python_of(SIDES[side].family, options)
            how = {"python": python, "timeout": options.timeout}
            comparison.runs.append(run_side(side, self.setting, link, number, **how))
            harness.say_turn(comparison.runs[-1], link.title)
            self.write(finished=False)

    def document(self, *, finished: bool) -> dict[str, Any]:
        """What is written to disk."""
        options = self.options
        return {
            **harness.about(options, SCHEMA),
            "finished": finished,
            "skipped": self.skipped,
            "models": {options.model: {"parameters": count_parameters(options.model)}},
            "hosts": HOSTS,
            "ranks_a_host": RANKS_A_HOST,
            "notes": {name: side.note for name, side in SIDES.items()},
            "setting": self.setting.to_json(),
            "links": [
                {
                    "link": c.setting.to_json(),
                    "measured": self.streams.get(c.setting),
                    "rows": rows(self.setting, c.setting, c.runs, c.missing),
                    "runs": [run.to_json() for run in c.runs],
                }
                for c in self.links
                if c.runs
            ],
        }

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON, Markdown and, at the end, PNG."""
        result = self.document(finished=finished)
        harness.keep(self.options, result, report(result, markdown=True))
        if finished:
            harness.plot(self.options.output / f"{self.options.name}.png", charts(result))
        return result


@harness.command
def main(
    arguments: Sequence[str] | None = None, run_side: Callable[..., Run] = launch.run_side
) -> int:
    """0 when every turn ended well or there can be no hosts here, 1 when one failed, 2 for a wrong
    command line, 130 after Ctrl-C. An optional side that fails is a finding.
    """
    options = harness.parsed(parser(), arguments)
    session = Session(options)
    session.skipped = hosts.permitted(session.asked[0].setting)
    if session.skipped:  # what an earlier run measured stays on the disk as it is
        document = session.document(finished=False)
        print(json.dumps(document) if options.json else f"skipped: {session.skipped}")
        return 0
    gone = absent({SIDES[side].family for side in session.sides}, options)
    for comparison in session.asked:
        comparison.missing = [side for side in session.sides if SIDES[side].family in gone]
    with harness.stoppable() as stop:
        try:
            session.measure(run_side)
        except hosts.HostError as error:
            print(f"error: {error}", file=sys.stderr)
            stop.status = 1
    result = session.write(finished=stop.status == 0)
    print(json.dumps(result) if options.json else report(result, markdown=False))
    failed = any(
        run.status != "ok" and not SIDES[run.side].optional for c in session.links for run in c.runs
    )
    return stop.status or int(failed)


if __name__ == "__main__":
    sys.exit(main())
