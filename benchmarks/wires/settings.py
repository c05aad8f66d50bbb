"""What is measured: links, sides, and what each side's recipe is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HOSTS = 2
RANKS_A_HOST = 2


@dataclass(frozen=True)
class Link:
    """`rate` in bits a second, each way; `delay_ms` milliseconds one way, beside what the rate takes."""

    rate: float
    delay_ms: float = 0.0

    @property
    def title(self) -> str:
        unit, size = next((u, s) for u, s in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0)) if self.rate >= s)
        return f"{self.rate / size:g} {unit}" + (f", {self.delay_ms:g} ms each way" if self.delay_ms else "")

    def to_json(self) -> dict[str, float]:
        """A plain dictionary that `Link(**d)` reads back."""
        return asdict(self)


def read_rate(text: str) -> float:
    """Bits a second of "100M", "2.5G" or "64k".

    Raises:
        ValueError: it is none of these, or below 1 Mbit/s.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)", text)
    if found is None:
        raise ValueError(f"--rates {text}: expected bits a second with k, M or G behind the number, such as 100M, 1G or 10G.")
    rate = float(found[1]) * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]]
    if rate < 1e6:
        raise ValueError(f"--rates {text}: expected at least 1M (one megabit a second), or a step would take hours.")
    return rate


@dataclass(frozen=True)
class Side:
    """One library at one setting.

    Attributes:
        family: "ddp", "fsdp2", "deepspeed" or "onefold".
        note: how it is set up.
        arguments: of `Recipe.zero` for Onefold, of `zero_optimization` for DeepSpeed; of FSDP2 "hybrid": shard inside a host,
            replicate across. None: not to be had yet, and refused by that name.
        between: what the closed form says that a host sends the other in a step, in 16-bit equivalents of Ψ elements where
            parameters and gradients travel in 16 bits, on two hosts of two ranks, with one micro-batch. None: no closed form of ours.
        encoded: the part of `between` that travels encoded, scales left out: as many bytes in any precision.
        again: the part of `between` that backward passes gather, were all units gathered for them: those at the turn of a pass are not.
        optional: a peer's part that not every machine has: that it cannot run here is a finding, and no failure of the command.
    """

    family: str
    note: str
    arguments: dict[str, Any] | None
    between: float | None = None
    optional: bool = False
    encoded: float = 0.0
    again: float = 0.0


_RELEASED = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""DeepSpeed keeps up to 1e9 parameters from the forward pass to the backward pass unless told: all of the model here, gathered once."""


def _zeropp(*keys: str) -> Side:
    """DeepSpeed's stage 3 with some keys of ZeRO++. It has the quantizer that two of them ask for on CUDA only."""
    values = {key: RANKS_A_HOST if key == "zero_hpz_partition_size" else True for key in keys}
    return Side("deepspeed", f"deepspeed-3-released with {', '.join(keys)}", _RELEASED | values, optional=True)


# [Note: bytes between hosts] Onefold's moves are pairwise: each rank sends each other rank one N-th of a unit. Of n ranks on each
# of H hosts a host sends n * (N - n) of those, n (H - 1) / H of a unit: all of it for 2 ranks on each of 2 hosts, 4 times that for
# 8 on each of 2. A ring (gloo's own, which DDP and FSDP2 use here) crosses each host's border once, and so sends (N - 1) / N of a
# unit whatever n is; gloo's reduce-scatter is an all-reduce, which counts twice.
SIDES: dict[str, Side] = {
    "ddp": Side("ddp", "DistributedDataParallel as in benchmarks.peers", {}),
    "fsdp2": Side("fsdp2", "fully_shard of each block and the root over all ranks", {"hybrid": False}),
    "fsdp2-hsdp": Side("fsdp2", "fully_shard on a mesh of hosts x ranks: sharded inside a host, replicated across", {"hybrid": True}),
    "deepspeed-3": Side("deepspeed", "ZeRO stage 3 with its default buckets", {"stage": 3}),
    "deepspeed-3-released": Side(
        "deepspeed", "ZeRO stage 3 that keeps no parameter from forward to backward, as with a large model", _RELEASED
    ),
    "deepspeed-hpz": _zeropp("zero_hpz_partition_size"),
    "deepspeed-qwz": _zeropp("zero_quantized_weights"),
    "deepspeed-qgz": _zeropp("zero_quantized_gradients"),
    "deepspeed-zeropp": _zeropp("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"),
    "onefold-1": Side("onefold", "Recipe.zero(1, group='flat')", {"stage": 1, "group": "flat"}, between=2.0),
    "onefold-2": Side("onefold", "Recipe.zero(2, group='flat')", {"stage": 2, "group": "flat"}, between=2.0),
    "onefold-3": Side("onefold", "Recipe.zero(3, group='flat'): every rank to every other", {"stage": 3, "group": "flat"}, 3.0, again=1.0),
    # In groups: each byte enters a host once, half of what pairwise moves of two ranks send. `between` has (H - 1) / H = 1/2 in it.
    "onefold-3-groups": Side("onefold", "Recipe.zero(3), as it is by itself: inside a host, then across", {"stage": 3}, 1.5, again=0.5),
    "zeropp-qwz": Side("onefold", "stage 3, gathers encoded in int8", {"stage": 3, "gather_codec": "int8"}, 1.0, encoded=0.5, again=0.25),
    "zeropp-hpz": Side("onefold", "stage 3, a second copy sharded inside the host", {"stage": 3, "second_copy": True}, 1.0),
    "zeropp-qgz": Side(
        "onefold", "stage 3, gradients encoded in int4, in two hops", {"stage": 3, "reduce_codec": "int4"}, 1.125, encoded=0.125,
        again=0.5,
    ),
    "zeropp": Side(
        "onefold",
        "stage 3 with all three",
        {"stage": 3, "gather_codec": "int8", "second_copy": True, "reduce_codec": "int4"},
        0.375,
        encoded=0.375,
    ),
    "hsdp": Side("onefold", "sharded inside a host, replicated across", {"stage": 3, "shard_group": "node"}, 1.0),
    "mics": Side("onefold", "each rank a group of its own, replicated across", {"stage": 3, "shard_group": 1}, 2.0),
    "hybrid-optimizer": Side(
        "onefold",
        "optimizer states over all ranks, parameters and gradients inside a host",
        {"stage": 3, "shard_group": "node", "optimizer_over": "all"},
        1.0,
    ),
}
"""Every side, in the order of a round."""

REFERENCE = "onefold-3"
"""The side that speed-ups and loss differences refer to."""


def available() -> list[str]:
    """Sides that have a recipe, in the order of a round."""
    return [name for name, side in SIDES.items() if side.arguments is not None]


def chosen(names: Sequence[str]) -> list[str]:
    """Sides in the order of a round; a family's name stands for all of it that is available.

    Raises:
        ValueError: a name that is unknown, or one that has no recipe yet.
    """
    families = {side.family for side in SIDES.values()}
    found: set[str] = set()
    for name in names:
        if name in SIDES:
            if SIDES[name].arguments is None:
                raise ValueError(
                    f"--sides {name}: it has no recipe yet (benchmarks/wires/settings.py); choose from {', '.join(available())}."
                )
            found.add(name)
        elif name in families:
            found |= {other for other in available() if SIDES[other].family == name}
        else:
            raise ValueError(f"--sides {name}: expected some of {', '.join(available())}, or a family such as onefold.")
    return [name for name in SIDES if name in found]
