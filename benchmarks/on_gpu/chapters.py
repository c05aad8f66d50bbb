"""The chapters check, numbers, overlap and groups, and those of the first hour."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks import harness, launch
from benchmarks.harness import ROOT, losses, relative
from benchmarks.on_gpu.run import STAGES, run
from benchmarks.pages import DASH, Table
from benchmarks.peers.settings import Setting
from benchmarks.wires.sides import HOSTS, RANKS_A_HOST, SIDES
from onefold.doctor.chapter_runs import CHAPTERS, LIMIT, Scope
from onefold.doctor.chapters import CHAPTER

__all__ = ["CHAPTERS"]

Chapter = tuple[Table, list[dict[str, Any]]]


def of_the_first_hour(name: str, options: harness.Options, left: float) -> Chapter:
    """One of `CHAPTERS` of `onefold doctor --check`, within `left` seconds: an outcome a run."""
    cuda = options.device == "cuda"
    scope = Scope(
        device=options.device,
        gpus=torch.cuda.device_count() if cuda else 2,
        gpu=torch.cuda.get_device_name() if cuda else "",
        capacity=torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        tiny=options.tiny,
        steps=max(2, options.steps // 2),
        deadline=time.monotonic() + left,
        limit=min(options.timeout, LIMIT),
        say=harness.say,
    )
    found = CHAPTER[name](scope)
    outcomes = [{"peer": run.name, **run.to_json(), "wall_s": run.seconds} for run in found.runs]
    return Table(found.title, found.columns, found.rows), outcomes


def check(options: harness.Options) -> Chapter:
    """`onefold doctor --check` without the chapters that are ours; its JSON is kept too."""
    table = Table("onefold doctor --check --quick", ("check", "found", "seconds", "said"))
    options.output.mkdir(parents=True, exist_ok=True)
    file, asked = options.output / "gpu-check.json", ["doctor", "--check", "--quick"]
    command = [sys.executable, "-m", "onefold", *asked]
    command += ["--device", options.device, "--json", str(file)]
    how: dict[str, Any] = {"cwd": ROOT, "env": launch.environment(options.threads)}
    how |= {"capture_output": True, "text": True, "timeout": options.timeout, "check": False}
    try:
        done = subprocess.run(command, **how)
    except subprocess.TimeoutExpired:
        error = f"not finished after {options.timeout:.0f} s"
        return table, [{"peer": "check", "status": "timeout", "error": error}]
    if done.returncode not in (0, 1) or not file.exists():
        error = (done.stderr or done.stdout)[-600:]
        return table, [{"peer": "check", "status": "failed", "error": error}]
    report = json.loads(file.read_text())
    for c in report["checks"]:
        table.add(c["name"], c["status"], f"{c['seconds']:.1f}", c["said"])
    wrong = [f"{c['name']}: {c['said']}" for c in report["checks"] if c["status"] == "wrong"]
    outcome = {"peer": "check", "status": "failed" if wrong else "ok", "error": "\n".join(wrong)}
    return table, [{**outcome, "report": report}]


def same_numbers(options: harness.Options) -> Chapter:
    """The reference is one process that takes the ranks' parts one after another."""
    columns = ("peer", "precision", "ranks", "backend", "last loss", "× one process's")
    table = Table("Several ranks, one GPU: losses", (*columns, "largest difference"))
    outcomes = []
    for precision in options.precisions:
        for ranks in options.ranks:
            many = Setting(
                model="gpt-tiny", tokens=256, precision=precision, ranks=ranks, warmup=0, steps=6,
                device=options.device,
            )  # fmt: skip
            reference = run("plain", replace(many, ranks=1), options, whole_batch_of=ranks)
            outcomes.append(reference)
            for peer in ("ddp", *STAGES):
                outcome = run(peer, many, options)
                outcomes.append(outcome)
                row = (peer, precision, str(ranks))
                if outcome["status"] != "ok" or reference["status"] != "ok":
                    table.add(*row, DASH, outcome["status"])
                    continue
                own, expected = losses(outcome["ranks"]), losses(reference["ranks"])
                far = f"{relative(own, expected):.1e}"
                multiple = f"{own[-1] / expected[-1]:.6f}"
                table.add(*row, outcome["ranks"][0]["backend"], f"{own[-1]:.6f}", multiple, far)
    return table, outcomes


