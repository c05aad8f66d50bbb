"""Machines by name: GPUs, links between nodes, and a node's host, from `hardware.toml` and a user's
file of the same form.

    [gpu.mine]                       [link.mine]            [host.default]
    capacity = 48e9   # bytes        bandwidth = 50e9       memory = 512e9
    bf16 = 150e12     # FLOP/s

A table of a user's file adds a name, or changes the given keys of a known one. All figures are
bytes, bytes/s (in one direction) or FLOP/s.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from onefold.machine.calibration import Calibration
from onefold.reading import formed
from onefold.wording import did_you_mean

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_RATE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(?:(GB/s)|(?i:g|gbps|gbit/s|gb/s))")


#: Of a row's figures: bytes, bytes/s or FLOP/s.
Figure = Annotated[float, Field(gt=0, lt=1e30)]


class Row(BaseModel):
    """A row of a table. Figures that are 0 are not known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    title: str = ""


RowT = TypeVar("RowT", bound=Row)


class Gpu(Row):
    """One GPU. A rate is of dense matrix products, nominal, by precision; large products reach the share
    `attainable` of it. Without one, fp32 has half of the lowest.
    """

    capacity: Annotated[int, Field(gt=0)]
    memory_bandwidth: Figure
    fp32: Figure = 0.0
    tf32: Figure = 0.0
    fp16: Figure = 0.0
    bf16: Figure = 0.0
    attainable: Annotated[float, Field(gt=0, le=1)] = 0.75
    link: Figure = 25e9
    host_link: Figure = 25e9

    @model_validator(mode="after")
    def _has_a_rate(self) -> Self:
        if not any(self.rates.values()):
            raise ValueError("expected a matrix rate: fp32, tf32, fp16 or bf16, in FLOP/s")
        return self

    @property
    def rates(self) -> dict[str, float]:
        """The known rates."""
        found = {p: getattr(self, p) for p in PRECISIONS if getattr(self, p)}
        return {"fp32": min(found.values(), default=0.0) / 2, **found}


class Link(Row):
    """The network adapters of one node: bytes/s that they send together."""

    bandwidth: Figure


class Host(Row):
    """A node's host: bytes and bytes/s.

    Attributes:
        link_bandwidth: of all GPUs together, to and from the host.
        nvme_bandwidth: of reading; also of writing if `nvme_write` is 0.
    """

    memory: Figure
    memory_bandwidth: Figure
    link_bandwidth: Figure
    nvme: Figure
    nvme_bandwidth: Figure
    nvme_write: Figure = 0.0


