"""The page docs/validation.md as text."""

from __future__ import annotations

from benchmarks.validation import (
    compute,
    fits,
    memory,
    memory_elsewhere,
    printed,
    runs,
)
from benchmarks.validation.claims import claims
from benchmarks.validation.systems import SYSTEMS
from benchmarks.validation.tables import Table, markdown, within
from onefold.plan.traffic import Software

_HEAD = """\
# The plan beside published figures

Written by `python -m benchmarks.validation` from the tables in `benchmarks/data`; do not edit. Ratios are predicted ÷ published, misses
included. The questions of `tests/benchmarks/data/planner_cases.csv` are a test of their own
(`tests/benchmarks/test_planner_cases.py`); most of them ask for one figure of a paper, which `benchmarks.validation.formulas` or,
for a published system, `benchmarks.validation.systems` answers: no whole plan.

Three kinds of table: **formula** (both sides compute; they must agree but for rounding and what the sources misprint), **memory** and
**time** (the published side was measured).
"""

#: What is not compared, and why.
_NOT_COMPARED: tuple[tuple[str, str], ...] = (
    (
        (
            "ZeRO Figs. 2 and 3, Tables 6 to 9 (`zero_table6_superlinear_configs`,"
            " `zero_tables7_8_9_configs`); times of Megatron-LM and MegaScale with TP and PP"
        ),
        "model parallelism, which is not modelled",
    ),
    (
        (
            "ZeRO Table 3 and Fig. 6 (`zero_table3_fig6_configs`); ZeRO-Infinity Figs. 5a, 5b"
            " (`infinity_fig5b_weak_scaling`, 64 to 512 GPUs) and 6b; 70B and 405B of torchtitan"
        ),
        "as above, or tiling",
    ),
    (
        (
            "ZeRO-Offload Fig. 11, ZeRO-3 Offload's blog (`zero3_offload_blog_scaling`,"
            " `zero3_offload_blog_throughput`)"
        ),
        "micro-batches are not published",
    ),
    (
        "FSDP Fig. 6a (`fsdp_fig6a_throughput_8gpu`)",
        "sequence lengths (611M, 2.28B) and the batch (11.3B on 8 GPUs) are not published",
    ),
    ("torchtitan with fp8, asyncTP or context parallelism", "not built"),
    (
        "torchtitan's absolute peaks",
        "selective recompute by operator: the tracer's subject, not the formulas'",
    ),
    (
        "176B on 384 V100 by bandwidth (`zero3_bandwidth_rule_384v100`)",
        (
            'ranges ("<20", "30-40", "40+" TFLOP/s a GPU at 100, 200 to 400 and 800 Gbit/s) without'
            " the tokens of a GPU, on which they depend as much; with ZeRO++'s constants {rates}"
        ),
    ),
    ("IDEFICS-80B's 49 s", "unknown micro-batch; compute and communication above add to 30 s"),
    (
        (
            "DGX-2 nodes (`infinity_fig2b_hardware`), hardware of the future"
            " (`infinity_table3_future_hw`)"
        ),
        "what the table of machines takes as input",
    ),
    ("accelerate's estimates (`accelerate_estimate`)", "multiples of a size"),
    (
        "adapters, Muon, 8-bit states (the other rows of `optimizer_and_peft_bytes`)",
        (
            "measured on runs whose set-up is not published, or multiples of sizes that the code"
            " takes as input"
        ),
    ),
    (
        "ZeRO++'s single figures (`zeropp_misc`)",
        "speed-ups of RLHF jobs; volumes of its all-to-all inside a node, which is not built",
    ),
    ("`claim_audit`, `planner_cases`", "the claims above; the test named above"),
)


def not_compared() -> str:
    at = {
        tokens: " / ".join(
            f"{runs.by_bandwidth(tokens, link):.0f}" for link in (100, 200, 400, 800)
        )
        for tokens in (1024, 2048)
    }
    rates = " and ".join(f"{rate} at {tokens:,} tokens" for tokens, rate in at.items())
    rows = [f"| {data} | {why.format(rates=rates)} |" for data, why in _NOT_COMPARED]
    return "\n".join(["## Not compared", "", "| data | why |", "|---|---|", *rows, ""])


