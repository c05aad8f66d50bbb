"""From turns to rows: what a host sends the other in a step, what the step takes. Also the schema
of the JSON that is written.

{
  "schema": "onefold-wires/1",
  "command": str, "date": ISO 8601 with zone, "finished": bool,
  "skipped": str | null,                         # why there can be no hosts here; then nothing below was measured
  "machine": {"cpu", "cores", "memory_gib", "system", "kernel"},
  "versions": {"python", "torch", "onefold", "deepspeed", "commit"},
  "models": {name: {"parameters": int}},
  "hosts": 2, "ranks_a_host": int,
  "notes": {side: how it is set up},
  "setting": {...},                              # benchmarks.peers.settings.Setting, field by field
  "links": [{
    "link": {"rate": bit/s, "delay_ms"},
    "measured": {"bit_s", "round_trip_ms"},      # of one plain stream, payload
    "rows": [{...}],                             # Row, field by field: the table
    "runs": [{                                   # Run: the raw measurements, one a side and round
      "side", "link", "round", "status", "error", "wall_s",
      "ranks": [{"rank", "losses", "step_s",
                 "inside_bytes", "between_bytes",                          # payload of its sockets, over all timed steps
                 "ledger_inside", "ledger_between", "control_bytes",       # Onefold only
                 "interface_bytes", "queue_bytes", "dropped"}]             # a host's first rank only
    }]
  }]
}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.harness import step_seconds
from benchmarks.peers.model import count_at_the_turn, count_parameters
from benchmarks.peers.settings import Setting
from benchmarks.wires.settings import HOSTS, REFERENCE, SIDES, Link

SCHEMA = "onefold-wires/1"


@dataclass
class Run:
    """One side in one turn. `status` is "ok", "failed" or "timeout"; `ranks` holds what each worker
    wrote.
    """

    side: str
    link: dict[str, float]
    round: int
    status: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `Run(**d)` reads back."""
        return dict(self.__dict__)


@dataclass
class Row:
    """One side over one link. None: not measured, or not known of this side.

    Bytes are those that one host sends in an optimizer step, the mean of both hosts and the median
    of the rounds: `between_bytes` and `inside_bytes` payload of the sockets, `interface_bytes` and
    `queue_bytes` of the link (`counters.py`), `ledger_between` and `ledger_inside` what Onefold
    says. `equivalents` is `between_bytes` over 2 bytes times the model's parameters, `expected` the
    closed form of it. `headers` is the share by which the frames exceed the payload, `busy` the
    share of the step in which the link sends at its rate. `step_s` is the median of all timed
    steps, a step lasting until its slowest rank is done; `faster` the median over rounds of the
    reference's median step over this side's, with its extremes. `agree`: the last step's loss, of
    one batch on all ranks, was one number. `loss_difference` is the largest relative difference to
    the reference's losses (means over ranks).
    """

    side: str
    status: str
    rounds: int = 0
    step_s: float | None = None
    faster: float | None = None
    faster_low: float | None = None
    faster_high: float | None = None
    between_bytes: float | None = None
    inside_bytes: float | None = None
    equivalents: float | None = None
    expected: float | None = None
    interface_bytes: float | None = None
    queue_bytes: float | None = None
    headers: float | None = None
    ledger_between: float | None = None
    ledger_inside: float | None = None
    dropped: int | None = None
    busy: float | None = None
    agree: bool | None = None
    loss_difference: float | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, null for None."""
        return asdict(self)


def of_a_host(run: Run, name: str, steps: int) -> float | None:
    """Bytes of one host in a step, the mean of both; None if a rank that counts them did not."""
    found = [rank[name] for rank in run.ranks if name in rank]
    return sum(found) / HOSTS / steps if found and None not in found else None


def expected(side: str, setting: Setting) -> float | None:
    """Bytes between hosts as the closed form has them in 16-bit equivalents, one micro-batch a
    step.

    Twice as many where 32 bits travel, but for what is encoded.
    """
    between, encoded = SIDES[side].between, SIDES[side].encoded
    if between is None or setting.accumulation > 1:
        return None
    found = SIDES[side].again * count_at_the_turn(setting.model) / count_parameters(setting.model)
    between -= found
    encoded -= found if "gather_codec" in (SIDES[side].arguments or {}) else 0
    return encoded + (between - encoded) * (1 if setting.precision == "bf16" else 2)


def summarize(
    setting: Setting, link: Link, runs: Sequence[Run], missing: Sequence[str] = ()
) -> list[Row]:
    """The rows of one link in the order in which the sides ran; `missing` sides are not
    installed.
    """
    references = harness.by_round(runs, REFERENCE)
    return harness.sides_of(
        runs, lambda side, good: _row(side, setting, link, good, references), Row, missing
    )


def _row(
    side: str, setting: Setting, link: Link, good: Sequence[Run], references: dict[int, Run]
) -> Row:
    def bytes_of(name: str) -> float | None:
        found = [
            value for run in good if (value := of_a_host(run, name, setting.steps)) is not None
        ]
        return median(found) if found else None

    step = median(second for run in good for second in step_seconds(run))
    faster, low, high = harness.spread([1 / r for r in harness.ratios(good, references)])
    between, queue = bytes_of("between_bytes"), bytes_of("queue_bytes")
    return Row(
        side,
        "ok",
        rounds=len(good),
        step_s=step,
        faster=faster,
        faster_low=low,
        faster_high=high,
        between_bytes=between,
        inside_bytes=bytes_of("inside_bytes"),
        equivalents=None if between is None else between / (2 * count_parameters(setting.model)),
        expected=expected(side, setting),
        interface_bytes=bytes_of("interface_bytes"),
        queue_bytes=queue,
        headers=queue / between - 1 if queue is not None and between else None,
        ledger_between=bytes_of("ledger_between"),
        ledger_inside=bytes_of("ledger_inside"),
        dropped=sum(rank.get("dropped", 0) for run in good for rank in run.ranks),
        busy=None if queue is None else 8 * queue / link.rate / step,
        agree=all(len({rank["losses"][-1] for rank in run.ranks}) == 1 for run in good),
        loss_difference=harness.loss_difference(good, references),
    )
