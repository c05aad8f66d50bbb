"""From turns to rows and goals: slowest ranks, medians over rounds; GB are 10^9 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.harness import Row, Run, middle, of_ranks, over_rounds, relative, scaled

BUFFER = 16.0
"""MiB that a load may take beside a rank's part of the checkpoint: `onefold.checkpoint.apply.BUFFER` elements of fp32."""
Rank = dict[str, Any]


def _groups(runs: Sequence[Run], kind: str) -> dict[tuple[str, int, int], list[Run]]:
    """The turns of a kind that ended well, by peer and sizes, in their order."""
    found: dict[tuple[str, int, int], list[Run]] = {}
    for run in runs:
        if run.side.kind == kind and run.status == "ok":
            found.setdefault((run.side.peer, run.side.saved, run.side.ranks), []).append(run)
    return found


def _each(turns: Sequence[Run], name: str) -> list[list[Rank]]:
    """What the ranks said of each repetition of a turn's task."""
    return [list(said) for run in turns for said in zip(*(r[name] for r in run.ranks), strict=True)]


def save_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each peer and number of ranks that saved; `report.LEGENDS` says what it holds."""
    rows = []
    for (peer, _, size), turns in _groups(runs, "save").items():
        seconds, on_disk, disk, alone = [], [], [], []
        saves = _each(turns, "saves")
        for ranks in saves:
            first = ranks[0]
            share = first["folder_bytes"] / (first["disk"]["bytes"] * size)
            seconds.append(max(save["seconds"] for save in ranks))
            on_disk.append(seconds[-1] + first["flush_s"])
            disk.append(max(save["disk"]["write_s"] for save in ranks) * share)
            if "alone_write_s" in first["disk"]:
                alone.append(first["disk"]["alone_write_s"] / on_disk[-1])
        rates = [d / s for d, s in zip(disk, on_disk, strict=True)]
        total = median(ranks[0]["folder_bytes"] for ranks in saves) / 1e9
        direct = middle(of_ranks(ranks, lambda s: s["disk"].get("direct_s")) for ranks in saves)
        rows.append(
            {
                "peer": peer,
                "ranks": size,
                "folder_gb": total,
                "seconds": median(seconds),
                "on_disk_s": median(on_disk),
                "gb_s": total / median(on_disk),
                "disk_gb_s": total / median(disk),
                "rate": median(rates),
                "rate_low": min(rates),
                "alone_rate": middle(alone),
                "direct_gb_s": total / direct if direct else None,
                "peak_mib": middle(of_ranks(ranks, "peak_mib") for ranks in saves),
                "count": len(rates),
            }
        )
    return rows


def behind_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each peer and way of saving behind the training."""
    rows = []
    for (peer, _, size), turns in _groups(runs, "save").items():
        saves = _each(turns, "behind")
        for way in dict.fromkeys(ranks[0]["way"] for ranks in saves):
            mine = [ranks for ranks in saves if ranks[0]["way"] == way]
            rows.append({"peer": peer, "way": way, "ranks": size, **behind(mine)})
    return rows


def behind(saves: Sequence[Sequence[Rank]]) -> Row:
    """Saves behind the training, in one way; `saves`: of each save what the ranks said."""
    alone, beside, found = [], [], []
    for ranks in saves:
        usual = [max(step) for step in zip(*(s["alone_s"] for s in ranks), strict=True)]
        spans = zip(*(s["beside"] for s in ranks), strict=True)
        steps = [max(end - begin for begin, end in step) for step in spans]
        base = median(usual) if usual else 0.0
        stall, whole = (max(s[name] for s in ranks) for name in ("stall_s", "whole_s"))
        lost = stall + sum(step - base for step in steps)
        alone += usual
        beside += steps
        found.append((stall, whole, stall / whole, lost, of_ranks(ranks, "copy_mib")))
    opening = [f for f, ranks in zip(found, saves, strict=True) if ranks[0]["number"] == 0]
    later = [f for f, ranks in zip(found, saves, strict=True) if ranks[0]["number"]] or found
    stalls, wholes, shares, losses, _ = zip(*later, strict=True)
    first_stalls, _, first_shares, _, copies = zip(*opening, strict=True)
    return {
        "first_stall_s": median(first_stalls),
        "stall_s": median(stalls),
        "whole_s": median(wholes),
        "first_share": median(first_shares),
        "stall_share": median(shares),
        "alone_s": median(alone) if alone else 0.0,
        "beside_s": middle(beside),
        "lost_s": median(losses),
        "copy_mib": middle(copies),
        "count": len(saves),
    }


