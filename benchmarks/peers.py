"""Onefold and its peers, measured alternately on one model, the same data and the same ranks.

    python -m benchmarks peers --quick            # one setting, two minutes or so
    python -m benchmarks peers --budget 60        # each respect varied by itself, as many rounds as an hour allows
    python -m benchmarks peers --full --resume    # every combination: hours, in as many sittings as it takes

A *setting* is what all peers share: model, tokens a rank, precision, ranks, micro-batches a step.
For each setting the peers run in turn, round after round (A B C A B C ...), every one in its own
fresh processes, so that a drift of the machine falls on all of them and no peer inherits another's
memory. With the defaults a round takes about 45 minutes on two cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from benchmarks import gpt, harness, training
from benchmarks.gpt import PRECISIONS, SHAPES, Setting, count_parameters
from benchmarks.harness import Row
from benchmarks.pages import Cell, Panel, shown
from benchmarks.trainers import build
from benchmarks.trainers import prepare as import_for

SIDES: tuple[str, ...] = (
    "ddp", "zero-optimizer", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3",
    "onefold-0", "onefold-1", "onefold-2", "onefold-3",
)  # fmt: skip
"""In the order of a round. A number is the ZeRO stage."""

NOTES: dict[str, str] = {
    "ddp": (
        "DistributedDataParallel, gradients as bucket views, no_sync between boundaries; "
        "bf16: fp32 weights under autocast, fp32 on the wire"
    ),
    "zero-optimizer": "DDP as above with ZeroRedundancyOptimizer(parameters_as_bucket_view=True)",
    "fsdp2": (
        "fully_shard of each block, then of the root; bf16: MixedPrecisionPolicy(param bf16, reduce"
        " fp32)"
    ),
    "deepspeed-N": (
        "DeepSpeed ZeRO stage N with its default buckets; "
        "bf16: bf16.enabled, gradients accumulated in fp32 (data_types), bf16 on the wire"
    ),
    "onefold-N": (
        "onefold.shard with Recipe.zero(N, precision), onefold.no_sync between boundaries; "
        "bf16: bf16 on the wire, summed in fp32"
    ),
}
SIZES: dict[str, int] = {"communication": 256, "compute": 2048}
"""Tokens a rank and micro-batch: 256 leave the wire the bottleneck of a 110M-parameter model, 2,048 the arithmetic."""
QUICK: dict[str, Any] = {
    "sizes": ["communication"], "precisions": ["fp32"], "ranks": [2], "accumulation": [1],
    "rounds": 1, "steps": 3, "warmup": 1,
}  # fmt: skip


def prepare(job: dict[str, Any]) -> None:
    import_for(job["side"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One side on this rank."""

    def made(setting: Setting) -> Any:
        return build(job["side"], setting, gpt.build(setting.model))

    return training.measured(job, Setting(**job["setting"]), made)


def settings(options: harness.Options) -> list[Setting]:
    """Every combination or, unless `--full`, those that differ from the first of each in at most one
    respect; cheap ones first. A step that is compute-bound or of several micro-batches is long and
    steady, so half of `warmup` and `steps` do for it.
    """
    if options.quick:
        vars(options).update(QUICK)
    harness.check_at_least(options, 1, "ranks", "accumulation", "steps", "rounds")
    harness.check_at_least(options, 0, "warmup")
    found = []
    asked = (options.sizes, options.ranks, options.precisions, options.accumulation)
    for combination in itertools.product(*asked):
        differ = sum(value != first for value, (first, *_) in zip(combination, asked, strict=True))
        if differ > 1 and not options.full:
            continue
        size, ranks, precision, micro = combination
        half = 2 if size == "compute" or micro > 1 else 1
        found.append(
            Setting(
                model=options.model,
                tokens=options.tokens or SIZES[size],
                precision=precision,
                ranks=ranks,
                accumulation=micro,
                warmup=max(min(options.warmup, 1), options.warmup // half),
                steps=max(min(options.steps, 2), options.steps // half),
                clip=options.clip,
                threads=options.threads,
            )
        )
    return found


class Peers(training.Steps):
    schema, module, known, notes = "onefold-peers/2", "benchmarks.peers", SIDES, NOTES
    reference = "ddp"
    legend = f"{training.LEGEND} X: 4 bytes a parameter times (N-1)/N, so an fp32 all-reduce is 2."

    def columns(self, setting: Setting) -> Mapping[str, Cell]:
        unit = 4 * count_parameters(setting.model) * (setting.ranks - 1) / setting.ranks
        of_x = {"sent / X": shown("sent_bytes", "{:.3f}", unit)} if unit else {}
        usual = (training.times("DDP"), training.MEMORY, training.WIRE, of_x, training.LOSS)
        return {name: cell for columns in usual for name, cell in columns.items()}

    def goals(self, judged: Any) -> list[Row]:
        """Of the first setting."""
        rows = {row["side"]: row for _, found in judged[:1] for row in found}
        ratio = {n: rows.get(f"onefold-{n}", {}).get("ratio") for n in (1, 2, 3)}
        peaks = [rows.get(side, {}).get("peak_mib") for side in ("onefold-3", "fsdp2")]
        share = peaks[0] / peaks[1] if all(peaks) else None
        return [
            *(
                harness.goal(f"stage {n}: at most {most} × DDP", ratio[n], most)
                for n, most in ((1, 1.05), (2, 1.05), (3, 1.25))
            ),
            harness.goal("stage 3: at most 0.7 of FSDP2's peak", share, 0.7),
        ]

    def charts(self, result: dict[str, Any]) -> list[list[Panel]]:
        """Step time and peak memory."""
        found = []
        for c in result["comparisons"]:
            good = [row for row in c["rows"] if row["status"] == "ok"]
            ratio = {row["side"]: row["ratio"] or 0.0 for row in good}
            peak = {row["side"]: row["peak_mib"] or 0.0 for row in good}
            title = Setting(**c["setting"]).title
            memory = Panel("peak memory of a rank, MiB", bars=peak, form="%.0f")
            found.append([Panel("step time, × DDP", title, ratio, levels=[1.0]), memory])
        return found


@harness.command(
    "peers",
    __doc__,
    rounds=3,
    steps=4,
    warmup=2,
    clip=0.0,
    timeout=900.0,
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; a family's name takes all of it"),
    full=(False, "every combination, hours; else those that differ from the first in one respect"),
    sizes=(list(SIZES), "what bounds a step", SIZES),
    precisions=(list(PRECISIONS), "what is computed in", PRECISIONS),
    ranks=([2, 4], "how many ranks"),
    accumulation=([1, 4], "micro-batches an optimizer step"),
    tokens=(None, "tokens a rank and micro-batch in place of the size's own", int),
    quick=(False, "communication-bound, fp32, 2 ranks, no accumulation, one round of 3 steps"),
    model=("gpt-110m", "which GPT", SHAPES),
    **harness.OPTIONS,
)
def main(options: harness.Options) -> int:
    return Peers(options, settings(options)).run()
