"""Records as files: what is committed of them, how they are written so that a difference reads
well, and what differs.

    {"shared": {"@3f0c...": [what several records hold in common]},
     "records": {"stages: 3 on 2, bf16": {"wire": {...}, "moves": "@3f0c...", ...}}}

What stands in more than one place is written once and named by its hash. Whatever fits stands on
one line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recording.seen import digest

Record = dict[str, Any]
#: Characters of a value from which it is worth a name of its own, and of a line that a value may
#: fill.
WORTH_SHARING, LINE = 120, 138


# -- of several ranks ------------------------------------------------------------------------------


def merged(ranks: list[Record]) -> Record:
    """One record of all ranks: a value once where all that have it agree. Of the moves of others
    only their hash.
    """
    if raised := [
        f"rank {n}: {one['raised']}\n{one.get('trace', '')}"
        for n, one in enumerate(ranks)
        if "raised" in one
    ]:
        return {"raised": "\n".join(raised)}
    out: Record = {}
    for key in {key: None for one in ranks for key in one}:
        values = {n: one[key] for n, one in enumerate(ranks) if key in one}
        first = values[min(values)]
        if all(value == first for value in values.values()):
            out[key] = first
        elif key in ("loaded", "bits"):
            out[key] = merged([values.get(n, {}) for n in range(len(ranks))])
        elif key == "moves":
            out[key] = {
                "rank 0": first,
                "others": [digest(value) for n, value in values.items() if n],
            }
        else:
            out[key] = {f"rank {n}": value for n, value in values.items()}
    return out


def committed(record: Record, portable: bool) -> Record:
    """The part of a record that is the same on every processor."""
    out = {key: value for key, value in record.items() if key != "bits"}
    if portable and "bits" in record:
        out["bits"] = {key: digest(value) for key, value in record["bits"].items()}
    if "loaded" in out:
        out["loaded"] = committed(out["loaded"], portable)
    return _rounded(out)


def _rounded(value: Any) -> Any:
    """Seconds and rates to ten digits: the last ones may differ between C libraries."""
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


# -- files -----------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Record]:
    """{name: record}"""
    if not path.exists():
        return {}
    held = json.loads(path.read_text())
    return {name: _unfolded(record, held["shared"]) for name, record in held["records"].items()}


def write(path: Path, records: dict[str, Record]) -> None:
    """Sorted, and what stands in several places once."""
    counts: Counter[str] = Counter()
    for record in records.values():
        counts.update(_large(record))
    shared: dict[str, Any] = {}
    folded = {
        name: _folded(record, counts, shared, itself=True) for name, record in records.items()
    }
    path.write_text("".join(_lines({"records": folded, "shared": shared})) + "\n")


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _large(value: Any) -> Iterator[str]:
    if isinstance(value, (dict, list)) and len(plain := _plain(value)) >= WORTH_SHARING:
        yield plain
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _large(inner)


def _folded(value: Any, counts: Counter[str], shared: dict[str, Any], itself: bool = False) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    plain = _plain(value)
    if counts[plain] > 1 and not itself:
        name = f"@{digest(value)[:12]}"
        if name not in shared:
            shared[name] = None  # its place, before what is inside it
            shared[name] = _folded(value, counts, shared, itself=True)
        return name
    if isinstance(value, dict):
        return {k: _folded(v, counts, shared) for k, v in value.items()}
    return [_folded(v, counts, shared) for v in value]


def _unfolded(value: Any, shared: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        return _unfolded(shared[value], shared)
    if isinstance(value, dict):
        return {k: _unfolded(v, shared) for k, v in value.items()}
    return [_unfolded(v, shared) for v in value] if isinstance(value, list) else value


def _lines(value: Any, depth: int = 0) -> Iterator[str]:
    """JSON whose containers stand on one line each where they fit."""
    plain = _plain(value)
    if not isinstance(value, (dict, list)) or len(plain) + depth <= LINE or not value:
        yield plain
        return
    items = (
        [(f"{_plain(k)}: ", value[k]) for k in sorted(value)]
        if isinstance(value, dict)
        else [("", v) for v in value]
    )
    opens, closes = ("{", "}") if isinstance(value, dict) else ("[", "]")
    yield f"{opens}\n"
    for number, (label, inner) in enumerate(items):
        yield " " * (depth + 1) + label
        yield from _lines(inner, depth + 1)
        yield ",\n" if number + 1 < len(items) else "\n"
    yield " " * depth + closes


# -- comparison ------------------------------------------------------------------------------------


def differences(name: str, recorded: Any, now: Any) -> list[str]:
    """A sentence for each place in which two records differ."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        found = []
        for key in sorted(set(recorded) | set(now)):
            if key not in now or key not in recorded:
                what, value = ("gone", recorded.get(key)) if key in recorded else ("new", now[key])
                found.append(f"{name} / {key}: {what}: {_short(value)}")
            else:
                found += differences(f"{name} / {key}", recorded[key], now[key])
        return found
    if isinstance(recorded, list) and isinstance(now, list) and recorded != now:
        if len(recorded) == len(now):
            return [
                s
                for i, (a, b) in enumerate(zip(recorded, now, strict=True))
                for s in differences(f"{name} / {i}", a, b)
            ]
        at = next(
            (i for i, (a, b) in enumerate(zip(recorded, now, strict=False)) if a != b),
            min(len(recorded), len(now)),
        )
        was, comes = (
            recorded[at] if at < len(recorded) else "the end",
            (now[at] if at < len(now) else "the end"),
        )
        return [
            f"{name}: {len(now)} entries, recorded {len(recorded)}; entry {at} is {_short(comes)},"
            f" recorded {_short(was)}"
        ]
    return (
        []
        if recorded == now and type(recorded) is type(now)
        else [f"{name}: {_short(now)}, recorded {_short(recorded)}"]
    )


def _short(value: Any) -> str:
    plain = _plain(value)
    return plain if len(plain) <= 160 else f"{plain[:150]} ..."
