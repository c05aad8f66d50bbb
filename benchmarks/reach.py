"""What trains on how much memory: `python -m benchmarks reach [--check]` writes docs/reach.md,
every cell an answer of `onefold plan`.

A cell is the fastest way that the plan finds to train a model of that size on one GPU with the host
and the disk beside it: nothing is measured for it. What was measured stands under the table, as
benchmarks/offload has left it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import harness, pages
from benchmarks.harness import ROOT
from onefold.plan.account import Candidate
from onefold.plan.hardware import Gpu, Host, Machine, builtin
from onefold.plan.job import Job
from onefold.plan.search import recommend
from onefold.plan.subject import question_of

PAGE, MEASURED = ROOT / "docs" / "reach.md", ROOT / "benchmarks" / "results" / "offload.json"
SEQ = 2048


@dataclass(frozen=True)
class Place:
    """One GPU by its memory, host memory and disk in GB, and the disk's GB/s."""

    memory: int
    gpu: str
    host: int
    disk: int
    rate: float

    @property
    def title(self) -> str:
        return f"{self.memory} GB · {self.host} GB host · {self.disk / 1000:g} TB disk"

    def machine(self) -> Machine:
        found: Gpu = builtin().gpu(self.gpu)
        own = {"name": f"{self.memory} GB", "capacity": self.memory * 10**9}
        link = found.host_link
        host = Host(
            name="default",
            memory=self.host * 1e9,
            memory_bandwidth=HOST_BANDWIDTH,
            link_bandwidth=link,
            nvme=self.disk * 1e9,
            nvme_bandwidth=self.rate * 1e9,
        )
        return Machine(found.model_copy(update=own), 1, 1, None, host)


#: Bytes/s that an update on the host moves, an assumption: two channels of DDR5, or what
#: ZeRO-Offload measured of a server.
HOST_BANDWIDTH = 50e9
#: Rates of the 8 GB device are those of the 16 GB one's generation, as no GPU of 8 GB is in the
#: table.
PLACES = (
    Place(8, "t4", 32, 1000, 3.0),
    Place(16, "t4", 64, 2000, 3.0),
    Place(24, "rtx4090", 128, 2000, 6.0),
    Place(80, "h100-80", 512, 8000, 12.0),
    Place(141, "h200", 1000, 16000, 12.0),
)
MODELS = (
    "gpt3-125m",
    "gpt3-1.3b",
    "llama-3.2-3b",
    "llama-3-8b",
    "llama-2-13b",
    "llama-3-70b",
    "gpt3-175b",
    "llama-3-405b",
)


def answered(model: str, place: Place) -> Candidate | None:
    """The plan's recommendation; with activations on the host where nothing else fits."""
    precision = "bf16" if "bf16" in builtin().gpu(place.gpu).rates else "fp16"
    for options in ({}, {"offload_activations": "cpu"}):
        job = Job.of({"seq": SEQ, "precision": precision, **options}, "the table")
        found = recommend(question_of(model, place.machine(), job))
        if found is not None:
            return replace(found, notes=tuple(options))
    return None


def cell(found: Candidate | None) -> str:
    """In a few words: what leaves the device, what is recomputed, seconds of a step."""
    if found is None:
        return "–"
    scheme = found.scheme
    share = f"{scheme.share:.2g} of " if scheme.share < 1 else ""
    where = share + _WHERE[scheme.offload]
    extra = [_MORE[name] for name in found.notes]
    if scheme.checkpointing != "none":
        extra.insert(0, {"full": "recompute", "selective": "some recompute"}[scheme.checkpointing])
    seconds = found.account.seconds["step"]
    took = f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}"
    return f"{', '.join([where, *extra])}; {took} s"


#: The cell that the large model of benchmarks/offload belongs to, by its size and memory.
MEASURED_AT = ("gpt3-1.3b", PLACES[0])
_WHERE = {
    "none": "device", "optimizer": "optimizer on host", "optimizer-nvme": "optimizer on disk", "parameters": "all on host",
    "parameters-nvme": "parameters on host, rest on disk", "nvme": "all on disk",
}  # fmt: skip
_MORE = {"offload_activations": "activations on host"}


def table(large: dict[str, Any]) -> str:
    """The Markdown table; the cell of `MEASURED_AT` is marked where the large model has run in it."""
    lines = [["model", *(p.title for p in PLACES)]]
    for name in MODELS:
        cells = {place: cell(answered(name, place)) for place in PLACES}
        if name == MEASURED_AT[0] and large["resident_bytes"] < 8 << 30:
            cells[MEASURED_AT[1]] += " ●"
        lines.append([name, *cells.values()])
    return pages.markdown(lines, left=len(lines[0])).rstrip()


def page() -> str:
    """The whole page."""
    large = json.loads(MEASURED.read_text(encoding="utf-8"))["large"]
    return f"""# What trains on how much memory

Written by `python -m benchmarks reach`: each cell is what `onefold plan` recommends for one sample of {SEQ:,} tokens on one GPU, with
AdamW, fp32 masters and moments, and the seconds that it predicts for a step. A step of many micro-batches moves states once: it hides
more. "–": it does not fit.

{table(large)}

Assumed: {"; ".join(f"{p.memory} GB: rates of {builtin().gpu(p.gpu).title}, a disk of {p.rate:g} GB/s" for p in PLACES)}. An update
on the host moves {HOST_BANDWIDTH / 1e9:g} GB/s; 640 MiB of each device are the process's own, and 10 % of what comes and goes is lost to
fragmentation. The T4 has no bf16: fp16 there. "optimizer" is masters, moments and gradients; "0.4 of" is the smallest share of the units
that has to leave.

**Measured.** No cell has been measured on a GPU: the table is a prediction. Bytes at rest and moved equal the
ledgers of real runs on CPU ranks.
● marks a size that has run in that much memory, but on a CPU: {large["parameters"] / 1e9:.2f}B parameters on {large["ranks"]} CPU ranks, \
everything on the disk: {large["resident_bytes"] / 2**30:.2f} GiB resident in both together, {large["disk_bytes"] / 1e9:.1f} GB on the \
disk, {large["step_s"]:.0f} s a step of {large["tokens"]} tokens a rank (`examples/larger_than_memory.py`).
"""


@harness.command(
    "reach",
    __doc__,
    results=False,
    check=(False, "write nothing; fail if the page is not what the code says"),
)
def main(options: harness.Options) -> int:
    return harness.write_page(PAGE, page(), options.check)