def hidden(options: harness.Options) -> Chapter:
    """Profiled steps of rank 0."""
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    columns = ("peer", "ranks", "backend", "comm + copies ms", "of it hidden", "compute ms")
    table = Table("Overlap in two profiled steps of rank 0", (*columns, "idle ms"))
    outcomes = []
    setting = Setting(
        model=options.model, tokens=options.tokens, precision="bf16", ranks=max(2, gpus), warmup=3,
        steps=2, device=options.device,
    )  # fmt: skip
    for peer in ("fsdp2", *STAGES):
        trace = options.output.resolve() / f"gpu-trace-{peer}.json.gz"
        outcome = run(peer, setting, options, trace=str(trace))
        outcomes.append(outcome)
        if outcome["status"] != "ok":
            table.add(peer, str(setting.ranks), DASH, outcome["status"])
            continue
        rank = outcome["ranks"][0]
        seen = rank["trace"]
        share = f"{seen['both_s'] / seen['comm_s']:.0%}" if seen["comm_s"] else DASH
        times = [f"{1000 * seen[name]:.1f}" for name in ("comm_s", "compute_s", "idle_s")]
        table.add(peer, str(setting.ranks), rank["backend"], times[0], share, *times[1:])
    return table, outcomes


# -- groups and codecs -----------------------------------------------------------------------------

REFERENCE = "onefold-3-groups"
RECIPES = (
    REFERENCE,
    "zeropp-hpz",
    "zeropp-qwz",
    "zeropp-qgz",
    "zeropp",
    "hsdp",
    "hybrid-optimizer",
)
TWICE = (REFERENCE, "zeropp", "hsdp")
"""Recipes that run a second time, with `overlap=False`."""
STEPS = 6


def groups(options: harness.Options) -> Chapter:
    """Groups and codecs on one GPU: four ranks over gloo share it and pretend to be two nodes.

    Asked of each recipe: that it trains as plain stage 3 does (to the bit where nothing is encoded
    and the groups are the same), that streams and prefetching change no bit of it, and that its
    bytes between nodes are the formula's. A row a recipe and precision.
    """
    ranks = HOSTS * RANKS_A_HOST
    columns = ("recipe", "precision", "last loss", "to groups of stage 3", "overlap off")
    title = f"Groups and codecs: {ranks} ranks in {HOSTS} pretended nodes, one GPU"
    table = Table(title, (*columns, "between, 2Ψ a node", "formula"))
    outcomes = []
    for precision in options.precisions:
        setting = Setting(
            model="gpt-tiny", tokens=128, precision=precision, ranks=ranks, warmup=0, steps=STEPS,
            device=options.device,
        )  # fmt: skip
        expected: list[float] = []
        for name in RECIPES:
            found = run(name, setting, options, ranks_a_node=RANKS_A_HOST)
            outcomes.append(found)
            if found["status"] != "ok":
                table.add(name, precision, found["status"])
                continue
            own, same = losses(found["ranks"]), DASH
            expected = own if name == REFERENCE else expected
            if name in TWICE:
                changes = {"overlap": False}
                apart = run(name, setting, options, ranks_a_node=RANKS_A_HOST, changes=changes)
                outcomes.append(apart)
                same = apart["status"]
                if same == "ok":
                    theirs = losses(apart["ranks"])
                    same = "the same bits" if theirs == own else "DIFFERS"
                if same == "DIFFERS":
                    error = f"{precision}: with overlap=False the losses are {theirs}"
                    apart |= {"status": "differs", "error": error}
            far = f"{relative(own, expected):.1e}" if expected else DASH
            told = _bytes(name, setting, found)
            table.add(name, precision, f"{own[-1]:.6f}", far, same, *told)
    return table, outcomes


def _bytes(name: str, setting: Setting, found: dict[str, Any]) -> tuple[str, str]:
    """What a node sends the other in a step, in bytes of 16-bit Ψ, and by the formula."""
    side = SIDES[name]
    sent = sum(rank["between_bytes"] for rank in found["ranks"][:RANKS_A_HOST]) / STEPS
    wide = 2 if setting.precision == "fp32" else 1
    said = DASH
    if side.between is not None:
        said = f"{(side.between - side.encoded) * wide + side.encoded:.3f}"
    return f"{sent / (2 * found['ranks'][0]['numel']):.3f}", said
