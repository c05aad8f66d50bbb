"""State on the host and on NVMe: Onefold beside FSDP2's and DeepSpeed's offload, on one model, the
same data and the same ranks.

    python -m benchmarks.offload --disk FOLDER --deepspeed-python PYTHON    # three rounds at two batch sizes, an hour or so
    python -m benchmarks.offload --quick                                    # one round of 256 tokens, some minutes
    python -m benchmarks.offload --only-large --disk FOLDER                 # 1.3 billion parameters in a few GiB, states on disk
    python benchmarks/gpu.py --only offload largest                         # the same questions on one CUDA GPU

A *side* is a library with its state in a certain place. All sides take turns, round after round,
each in fresh processes, so that a drift of the machine falls on all of them. On CPU ranks device
and host are the same memory: what is measured is what moving state costs in software, what the
engine holds on which tier, and what the disk gives. Beside every timed step of a side that uses the
disk a third process copies as much sequentially with O_DIRECT while the ranks wait: what the disk
gives just then.

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "disk": {"file_system": str, "copy_mib": int, "chunk_mib": int},
    "models": {name: {"parameters": int}}, "notes": {side: how it is set up},
    "comparisons": [{
      "setting": {...},                                 # benchmarks.peers.settings.Setting, field by field
      "rows": [{...}], "pairs": [{...}],                # rows.rows and rows.pairs
      "runs": [{"side", "round", "status", "error", "wall_s", "ranks": [{       # the raw measurements, one a side and round
        "rank", "losses", "step_s": [s], "optimizer_s": [s], "cpu_s", "build_s",
        "baseline_mib", "set_up_peak_mib", "peak_mib", "peak_is_of_timed_steps", "rest_mib",
        "held": {tier: {"rest"|"peak": {category: bytes}}}, "moved": {move: bytes, "waited_s"}, "planned": {...},   # null: no ledgers
        "step_disk", "optimizer_disk": [{"read", "written": bytes, "busy_s"}],      # of a timed step, and of the optimizer's part of it
        "copies": [{"copy", "two": bytes/s}],           # rank 0's, around the timed steps
        "file_cache_bytes", "page_cache_growth"}]}]
    }],
    "large": {...} | null, "smollm2": {...} | null,     # large.measure, large.measure_smollm2
    "goals": [{"goal", "figure", "met": bool | null}]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness, launch, probes
from benchmarks.offload import large, report, rows
from benchmarks.offload.sides import NOTES, SIDES, those
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import SIZES, Setting
from benchmarks.study import OPTIONS, Comparison, Study


def settings_of(options: harness.Options) -> list[Setting]:
    """The settings that the command line asks for."""
    if options.quick:
        options.tokens, options.precisions = options.tokens[:1], options.precisions[:1]
        options.rounds, options.steps = 1, 2
    harness.check_at_least(
        options, 1, "tokens", "ranks", "accumulation", "steps", "rounds", "warmup"
    )
    names = {tokens: size for size, tokens in SIZES.items()}
    alike = ("model", "ranks", "accumulation", "warmup", "steps", "clip", "threads")
    shared = {name: getattr(options, name) for name in alike}
    return [
        Setting(tokens=n, size=names.get(n, "larger batch"), precision=precision, **shared)
        for precision in options.precisions
        for n in options.tokens
    ]


class Offload(Study):
    """Every side, and the models too large for their memory.

    Args:
        run_ranks: starts the ranks of a turn.
    """

    schema = "onefold-offload/1"

    def __init__(self, options: harness.Options, run_ranks: Callable[..., dict[str, Any]]) -> None:
        sides = harness.chosen(options.sides, list(SIDES))
        super().__init__(options, settings_of(options), sides)
        self.run_ranks = run_ranks
        self.large, self.smollm2 = self.old.get("large"), self.old.get("smollm2")
        self.disk = Path()

    def read(self, setting: dict[str, Any]) -> Setting:
        return Setting(**setting)

    def those(self, setting: Setting) -> list[str]:
        return those(self.sides, setting)

    def measure(self) -> None:
        """All turns; state on the disk goes to a folder that lasts as long as this."""
        o = self.options
        only_large = o.only_large or o.only_smollm2
        self.disk = Path(tempfile.mkdtemp(prefix="offload-", dir=o.disk)).resolve()
        try:
            if not only_large:
                super().measure()
            if o.large or only_large:
                self.measure_large()
        finally:
            shutil.rmtree(self.disk, ignore_errors=True)

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        o = self.options
        with tempfile.TemporaryDirectory(dir=self.disk) as place:
            job = {"copy_mib": o.copy_mib, "chunk_mib": o.chunk_mib, "own_adam": o.deepspeed_adam}
            job["disk"] = place if SIDES[side].on_disk else None
            return launch.run_side(side, setting, o, job, run=self.run_ranks)

    def measure_large(self) -> None:
        """The models too large for their memory."""
        o = self.options
        shared = {"steps": o.large_steps, "tokens": 256, "threads": o.threads}
        if not o.only_smollm2:
            size, patience = ("--size", o.large_size), max(o.timeout, 3600.0)
            self.large = large.measure(
                self.disk, options=size, ranks=o.ranks, timeout=patience, **shared
            )
        self.smollm2 = large.measure_smollm2(self.disk, timeout=o.timeout, **shared)

    def found(self, comparison: Comparison) -> dict[str, Any]:
        c = comparison
        return {"rows": rows.rows(c.setting, c.runs, c.missing), "pairs": rows.pairs(c.runs)}

    def document(self) -> dict[str, Any]:
        o = self.options
        judged = [(c.setting, self.found(c)["rows"]) for c in self.comparisons if c.runs]
        return {
            "disk": {
                "file_system": probes.file_system(o.disk),
                "copy_mib": o.copy_mib,
                "chunk_mib": o.chunk_mib,
            },
            "models": {o.model: {"parameters": count_parameters(o.model)}},
            "notes": NOTES,
            "large": self.large,
            "smollm2": self.smollm2,
            "goals": rows.goals(judged, self.large, self.smollm2),
        }

    def page(self, result: dict[str, Any]) -> str:
        return report.to_markdown(result)

    @property
    def failed(self) -> bool:
        there = [found["status"] for found in (self.large, self.smollm2) if found is not None]
        return super().failed or any(s not in ("ok", "not installed") for s in there)


@harness.command(
    "offload",
    __doc__,
    rounds=3,
    steps=3,
    warmup=2,
    accumulation=1,
    clip=0.0,
    timeout=900.0,
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; the beginning of names takes all of them"),
    tokens=([256, 1024], "tokens a rank and micro-batch"),
    precisions=(["fp32"], "what is computed in", ["fp32", "bf16"]),
    ranks=(2, "how many ranks"),
    disk=(Path.cwd(), "a folder on the disk to be measured; what is written there is removed"),
    copy_mib=(64, "of each of the four files of the plain copy; 0: no copy"),
    chunk_mib=(8, "what the plain copy reads and writes at a time"),
    quick=(False, "256 tokens, fp32, one round of two steps"),
    large=(False, "a model too large for its memory, and SmolLM2 on one process: 15 minutes more"),
    only_large=(False, "nothing but that"),
    only_smollm2=(False, "nothing but SmolLM2 on one process: some 3 minutes"),
    large_size=("1.3b", "a size that examples/larger_than_memory.py knows"),
    large_steps=(5, "steps of these two"),
    deepspeed_adam=(False, "DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler"),
    model=("gpt-110m", "which GPT", SHAPES),
    **OPTIONS,
)
def main(
    options: harness.Options, run_ranks: Callable[..., dict[str, Any]] = launch.run_ranks
) -> int:
    """With the defaults a round takes about 25 minutes on two cores."""
    return Offload(options, run_ranks).run()


if __name__ == "__main__":
    sys.exit(main())
