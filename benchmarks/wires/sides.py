"""What is measured: links, and sides: what each recipe is made of, and how it is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.harness import Refused, chosen
from benchmarks.peers import adapters
from benchmarks.peers.settings import Setting

HOSTS = 2
RANKS_A_HOST = 2


@dataclass(frozen=True)
class Link:
    """`rate` in bits a second, each way; `delay_ms` one way, beside what the rate takes."""

    rate: float
    delay_ms: float = 0.0

    @property
    def title(self) -> str:
        units = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
        unit, size = next((u, s) for u, s in units if self.rate >= s)
        delay = f", {self.delay_ms:g} ms each way" if self.delay_ms else ""
        return f"{self.rate / size:g} {unit}{delay}"


def read_rate(text: str) -> float:
    """Bits a second of "100M", "2.5G" or "64k". Refuses anything else, and less than 1 Mbit/s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)", text)
    if found is None:
        raise Refused(
            f"--rates {text}: expected bits a second with k, M or G behind the number, such as"
            " 100M, 1G or 10G."
        )
    rate = float(found[1]) * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]]
    if rate < 1e6:
        raise Refused(
            f"--rates {text}: expected at least 1M (one megabit a second), or a step would take"
            " hours."
        )
    return rate


@dataclass(frozen=True)
class Side:
    """One library at one setting.

    Attributes:
        family: "ddp", "fsdp2", "deepspeed" or "onefold".
        note: how it is set up.
        arguments: of `Recipe.zero` for Onefold, of `zero_optimization` for DeepSpeed; of FSDP2
            "hybrid": shard inside a host, replicate across.
        between: what the closed form says that a host sends the other in a step, in 16-bit
            equivalents of Ψ elements where parameters and gradients travel in 16 bits, on two hosts
            of two ranks, with one micro-batch. None: no closed form of ours.
        encoded: the part of `between` that travels encoded, scales left out: as many bytes in any
            precision.
        again: the part of `between` that backward passes gather, were all units gathered for them:
            those at the turn of a pass are not.
        optional: a peer's part that not every machine has: that it cannot run here is a finding,
            and no failure of the command.
    """

    family: str
    note: str
    arguments: dict[str, Any]
    between: float | None = None
    optional: bool = False
    encoded: float = 0.0
    again: float = 0.0


_RELEASED = {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
"""DeepSpeed keeps up to 1e9 parameters from the forward pass to the backward pass unless told: all of the model here, gathered once."""


def _zeropp(*keys: str) -> Side:
    """DeepSpeed's stage 3 with keys of ZeRO++. Two of them need its quantizer, for CUDA only."""
    values = {key: RANKS_A_HOST if key == "zero_hpz_partition_size" else True for key in keys}
    note = f"deepspeed-3-released with {', '.join(keys)}"
    return Side("deepspeed", note, _RELEASED | values, optional=True)


def _ours(
    note: str, between: float, encoded: float = 0.0, again: float = 0.0, **arguments: Any
) -> Side:
    return Side("onefold", note, {"stage": 3, **arguments}, between, encoded=encoded, again=again)


# [Note: bytes between hosts] Onefold's moves are pairwise: each rank sends each other rank one N-th
# of a unit. Of n ranks on each of H hosts a host sends n * (N - n) of those, n (H - 1) / H of a
# unit: all of it for 2 ranks on each of 2 hosts, 4 times that for 8 on each of 2. A ring (gloo's
# own, which DDP and FSDP2 use here) crosses each host's border once, and so sends (N - 1) / N of a
# unit whatever n is; gloo's reduce-scatter is an all-reduce, which counts twice. In groups each
# byte enters a host once, half of what pairwise moves of two ranks send: `between` has
# (H - 1) / H = 1/2 in it.
SIDES: dict[str, Side] = {
    "ddp": Side("ddp", "DistributedDataParallel as in benchmarks.peers", {}),
    "fsdp2": Side("fsdp2", "fully_shard of each block and the root over all ranks", {}),
    "fsdp2-hsdp": Side(
        "fsdp2",
        "fully_shard on a mesh of hosts x ranks: sharded inside a host, replicated across",
        {"hybrid": True},
    ),
    "deepspeed-3": Side("deepspeed", "ZeRO stage 3 with its default buckets", {"stage": 3}),
    "deepspeed-3-released": Side(
        "deepspeed",
        "ZeRO stage 3 that keeps no parameter from forward to backward, as with a large model",
        _RELEASED,
    ),
    "deepspeed-hpz": _zeropp("zero_hpz_partition_size"),
    "deepspeed-qwz": _zeropp("zero_quantized_weights"),
    "deepspeed-qgz": _zeropp("zero_quantized_gradients"),
    "deepspeed-zeropp": _zeropp(
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"
    ),
    "onefold-1": _ours("Recipe.zero(1, group='flat')", 2.0, stage=1, group="flat"),
    "onefold-2": _ours("Recipe.zero(2, group='flat')", 2.0, stage=2, group="flat"),
    "onefold-3": _ours(
        "Recipe.zero(3, group='flat'): every rank to every other", 3.0, again=1.0, group="flat"
    ),
    "onefold-3-groups": _ours(
        "Recipe.zero(3), as it is by itself: inside a host, then across", 1.5, again=0.5
    ),
    "zeropp-qwz": _ours(
        "stage 3, gathers encoded in int8", 1.0, encoded=0.5, again=0.25, gather_codec="int8"
    ),
    "zeropp-hpz": _ours("stage 3, a second copy sharded inside the host", 1.0, second_copy=True),
    "zeropp-qgz": _ours(
        "stage 3, gradients encoded in int4, in two hops",
        1.125,
        encoded=0.125,
        again=0.5,
        reduce_codec="int4",
    ),
    "zeropp": _ours(
        "stage 3 with all three",
        0.375,
        encoded=0.375,
        gather_codec="int8",
        second_copy=True,
        reduce_codec="int4",
    ),
    "hsdp": _ours("sharded inside a host, replicated across", 1.0, shard_group="node"),
    "mics": _ours("each rank a group of its own, replicated across", 2.0, shard_group=1),
    "hybrid-optimizer": _ours(
        "optimizer states over all ranks, parameters and gradients inside a host",
        1.0,
        shard_group="node",
        optimizer_over="all",
    ),
}
"""Every side, in the order of a round."""

REFERENCE = "onefold-3"
"""The side that speed-ups and loss differences refer to."""


def chosen_sides(names: Sequence[str]) -> list[str]:
    """Sides in the order of a round; a family's name stands for all of it."""
    families: dict[str, list[str]] = {}
    for name, side in SIDES.items():
        families.setdefault(side.family, []).append(name)
    found = [s for n in names for s in ([n] if n in SIDES else families.get(n, [n]))]
    return chosen(found, list(SIDES))


def build(name: str, setting: Setting, model: nn.Module, ranks_a_host: int, **changes: Any) -> Any:
    """The side around whole fp32 weights on every rank; `changes` replace some of its arguments."""
    side = SIDES[name]
    arguments = side.arguments | changes
    if side.family == "onefold":
        return adapters.Onefold(setting, model, **arguments)
    if side.family == "deepspeed":
        return adapters.DeepSpeed(setting, model, **arguments)
    if side.family == "fsdp2":
        hosts = setting.ranks // ranks_a_host
        return adapters.FSDP2(setting, model, (hosts, ranks_a_host) if arguments else ())
    return adapters.build(name, setting, model)
