"""From turns to rows and goals. Also the schema of the JSON that is written.

{
  "schema": "onefold-checkpoint/1",
  "command": str, "date": ISO 8601 with zone, "finished": bool,
  "machine": {"cpu", "cores", "memory_gib", "system", "kernel"}, "file_system": str, "cached": str,
  "versions": {"python", "torch", "onefold", "deepspeed", "commit", "transformers"},      # null: not installed
  "model": {"name", "parameters", "state_bytes"}, "ranks": int, "tokens": int, "notes": {peer: how
  it is set up},
  "goals": [{...}],                  # rows.Goal, field by field
  "saves": [...], "behind": [...], "loads": [...], "pretrained": [...],      # the rows of rows.py, field by field
  "missing": [peer],                 # not installed
  "runs": [{"turn": settings.Turn, "round", "status", "error", "wall_s", "ranks": [what each worker
  wrote]}]
}

Seconds of a turn are those of its slowest rank; rows are medians over rounds and repetitions. GB
are 10^9 bytes, MiB 2^20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from benchmarks.checkpoint.rows import BehindRow, Goal, LoadRow, OpenRow, Run, SaveRow

SCHEMA = "onefold-checkpoint/1"
BUFFER = 16.0
"""MiB that a load may take beside a rank's part of the checkpoint: `onefold.checkpoint.apply.BUFFER` elements of fp32."""
Rank = dict[str, Any]


def to_json(row: Any) -> dict[str, Any]:
    """A row or goal as a plain dictionary."""
    return asdict(row)


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _slowest(ranks: Sequence[Rank], look: Callable[[Rank], float | None]) -> float | None:
    known = [value for rank in ranks if (value := look(rank)) is not None]
    return max(known) if known else None


def _seconds(ranks: Sequence[Rank], look: Callable[[Rank], float]) -> float:
    return max(look(rank) for rank in ranks)


def _sure(values: Sequence[float]) -> float:
    return median(values)


def _groups(runs: Sequence[Run], kind: str) -> dict[tuple[str, int, int], list[Run]]:
    """The turns of a kind that ended well, by peer and sizes, in the order in which they came
    first.
    """
    found: dict[tuple[str, int, int], list[Run]] = {}
    for run in runs:
        if run.turn.kind == kind and run.status == "ok":
            found.setdefault((run.turn.peer, run.turn.saved, run.turn.ranks), []).append(run)
    return found


def save_rows(runs: Sequence[Run]) -> list[SaveRow]:
    """A row for each peer and number of ranks."""
    rows = []
    for (peer, _, size), turns in _groups(runs, "save").items():
        seconds, on_disk, disk, nbytes, peaks, alone, direct = [], [], [], [], [], [], []
        for run in turns:
            for number, first in enumerate(run.ranks[0]["saves"]):
                one = [rank["saves"][number] for rank in run.ranks]
                seconds.append(_seconds(one, lambda save: save["seconds"]))
                on_disk.append(seconds[-1] + first["flush_s"])
                disk.append(
                    _seconds(one, lambda save: save["disk"]["write_s"])
                    * first["folder_bytes"]
                    / (first["disk"]["bytes"] * size)
                )
                nbytes.append(first["folder_bytes"])
                peaks.append(_slowest(one, lambda save: save["peak_mib"]))
                direct.append(_slowest(one, lambda save: save["disk"].get("direct_s")))
                if "alone_write_s" in first["disk"]:
                    alone.append(first["disk"]["alone_write_s"] / on_disk[-1])
        pairs = [d / s for d, s in zip(disk, on_disk, strict=True)]
        total, taken = _sure(nbytes) / 1e9, _sure(on_disk)
        past = _middle(direct)
        rates = (_sure(pairs), min(pairs), _middle(alone), total / past if past else None)
        rows.append(
            SaveRow(
                peer,
                size,
                total,
                _sure(seconds),
                taken,
                total / taken,
                total / _sure(disk),
                *rates,
                _middle(peaks),
                len(pairs),
            )
        )
    return rows


def behind_rows(runs: Sequence[Run]) -> list[BehindRow]:
    """A row for each peer and way of saving behind the training."""
    rows = []
    for (peer, _, size), turns in _groups(runs, "save").items():
        ways = dict.fromkeys(save["way"] for run in turns for save in run.ranks[0]["behind"])
        for way in ways:
            saves = [
                [rank["behind"][number] for rank in run.ranks]
                for run in turns
                for number, save in enumerate(run.ranks[0]["behind"])
                if save["way"] == way
            ]
            rows.append(_behind_row(peer, way, size, saves))
    return rows


