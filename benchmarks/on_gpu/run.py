"""Which sides can run here, and one of them in fresh processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness, launch
from benchmarks.offload.sides import PLAIN, SIDES, Side
from benchmarks.peers.settings import Setting

STAGES = ("onefold-0", "onefold-1", "onefold-2", "onefold-3")


def run(
    peer: str,
    setting: Setting,
    options: harness.Options,
    module: str = "benchmarks.worker",
    **more: Any,
) -> dict[str, Any]:
    """One peer in fresh processes; the outcome of `launch.run_ranks` with what was asked for."""
    job = {"observed": True, **more}
    outcome = launch.run_side(peer, setting, options, job, module=module)
    seconds = f"{outcome['status']} in {outcome['wall_s']:.0f} s"
    harness.say(f"{peer} {setting.model} {setting.precision} {setting.ranks} ranks: {seconds}")
    return {"peer": peer, "setting": asdict(setting), "error": "", **outcome}


@contextmanager
def state(options: harness.Options) -> Iterator[dict[str, Any]]:
    """What a job says of state off the device: a folder on the disk that lasts as long as this."""
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.disk) as place:
        yield {"disk": str(Path(place).resolve()), "own_adam": options.deepspeed_adam}


def side_of(name: str) -> Side:
    """A side of `benchmarks/offload`, or plain PyTorch."""
    return {**SIDES, **PLAIN}[name]


def available(names: Sequence[str], options: harness.Options) -> tuple[list[str], list[str]]:
    """(sides that can run here, those whose library is not installed)"""
    absent = launch.absent(names, options)
    return [n for n in names if n not in absent], [n for n in names if n in absent]
