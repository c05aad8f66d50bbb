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

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import harness, pages
from benchmarks.harness import Row, Run
from benchmarks.launch import python_of
from benchmarks.pages import DASH, Cell, Panel, range_of, shown
from benchmarks.peers.model import SHAPES, count_at_the_turn, count_parameters
from benchmarks.peers.settings import Setting
from benchmarks.study import OPTIONS, Comparison, Study, timings
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


def setting_of(options: harness.Options) -> Setting:
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
    """The rows of one link, as `LEGEND` says. None: not measured, or not known of this side."""
    references = harness.by_round(runs, REFERENCE)

    def row(side: str, good: list[Run]) -> Row:
        sent = {
            name: harness.middle(of_a_host(run, name, setting.steps) for run in good)
            for name in (
                "between_bytes", "inside_bytes", "interface_bytes", "queue_bytes", "ledger_between",
                "ledger_inside",
            )
        }  # fmt: skip
        names = ("faster", "faster_low", "faster_high")
        timed = timings(good, references, names, faster=True)
        between, queue = sent["between_bytes"], sent["queue_bytes"]
        return {
            **timed,
            **sent,
            "equivalents": harness.scaled(between, 2 * count_parameters(setting.model)),
            "expected": expected(side, setting),
            "headers": queue / between - 1 if queue is not None and between else None,
            "dropped": sum(rank.get("dropped", 0) for run in good for rank in run.ranks),
            "busy": None if queue is None else 8 * queue / link.rate / timed["step_s"],
            "agree": all(len({rank["losses"][-1] for rank in run.ranks}) == 1 for run in good),
            "loss_difference": harness.loss_difference(good, references),
        }

    return harness.rows_of(runs, row, missing)


# -- the command -----------------------------------------------------------------------------------


def title(link: dict[str, Any]) -> str:
    """The link in words, with what a plain stream got from it."""
    found, measured = Link(**link["link"]), link["measured"]
    if measured is None:
        return found.title
    return (
        f"{found.title} (one plain stream: {measured['bit_s'] / 1e6:,.1f} Mbit/s of payload, "
        f"{measured['round_trip_ms']:.2f} ms for a round trip)"
    )


class Wires(Study):
    """Every side over every link. `run_side` measures one side once."""

    schema, parts, part = "onefold-wires/1", "links", "link"

    def __init__(self, options: harness.Options, run_side: Callable[..., dict[str, Any]]) -> None:
        self.setting, self.run_side = setting_of(options), run_side
        links = [Link(read_rate(rate), options.delay) for rate in options.rates]
        sides = chosen_sides(options.sides)
        same = {"setting": asdict(self.setting)}
        super().__init__(options, dict.fromkeys(links), sides, **same)
        old = self.old.get("links", ())
        self.streams: dict[Link, Any] = {self.read(c["link"]): c["measured"] for c in old}
        self.skipped: str | None = None

    def read(self, setting: dict[str, Any]) -> Link:
        return Link(**setting)

    def take(self, setting: Link, side: str) -> dict[str, Any]:
        self.streams[setting] = self.streams.get(setting) or launch.measured(setting)
        how = {"python": python_of(side, self.options), "timeout": self.options.timeout}
        return self.run_side(side, self.setting, setting, **how)

    def found(self, comparison: Comparison) -> dict[str, Any]:
        c = comparison
        measured = self.streams.get(c.setting)
        return {"measured": measured, "rows": rows(self.setting, c.setting, c.runs, c.missing)}

    def document(self) -> dict[str, Any]:
        name = self.options.model
        return {
            "skipped": self.skipped,
            "models": {name: {"parameters": count_parameters(name)}},
            "hosts": HOSTS,
            "ranks_a_host": RANKS_A_HOST,
            "notes": {name: side.note for name, side in SIDES.items()},
            "setting": asdict(self.setting),
        }

    def page(self, result: dict[str, Any]) -> str:
        setting, parts = Setting(**result["setting"]), [pages.where(result)]
        parts.append(f"{result['hosts']} hosts of {result['ranks_a_host']} ranks. {setting.title}.")
        for link in result["links"]:
            parts += [f"**{title(link)}**", pages.table(COLUMNS, link["rows"])]
        used = {row["side"] for link in result["links"] for row in link["rows"]}
        return pages.page(*parts, LEGEND, *pages.notes(result["notes"], used))

    def charts(self, result: dict[str, Any]) -> list[list[Panel]]:
        """Step time a link, and bytes between hosts beside their closed form."""
        found = []
        for link in result["links"]:
            good = [row for row in link["rows"] if row["status"] == "ok"]
            seconds = {row["side"]: row["step_s"] or 0.0 for row in good}
            sent = {row["side"]: row["equivalents"] or 0.0 for row in good}
            formula = {row["side"]: row["expected"] for row in good if row["expected"] is not None}
            bytes_ = Panel("bytes between hosts, 16-bit Ψ", bars=sent, marks=formula)
            found.append([Panel("step time, s", Link(**link["link"]).title, seconds), bytes_])
        return found

    @property
    def failed(self) -> bool:
        """An optional side that fails is a finding."""
        runs = [run for c in self.comparisons for run in c.runs]
        return any(run.status != "ok" and not SIDES[run.side].optional for run in runs)


@harness.command(
    "wires",
    __doc__,
    rounds=1,
    steps=2,
    warmup=1,
    accumulation=1,
    timeout=1800.0,
    rates=(["100M", "1G", "10G"], "bits a second of the link, each way"),
    delay=(0.0, "milliseconds one way, by netem"),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; or a family"),
    tokens=(256, "tokens a rank and micro-batch"),
    precision=("bf16", "what is computed in", ["fp32", "bf16"]),
    model=("gpt-110m", "which GPT", SHAPES),
    **OPTIONS,
)
def main(
    options: harness.Options, run_side: Callable[..., dict[str, Any]] = launch.run_side
) -> int:
    """0 also where there can be no hosts; what an earlier run measured then stays as it is."""
    study = Wires(options, run_side)
    study.skipped = hosts.permitted(study.asked[0].setting)
    if not study.skipped:
        return study.run()
    if options.json:
        head = harness.about(options, study.schema)
        print(json.dumps({**head, "finished": False, **study.document(), "links": []}))
    else:
        print(f"skipped: {study.skipped}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
