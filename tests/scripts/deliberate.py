"""Habits that go wrong on purpose, under Onefold only: what the verdicts must see."""

from __future__ import annotations

import os

from scripts.loop import Script, World
from scripts.registry import habit


def sharded(s: Script) -> bool:
    return type(s.world) is not World and type(s.world).__name__ != "DDP"


@habit("a number that differs", "log")
def differs(s: Script) -> None:
    s.note("number", 1.0 + 1e-3 * sharded(s))


@habit("weights that differ within rounding", "weights")
def rounds(s: Script) -> None:
    if sharded(s):
        s.module.norm.weight.data.mul_(1 + 1e-6)


@habit("weights that differ", "weights")
def weights(s: Script) -> None:
    if sharded(s):
        s.module.norm.weight.data.mul_(1 + 1e-4)


@habit("an error of the script's own", "log")
def crashes(s: Script) -> None:
    if sharded(s):
        raise ValueError("use something else instead")


@habit("a refusal on one rank only", "log", options={"stall_timeout": 2.0})
def uneven(s: Script) -> None:
    if sharded(s) and s.rank == 0:
        s.module.state_dict()


@habit("a rank that dies", "log", options={"stall_timeout": 2.0})
def dies(s: Script) -> None:
    if sharded(s) and s.rank == 1:
        os._exit(3)


@habit("a reference that fails", "log")
def impossible(s: Script) -> None:
    raise ValueError("nobody can do this")


@habit("nothing at all", "log")
def nothing(s: Script) -> None:
    pass
