"""The timeline of a step with state on NVMe, with steps in the backward pass, and in tiles: by hand
on a machine of round figures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onefold.offload.nvme import Nvme, stores_from, substitute
from onefold.simulation.disk import Disk
from onefold.simulation.timeline import COPIES, DISK, READ, WRITTEN, Timeline
from timed import BLOCKS, of, run, seconds

pytestmark = pytest.mark.one_in(6)

UP, DOWN = COPIES["up"], COPIES["down"]
#: What a recipe names; nothing is written there.
NVME: dict[str, Any] = {"offload_optimizer": "nvme", "nvme": "/nowhere"}


# -- state on NVMe ---------------------------------------------------------------------------------


def test_a_step_with_states_on_nvme_reads_and_writes_all_of_them() -> None:
    found = run(disk=0.1, **NVME)
    gradients, *others = (
        [s for s in of(found, WRITTEN) if s.phase == phase] for phase in ("backward", "optimizer")
    )
    assert [s.unit for s in gradients] == [f"blocks.{i}" for i in (3, 2, 1, 0)]
    # Masters and two moments; gradients are read only
    assert [len(spans) for spans in others] == [3 * BLOCKS]
    assert seconds(of(found, WRITTEN)) == pytest.approx(4 * BLOCKS * 0.1)
    assert len(of(found, READ)) == 4 * BLOCKS
    assert {s.phase for s in of(found, READ)} == {"optimizer"}
    assert {s.stream for s in of(found, READ, WRITTEN)} == {DISK}
    assert found.busy[DISK] == pytest.approx(8 * BLOCKS * 0.1)


def test_a_simulation_makes_no_file(tmp_path: Any) -> None:
    with stores_from(lambda: Disk(None)):
        made = substitute()
        assert made is not None
        region = made().region("(root).0.master", 10, torch.float32)
        assert not isinstance(made(), Nvme)
        assert region.nbytes == 40
    assert substitute() is None
    run(disk=0.1, offload_optimizer="nvme", nvme=str(tmp_path))
    assert not list(tmp_path.iterdir())


# -- steps in the backward pass --------------------------------------------------------------------


def spans(timeline: Timeline) -> list[tuple[Any, ...]]:
    return [(s.stream, s.name, s.unit, s.begin, s.end) for s in timeline.spans]


# -- tiles -----------------------------------------------------------------------------------------
