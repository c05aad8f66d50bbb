"""What a process takes of a GPU beside its tensors: the driver's context, and NCCL's buffers.

| part                    | bytes                                 | source                                                        |
|-------------------------|---------------------------------------|---------------------------------------------------------------|
| context                 | 640 MiB                               | an assumption: CUDA's context, loaded kernels, libraries      |
| each communicator       | 512 MiB                               | an assumption: rings of 16 to 32 channels, by NCCL's buffers  |
| sends to a peer in the  | 14 MiB × channels to that peer, which | NCCL's issue 1685: on eight H100 the first all-to-all took    |
| node (all-to-all)       | are 2 × its NVLinks, up to 32; 2      | 3.28 GB, in buffers of 10 MiB and twice 2 MiB on 32 channels; |
|                         | without NVLink                        | 7 × 32 × 14 MiB are 3.29 GB                                   |
| sends to other nodes    | 512 MiB, however many peers           | NCCL's issues 1450 and 2363: one shared buffer                |

Ordered sums and codecs send to every peer; native sums (reduce="native") do not. The engine makes
its communicators as `onefold.comm.communicators.communicators_of` counts them. The script's own process
group is not counted: it takes a communicator more once the script uses it on the device.
The chapter `communicators` of benchmarks/gpu.py measures all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.comm.communicators import communicators_of
from onefold.layout import Level
from onefold.plan.degrees import Degrees
from onefold.plan.hardware import Machine
from onefold.plan.program import members
from onefold.plan.rank import UnitPlan
from onefold.recipe.rows import NATIVE
from onefold.wording import readable

CONTEXT, COMMUNICATOR, CHANNEL, NETWORK = 640 << 20, 512 << 20, 14 << 20, 512 << 20
#: Bytes/s of one NVLink in one direction, from the second generation on.
NVLINK = 25e9
#: The most channels to one peer, and those without NVLink.
MOST_CHANNELS, FEWEST_CHANNELS = 32, 2


@dataclass(frozen=True)
class Reserve:
    """Bytes of one GPU that hold no tensor.

    Attributes:
        context: of the driver.
        communicators: how many communicators the engine makes.
        exchanges: bytes of NCCL's buffers for messages to single peers.
    """

    context: int = 0
    communicators: int = 0
    exchanges: int = 0

    @property
    def nbytes(self) -> int:
        return self.context + self.communicators * COMMUNICATOR + self.exchanges

    def __str__(self) -> str:
        said = f"{readable(self.context)} for the driver"
        if self.communicators:
            said += (
                f", {readable(self.communicators * COMMUNICATOR)} for {self.communicators}"
                " communicators"
            )
        if self.exchanges:
            said += (
                f", {readable(self.exchanges)} for all-to-alls (NCCL_MAX_P2P_NCHANNELS limits"
                " their channels)"
            )
        return said


def channels_to_a_peer(link: float) -> int:
    """Return NCCL's channels between two GPUs of a node, joined by `link` bytes/s in one
    direction: a power of 2.
    """
    wanted = 2 * int(link // NVLINK) if link > NVLINK else FEWEST_CHANNELS
    return min(MOST_CHANNELS, 1 << max(0, wanted - 1).bit_length())


def reserve_of(units: Sequence[UnitPlan], machine: Machine, degrees: Degrees) -> Reserve:
    """Return what is reserved on each GPU of `machine`: buffers for the largest group that holds
    parameters, communicators of all groups, and one for each other axis.
    """
    if machine.ranks == 1:
        return Reserve(CONTEXT)
    groups = {flat.held: flat for u in units for flat in u.flats}
    exchanges, largest = 0, groups[max(groups, key=len)]
    topology = largest.topology
    levels: tuple[Level, ...] = ("intra-group", "inter-group") if topology.two_levels else ("all",)
    for level in levels if largest.recipe.reduce != NATIVE else ():
        over = members(topology, range(topology.size), 0, level)
        far = sum(rank >= machine.local for rank in over)
        exchanges += (len(over) - 1 - far) * channels_to_a_peer(machine.gpu.link) * CHANNEL
        exchanges += NETWORK if far else 0
    communicators = sum(n > 1 for n in (degrees.tp, degrees.pp, degrees.cp, degrees.ep))
    communicators += sum(communicators_of(flat.topology) for flat in groups.values())
    return Reserve(CONTEXT, communicators, exchanges)
