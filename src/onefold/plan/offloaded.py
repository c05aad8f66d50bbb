"""What a rank holds off its device, between steps and in a step.

                 host                                            a disk
    at rest      masters, moments, parameters: by their rows     the same, and gradients, which keep their place
    in a step    + gradients, from their reduction to the end    –
                 + chunks on their way to and from the disk

Tests compare it with the engine's ledgers: bytes at rest are exact, the host's in a step are a bound.
The tiers are ZeRO-Offload's (Ren et al. 2021, section 4.1) and ZeRO-Infinity's (Rajbhandari et al.
2021, 5.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from onefold.device.copies import HOST_COPIES, HOST_WINDOWS, WINDOW
from onefold.layout import ShardSpec, round_up
from onefold.memory import GRADIENTS, MASTERS, MOMENTS, PARAMETERS, STAGING
from onefold.offload.step import AHEAD, WAITING
from onefold.offload.transfers import BEHIND
from onefold.plan.program import Program
from onefold.plan.rank import filled, moments, states_on_disk
from onefold.recipe import Tier
from onefold.recipe.options import SECTOR
from onefold.recipe.rows import OFF_DEVICE

HOST = Tier.HOST.value
_CATEGORIES = {"master": MASTERS, "parameter": PARAMETERS, "gradient": GRADIENTS}


def offloaded_bytes(program: Program) -> dict[str, dict[str, int]]:
    """Return the bytes in a step, at most, by tier ("host", "nvme", ...) and category. Between steps the
    host holds the same without gradients and staging; if these are pinned, they are kept idle. Not
    counted: masters of the host that it has cast for the device, usually those of one or two units.
    """
    flats = [f for u in program.rank for f in u.flats if f.tiers is not None]
    held = {tier.value: Counter[str]() for tier in OFF_DEVICE}
    for flat in flats:
        for tier, kind, nbytes in flat.offloaded:
            held[tier.value][_CATEGORIES[kind]] += nbytes
        for tier, nbytes in moments(flat, program.optimizer).items():
            held[tier.value][MOMENTS] += nbytes * (program.owned is None)
    trained, host = [f for f in flats if f.trainable and f.own], held[HOST]
    host[GRADIENTS] = _gradients(program, trained, host[MOMENTS])
    host[STAGING] = _staging(program, flats, trained)
    host[MOMENTS] += program.owned.host_states if program.owned else 0
    return {tier: filled(by) for tier, by in held.items()}


# -- in a step -------------------------------------------------------------------------------------


def _gradients(program: Program, trained: Sequence[ShardSpec], made: int) -> int:
    """Return the host's bytes of gradients, at most. `made`: those of moments there, which the first
    step makes.
    """
    streams, on_disk = program.streams, program.recipe.gradients.tier.on_disk
    kept = sorted((f.own * f.dtypes.master.itemsize for f in trained), reverse=True)
    stay = 0 if on_disk else sum(kept)
    if program.steps_in_backward:
        # The first step runs after the backward pass, and moments take the place of gradients, unless
        # these are pinned
        stay = max(sum(kept[: WAITING + 1]), stay - (0 if streams else made))
    # Sums land beside the kept gradients if those are on a disk, or if the host casts or adds
    beside = [
        f.own * (f.dtypes.master if streams else f.landed).itemsize
        for f in trained
        if on_disk or (not streams and (program.again or f.landed != f.dtypes.master))
    ]
    return stay + max(beside, default=0)


def _staging(program: Program, flats: Sequence[ShardSpec], trained: Sequence[ShardSpec]) -> int:
    """Return the host's bytes of data on its way to and from disks, at most: those of a backward pass
    and of a step, since pinned buffers of one size do not make way for those of another.
    """
    parameters, gradients, optimizer = (row.tier for row in program.recipe.rows)
    if not (optimizer.on_disk and trained):
        return 0
    chunk = min(program.recipe.chunk, round_up(max(f.own for f in flats), SECTOR))
    # Chunks of masters, gradients and moments that are read, stepped and written
    many = sum(-(-f.own // chunk) for f in trained)
    stepped = [
        (1 + gradients.on_disk) * chunk * f.dtypes.master.itemsize
        + states_on_disk(f, chunk, program.optimizer)
        for f in trained
    ]
    # Gradients and compute copies, of which a chunk each waits for the disk
    waiting = [
        gradients.on_disk * f.dtypes.master.itemsize + f.lies_apart * f.dtypes.compute.itemsize
        for f in trained
    ]
    written = BEHIND * chunk * max(f.dtypes.master.itemsize for f in trained)
    out = min(many * max(stepped), (AHEAD + 1) * max(stepped) + written)
    out += (BEHIND + 1) * chunk * max(waiting)
    if parameters.on_disk:  # units that are read for gathers
        read = Counter(f.own * f.dtypes.compute.itemsize for f in flats)
        out += sum(nbytes * min(n, 2 + program.units_ahead) for nbytes, n in read.items())
    elif parameters is Tier.DEVICE and program.streams:
        # New masters are cast for the device: so many, if copies lag behind
        casts = Counter[int]()
        for f in trained:
            each = f.dtypes.compute.itemsize * (f.dtypes.compute != f.dtypes.master)
            casts.update(min(chunk, f.own - a) * each for a in range(0, f.own, chunk))
        limit = max(HOST_WINDOWS * WINDOW, HOST_COPIES * max(casts))
        out += sum(min(nbytes * n, limit + nbytes) for nbytes, n in casts.items())
    return out
