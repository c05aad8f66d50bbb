"""The chapters check, numbers and overlap."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import Table
from benchmarks.on_gpu.run import STAGES, mean_losses, relative, run
from benchmarks.peers import launch
from benchmarks.peers.settings import Setting


def check(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """`onefold doctor --check` on all GPUs, without the chapters that this run measures itself; its
    JSON stays beside ours.
    """
    table = Table("onefold doctor --check --quick", ("check", "found", "seconds", "said"))
    file = options.output / "gpu-check.json"
    command = [
        sys.executable,
        "-m",
        "onefold",
        "doctor",
        "--check",
        "--quick",
        "--device",
        options.device,
        "--json",
        str(file),
    ]
    try:
        done = subprocess.run(
            command, cwd=launch.ROOT, env=launch.environment(options.threads), capture_output=True, text=True, timeout=options.timeout,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return table, [
            {
                "peer": "check",
                "status": "timeout",
                "error": f"not finished after {options.timeout:.0f} s",
            }
        ]
    if done.returncode not in (0, 1) or not file.exists():
        return table, [
            {"peer": "check", "status": "failed", "error": (done.stderr or done.stdout)[-600:]}
        ]
    report = json.loads(file.read_text())
    table.rows = [
        [c["name"], c["status"], f"{c['seconds']:.1f}", c["said"]] for c in report["checks"]
    ]
    wrong = [f"{c['name']}: {c['said']}" for c in report["checks"] if c["status"] == "wrong"]
    return table, [
        {
            "peer": "check",
            "status": "failed" if wrong else "ok",
            "error": "\n".join(wrong),
            "report": report,
        }
    ]


def same_numbers(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """The reference is one process that takes the ranks' parts one after another."""
    table = Table(
        "Several ranks, one GPU: losses",
        (
            "peer",
            "precision",
            "ranks",
            "backend",
            "last loss",
            "× one process's",
            "largest difference",
        ),
    )
    outcomes = []
    for precision in options.precisions:
        for ranks in options.ranks:
            many = Setting(
                model="gpt-tiny",
                tokens=256,
                precision=precision,
                ranks=ranks,
                warmup=0,
                steps=6,
                threads=1,
                device=options.device,
            )
            one = replace(many, ranks=1)
            reference = run("plain", one, options, whole_batch_of=ranks)
            outcomes.append(reference)
            for peer in ("ddp", *STAGES):
                outcome = run(peer, many, options)
                outcomes.append(outcome)
                row = [peer, precision, str(ranks)]
                if outcome["status"] != "ok" or reference["status"] != "ok":
                    table.rows.append([*row, "–", outcome["status"], "–", "–"])
                    continue
                losses, expected = mean_losses(outcome), mean_losses(reference)
                backend = outcome["ranks"][0]["backend"]
                table.rows.append(
                    [
                        *row,
                        backend,
                        f"{losses[-1]:.6f}",
                        f"{losses[-1] / expected[-1]:.6f}",
                        f"{relative(losses, expected):.1e}",
                    ]
                )
    return table, outcomes


def hidden(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """Profiled steps of rank 0."""
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    columns = (
        "peer",
        "ranks",
        "backend",
        "comm + copies ms",
        "of it hidden",
        "compute ms",
        "idle ms",
    )
    table = Table("Overlap in two profiled steps of rank 0", columns)
    outcomes = []
    for peer in ("fsdp2", *STAGES):
        setting = Setting(
            model=options.model,
            tokens=options.tokens,
            precision="bf16",
            ranks=max(2, gpus),
            warmup=3,
            steps=2,
            device=options.device,
        )
        trace = options.output.resolve() / f"gpu-trace-{peer}.json.gz"
        outcome = run(peer, setting, options, trace=str(trace))
        outcomes.append(outcome)
        if outcome["status"] != "ok":
            table.rows.append([peer, str(setting.ranks), "–", outcome["status"], "–", "–", "–"])
            continue
        rank = outcome["ranks"][0]
        seen = rank["trace"]
        share = f"{seen['both_s'] / seen['comm_s']:.0%}" if seen["comm_s"] else "–"
        times = [f"{1000 * seen[name]:.1f}" for name in ("comm_s", "compute_s", "idle_s")]
        table.rows.append([peer, str(setting.ranks), rank["backend"], times[0], share, *times[1:]])
    return table, outcomes