def _behind_row(peer: str, way: str, size: int, saves: Sequence[Sequence[Rank]]) -> BehindRow:
    """`saves`: of each save what the ranks said."""
    stalls, wholes, alone, beside, lost, first = [], [], [], [], [], []
    for ranks in saves:
        stall, whole = (
            _seconds(ranks, lambda s: s["stall_s"]),
            _seconds(ranks, lambda s: s["whole_s"]),
        )
        usual = [max(step) for step in zip(*(s["alone_s"] for s in ranks), strict=True)]
        steps = [
            max(b - a for a, b in step) for step in zip(*(s["beside"] for s in ranks), strict=True)
        ]
        base = median(usual) if usual else 0.0
        stalls.append(stall)
        wholes.append(whole)
        first.append(ranks[0]["number"] == 0)
        alone += usual
        beside += steps
        lost.append(stall + sum(step - base for step in steps))
    later = [n for n, is_first in enumerate(first) if not is_first] or list(range(len(first)))
    opening = [n for n, is_first in enumerate(first) if is_first]
    return BehindRow(
        peer,
        way,
        size,
        first_stall_s=_sure([stalls[n] for n in opening]),
        stall_s=_sure([stalls[n] for n in later]),
        whole_s=_sure([wholes[n] for n in later]),
        first_share=_sure([stalls[n] / wholes[n] for n in opening]),
        stall_share=_sure([stalls[n] / wholes[n] for n in later]),
        alone_s=_sure(alone) if alone else 0.0,
        beside_s=_middle(beside),
        lost_s=_sure([lost[n] for n in later]),
        copy_mib=_middle([_slowest(saves[n], lambda s: s["copy_mib"]) for n in opening]),
        count=len(saves),
    )


def load_rows(runs: Sequence[Run]) -> list[LoadRow]:
    """A row for each peer and pair of sizes."""
    proofs = {
        (run.round, run.turn.peer, run.turn.ranks): run.ranks[0]["proof"]
        for run in runs
        if run.turn.kind == "save" and run.ranks
    }
    rows = []
    for (peer, saved, size), turns in _groups(runs, "load").items():
        differences = [
            abs(mine - theirs) / abs(theirs)
            for run in turns
            for mine, theirs in zip(
                run.ranks[0]["proof"], proofs.get((run.round, peer, saved), ()), strict=False
            )
        ]
        cold = [[rank["cold"] for rank in run.ranks] for run in turns]
        warm = [[rank["warm"] for rank in run.ranks] for run in turns]
        total = turns[0].ranks[0]["folder_bytes"] / 1e9
        warm_s = _sure([_seconds(ranks, lambda load: load["seconds"]) for ranks in warm])
        disk = [[load["read_disk"] for load in ranks if "read_disk" in load] for ranks in cold]
        rows.append(
            LoadRow(
                peer,
                saved,
                size,
                cold_s=_sure([_seconds(ranks, lambda load: load["seconds"]) for ranks in cold]),
                warm_s=warm_s,
                warm_gb_s=total / warm_s,
                need_gb=total / size,
                read_gb=_scaled(
                    _middle(
                        [_slowest(ranks, lambda load: load.get("read_calls")) for ranks in warm]
                    ),
                    1e9,
                ),
                disk_gb=_scaled(_middle([sum(values) if values else None for values in disk]), 1e9),
                peak_mib=_middle(
                    [_slowest(ranks, lambda load: load["peak_mib"]) for ranks in cold]
                ),
                stays_mib=_middle(
                    [_slowest(ranks, lambda load: load["stays_mib"]) for ranks in cold]
                ),
                loss_difference=max(differences, default=None),
                count=len(turns),
            )
        )
    return rows


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def open_rows(runs: Sequence[Run], nbytes: int) -> list[OpenRow]:
    """A row for each way and number of ranks; `nbytes` of weights are in the folder."""
    rows = []
    for (way, _, size), turns in _groups(runs, "pretrained").items():
        peaks = [
            [rank["peak_mib"] for rank in run.ranks if rank["peak_mib"] is not None]
            for run in turns
        ]
        rows.append(
            OpenRow(
                way,
                size,
                seconds=_sure([_seconds(run.ranks, lambda rank: rank["seconds"]) for run in turns]),
                peak_mib=_middle([max(p) if p else None for p in peaks]),
                all_peak_mib=_middle([sum(p) if p else None for p in peaks]),
                own_peak_mib=_sure(
                    [_seconds(run.ranks, lambda rank: rank["own_peak_mib"]) for run in turns]
                ),
                stays_mib=_middle(
                    [_slowest(run.ranks, lambda rank: rank["stays_mib"]) for run in turns]
                ),
                shard_mib=nbytes / size / 2**20,
                read_gb=_scaled(
                    _middle(
                        [_slowest(run.ranks, lambda rank: rank.get("read_calls")) for run in turns]
                    ),
                    1e9,
                ),
                loss=fmean(run.ranks[0]["loss"] for run in turns),
                count=len(turns),
            )
        )
    return rows


