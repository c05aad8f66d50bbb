"""The measurement itself, at sizes that take a moment: everything asked for is there, positive, and
leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.doctor.calibrate import measure_disk
from onefold.doctor.measure import Sizes, measure
from onefold.processes.ranks import Ranks
from ranks import run_ranks

TINY = Sizes(64, 1 << 16, 1 << 16, 1 << 10, 64, 16)


def measured_on_a_rank() -> dict[str, Any]:
    dist = torch.distributed
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    control = dist.group.WORLD if size > 1 else None
    here = Ranks(rank, size, rank, size, torch.device("cpu"), "gloo", control)
    return measure(here, TINY)


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_measure_together_and_agree(count: int) -> None:
    found, *others = run_ranks(count, measured_on_a_rank)
    # Every rank knows the seconds of the slowest
    assert all(other["gpu"] == found["gpu"] for other in others)
    assert found["gpu"].keys() == {"attainable", "fp32", "bf16", "memory_bandwidth", "link"}
    assert all(value > 0 for value in found["gpu"].values())
    assert found["kernel_share"] > 0 <= found["hop_seconds"] and found["contention"] >= 0


def test_a_disk_is_measured_and_left_as_it_was_also_where_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure_disk(tmp_path)
    assert found["nvme_write"] > 0 < found["nvme_bandwidth"]
    with pytest.raises(OSError, match="No such file or directory"):
        measure_disk(tmp_path / "nowhere")

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        measure_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []
