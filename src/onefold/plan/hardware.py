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
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from onefold.machine.calibration import Calibration
from onefold.wording import did_you_mean

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_RATE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(g|gbps|gbit/s|gb/s)")


@dataclass(frozen=True)
class Gpu:
    """One GPU. A rate is of dense matrix products, nominal, by precision; large products reach the share
    `attainable` of it. Without one, fp32 has half of the lowest.
    """

    name: str
    capacity: int
    memory_bandwidth: float
    title: str = ""
    fp32: float = 0.0
    tf32: float = 0.0
    fp16: float = 0.0
    bf16: float = 0.0
    attainable: float = 0.75
    link: float = 25e9
    host_link: float = 25e9

    def __post_init__(self) -> None:
        if not any(self.rates.values()):
            raise ValueError(
                f"gpu.{self.name} lacks a matrix rate (fp32, tf32, fp16 or bf16, in FLOP/s)."
            )
        if self.attainable > 1:
            raise ValueError(
                f"gpu.{self.name}.attainable is {self.attainable}: expected a share of the nominal"
                " rate, at most 1."
            )

    @property
    def rates(self) -> dict[str, float]:
        """The known rates."""
        found = {p: getattr(self, p) for p in PRECISIONS if getattr(self, p)}
        return {"fp32": min(found.values(), default=0.0) / 2, **found}


@dataclass(frozen=True)
class Link:
    """The network adapters of one node: bytes/s that they send together."""

    name: str
    bandwidth: float
    title: str = ""


@dataclass(frozen=True)
class Host:
    """A node's host: bytes and bytes/s.

    Attributes:
        link_bandwidth: of all GPUs together, to and from the host.
        nvme_bandwidth: of reading; also of writing if `nvme_write` is 0.
    """

    name: str
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    nvme: float
    nvme_bandwidth: float
    nvme_write: float = 0.0


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
        contention: the share of a second that computing loses to each hidden second of
            communication (0: separate engines; 1: the same cores).
        software: what software reaches of these rates.
        shared: the device is a CPU: its memory is the host's, and copies stay within memory.
        is_timed: its speeds are known, from the table or measured.
        disk: a folder on the disk that was measured, "" for none.
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
        """Ranks of one node, as `states.topology_of` takes them; None on a single node."""
        return self.local if self.nodes > 1 else None

    @property
    def is_here(self) -> bool:
        """It is this machine, not one of the table."""
        return self.gpu.name == "here"

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


class Catalogue(dict[str, dict[str, Any]]):
    """All GPUs, links and hosts: rows by name, by kind."""

    def gpu(self, name: str) -> Gpu:
        """Return a GPU by name. Raises ValueError with the nearest names."""
        return self._row("gpu", name)

    def link(self, name: str) -> Link:
        """Return a link by name, or by its rate: "100g", "8x200g" (Gbit/s of a node), "25GB/s".
        Raises ValueError with the nearest names.
        """
        plain = str(name).strip().lower()
        in_bytes = "GB/s" in str(name)
        match = _RATE.fullmatch(plain if in_bytes else plain.replace("gb/s", "gbit/s"))
        if match and (rate := int(match[1] or 1) * float(match[2])) > 0:
            bits = 1 if match[3] == "gb/s" else 8
            return Link(plain, rate * 1e9 / bits, f"{name} between nodes")
        rates = " Or give its rate: '100g', '8x200g' (Gbit/s of a node), '25GB/s'."
        return self._row("link", name, rates)

    def _row(self, kind: str, name: str, otherwise: str = "") -> Any:
        known, plain = self[kind], str(name).strip().lower()
        if plain in known:
            return known[plain]
        what = kind.upper() if kind == "gpu" else kind
        raise ValueError(
            f"no {what} is called {name!r}. {did_you_mean(plain, known, 3)}{otherwise}"
        )

    def with_rows(self, tables: Mapping[str, Any]) -> Catalogue:
        """Return the catalogue with the rows of a file: new ones, or changed keys of known ones.
        Raises ValueError with the key, and what was expected.
        """
        out = Catalogue({kind: dict(self.get(kind, {})) for kind in _KINDS})
        # A calibration is such a file, with a table more
        for kind in _checked(tables, (*_KINDS, "measured"), "the file").keys() & _KINDS.keys():
            known = {f.name: f.default for f in fields(_KINDS[kind]) if f.name != "name"}
            for name, entry in _checked(tables[kind], tables[kind], kind).items():
                where, plain = f"{kind}.{name}", name.lower()
                for key, value in _checked(entry, known, where).items():
                    number = isinstance(value, (int, float)) and not isinstance(value, bool)
                    if key != "title" and not (number and 0 < value < 1e30):
                        raise ValueError(
                            f"{where}.{key} is {value!r}: expected a number above 0 and below 1e30."
                        )
                old = out[kind].get(plain) or (out[kind].get("default") if kind == "host" else None)
                lacking = [
                    k for k, default in known.items() if default is MISSING and k not in entry
                ]
                if lacking and old is None:
                    raise ValueError(f"{where} lacks {', '.join(lacking)}.")
                row = replace(old, **entry) if old else _KINDS[kind](name=plain, **entry)
                out[kind][plain] = row
        return out


_KINDS: Mapping[str, Any] = {"gpu": Gpu, "link": Link, "host": Host}


def _checked(values: Any, known: Collection[str], where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}: expected a table, such as [{where}].")
    for key in values:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}. {did_you_mean(key, known)}")
    return values


@cache
def builtin() -> Catalogue:
    """Return the table of the package."""
    text = resources.files("onefold.plan").joinpath("hardware.toml").read_text(encoding="utf-8")
    return Catalogue().with_rows(tomllib.loads(text))


def catalogue(file: str | Path | None = None) -> Catalogue:
    """Return the built-in table, changed by a user's TOML file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is no TOML, or an entry is wrong: the file, the key and what was
            expected.
    """
    if file is None:
        return builtin()
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(
            f"no hardware file at {path}: expected a TOML file with tables [gpu.NAME], [link.NAME]"
            " or [host.default]."
        )
    try:
        return builtin().with_rows(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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
    return Machine(found, gpus, per_node, between, known["host"]["default"])


def calibrated(found: Calibration) -> Machine:
    """Return this machine as `onefold doctor --calibrate` measured it, all of its ranks on one node.
    Raises ValueError for a row that lacks a key or has a wrong one.
    """
    table = builtin().with_rows({"gpu": {"here": found.gpu}, "host": {"default": found.host}})
    software = Software(found.kernel_share, 1.0, found.hop_seconds, 0.0)
    return Machine(
        table.gpu("here"), found.ranks, found.ranks, None, table["host"]["default"], software, found.contention,
        found.device == "cpu", disk=found.disk,
    )  # fmt: skip
