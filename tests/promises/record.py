"""Compare the rows of the table between two source trees: bits, bytes and peaks, row by row.

    python tests/promises/record.py --against ../before              every row of up to four ranks
    python tests/promises/record.py --against ../before --only "^tiers" --ranks 2
    python tests/promises/record.py --write build/rows.json

A change that is meant to leave every number as it is shows so: `make record ARGS="--against TREE"`,
where the tree is a checkout from before. Each tree is recorded by its own `record.py`, or by this one
if it has none. Bits are those of this machine: recordings of two machines are not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [
        str(TREE / "tests"),
        *([] if "PYTHONPATH" in os.environ else [str(TREE / "src")]),
    ]

#: Rows of a start, and sentences that are shown.
TOGETHER, SHOWN = 16, 40


def digest(tensors: dict[str, Any]) -> dict[str, str]:
    """{name: sixteen digits that stand for a tensor's dtype, shape and bits}"""
    import torch

    found = {}
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
        found[name] = hashlib.sha256(head + raw).hexdigest()[:16]
    return found


def seen_of(names: list[str], folder: str) -> dict[str, Any]:
    """On a rank: {row: what it saw}. A row that raises is what it raised."""
    from promises.jobs import train
    from promises.table import table

    rows, found = {row.name: row for row in table()}, {}
    for at, name in enumerate(names):
        Path(folder, str(at)).mkdir(exist_ok=True)
        try:
            seen = train(rows[name], Path(folder, str(at)))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            found[name] = {"raised": told, "trace": traceback.format_exc(limit=-4)}
            continue
        bits = {"losses": [loss.hex() for loss in [*seen.losses, *seen.next]]}
        bits |= {"weights": digest(seen.weights), "states": digest(seen.states)}
        found[name] = {
            "bits": bits,
            "bytes": [seen.units, seen.rest, seen.sent, seen.by_link, seen.moved, seen.gradients],
            "peaks": [seen.peak, 0 if rows[name].on_disk else seen.host_peak],
        }
    return found


def take(only: str, ranks: set[int]) -> dict[str, Any]:
    """{row: {rank: what it saw}} of this tree."""
    from promises.table import table
    from ranks import run_ranks

    rows = [r for r in table() if r.mesh.ranks in ranks and re.search(only, r.name)]
    found: dict[str, Any] = {}
    for count in sorted({r.mesh.ranks for r in rows}):
        names = [r.name for r in rows if r.mesh.ranks == count]
        for first in range(0, len(names), TOGETHER):
            some = names[first : first + TOGETHER]
            with tempfile.TemporaryDirectory(prefix="onefold-record-") as folder:
                told = run_ranks(count, seen_of, some, folder, timeout=1200.0)
            found |= {name: {str(n): one[name] for n, one in enumerate(told)} for name in some}
            print(f"{len(found)} of {len(rows)} rows", file=sys.stderr)
    return found


def written_by(tree: Path, only: str, ranks: str) -> dict[str, Any]:
    """What the rows come to with the source of `tree`, in a process of its own."""
    own = tree / "tests" / "promises" / "record.py"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, str(own if own.exists() else Path(__file__).resolve())]
        command += ["--write", str(file), "--only", only, "--ranks", ranks]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        done = subprocess.run(command, env=environment)
        if done.returncode or not file.exists():
            raise SystemExit(f"{tree} was not recorded: status {done.returncode}")
        return json.loads(file.read_text())


def differences(name: str, a: Any, b: Any) -> Iterator[str]:
    """A sentence for each place in which two records differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from differences(f"{name} / {key}", a.get(key), b.get(key))
    elif a != b:
        yield f"{name}: {str(b)[:300]}, before {str(a)[:300]}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the rows of two source trees.")
    parser.add_argument("--against", type=Path, help="a checkout from before")
    parser.add_argument("--write", type=Path, help="record this tree to a file")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks")
    given = parser.parse_args(arguments)
    if given.write is not None:
        found = take(given.only, {int(n) for n in given.ranks.split(",")})
        given.write.write_text(json.dumps(found))
        return 0
    if given.against is None or not (given.against / "src" / "onefold").is_dir():
        raise SystemExit(f"--against {given.against}: there is no source tree")
    before = written_by(given.against.resolve(), given.only, given.ranks)
    now = written_by(TREE, given.only, given.ranks)
    both = before.keys() & now.keys()
    wrong = [s for name in sorted(both) for s in differences(name, before[name], now[name])]
    wrong += [f"{name}: raised" for name in sorted(both) if "raised" in str(now[name])[:40]]
    for sentence in wrong[:SHOWN]:
        print(sentence)
    alone = len(before) + len(now) - 2 * len(both)
    print(f"{len(both)} rows compared, {len(wrong)} differences; {alone} rows of one tree only.")
    return 1 if wrong or not both else 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    finally:
        if "ranks" in sys.modules:
            sys.modules["ranks"].stop_fork_servers()
    sys.exit(status)
