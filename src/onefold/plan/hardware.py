"""Machines by name: GPUs, links between nodes and what a node has beside them, from `hardware.toml`
and a user's file of the same form.

    [gpu.mine]                       [link.mine]            [host.default]
    capacity = 48e9   # bytes        bandwidth = 50e9       memory = 512e9
    bf16 = 150e12     # FLOP/s

A table of a user's file adds a name, or changes the given keys of one that exists. Bytes, bytes/s
(one direction), FLOP/s throughout.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from onefold.doctor.calibration import Calibration

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
#: What a GPU of the table has if its entry leaves the key out.
_DEFAULTS: dict[str, Any] = {"attainable": 0.75, "link": 25e9, "host_link": 25e9}
_RATE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(g|gbps|gbit/s|gb/s)")


@dataclass(frozen=True)
class Gpu:
    """One GPU. `rates` are nominal dense matrix FLOP/s by precision, of which large products reach
    the share `attainable`.
    """

    name: str
    title: str
    capacity: int
    rates: Mapping[str, float]
    attainable: float
    memory_bandwidth: float
    link: float
    host_link: float


@dataclass(frozen=True)
class Link:
    """What all network adapters of one node send together, bytes/s."""

    name: str
    title: str
    bandwidth: float


@dataclass(frozen=True)
class Host:
    """What one node has beside its GPUs: bytes and bytes/s. `link_bandwidth` is what all GPUs
    together move to and from the host.

    `nvme_bandwidth` is of reading, and of writing too where `nvme_write` is 0.
    """

    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    nvme: float
    nvme_bandwidth: float
    nvme_write: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Where a plan runs.

    Attributes:
        gpu: one of its GPUs.
        ranks, per_node: processes in all, and in one node.
        between: the link between nodes; None on a single node.
        host: what a node has beside its GPUs.
        contention: share of a hidden second of communication that computing loses to it (0:
            separate engines; 1: the same cores).
        measured: a calibration that replaces the table's figures for communication.
        shared: the device is a CPU: the host's memory is its own, and a copy between them is one
            within memory.
    """

    gpu: Gpu
    ranks: int
    per_node: int
    between: Link | None
    host: Host
    contention: float = 0.0
    measured: Calibration | None = field(default=None, compare=False)
    shared: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1:
            raise ValueError(
                f"a machine of {self.ranks} GPUs, {self.per_node} a node: expected 1 or more of"
                " each."
            )
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
        """Ranks of one node: fewer than `per_node` where the machine is a part of one."""
        return min(self.ranks, self.per_node)

    @property
    def capacity(self) -> int:
        """Bytes of one GPU."""
        return self.gpu.capacity

    def peak(self, precision: str) -> float:
        """Nominal FLOP/s of one GPU, the figure that MFU is a share of.

        fp32 is tf32's rate where the GPU has it (torch uses it when told so); bf16 falls back to
        fp32 where there is none (V100, T4).

        Raises:
            ValueError: a precision that is not known.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}.")
        rates = self.gpu.rates
        return rates[precision] if precision in rates else rates["fp32"]

    def matrix_rate(self, precision: str) -> float:
        """FLOP/s that large matrix products reach on one GPU."""
        return self.peak(precision) * self.gpu.attainable

    def host_link(self) -> float:
        """Bytes/s between one GPU and the host while every GPU of the node does the same."""
        return min(self.gpu.host_link, self.host.link_bandwidth / self.local)


@dataclass(frozen=True)
class Catalogue:
    """Every GPU, link and host that is known by name."""

    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    hosts: Mapping[str, Host]

    def gpu(self, name: str) -> Gpu:
        """Raises ValueError with the nearest names."""
        return self.gpus[_key(name, self.gpus, "GPU")]

    def link(self, name: str) -> Link:
        """A link by name, or by its rate: "100g", "8x200g" (Gbit/s a node), "25GB/s". Raises
        ValueError with the nearest names.
        """
        plain = name.strip().lower()
        if plain in self.links:
            return self.links[plain]
        in_bytes = "GB/s" in name
        match = _RATE.fullmatch(plain if in_bytes else plain.replace("gb/s", "gbit/s"))
        if match and (rate := int(match[1] or 1) * float(match[2])) > 0:
            bits = 1 if match[3] == "gb/s" else 8
            return Link(plain, f"{name} between nodes", rate * 1e9 / bits)
        raise ValueError(
            f"{_unknown(name, self.links, 'link')} Or give its rate: '100g', '8x200g' (Gbit/s of a"
            " node), '25GB/s'."
        )

    def machine(
        self, gpus: int, per_node: int = 8, gpu: str = "a100-80", link: str = "8x200g"
    ) -> Machine:
        """`gpus` GPUs of one kind in nodes of `per_node`."""
        found, between = self.gpu(gpu), self.link(link)
        return Machine(
            found, gpus, per_node, between if gpus > per_node else None, self.hosts["default"]
        )


_KINDS: Mapping[str, Any] = {"gpu": Gpu, "link": Link, "host": Host}
_KEYS: Mapping[str, tuple[str, ...]] = {
    "gpu": (
        "capacity",
        "attainable",
        "memory_bandwidth",
        "link",
        "host_link",
        *PRECISIONS,
        "title",
    ),
    "link": ("bandwidth", "title"),
    "host": tuple(f.name for f in fields(Host)),
}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "gpu": ("capacity", "memory_bandwidth"),
    "link": ("bandwidth",),
    "host": tuple(name for name in _KEYS["host"] if name != "nvme_write"),
}


def _unknown(name: str, known: Iterable[str], what: str) -> str:
    near = difflib.get_close_matches(name.lower(), sorted(known), 3, 0.5)
    hint = (
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"Known: {', '.join(sorted(known))}."
    )
    return f"no {what} is called {name!r}. {hint}"


def _key(name: str, known: Mapping[str, Any], what: str) -> str:
    plain = name.strip().lower()
    if plain not in known:
        raise ValueError(_unknown(name, known, what))
    return plain


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{where} is {value!r}: expected a number above 0.")
    return float(value)


def _check_keys(values: Any, known: Iterable[str], where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}: expected a table, such as [{where}].")
    known = sorted(known)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ValueError(f"{where} has no key {key!r}. {hint}")
    return values


def _read(kind: str, name: str, values: Any, old: Any) -> Any:
    """One entry of a table, over the `old` one where there is one."""
    where = f"{kind}.{name}"
    given = dict(_check_keys(values, _KEYS[kind], where))
    title = str(given.pop("title", "") or getattr(old, "title", name))
    figures: dict[str, Any] = {k: _number(v, f"{where}.{k}") for k, v in given.items()}
    rates = {p: figures.pop(p) for p in PRECISIONS if p in figures}
    lacking = [k for k in _NEEDED[kind] if old is None and k not in figures]
    if kind == "gpu" and old is None and not lacking and not rates:
        lacking = ["a matrix rate (fp32, tf32, fp16 or bf16, in FLOP/s)"]
    if lacking:
        raise ValueError(f"{where} lacks {', '.join(lacking)}.")
    if figures.get("attainable", 0.5) > 1:
        raise ValueError(
            f"{where}.attainable is {figures['attainable']}: expected a share of the nominal rate,"
            " at most 1."
        )
    if kind == "gpu":
        figures = (_DEFAULTS if old is None else {}) | figures
        rates = (old.rates if old else {}) | rates
        rates.setdefault("fp32", min(rates.values()) / 2)
        figures |= {"rates": rates, "capacity": int(figures.get("capacity", old and old.capacity))}
    if kind != "host":
        figures |= {"name": name, "title": title}
    return replace(old, **figures) if old else _KINDS[kind](**figures)


def _merge(base: Catalogue, values: Mapping[str, Any]) -> Catalogue:
    _check_keys(values, tuple(_KINDS), "the file")
    found: dict[str, dict[str, Any]] = {
        "gpu": dict(base.gpus),
        "link": dict(base.links),
        "host": dict(base.hosts),
    }
    for kind, known in found.items():
        entries = values.get(kind, {})
        for name, entry in _check_keys(entries, entries or (), kind).items():
            key = name.lower()
            old = known.get(key) or (known.get("default") if kind == "host" else None)
            known[key] = _read(kind, key, entry, old)
    return Catalogue(found["gpu"], found["link"], found["host"])


@cache
def builtin() -> Catalogue:
    """What the package knows."""
    text = resources.files("onefold.plan").joinpath("hardware.toml").read_text(encoding="utf-8")
    return _merge(Catalogue({}, {}, {}), tomllib.loads(text))


def catalogue(file: str | Path | None = None) -> Catalogue:
    """The built-in table, with a user's TOML file over it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that is no TOML, or an entry that is wrong: the file, the key and what
            was expected.
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
        return _merge(builtin(), tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def machine(
    gpus: int,
    per_node: int = 8,
    gpu: str = "a100-80",
    link: str = "8x200g",
    file: str | Path | None = None,
) -> Machine:
    """`gpus` GPUs of one kind in nodes of `per_node`, joined by `link`. Raises ValueError for names
    and counts that cannot be.
    """
    return catalogue(file).machine(gpus, per_node, gpu, link)


def calibrated(calibration: Calibration, ranks: int) -> Machine:
    """This machine as `onefold doctor --calibrate` measured it, with `ranks` ranks at work at once on one node. On CPU
    the ranks share one memory, so that each has its part of it.

    Raises:
        CalibrationError: fewer or more ranks than were measured.
    """
    rates = {
        p: calibration.peak_rate(d, ranks)
        for p, d in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"))
        if d in calibration.dtypes
    }
    cpu, default = calibration.device == "cpu", builtin().hosts["default"]
    host_link, disk = calibration.host_link, calibration.disk
    to_host = min(host_link.to_device, host_link.to_host) if host_link else float("inf")
    found = Gpu(
        "here",
        calibration.device_name,
        calibration.device_bytes // (ranks if cpu else 1),
        rates,
        attainable=1.0,
        memory_bandwidth=calibration.copy_rate(ranks),
        link=calibration.fit("all-gather", ranks).bytes_per_s if ranks > 1 else float("inf"),
        host_link=to_host,
    )
    host = replace(
        default,
        memory=calibration.host_bytes,
        link_bandwidth=to_host * ranks,
        nvme_bandwidth=disk.read if disk else default.nvme_bandwidth,
        nvme_write=disk.write if disk else 0.0,
    )
    contention = 1 - calibration.hidden(ranks)
    return Machine(found, ranks, ranks, None, host, contention, calibration, cpu)
