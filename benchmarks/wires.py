"""Two hosts with a slow link between them, on one machine: what crosses the link in a step, and how
long the step takes.

    python -m benchmarks wires                                  # 100 Mbit/s, 1 Gbit/s and 10 Gbit/s, every side
    python -m benchmarks wires --rates 1G --sides onefold-3 fsdp2 --rounds 1

A *host* is a network and a process namespace of its own (`hosts.py`); two are joined by a pair of
virtual Ethernet devices whose sending queues the kernel holds to the rate (`tc`). A turn (one side, one
link) has fresh hosts of two ranks each, and they go with it, however it ends. Needs root (or
`unshare --map-root-user`), iproute2 and util-linux; where that is not to be had the command says
what is missing. Bytes come from four places that know nothing of each other:

| where     | what it counts                                                       | headers                        |
|-----------|----------------------------------------------------------------------|--------------------------------|
| interface | what the host gave its end of the link                               | one a packet, before it is cut |
| queue     | the same as the rate is charged for it                               | one a frame                    |
| sockets   | payload of a rank's connections, by where the other end is           | none                           |
| ledger    | what Onefold says that a rank sent, by the ranks of the move's group | none, nor gloo's               |

All count from the beginning: differences are taken, while the ranks stand still, so that no byte is on
its way. The JSON has "skipped" too: why there can be no hosts here.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks import gpt, harness, hosts, launch, probes, trainers, training
from benchmarks.gpt import SHAPES, count_at_the_turn, count_parameters
from benchmarks.harness import ROOT, Refused, Row, Run
from benchmarks.hosts import HOSTS
from benchmarks.pages import DASH, Cell, range_of, shown

RANKS_A_HOST = 2


@dataclass(frozen=True)
class Setting(gpt.Setting):
    """`rate`: of the link, bits a second each way."""

    ranks: int = HOSTS * RANKS_A_HOST
    rate: float = 1e9

    @property
    def title(self) -> str:
        return f"{hosts.said(self.rate)}: {super().title}"


def read_rate(text: str) -> float:
    """Bits a second of "100M" or "2.5G". Refuses anything else, and less than 1 Mbit/s."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MG])", text)
    rate = float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]] if found else 0.0
    if rate < 1e6:
        raise Refused(
            f"--rates {text}: expected bits a second with M or G behind the number, at least 1M, such"
            " as 100M, 1G or 10G."
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


def build(name: str, setting: gpt.Setting, model: nn.Module, **changes: Any) -> Any:
    """The side around whole fp32 weights on every rank; `changes` replace some of its arguments."""
    side = SIDES[name]
    arguments = side.arguments | changes
    if side.family == "onefold":
        return trainers.Onefold(setting, model, **arguments)
    if side.family == "deepspeed":
        return trainers.DeepSpeed(setting, model, **arguments)
    if side.family == "fsdp2":
        return trainers.FSDP2(setting, model, (HOSTS, RANKS_A_HOST) if arguments else ())
    return trainers.build(name, setting, model)


# -- a rank ----------------------------------------------------------------------------------------


def host_counters() -> dict[str, int | None]:
    """Bytes of the interface, and bytes and dropped packets of the queue that shapes the link."""
    told = subprocess.run(
        [hosts.tool("tc"), "-s", "-j", "qdisc", "show", "dev", hosts.INTERFACE],
        capture_output=True,
        text=True,
        check=True,
    )
    (root,) = [found for found in json.loads(told.stdout) if found.get("root")]
    sent = probes.interface_bytes_sent(hosts.INTERFACE)
    return {"interface_bytes": sent, "queue_bytes": root["bytes"], "dropped": root["drops"]}


def socket_counters(own_address: str) -> dict[str, int | None]:
    """Payload sent to ranks of the own host and of others; None where the kernel does not say."""
    sent = probes.socket_bytes_by_peer()
    if sent is None:
        return {"inside_bytes": None, "between_bytes": None}
    own = ("127.", "::1")
    inside = sum(n for at, n in sent.items() if at == own_address or at.startswith(own))
    return {"inside_bytes": inside, "between_bytes": sum(sent.values()) - inside}


class LedgerCounter:
    """What Onefold's ledger entered since this was made, inside the host and between hosts."""

    def __init__(self, traffic: Any, rank: int) -> None:
        self._traffic, self._rank = traffic, rank
        traffic.reset()
        traffic.wanted = lambda: True

    def bytes(self) -> dict[str, int]:
        """`ledger_inside`, `ledger_between`, and `control_bytes`, which the ledger keeps apart.

        A move treats the other ranks of its group alike, so what it sent is divided by where they
        are.

        Raises:
            RuntimeError: more moves than the ledger keeps.
        """
        between, host = 0.0, self._rank // RANKS_A_HOST
        for event in self._traffic.events:
            others = [rank for rank in read_ranks(event.group) if rank != self._rank]
            away = [rank for rank in others if rank // RANKS_A_HOST != host]
            between += event.nbytes * len(away) / max(1, len(others))
        total = self._traffic.sent().nbytes
        kept = sum(event.nbytes for event in self._traffic.events)
        if kept != total:
            raise RuntimeError(
                f"the ledger kept moves of {kept:,} bytes of {total:,}: measure fewer steps at a"
                " time."
            )
        return {
            "ledger_inside": total - round(between),
            "ledger_between": round(between),
            "control_bytes": self._traffic.control_bytes,
        }


def read_ranks(format_ranks: str) -> list[int]:
    """The ranks of "0-3", "0,2" or "0-1,4": the way groups are named in the ledger."""
    out: list[int] = []
    for part in format_ranks.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def read_all(ledger: Callable[[], dict[str, int]]) -> dict[str, int | None]:
    """Every counter of this rank, and on a host's first rank the host's. Collective."""
    dist.barrier()
    found: dict[str, int | None] = {**socket_counters(os.environ[hosts.ADDRESS]), **ledger()}
    if dist.get_rank() % RANKS_A_HOST == 0:
        found |= host_counters()
    dist.barrier()
    return found


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up, time. Seconds as a list of steps; bytes over all timed steps.

    The last step's batch is the same on all ranks, so that its loss is one number everywhere if all
    train one model.
    """
    setting, rank = Setting(**job["setting"]), job["rank"]
    trainer = build(job["side"], setting, gpt.build(setting.model))
    losses = [trainer.step(gpt.batches(setting, step, rank)) for step in range(setting.warmup)]
    last = setting.warmup + setting.steps - 1
    data = [gpt.batches(setting, step, rank) for step in range(setting.warmup, last)]
    data.append(gpt.batches(setting, last, 0))
    ledger: Callable[[], dict[str, int]] = dict
    if isinstance(trainer, trainers.Onefold):
        ledger = LedgerCounter(trainer.engine.traffic, rank).bytes
    before, seconds = read_all(ledger), []
    for taken in data:
        begun = time.perf_counter()
        losses.append(trainer.step(taken))
        seconds.append(time.perf_counter() - begun)
    after = read_all(ledger)
    dist.barrier()  # a rank that returned would free what another may still be reading
    counted = {name: probes.difference(after[name], before[name]) for name in after}
    return {"losses": losses, "step_s": seconds, **counted}


def prepare(job: dict[str, Any]) -> None:
    """Where nodes end, as a launcher would say."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_A_HOST)
    os.environ["LOCAL_RANK"] = str(job["rank"] % RANKS_A_HOST)
    trainers.prepare(SIDES[job["side"]].family)


def join(job: dict[str, Any]) -> None:
    launch.join(job, timeout=datetime.timedelta(seconds=job["timeout"]))


# -- rows ------------------------------------------------------------------------------------------

COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "step s": shown("step_s", "{:.2f}"),
    "faster": shown("faster", "{:.2f}"),
    "range": range_of("faster_low", "faster_high"),
    "between MiB": shown("between_bytes", "{:,.1f}", 2**20),
    "in 2Ψ": shown("equivalents", "{:.3f}"),
    "formula": shown("expected", "{:.3f}"),
    "inside MiB": shown("inside_bytes", "{:,.1f}", 2**20),
    "interface MiB": shown("interface_bytes", "{:,.1f}", 2**20),
    "frames MiB": shown("queue_bytes", "{:,.1f}", 2**20),
    "headers": shown("headers", "{:+.1%}"),
    "ledger between MiB": shown("ledger_between", "{:,.1f}", 2**20),
    "ledger inside MiB": shown("ledger_inside", "{:,.1f}", 2**20),
    "link busy": shown("busy", "{:.0%}"),
    "ranks agree": lambda row: {None: DASH, True: "yes", False: "NO"}[row["agree"]],
    "loss diff": shown("loss_difference", "{:.1e}"),
}
LEGEND = (
    "Bytes are those that one host sends in an optimizer step, the mean of both, the median of the"
    " rounds. between, inside:"
    " payload of the ranks' sockets to the other host, and to their own. in 2Ψ: between, over 2"
    " bytes a parameter; formula: the closed form of it, for our recipes on two hosts of two"
    " ranks. interface: what the interface counted, one header a packet of up to 64 KiB; frames:"
    " the same with the headers of each frame of 1,500 bytes, which is what the rate is charged"
    " for; headers: frames beyond the payload, acknowledgements and the launchers' words included."
    " ledger: what Onefold says that it sent. step s: median of the timed steps, a step lasting"
    " until its slowest rank is done; faster: onefold-3's step over this one's, median of the"
    " rounds, with their range. link busy: share of the step in which the link sends at its rate."
    " ranks agree: the last step's loss, of one batch on all ranks, was one number. loss diff:"
    " largest relative difference to onefold-3's losses."
)


def of_a_host(run: Run, name: str, steps: int) -> float | None:
    """Bytes of one host in a step, the mean of both; None if a rank that counts them did not."""
    found = [rank[name] for rank in run.ranks if name in rank]
    return sum(found) / HOSTS / steps if found and None not in found else None


def expected(side: str, setting: gpt.Setting) -> float | None:
    """Bytes between hosts as the closed form has them in 16-bit equivalents, one micro-batch a
    step. Twice as many where 32 bits travel, but for what is encoded.
    """
    between, encoded = SIDES[side].between, SIDES[side].encoded
    if between is None or setting.accumulation > 1:
        return None
    found = SIDES[side].again * count_at_the_turn(setting.model) / count_parameters(setting.model)
    between -= found
    encoded -= found if "gather_codec" in SIDES[side].arguments else 0
    return encoded + (between - encoded) * (1 if setting.precision == "bf16" else 2)


class Wires(training.Steps):
    """Every side over every link."""

    schema, module, known, read = "onefold-wires/2", "benchmarks.wires", tuple(SIDES), Setting
    notes = {name: side.note for name, side in SIDES.items()}  # noqa: RUF012
    reference, legend = "onefold-3", LEGEND

    skipped: str | None = None

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        with hosts.joined(setting.rate) as pair:

            def start(rank: int, command: list[str], log: Path, env: dict[str, str]) -> Any:
                host = pair[rank // RANKS_A_HOST]
                more = {"GLOO_SOCKET_IFNAME": hosts.INTERFACE, hosts.ADDRESS: host.address}
                with log.open("wb") as out:
                    pipes = {"stdin": subprocess.PIPE, "stdout": out, "stderr": subprocess.STDOUT}
                    return host.start(command, folder=ROOT, environment=env | more, **pipes)

            return launch.run_side(self.module, side, setting, self.options, start)

    def row(self, comparison: harness.Comparison, side: str, good: list[Run]) -> Row:
        setting, references = comparison.setting, self.references(comparison)
        sent = {
            name: harness.middle(of_a_host(run, name, setting.steps) for run in good)
            for name in (
                "between_bytes", "inside_bytes", "interface_bytes", "queue_bytes", "ledger_between",
                "ledger_inside",
            )
        }  # fmt: skip
        names = ("faster", "faster_low", "faster_high")
        timed = harness.timings(good, references, names, faster=True)
        between, queue = sent["between_bytes"], sent["queue_bytes"]
        return {
            **timed,
            **sent,
            "equivalents": harness.scaled(between, 2 * count_parameters(setting.model)),
            "expected": expected(side, setting),
            "headers": queue / between - 1 if queue is not None and between else None,
            "dropped": sum(rank.get("dropped", 0) for run in good for rank in run.ranks),
            "busy": None if queue is None else 8 * queue / setting.rate / timed["step_s"],
            "agree": all(len({rank["losses"][-1] for rank in run.ranks}) == 1 for run in good),
            "loss_difference": harness.loss_difference(good, references),
        }

    def columns(self, setting: gpt.Setting) -> Mapping[str, Cell]:
        return COLUMNS

    def document(self) -> dict[str, Any]:
        return {**super().document(), "skipped": self.skipped}

    @property
    def failed(self) -> bool:
        """An optional side that fails is a finding."""
        runs = [run for c in self.comparisons for run in c.runs]
        return any(run.status != "ok" and not SIDES[run.side].optional for run in runs)


@harness.command(
    "wires",
    __doc__,
    rounds=1,
    steps=2,
    warmup=1,
    accumulation=1,
    timeout=1800.0,
    rates=(["100M", "1G", "10G"], "bits a second of the link, each way"),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; the beginning of names takes all of them"),
    tokens=(256, "tokens a rank and micro-batch"),
    precision=("bf16", "what is computed in", gpt.PRECISIONS),
    model=("gpt-110m", "which GPT", SHAPES),
    **harness.OPTIONS,
)
def main(options: harness.Options) -> int:
    """0 also where there can be no hosts; what an earlier run measured then stays as it is."""
    counts = ("tokens", "accumulation", "rounds", "steps", "warmup", "threads")
    harness.check_at_least(options, 1, *counts)
    names = ("model", "tokens", "precision", "accumulation", "steps", "warmup", "threads")
    shared = {name: getattr(options, name) for name in names}
    study = Wires(options, [Setting(rate=read_rate(rate), **shared) for rate in options.rates])
    study.skipped = hosts.permitted(study.asked[0].setting.rate)
    if not study.skipped:
        return study.run()
    print(f"skipped: {study.skipped}")
    return 0
