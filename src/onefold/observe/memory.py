"""Memory by tier, as the ledgers count it and as the operating system does.

tier     the engine's ledger      where the optimizer's states are counted
device   engine.memory            `optimizer.state` of parameters that are stored on the device
host     engine.transfers.host    `optimizer.state` of parameters that are stepped on the host
a disk   engine.transfers.disk    in this ledger, by the engine; `optimizer.state` has only meta tensors
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from onefold.plan.schema import CATEGORIES, MOMENTS
from onefold.recipe.rows import Tier
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function

DEVICE, HOST, NVME = (tier.value for tier in Tier)


@dataclass
class Held:
    """The memory of one tier. `held`: bytes by category at the beginning. `changes`: every
    (seconds, category, unit, bytes gained or lost), in order.
    """

    held: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[float, str, str, int]] = field(default_factory=list)

    def levels(
        self, start: float = 0.0, only: Container[str] | None = None
    ) -> Iterator[tuple[float, dict[str, int]]]:
        """Yield (seconds, bytes by category) at `start` and after every change."""
        now = Counter(
            {category: n for category, n in self.held.items() if only is None or category in only}
        )
        yield start, dict(now)
        for at, category, _, delta in self.changes:
            if only is None or category in only:
                now[category] += delta
                yield at, dict(now)

    def peak(self, only: Container[str] | None = None) -> dict[str, int]:
        """Return the bytes by category at the moment when their sum was largest."""
        _, most = max(self.levels(only=only), key=lambda level: sum(level[1].values()))
        return ordered(most)


def ordered(bytes_by_category: dict[str, int]) -> dict[str, int]:
    """Order the categories as in the schema, then any others. Leaves out empty ones."""
    names = dict.fromkeys((*CATEGORIES, *bytes_by_category))
    return {name: n for name in names if (n := bytes_by_category.get(name, 0))}


def resident_memory() -> tuple[int, int]:
    """Return (resident bytes now, at peak) of this process."""
    text = Path("/proc/self/status").read_text()
    now, peak = (int(n) for n in re.findall(r"^Vm(?:RSS|HWM):\s+(\d+) kB", text, re.M)[::-1])
    return now * 1024, peak * 1024


def held_by_tier(engine: Engine, moments: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the bytes by tier, then by category: of the ledgers, and those that `moments_by_tier` found."""
    found = {tier.value: ledger.now() for tier, ledger in engine.transfers.ledgers.items()}
    for tier, nbytes in moments.items():
        found[tier][MOMENTS] = nbytes
    return {tier: ordered(held) for tier, held in found.items()}


def moments_by_tier(optimizer: torch.optim.Optimizer, engine: Engine) -> dict[str, int]:
    """Return the bytes of the optimizer's state on the device and on the host, without zeros. Each
    storage counts once.
    """
    offloaded = {id(e.param) for e in engine.entries if e.flat.storage.offloaded}
    storages: dict[int, tuple[str, int]] = {}
    with disable_torch_function():
        for param, state in optimizer.state.items():
            tier = HOST if id(param) in offloaded else DEVICE
            for t in tree_leaves(state):
                if isinstance(t, torch.Tensor) and not t.is_meta:
                    storage = t.untyped_storage()
                    storages[storage._cdata] = tier, storage.nbytes()
    out = Counter[str]()
    for tier, nbytes in storages.values():
        out[tier] += nbytes
    return {tier: nbytes for tier, nbytes in out.items() if nbytes}