#: Constants along the valley of the fit.
FLAT = ((0.78, 0.08), (0.77, 0.1), (0.76, 0.11))


def constants() -> str:
    """The fitted constants: in the code, and fitted again now."""
    lines = [
        "## What was fitted",
        "",
        "One constant a system, on the rows named; those rows are marked in the tables below.",
        "",
        "| system | constant | in the code | fitted again | rows |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {system.name} | {system.fitted} | {getattr(system.software, system.fitted):g} |"
        f" {fits.refit(name):g} | {system.fitted_on} |"
        for name, system in SYSTEMS.items()
    ]
    found, used = fits.shared(), fits.in_use()
    azure, all_runs = SYSTEMS["azure"], runs.azure()
    best = fits.misfit(fits.with_constant(azure, **found), all_runs) ** 0.5
    here = fits.misfit(fits.with_constant(azure, **used), all_runs) ** 0.5
    soft = Software()
    answers = [fits.answer_to_e46(kernel_share=k, overlap=o) for k, o in FLAT]
    lines += [
        "",
        "Shared by all: "
        + ", ".join(
            f"{name} = {used[name]:g} (best on a grid: {found[name]:g})"
            for name in ("kernel_share", "overlap", "hop_seconds")
        )
        + ", fitted together with the Azure report's link_share to its rows. Root mean square of"
        f" the ratio's logarithm: {here:.4f} in the code, {best:.4f} at the grid's best. The"
        " valley is flat: kernel_share and overlap of "
        + ", ".join(f"{k:g} and {o:g}" for k, o in FLAT)
        + " fit alike, and answer E46 (0.99 ± 0.07) with "
        + ", ".join(f"{answer:.3f}" for answer in answers)
        + ": that case is passed narrowly. The overlap is DeepSpeed's schedule of those years"
        " only.",
        "",
        (
            f"Assumed, not fitted: for an unknown cluster a link_share of {soft.link_share:g}, for"
            f" a schedule that prefetches an overlap of {soft.overlap:g}, a spread between ranks of"
            f" {soft.straggler:g}; for the largest model 0.8 of what the states allow."
        ),
        "",
    ]
    return "\n".join(lines)


def claimed() -> str:
    lines = [
        "## Claims often repeated, checked",
        "",
        (
            "The last column names the keys of the line's answer that show the figures (a table's"
            " values summed; GB are 10⁹ bytes). `states`"
        ),
        (
            "are all model states at once, as the papers count them; what the engine holds at rest"
            " and at peak stands beside them."
        ),
        "",
        "| claim | what the code says | line | where it shows it |",
        "|---|---|---|---|",
        *(
            f"| {c.claim} | {c.checked} | `{c.line}` | {', '.join(map(str, c.shows))} |"
            for c in claims()
        ),
        "",
    ]
    return "\n".join(lines)


def overview(made: list[Table]) -> str:
    lines = [
        "## Overview",
        "",
        "Without the rows that a constant was fitted to.",
        "",
        "| table | kind | figures | within 5 % | within 25 % |",
        "|---|---|---|---|---|",
    ]
    for table in made:
        free = [line for line in table.lines if not line.fitted]
        lines.append(
            f"| {table.title} | {table.kind} | {len(free)} | {within(free, 0.05)} |"
            f" {within(free, 0.25)} |"
        )
    for kind in ("formula", "memory", "time"):
        free = [
            line for table in made if table.kind == kind for line in table.lines if not line.fitted
        ]
        lines.append(
            f"| **all** | {kind} | {len(free)} | {within(free, 0.05)} | {within(free, 0.25)} |"
        )
    return "\n".join([*lines, ""])


def all_tables() -> list[Table]:
    makers = (
        *memory.MAKERS,
        *memory_elsewhere.MAKERS,
        *compute.MAKERS,
        *printed.MAKERS,
    )
    return [*(make() for make in makers), *runs.tables()]


def page() -> str:
    made = all_tables()
    return "\n".join(
        [
            _HEAD,
            overview(made),
            claimed(),
            constants(),
            "## Tables",
            "",
            *(markdown(t) for t in made),
            not_compared(),
        ]
    )
