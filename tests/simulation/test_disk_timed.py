"""The timeline of a step with state on NVMe, with steps in the backward pass, and in tiles: by hand
on a machine of round figures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onefold.device import clocked, new_lock, new_thread
from onefold.offload.nvme import Nvme, stores_from, substitute
from onefold.simulation.clock import Clock
from onefold.simulation.disk import Disk
from onefold.simulation.prices import Prices
from onefold.simulation.timeline import BACKWARD_STEPS, COPIES, DISK, HOST, READ, WRITTEN, Timeline
from timed import ADAM, BLOCKS, CAST, HIDDEN, by_hand, of, run, seconds, simulation

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


def test_writing_may_be_slower_than_reading() -> None:
    prices = Prices(by_hand(disk=1.0))
    host = prices.machine.host
    assert host.nvme_write == 0.0 and prices.disk(WRITTEN, 1e6) == prices.disk(READ, 1e6) > 0
    object.__setattr__(host, "nvme_write", host.nvme_bandwidth / 2)
    assert prices.disk(WRITTEN, 1e6) == 2 * prices.disk(READ, 1e6)


def test_a_read_waits_for_the_disks_latency_which_reads_behind_it_hide() -> None:
    plain, late = run(disk=0.1, **NVME), run(disk=0.1, latency=0.05, **NVME)
    assert late.busy[DISK] == pytest.approx(plain.busy[DISK])
    waits = late.parts.disk - plain.parts.disk
    # That of the last write of the pass, and of the first read of the step
    assert waits == pytest.approx(2 * 0.05)


def test_parameters_on_nvme_are_read_ahead_of_every_gather() -> None:
    found = run(disk=0.1, offload_param="nvme", **NVME)
    reads = [s for s in of(found, READ) if s.phase != "optimizer"]
    assert [s.unit for s in reads] == [f"blocks.{i}" for i in (0, 1, 2, 3, 2, 1, 0)]
    assert all(s.seconds == pytest.approx(0.05) for s in reads), "in bf16"
    ups = [s for s in of(found, UP) if s.phase != "optimizer"]
    for read, up in zip(reads, ups, strict=True):
        assert up.unit == read.unit and up.begin >= read.end
    assert found.parts.exposed[READ] == pytest.approx(0.05 + 4 * 0.1), "only the first one waits"


def test_a_part_on_nvme_takes_a_part_of_the_reads() -> None:
    whole, half = (
        run(disk=0.1, nvme="/nowhere", offload_optimizer=part) for part in ("nvme", "nvme:0.5")
    )
    assert half.busy[DISK] == pytest.approx(whole.busy[DISK] / 2)


def test_gradients_of_later_micro_batches_are_read_added_and_written() -> None:
    one, two = (run(stage=2, micro_batches=n, disk=0.1, **NVME) for n in (1, 2))
    assert two.busy[DISK] - one.busy[DISK] == pytest.approx(2 * BLOCKS * 0.1)
    adds = [s for s in two.spans if s.stream == HOST and s.name == "add_"]
    assert len(adds) == BLOCKS and all(s.kind == "engine" for s in adds)


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


def test_the_pass_waits_for_the_steps_that_it_cannot_hide() -> None:
    fast, slow = (
        run(offload_optimizer="cpu", update=update, step_in_backward=True) for update in (1.0, 4.0)
    )
    assert slow.parts.steps - fast.parts.steps > 3 * (4.0 - 1.0)
    last = of(slow, STEPPED)[-1]
    assert slow.step == pytest.approx(last.end + 4.0 * CAST / ADAM + 0.5), "and its copy up"
    waits = [s for s in slow.spans if s.kind == "wait" and s.name == BACKWARD_STEPS]
    assert {s.stream for s in waits} == {HOST}
    assert slow.parts.steps <= sum(s.seconds for s in waits) + 1e-9


def test_masters_on_nvme_are_read_for_their_step_in_the_backward_pass() -> None:
    found = run(disk=0.1, step_in_backward=True, **NVME)
    assert {s.phase for s in of(found, READ, WRITTEN)} == {"backward"}
    # Gradients are stepped from memory
    assert found.busy[DISK] == pytest.approx(6 * BLOCKS * 0.1)
    waits = [s for s in found.spans if s.kind == "wait" and s.name == READ]
    assert {s.stream for s in waits} == {THREAD}


def spans(timeline: Timeline) -> list[tuple[Any, ...]]:
    return [(s.stream, s.name, s.unit, s.begin, s.end) for s in timeline.spans]


def test_threads_come_in_the_order_of_their_times_in_every_run() -> None:
    options = {"disk": 0.3, "offload_param": "nvme", "step_in_backward": True, **NVME}
    first = simulation(**options).timeline
    again = simulation.__wrapped__(**options).timeline
    assert first is not None and again is not None
    assert spans(first) == spans(again)
    assert [s.begin for s in of(first, READ)] == sorted(s.begin for s in of(first, READ))


def test_a_thread_that_is_ahead_lets_the_others_run_first() -> None:
    clock, order = Clock(Prices(by_hand()), tiers=True), []

    def works(name: str, *seconds: float) -> None:
        for long in seconds:
            clock._spends(long)
            order.append((name, clock.host))

    with clocked(clock):
        thread = new_thread("beside")
        job = thread.submit(lambda: works("beside", 2.0, 2.0))
        works("first", 1.0, 2.0)
        job.result()
        assert clock.host == 4.0, "it waits for the other one"
        thread.shutdown()
    assert order == [("first", 1.0), ("beside", 2.0), ("first", 3.0), ("beside", 4.0)]


def test_a_lock_is_held_in_simulated_time() -> None:
    clock, order = Clock(Prices(by_hand()), tiers=True), []
    with clocked(clock):
        lock, thread = new_lock(), new_thread("beside")

        def takes(name: str, first: float, inside: float) -> None:
            clock._spends(first)
            with lock, lock:
                order.append((name, clock.host))
                clock._spends(inside)

        job = thread.submit(lambda: takes("beside", 2.0, 1.0))
        takes("first", 1.0, 5.0)
        job.result()
        thread.shutdown()
    assert order == [("first", 1.0), ("beside", 6.0)]


def test_an_error_of_another_thread_is_raised_where_its_job_is_waited_for() -> None:
    clock = Clock(Prices(by_hand()))
    with clocked(clock):
        thread = new_thread("beside")

        def fails() -> None:
            raise ValueError("on purpose")

        job = thread.submit(fails)
        with pytest.raises(ValueError, match="on purpose"):
            job.result()
        thread.shutdown()


# -- tiles -----------------------------------------------------------------------------------------


def test_tiles_are_gathered_one_after_the_other_and_held_two_at_a_time() -> None:
    whole, found = run(words=True), run(words=True, tile="700KB")
    names = [f"blocks.{i}.tiles.{k}" for i in range(BLOCKS) for k in range(4)]
    gathers = [
        s
        for s in found.spans
        if s.name == "all-gather" and s.kind == "collective" and "tiles" in s.unit
    ]
    forward, backward = ([s for s in gathers if s.phase == p] for p in ("forward", "backward"))
    assert [s.unit for s in forward] == names
    # Also those of the last block, which stays gathered between the passes if it is whole
    assert sorted(s.unit for s in backward) == names
    assert all(s.seconds == pytest.approx(0.25, rel=0.1) for s in gathers)
    products = {s.unit for s in found.spans if s.name == "mm" and s.kind == "model"}
    assert products >= set(names)
    held, most, tile = 0, 0, 2 * HIDDEN * HIDDEN // 4
    for event in simulation(words=True, tile="700KB").events:
        if event.what == "gathered units" and "tiles" in event.unit:
            held += event.nbytes
            most = max(most, held)
    assert most == 2 * tile, "one in use, and the next one"
    assert found.parts.model == pytest.approx(whole.parts.model)


def test_tiles_of_masters_on_the_host_go_up_one_after_the_other() -> None:
    found = run(words=True, tile="700KB", offload_optimizer="cpu", offload_param="cpu")
    ups = [s for s in of(found, UP) if "tiles" in s.unit]
    assert len(ups) == 2 * BLOCKS * 4
    assert all(s.seconds == pytest.approx(0.5 / 4) for s in ups)