@dataclass(frozen=True)
class Software:
    """What software reaches of the hardware's rates. A plan uses the defaults for a machine that
    was not measured.

    Attributes:
        kernel_share: what a whole transformer reaches of the rate of large products; norms, softmax
            and small products take the rest. Fitted, like hop_seconds, to the Azure report (see
            `benchmarks.validation.systems`); on a calibrated machine measured in training steps.
        link_share: what a collective of large messages reaches of the nominal link. An assumption;
            published runs reach 0.17 to 1.
        hop_seconds: one step of a ring, from one rank to the next. A collective over N ranks takes
            N−1 of them: this term grows with N.
        straggler: the spread of the ranks' speeds, an assumption. The slowest of N normally
            distributed ranks is sqrt(2 ln N) deviations behind the mean.
    """

    kernel_share: float = 0.77
    link_share: float = 0.8
    hop_seconds: float = 7e-6
    straggler: float = 0.01


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is for.

    Attributes:
        gpu: one of its GPUs.
        ranks, per_node: processes in all, and in one node.
        between: the link between nodes; None on a single node.
        host: a node's host.
        contention: seconds that a step becomes longer by for each second of moves hidden behind
            computing (0: separate engines; 1: the same cores; more where moves that compete for
            the cores reach less of their link).
        software: what software reaches of these rates.
        shared: the device is a CPU: its memory is the host's, and copies stay within memory.
        is_timed: its speeds are known, from the table or measured.
        disk: a folder on the disk that was measured, "" for none.
        is_here: it is this machine, not one of the table.
    """

    gpu: Gpu
    ranks: int
    per_node: int
    between: Link | None
    host: Host
    software: Software = Software()
    contention: float = 0.0
    shared: bool = False
    is_timed: bool = True
    disk: str = ""
    is_here: bool = False

    def __post_init__(self) -> None:
        if self.ranks > self.per_node and self.ranks % self.per_node:
            near = self.ranks // self.per_node * self.per_node
            raise ValueError(
                f"{self.ranks} GPUs do not fill nodes of {self.per_node}: use {near} or"
                f" {near + self.per_node} GPUs, or say how many a node has."
            )
        if self.nodes > 1 and self.between is None:
            raise ValueError(
                f"{self.ranks} GPUs in nodes of {self.per_node} need a link between nodes, such as"
                " '8x200g'."
            )

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    @property
    def local(self) -> int:
        """Ranks of one node: fewer than `per_node` if the machine is a part of a node."""
        return min(self.ranks, self.per_node)

    @property
    def node_ranks(self) -> int | None:
        """Ranks of one node, as a launcher would say; None on a single node."""
        return self.local if self.nodes > 1 else None

    @property
    def capacity(self) -> int:
        """Bytes of one GPU."""
        return int(self.gpu.capacity)

    def peak(self, precision: str) -> float:
        """Return the nominal FLOP/s of one GPU, to which MFU refers. A precision without a rate
        (bf16 on V100 and T4) has the rate of fp32.
        """
        return self.gpu.rates.get(precision, self.gpu.rates["fp32"])

    def matrix_rate(self, precision: str) -> float:
        """Return the FLOP/s that large matrix products reach on one GPU."""
        return self.peak(precision) * self.gpu.attainable

    def host_link(self) -> float:
        """Return the bytes/s between one GPU and the host while all GPUs of the node move."""
        return min(self.gpu.host_link, self.host.link_bandwidth / self.local)


class Catalogue(BaseModel, extra="forbid"):
    """The tables of a file: rows of GPUs, links and the host by name. A calibration is such a file, with
    a table more.
    """

    gpus: dict[str, Gpu] = Field(default={}, alias="gpu")
    links: dict[str, Link] = Field(default={}, alias="link")
    hosts: dict[Literal["default"], Host] = Field(default={}, alias="host")
    measured: dict[str, Any] = {}

    @property
    def host(self) -> Host:
        return self.hosts["default"]

    def gpu(self, name: str) -> Gpu:
        """Return a GPU by name. Raises ValueError with the nearest names."""
        return _row("GPU", self.gpus, name)

    def link(self, name: str) -> Link:
        """Return a link by name, or by its rate: "100g", "8x200g" (Gbit/s of a node), "25GB/s".
        Raises ValueError with the nearest names.
        """
        match = _RATE.fullmatch(str(name).strip())
        if match and (rate := int(match[1] or 1) * float(match[2])) > 0:
            bandwidth = rate * 1e9 / (1 if match[3] else 8)
            return Link(name=match[0], bandwidth=bandwidth, title=f"{name} between nodes")
        rates = " Or give its rate: '100g', '8x200g' (Gbit/s of a node), '25GB/s'."
        return _row("link", self.links, name, rates)

    def with_rows(self, tables: dict[str, Any]) -> Catalogue:
        """Return the catalogue with the rows of a file: new ones, or changed keys of known ones.
        Raises ValueError with the key, and what was expected.
        """
        return formed(Catalogue, _over(self.model_dump(by_alias=True, exclude_unset=True), tables))


def _row(what: str, rows: Mapping[str, RowT], name: str, otherwise: str = "") -> RowT:
    plain = str(name).strip().lower()
    if plain in rows:
        return rows[plain].model_copy(update={"name": plain})
    raise ValueError(f"no {what} is called {name!r}. {did_you_mean(plain, rows, 3)}{otherwise}")


def _over(known: Any, given: Any) -> Any:
    """Return tables with what is given, and what else is known."""
    if not (isinstance(known, dict) and isinstance(given, dict)):
        return given
    return known | {k.lower(): _over(known.get(k.lower(), {}), v) for k, v in given.items()}


@cache
def builtin() -> Catalogue:
    """Return the table of the package."""
    text = resources.files("onefold.plan").joinpath("hardware.toml").read_text(encoding="utf-8")
    return Catalogue().with_rows(tomllib.loads(text))


def catalogue(file: str | Path | None = None) -> Catalogue:
    """Return the built-in table, changed by a user's TOML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no TOML, or an entry is wrong: the file, the key and what was expected.
    """
    if file is None:
        return builtin()
    try:
        return builtin().with_rows(tomllib.loads(Path(file).read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None


def machine(
    gpus: int,
    per_node: int = 8,
    gpu: str = "a100-80",
    link: str = "8x200g",
    file: str | Path | None = None,
) -> Machine:
    """Return `gpus` GPUs of one kind in nodes of `per_node`, joined by `link`. Raises ValueError
    for unknown names and impossible counts.
    """
    for name, count in (("gpus", gpus), ("per_node", per_node)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count!r}: expected a whole number, 1 or more.")
    known = catalogue(file)
    found, joined = known.gpu(gpu), known.link(link)
    between = joined if gpus > per_node else None
    return Machine(found, gpus, per_node, between, known.host)


def calibrated(found: Calibration) -> Machine:
    """Return this machine as `onefold doctor --calibrate` measured it, all of its ranks on one node.
    Raises ValueError for a row that lacks a key or has a wrong one.
    """
    table = builtin().with_rows({"gpu": {"here": found.gpu}, "host": {"default": found.host}})
    software = Software(found.kernel_share, 1.0, found.hop_seconds, 0.0)
    return Machine(
        table.gpu("here"), found.ranks, found.ranks, None, table.host, software, found.contention,
        found.device == "cpu", disk=found.disk, is_here=True,
    )  # fmt: skip
