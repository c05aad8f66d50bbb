"""The timeline of a step with state on NVMe, with steps in the backward pass, and in tiles: by hand
on a machine of round figures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onefold.offload.nvme import Nvme, stores_from, substitute
from onefold.simulation.disk import Disk
from onefold.simulation.timeline import COPIES, DISK, HOST, READ, WRITTEN, Timeline
from timed import ADAM, BLOCKS, CAST, of, run, seconds

pytestmark = pytest.mark.one_in(6)

UP, DOWN = COPIES["up"], COPIES["down"]
STEPPED = "_fused_adamw_"
#: The lane of the thread that steps in the backward pass.
THREAD = f"{HOST}: step"
#: Seconds in which a rank's part of a block is stepped and cast, on the machine by hand.
UPDATE = 1.0 + CAST / ADAM
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


def test_reads_run_ahead_of_the_update_and_writes_behind_it() -> None:
    fast, slow = (run(disk=disk, down=0.01, **NVME) for disk in (0.1, 1.0))
    # 7 of a block's 8 transfers are the step's, 0.7 s beside an update of 1.2 s
    first, *later = (s for s in of(fast, STEPPED) if s.phase == "optimizer")
    assert later[-1].begin == pytest.approx(first.begin + (BLOCKS - 1) * UPDATE, abs=0.02)
    assert fast.parts.exposed[READ] == pytest.approx(4 * 0.1), "those of the first block"
    # With a slow disk nothing but reads and writes is left, and all but the first updates hide
    begin = of(slow, READ)[0].begin
    assert slow.bound == DISK
    assert slow.step - begin == pytest.approx(7 * BLOCKS * 1.0, abs=2 * UPDATE)


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


def test_steps_in_the_backward_pass_run_in_a_thread_beside_it() -> None:
    at_the_end = run(offload_optimizer="cpu", update=0.5)
    found = run(offload_optimizer="cpu", update=0.5, step_in_backward=True)
    steps = of(found, STEPPED)
    assert {s.stream for s in steps} == {THREAD} and {s.phase for s in steps} == {"backward"}
    assert found.busy[THREAD] == pytest.approx(BLOCKS * UPDATE / 2)
    assert found.busy[HOST] == 0.0 and found.parts.optimizer == 0.0
    assert found.step < at_the_end.step - 1.0
    downs = of(found, DOWN)
    assert [s.unit for s in downs] == [f"blocks.{i}" for i in (3, 2, 1, 0)]
    for down, step in zip(downs, steps, strict=True):
        assert step.begin >= down.end


def spans(timeline: Timeline) -> list[tuple[Any, ...]]:
    return [(s.stream, s.name, s.unit, s.begin, s.end) for s in timeline.spans]


# -- tiles -----------------------------------------------------------------------------------------
