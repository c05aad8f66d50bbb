"""What leaves the device when states are kept elsewhere: counted by the plan; the runtime has no other tier yet.

    offload      masters, moments, gradients    the parameters' copy to compute with       on the way
    optimizer    host                           device                                     –
    parameters   host                           host                                       two units gathered
    nvme         NVMe, gradients on the host    NVMe                                       a sixteenth on the host, two units gathered

Masters and gradients on the host follow ZeRO-Offload (Ren et al. 2021, section 4.1), NVMe ZeRO-Infinity (Rajbhandari et al. 2021, 5.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onefold.memory import GATHERED, GRADIENTS, MASTERS, PARAMETERS
from onefold.plan.job import Scheme
from onefold.plan.schema import MOMENTS
from onefold.plan.states import FlatPlan, UnitPlan, moments

#: Of what lies on NVMe, the part that the host holds while it is on its way.
ON_ITS_WAY = 1 / 16


@dataclass(frozen=True)
class Moved:
    """Bytes of one rank: `gone` from the device at all times, `added` to it, and where they lie now."""

    gone: Mapping[str, int]
    added: Mapping[str, int]
    host: int
    nvme: int

    def apply(self, held: Mapping[str, int]) -> dict[str, int]:
        """What the device holds of what it held: gradients leave as they appear."""
        out = {k: v - self.gone.get(k, 0) for k, v in held.items() if k != GRADIENTS}
        for category, nbytes in self.added.items():
            out[category] = max(out.get(category, 0), nbytes) if category == GATHERED else out.get(category, 0) + nbytes
        return {k: v for k, v in out.items() if v > 0}


def moved(scheme: Scheme, units: Iterable[UnitPlan], optimizer: str) -> Moved:
    """What `scheme.offload` moves, for any scheme that offloads."""
    units = list(units)
    flats = [f for u in units for f in u.flats]
    away = scheme.offload in ("parameters", "nvme")
    trained = [f for f in flats if f.trainable]
    masters = sum(_masters(f) for f in trained)
    states = sum(moments(f, optimizer) for f in trained)
    gradients = sum(_owned(f) * f.dtypes.sums.itemsize for f in trained)
    copies = sum(_copy(f) for f in flats) if away else 0
    gone, added = {MASTERS: sum(_masters(f) for f in trained if not f.shared and not f.passive), MOMENTS: states}, {}
    if away:
        gone[MASTERS] += sum(_owned(f) * f.dtypes.compute.itemsize for f in flats if not f.trainable and not f.kept)
        gone[PARAMETERS] = sum(_resident(f) for f in flats if f.kept)
        largest = max((sum(f.numel * f.dtypes.compute.itemsize for f in u.flats) for u in units), default=0)
        added[GATHERED] = 2 * largest
    else:
        added[PARAMETERS] = sum(_owned(f) * f.dtypes.compute.itemsize for f in trained if not f.kept)
    whole = masters + states + copies
    if scheme.offload == "nvme":
        return Moved(gone, added, gradients + int(whole * ON_ITS_WAY), whole)
    return Moved(gone, added, whole + gradients, 0)


def _owned(flat: FlatPlan) -> int:
    return flat.owned[1] - flat.owned[0]


def _masters(flat: FlatPlan) -> int:
    return _owned(flat) * flat.dtypes.master.itemsize


def _copy(flat: FlatPlan) -> int:
    """Bytes of this rank's part of what is computed with; none of its own where the host's masters are in that dtype."""
    if flat.trainable and flat.dtypes.compute == flat.dtypes.master and not flat.kept:
        return 0
    return _owned(flat) * flat.dtypes.compute.itemsize


def _resident(flat: FlatPlan) -> int:
    numel = flat.layout.content if flat.passive else flat.numel
    return numel * flat.dtypes.compute.itemsize
