"""A turn of the benchmark, the rows that turns become, and goals: the fields of the JSON that is
written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.checkpoint.settings import Turn

Rank = dict[str, Any]


@dataclass
class Run:
    """One turn in one round. `status` is "ok", "failed" or "timeout"; `ranks` holds what each
    worker wrote.
    """

    turn: Turn
    round: int
    status: str
    ranks: list[Rank] = field(default_factory=list)
    error: str = ""
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {**self.__dict__, "turn": self.turn.to_json()}


@dataclass
class SaveRow:
    """Saves that the training waits for.

    `seconds` until the call returns, `on_disk_s` until the disk also knows every file. `disk_s`:
    what the same ranks take to write and flush as many bytes with nothing but write(2), beside each
    save; `rate` is the median of the pairs' disk_s / on_disk_s, `rate_low` the smallest;
    `alone_rate` the same against one process that writes everything; `direct_gb_s` the disk's past
    the page cache (O_DIRECT).
    `peak_mib`: host memory beyond rest, the largest rank.
    """

    peer: str
    ranks: int
    folder_gb: float
    seconds: float
    on_disk_s: float
    gb_s: float
    disk_gb_s: float
    rate: float
    rate_low: float
    alone_rate: float | None
    direct_gb_s: float | None
    peak_mib: float | None
    count: int


@dataclass
class BehindRow:
    """Saves behind the training, in one way.

    `first_stall_s`: how long the first of a run stands still, `stall_s`: later ones. `whole_s`:
        from the call until the checkpoint is
    whole. `stall_share`, `first_share`: stall / whole_s of later ones and of the first. `alone_s`
    and `beside_s`: a step alone, and one that begins while the save is under way. `lost_s`: what a
    save costs the training: its stall and the steps' delay. `copy_mib`: memory beyond rest after
    the first call.
    """

    peer: str
    way: str
    ranks: int
    first_stall_s: float
    stall_s: float
    whole_s: float
    first_share: float
    stall_share: float
    alone_s: float
    beside_s: float | None
    lost_s: float
    copy_mib: float | None
    count: int


@dataclass
class LoadRow:
    """Loads of a checkpoint that `saved` ranks wrote, on `ranks`.

    `cold_s` from the disk, `warm_s` with the files in the page cache. `need_gb`: what a rank owns
    of the state in the checkpoint.
    `read_gb`: bytes that the rank which reads most asked the kernel for; `disk_gb`: bytes that the
        disk gave all ranks in the cold load.
    `peak_mib` and `stays_mib`: host memory beyond rest in the cold load and after it, the largest
    rank. `loss_difference`: relative, of the two steps after the load to the two after the save.
    """

    peer: str
    saved: int
    ranks: int
    cold_s: float
    warm_s: float
    warm_gb_s: float
    need_gb: float
    read_gb: float | None
    disk_gb: float | None
    peak_mib: float | None
    stays_mib: float | None
    loss_difference: float | None
    count: int


@dataclass
class OpenRow:
    """A Hugging Face folder opened as a sharded model, from the disk.

    Memory in MiB beyond what the libraries take: `peak_mib` resident, the largest rank;
    `all_peak_mib` the sum over ranks; `own_peak_mib` without what is mapped from files, the largest
    rank; `stays_mib` afterwards, the largest rank; `shard_mib` what a rank owns.
    """

    way: str
    ranks: int
    seconds: float
    peak_mib: float | None
    all_peak_mib: float | None
    own_peak_mib: float
    stays_mib: float | None
    shard_mib: float
    read_gb: float | None
    loss: float
    count: int


@dataclass
class Goal:
    """One of the goals: what was measured, in words what it should be, and whether it is."""

    what: str
    goal: str
    value: float
    met: bool
    form: str = "{:.2f}"