def goals(
    saves: Sequence[SaveRow],
    behind: Sequence[BehindRow],
    loads: Sequence[LoadRow],
    ranks: int,
    cores: int,
) -> list[Goal]:
    """The goals that Onefold's checkpoints have, each with its figure; those that were not measured
    are left out.
    """
    return [*_rates(saves, ranks), *_stalls(behind), *_proportions(loads, ranks, cores)]


def _ours(peer: str) -> bool:
    return peer.startswith("onefold")


def _rates(saves: Sequence[SaveRow], ranks: int) -> Iterator[Goal]:
    for row in (r for r in saves if _ours(r.peer) and r.ranks == ranks):
        what = f"{row.peer}: rate of saving / rate of the disk, {row.ranks} ranks writing"
        yield Goal(what, "at least 0.80", row.rate, row.rate >= 0.8)
        if row.direct_gb_s is not None:
            rate = row.gb_s / row.direct_gb_s
            yield Goal(
                f"{row.peer}: the same, the disk written past the page cache",
                "at least 0.80",
                rate,
                rate >= 0.8,
            )


def _stalls(behind: Sequence[BehindRow]) -> Iterator[Goal]:
    theirs = [r for r in behind if r.peer == "fsdp2"]
    for ours in (r for r in behind if _ours(r.peer)):
        for when, share in (("the first", ours.first_share), ("later", ours.stall_share)):
            yield Goal(
                f"{ours.peer}: stall / time until whole, {when}",
                "at most 5 %",
                share,
                share <= 0.05,
                "{:.1%}",
            )
        for when, mine, others in (
            ("the first", ours.first_stall_s, [r.first_stall_s for r in theirs]),
            ("later", ours.stall_s, [r.stall_s for r in theirs]),
        ):
            if others:
                ratio = mine / min(others)
                yield Goal(
                    f"{ours.peer}: stall / that of the better of DCP's, {when}",
                    "at most 1",
                    ratio,
                    ratio <= 1,
                )


def _proportions(loads: Sequence[LoadRow], ranks: int, cores: int) -> Iterator[Goal]:
    """Time in proportion to bytes is asked of the core-seconds per byte, seconds of a warm load x
    min(ranks, cores) / bytes of all ranks: four ranks on two cores cannot be twice as fast as
    two.
    """
    for row in (r for r in loads if _ours(r.peer)):
        sizes = f"{row.peer}: {row.saved} -> {row.ranks}"
        if row.read_gb is not None:
            ratio = row.read_gb / row.need_gb
            yield Goal(
                f"{sizes}, bytes read / bytes owned, the rank that reads most",
                "at most 1.05",
                ratio,
                ratio <= 1.05,
            )
        if row.peak_mib is not None:
            ratio = row.peak_mib / (row.need_gb * 1e9 / 2**20 + BUFFER)
            yield Goal(
                f"{sizes}, host peak beyond rest / (bytes owned + {BUFFER:.0f} MiB)",
                "at most 1",
                ratio,
                ratio <= 1,
            )
        same = next(
            (r for r in loads if (r.peer, r.saved, r.ranks) == (row.peer, ranks, ranks)), None
        )
        if same is not None and row is not same:
            ratio = row.warm_s * min(row.ranks, cores) / (same.warm_s * min(same.ranks, cores))
            what = f"{sizes}, core-seconds per byte owned / those of {ranks} -> {ranks}"
            yield Goal(what, "at most 1.25", ratio, ratio <= 1.25)