def load_rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each peer, ranks that saved, and ranks that loaded; see `report.LEGENDS`."""
    proofs = {
        (run.round, run.side.peer, run.side.ranks): run.ranks[0]["proof"]
        for run in runs
        if run.side.kind == "save" and run.ranks
    }
    rows = []
    for (peer, saved, size), turns in _groups(runs, "load").items():
        differences = [
            relative(run.ranks[0]["proof"], proofs.get((run.round, peer, saved), ()))
            for run in turns
        ]
        total = turns[0].ranks[0]["folder_bytes"] / 1e9
        cold, warm = (
            over_rounds(turns, lambda r, w=w: r[w]["seconds"]) or 0.0 for w in ("cold", "warm")
        )  # type: ignore[misc]
        read = over_rounds(turns, lambda r: r["warm"].get("read_calls"))
        disk = over_rounds(turns, lambda r: r["cold"].get("read_disk"), sum)
        rows.append(
            {
                "peer": peer,
                "saved": saved,
                "ranks": size,
                "cold_s": cold,
                "warm_s": warm,
                "warm_gb_s": total / warm,
                "need_gb": total / size,
                "read_gb": scaled(read, 1e9),
                "disk_gb": scaled(disk, 1e9),
                "peak_mib": over_rounds(turns, lambda r: r["cold"]["peak_mib"]),
                "stays_mib": over_rounds(turns, lambda r: r["cold"]["stays_mib"]),
                "loss_difference": max((d for d in differences if d is not None), default=None),
                "count": len(turns),
            }
        )
    return rows


def open_rows(runs: Sequence[Run], nbytes: int) -> list[Row]:
    """A row for each way to open a folder with `nbytes` of weights, and number of ranks."""
    return [
        {
            "way": way,
            "ranks": size,
            "seconds": over_rounds(turns, "seconds"),
            "peak_mib": over_rounds(turns, "peak_mib"),
            "all_peak_mib": over_rounds(turns, "peak_mib", sum),
            "own_peak_mib": over_rounds(turns, "own_peak_mib"),
            "stays_mib": over_rounds(turns, "stays_mib"),
            "shard_mib": nbytes / size / 2**20,
            "read_gb": scaled(over_rounds(turns, "read_calls"), 1e9),
            "loss": fmean(run.ranks[0]["loss"] for run in turns),
            "count": len(turns),
        }
        for (way, _, size), turns in _groups(runs, "pretrained").items()
    ]


# -- goals -----------------------------------------------------------------------------------------


def goals(
    saves: Sequence[Row], behind: Sequence[Row], loads: Sequence[Row], ranks: int, cores: int
) -> list[Row]:
    """What Onefold's checkpoints should reach, what was measured, and whether that is enough."""
    ours = [[r for r in rows if r["peer"].startswith("onefold")] for rows in (saves, behind, loads)]
    theirs = [row for row in behind if row["peer"] == "fsdp2"]
    rates = [row for row in ours[0] if row["ranks"] == ranks]
    return [*_rates(rates), *_stalls(ours[1], theirs), *_proportions(ours[2], ranks, cores)]


def _at_most(what: str, goal: str, value: float, limit: float, form: str = "{:.2f}") -> Row:
    return {"what": what, "goal": goal, "value": value, "met": value <= limit, "form": form}


def _rates(saves: Sequence[Row]) -> Iterator[Row]:
    for row in saves:
        what = f"{row['peer']}: rate of saving / rate of the disk, {row['ranks']} ranks writing"
        rates = {what: row["rate"]}
        if row["direct_gb_s"] is not None:
            past = f"{row['peer']}: the same, the disk written past the page cache"
            rates[past] = row["gb_s"] / row["direct_gb_s"]
        for text, rate in rates.items():
            goal = {"what": text, "goal": "at least 0.80", "value": rate}
            yield {**goal, "met": rate >= 0.8, "form": "{:.2f}"}


def _stalls(ours: Sequence[Row], theirs: Sequence[Row]) -> Iterator[Row]:
    parts = (("the first", "first_share", "first_stall_s"), ("later", "stall_share", "stall_s"))
    for row in ours:
        for when, share, _ in parts:
            what = f"{row['peer']}: stall / time until whole, {when}"
            yield _at_most(what, "at most 5 %", row[share], 0.05, "{:.1%}")
        for when, _, stall in parts if theirs else ():
            what = f"{row['peer']}: stall / that of the better of DCP's, {when}"
            yield _at_most(what, "at most 1", row[stall] / min(r[stall] for r in theirs), 1)


def _proportions(loads: Sequence[Row], ranks: int, cores: int) -> Iterator[Row]:
    """Time in proportion to bytes is asked of the core-seconds per byte, seconds of a warm load x
    min(ranks, cores) / bytes of all ranks: four ranks on two cores cannot be twice as fast as
    two.
    """
    for row in loads:
        sizes = f"{row['peer']}: {row['saved']} -> {row['ranks']}"
        if row["read_gb"] is not None:
            what = f"{sizes}, bytes read / bytes owned, the rank that reads most"
            yield _at_most(what, "at most 1.05", row["read_gb"] / row["need_gb"], 1.05)
        if row["peak_mib"] is not None:
            what = f"{sizes}, host peak beyond rest / (bytes owned + {BUFFER:.0f} MiB)"
            owned = row["need_gb"] * 1e9 / 2**20 + BUFFER
            yield _at_most(what, "at most 1", row["peak_mib"] / owned, 1)
        own = (row["peer"], ranks, ranks)
        same = next((r for r in loads if (r["peer"], r["saved"], r["ranks"]) == own), None)
        if same is not None and row is not same:
            mine, theirs = (r["warm_s"] * min(r["ranks"], cores) for r in (row, same))
            what = f"{sizes}, core-seconds per byte owned / those of {ranks} -> {ranks}"
            yield _at_most(what, "at most 1.25", mine / theirs, 1.25)
