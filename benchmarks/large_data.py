"""How much memory the size of the data takes: `python -m benchmarks.large_data [--megabytes 10 4096]`.

For each size a file of text lines is written, and `onefold train` trains a tiny model on it with two
ranks, tokens of bytes and short sequences: of all tokenizers the most tokens, and the most samples.
Memory is each process's own (RssAnon of Linux), read every 20 ms; pages of mapped files are the
system's, which takes them back. The two processes with the highest peaks are the ranks; the first
rank tokenizes. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from benchmarks import harness, launch
from benchmarks.probes import family, own_bytes

SCHEMA = "onefold-large-data/1"
MB, MIB = 10**6, 1 << 20
RANKS, EVERY = 2, 0.02


def write_text(path: Path, nbytes: int) -> None:
    """Numbered lines out of Python's reference text."""
    lines = " ".join(topics[key] for key in sorted(topics)).splitlines()
    number = written = 0
    with path.open("w", encoding="utf-8", buffering=MIB) as file:
        while written < nbytes:
            text = "".join(f"{number + at} {line}\n" for at, line in enumerate(lines))
            written += file.write(text)
            number += len(lines)


def measure(folder: Path, megabytes: int, options: Any) -> dict[str, Any]:
    """The peaks of a run on so much text. Raises RuntimeError if it does not end well."""
    text, output = folder / "text.txt", folder / "run"
    write_text(text, megabytes * MB)
    asked = {
        "model": "llama:tiny", "tokenizer": "bytes", "data": text, "output": output, "seq": options.seq,
        "steps": options.steps, "eval-every": options.steps, "nproc": RANKS, "device": "cpu",
        "sample-tokens": 0,
    }  # fmt: skip
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "onefold", "train", *words, "--json"]
    begun = time.perf_counter()
    peaks: dict[int, int] = {}
    with (folder / "said.txt").open("w+") as said:
        child = subprocess.Popen(
            command, env=launch.environment(1), cwd=folder, stdout=said, stderr=subprocess.STDOUT
        )
        while child.poll() is None:
            for process in family(child.pid):
                peaks[process] = max(peaks.get(process, 0), own_bytes(process))
            time.sleep(EVERY)
        said.seek(0)
        if child.returncode:
            raise RuntimeError(f"{megabytes} MB of text ended with {said.read()[-3000:]}")
        events = [json.loads(line) for line in said if line.startswith("{")]
    plan = next(event for event in events if event["event"] == "plan")
    losses = [row["loss"] for row in events if row["event"] == "step"]
    cached = sum(file.stat().st_size for file in output.glob("tokens/*/*"))
    shutil.rmtree(output)
    text.unlink()
    return {
        "megabytes": megabytes,
        "samples": plan["samples"],
        "cache_bytes": cached,
        "seconds": time.perf_counter() - begun,
        "losses": losses,
        "peak_bytes": sorted(peaks.values(), reverse=True)[:RANKS],
    }


@harness.command(
    "large_data",
    __doc__,
    steps=4,
    megabytes=([10, 100, 4096], "sizes of the text"),
    seq=(128, "tokens a sample"),
    folder=(None, "where the text and its tokens lie meanwhile", Path),
)
def main(options: harness.Options) -> int:
    harness.check_at_least(options, 1, "megabytes", "steps")
    runs = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            runs.append(measure(Path(folder), megabytes, options))
        print(line_of(runs[-1]), flush=True)
    harness.keep(options, SCHEMA, steps=options.steps, seq=options.seq, runs=runs)
    return 0


def line_of(run: dict[str, Any]) -> str:
    peaks = " and ".join(f"{nbytes / MIB:,.0f} MiB" for nbytes in run["peak_bytes"])
    told = f"{run['megabytes']} MB: {run['samples']:,} samples, {run['seconds']:.0f} s"
    return f"{told}, ranks with {peaks} of their own at peak"


if __name__ == "__main__":
    raise SystemExit(main())
