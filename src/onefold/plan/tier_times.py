"""Seconds of tiers: the host link, the disks, the update on the host.

    forward     │██████████████│              parameters up, or read              hide behind the forward passes
    backward    │████████████████████████│    the same again, gradients down       hide behind the backward passes
    step                                 │▒▒▒ read ▒ update ▒ written ▒ up ▒│     the slower of update and moves; with
                                                                                  step_in_backward behind the backward passes

Link and disk work at the same time; what each of them carries in one phase it carries one after the
other. Behind a phase hides as much as communication has left of it (`onefold.plan.times`). Where
the device is a CPU a copy is made by who computes: it hides behind nothing, and gradients need
none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onefold.plan.hardware import Machine
from onefold.plan.offloaded import Carried
from onefold.plan.work import Work


@dataclass(frozen=True)
class TierTimes:
    """Seconds of a step: `io` waits for link and disks, `update` is the host's that nothing hides;
    `parts` by `schema.TIER_SECONDS`.
    """

    io: float
    update: float
    parts: Mapping[str, float]


def tier_times(work: Work, machine: Machine, room: Mapping[str, float]) -> TierTimes:
    """`room`: seconds of the "forward" and "backward" passes that communication leaves to hide
    behind.
    """
    left, parts = dict(room), defaultdict[str, float](float)
    io = 0.0
    for phase in ("forward", "backward"):
        beside, alone = _beside(work.carried, phase, machine, parts)
        io += alone + _hide(beside, phase, left, parts)
    link, disk = (
        work.host_bytes / machine.host_link(),
        work.nvme_bytes / (machine.host.nvme_bandwidth / machine.local),
    )
    parts["link"], parts["disk"] = parts["link"] + link, parts["disk"] + disk
    anywhere = max(link, disk)
    for phase in ("forward", "backward"):
        anywhere = _hide(anywhere, phase, left, parts)
    io += anywhere
    update = update_seconds(work, machine)
    beside, alone = _beside(work.carried, "step", machine, parts)
    parts["host update"] = update
    parts["hidden behind the update"] = min(beside, update)
    waits = max(update, beside) + alone
    if work.behind:
        waits = _hide(waits, "backward", left, parts)
    waiting = min(update, waits)
    return TierTimes(io + waits - waiting, waiting, {k: v for k, v in parts.items() if v})


def update_seconds(work: Work, machine: Machine) -> float:
    """Of the update on the host; on a CPU as it was measured there."""
    if machine.shared and machine.measured is not None and work.host_optimizer_numel:
        return machine.measured.optimizer_seconds(round(work.host_optimizer_numel), machine.ranks)
    return work.host_optimizer_bytes / (machine.host.memory_bandwidth / machine.local)


def _beside(
    carried: Iterable[Carried], phase: str, machine: Machine, parts: dict[str, float]
) -> tuple[float, float]:
    """(seconds that something else can hide, seconds that nothing can) of what one phase
    carries.
    """
    nbytes = defaultdict[str, float](float)
    for c in carried:
        nbytes[c.move] += c.nbytes if c.phase == phase else 0.0
    local, host = machine.local, machine.host
    disk = nbytes["read"] / (host.nvme_bandwidth / local) + nbytes["written"] / (
        (host.nvme_write or host.nvme_bandwidth) / local
    )
    read = nbytes["read"] if phase != "step" else 0  # parameters, which go on to the device
    link = (nbytes["up"] + nbytes["down"] + read) / machine.host_link()
    if machine.shared:
        link = 2 * nbytes["up"] / machine.gpu.memory_bandwidth
    parts["link"], parts["disk"] = parts["link"] + link, parts["disk"] + disk
    return (disk, link) if machine.shared else (max(link, disk), 0.0)


def _hide(seconds: float, phase: str, left: dict[str, float], parts: dict[str, float]) -> float:
    """What is left of `seconds` when a phase's room is used up."""
    hidden = min(seconds, left[phase])
    left[phase] -= hidden
    parts[f"hidden behind {phase}"] += hidden
    return seconds - hidden
