"""The choice of the stage where state rests off the device: what the plan says of the device, less what leaves it.

    plan of each stage, everything on the device          onefold.plan
      - masters, moments, gradients, parameters that rest elsewhere          `Away`, by the recipe's rows
      = what the device holds        host, NVMe: what rests there, and the buffers it passes through

On a CPU the host's memory is the device's: what goes there still takes of what is free. Tiles and activations on the host are not counted:
a run takes less than is said then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from onefold.memory import GATHERED, GRADIENTS, MASTERS, MOMENTS, PARAMETERS
from onefold.memory.host import free_host_memory
from onefold.optim.offloaded import AHEAD, BEHIND
from onefold.plan.schema import Account
from onefold.plan.shapes import ModelShape
from onefold.plan.states import FlatPlan, UnitPlan, moments, resting, units_of
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import bytes_an_element
from onefold.runtime.tiers import Tiers

#: What an optimizer's step on NVMe has in memory of one chunk: masters, gradients and Adam's two moments.
_KINDS = 4
_OPTIMIZER = "adamw"


@dataclass(frozen=True)
class Away:
    """Bytes of one rank, Adam's moments counted in.

    Attributes:
        device: how what rests on the device changes, by category.
        gathered: bytes of units gathered at a time that would need no gathering with everything on the device.
        gradients: the share of all gradients that stays on the device.
        host, nvme: what rests there; on the host also the buffers that states on NVMe are stepped in.
    """

    device: Mapping[str, int]
    gathered: int
    gradients: float
    host: int
    nvme: int

    @property
    def saved(self) -> int:
        """Bytes that are free on the device at any time, and would not be with everything there; below 0 if it takes more."""
        return -sum(self.device.values()) - self.gathered

    def at_rest(self, held: Mapping[str, int]) -> dict[str, int]:
        """What rests on the device of what would rest there."""
        out = {k: held.get(k, 0) + self.device.get(k, 0) for k in (*held, *self.device)}
        if GRADIENTS in out:
            out[GRADIENTS] = int(out[GRADIENTS] * self.gradients)
        return {k: v for k, v in out.items() if v > 0}

    def at_peak(self, held: Mapping[str, int]) -> dict[str, int]:
        """What the device holds in a step of what it would hold."""
        out = self.at_rest(held)
        return out | ({GATHERED: out.get(GATHERED, 0) + self.gathered} if self.gathered else {})

    def account(self, whole: Account) -> Account:
        """The account of the run, of that with everything on the device."""
        return replace(
            whole,
            rest=self.at_rest(whole.rest),
            peak=self.at_peak(whole.peak),
            ledger=self.at_peak(whole.ledger),
            bound=max(0, whole.bound - self.saved),
            host=self.host,
            nvme=self.nvme,
        )


def away_of(model: ModelShape, recipe: Recipe, on_device: Recipe, ranks: int) -> Away:
    """What leaves the device with `recipe`, which is `on_device` but for its tiers."""
    units = units_of(model, on_device, ranks)
    device: dict[str, int] = {}
    host = nvme = leaving = total = largest = 0
    chosen = _leaving(units, recipe)
    for index, unit in enumerate(units):
        gathered = 0
        for flat in unit.flats:
            total += _gradient(flat)
            tiers = Tiers.of(flat.trainable, recipe) if index in chosen else None
            if tiers is None:
                continue
            leaving += _gradient(flat)
            gathered += flat.numel * flat.dtypes.compute.itemsize if flat.kept and tiers.parameters is not Tier.DEVICE else 0
            for category, nbytes in _change(flat, tiers).items():
                device[category] = device.get(category, 0) + nbytes
            for tier, nbytes in _elsewhere(flat, tiers):
                host, nvme = (host + nbytes, nvme) if tier is Tier.HOST else (host, nvme + nbytes)
        largest = max(largest, gathered)
    if recipe.optimizer.tier is Tier.NVME and leaving:
        host += _in_steps(units, recipe)
    ahead = 2 + (recipe.prefetch if recipe.overlap else 0)
    return Away({k: v for k, v in device.items() if v}, ahead * largest, 1 - leaving / total if total else 1.0, host, nvme)


def _in_steps(units: list[UnitPlan], recipe: Recipe) -> int:
    """Bytes of host memory in which states on NVMe are stepped: chunks that are read, stepped and written."""
    largest = max(_owned(f) for u in units for f in u.flats if f.trainable)
    return min(recipe.chunk, largest) * recipe.optimizer.dtype.itemsize * _KINDS * (AHEAD + BEHIND + 2)


def _leaving(units: list[UnitPlan], recipe: Recipe) -> set[int]:
    """The units that `runtime.tiers.leaving` takes: all of them, or the last ones up to the share or the budget."""
    sizes = [sum(f.layout.content for f in unit.flats if f.trainable) for unit in units]
    if recipe.offload_bytes is None and recipe.offload_share >= 1:
        return set(range(len(units)))
    each = 4 + bytes_an_element(recipe.moments) + recipe.gradients.dtype.itemsize
    first = next((flat for unit in units for flat in unit.flats), None)  # a unit may have no parameters of its own
    divided = first.ranks if first is not None and recipe.optimizer.placement.value == "sharded" else 1
    budget = sum(sizes) * recipe.offload_share
    if recipe.offload_bytes is not None:
        budget = min(budget, recipe.offload_bytes * divided / each)
    chosen, taken = set(), 0
    for index in reversed(range(len(units))):
        if taken >= budget or (recipe.offload_bytes is not None and taken + sizes[index] > budget):
            continue
        chosen.add(index)
        taken += sizes[index]
    return chosen


def _change(flat: FlatPlan, tiers: Tiers) -> dict[str, int]:
    """How the device's bytes of one flat buffer that leaves change, by category."""
    before = resting(flat)
    stays = tiers.parameters is Tier.DEVICE
    whole = flat.numel if flat.kept else _owned(flat)
    after = {PARAMETERS: whole * flat.dtypes.compute.itemsize} if stays else {}
    change = {c: after.get(c, 0) - before.get(c, 0) for c in (PARAMETERS, MASTERS)}
    return change | {MOMENTS: -moments(flat, _OPTIMIZER)}


def _elsewhere(flat: FlatPlan, tiers: Tiers) -> Iterator[tuple[Tier, int]]:
    """(tier, bytes) of what one flat buffer has off the device."""
    d, owned = flat.dtypes, _owned(flat)
    yield tiers.optimizer, owned * d.master.itemsize + moments(flat, _OPTIMIZER)
    if flat.trainable:
        yield tiers.gradients, owned * d.sums.itemsize
    same = d.compute == d.master and tiers.parameters is tiers.optimizer
    if tiers.parameters is not Tier.DEVICE and not same:
        yield tiers.parameters, owned * d.compute.itemsize


def _owned(flat: FlatPlan) -> int:
    return flat.owned[1] - flat.owned[0]


def _gradient(flat: FlatPlan) -> int:
    return _owned(flat) * flat.dtypes.sums.itemsize if flat.trainable else 0


def host_has_room(away: Away, local_ranks: int) -> bool:
    """Whether this machine's memory has room for what its ranks put there; beside a GPU, whose memory is another."""
    return away.host * local_ranks <= free_host_memory()
