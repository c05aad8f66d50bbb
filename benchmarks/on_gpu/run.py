"""Which sides can run here; one of them in fresh processes; what is asked of its losses."""

from __future__ import annotations

import argparse
import sys
from statistics import fmean
from typing import Any

from benchmarks.offload.settings import PLAIN, SIDES, Side
from benchmarks.peers import adapters, launch
from benchmarks.peers.settings import Setting
from onefold.doctor.chapters import relative

__all__ = ["STAGES", "available", "mean_losses", "relative", "run", "side_of"]

STAGES = ("onefold-0", "onefold-1", "onefold-2", "onefold-3")


def run(
    peer: str,
    setting: Setting,
    options: argparse.Namespace,
    python: str = sys.executable,
    **more: Any,
) -> dict[str, Any]:
    """One peer in fresh processes; the outcome of `launch.run_ranks` with what was asked for."""
    job = {"peer": peer, "setting": setting.to_json(), **more}
    outcome = launch.run_ranks(
        "benchmarks.on_gpu.worker",
        job,
        setting.ranks,
        threads=setting.threads,
        python=python,
        timeout=options.timeout,
    )
    print(
        f"# {peer} {setting.precision} {setting.ranks} ranks: {outcome['status']} in"
        f" {outcome['wall_s']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return {"peer": peer, "setting": setting.to_json(), **outcome}


def mean_losses(outcome: dict[str, Any]) -> list[float]:
    """Loss of each step, the mean over ranks."""
    return [
        fmean(step) for step in zip(*(rank["losses"] for rank in outcome["ranks"]), strict=True)
    ]


def side_of(name: str) -> Side:
    """A side of `benchmarks/offload`, or plain PyTorch."""
    return {**SIDES, **PLAIN}[name]


def available(names: tuple[str, ...], options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """(sides that can run here, those whose library is not installed)"""
    pythons = {"deepspeed": options.deepspeed_python, "onefold": sys.executable}
    there = {p: launch.interpreter_has(python, p) for p, python in pythons.items()}
    absent = [
        name for name in names if (package := adapters.requirement(name)) and not there[package]
    ]
    return [name for name in names if name not in absent], absent
