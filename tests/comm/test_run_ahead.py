"""The host runs two units ahead of the device, and notices there that a peer hangs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
import standin
import virtual
from onefold.comm import CollectiveContext
from onefold.comm.pending import AHEAD, RunAhead
from onefold.device import clocked
from onefold.plan.hardware import Gpu, Host, Machine
from onefold.runtime import schedule
from onefold.simulation.clock import Clock
from onefold.simulation.prices import Prices
from ranks import run_ranks

CPU = torch.device("cpu")
BLOCKS = 12


def no_peer_is_late(context: CollectiveContext, seconds: float) -> Exception:
    raise AssertionError(f"{context}, {seconds} s")


def queued(units: int, on_host: float, on_device: float) -> tuple[list[float], list[float], int]:
    """When the host queues each unit, when the device begins each, and how often the host waited,
    if a unit takes the host and the device these seconds.
    """
    gpu = Gpu("by hand", "", 1 << 40, {"bf16": 1.0}, 1.0, 1.0, 1.0, 1.0)
    clock = Clock(Prices(Machine(gpu, 1, 1, None, Host(1.0, 1.0, 1.0, 1.0, 1.0))))
    begun: list[float] = []
    came: list[float] = []
    with clocked(clock):
        ahead = RunAhead(CPU, 1.0, no_peer_is_late)
        stream = clock.current_stream()
        for unit in range(units):
            ahead.comes(unit, "forward")
            came.append(clock.host)
            clock.host += on_host
            begun.append(max(stream.free, clock.host))
            stream.free = begun[-1] + on_device
    return came, begun, ahead.polls


def test_the_host_waits_for_the_unit_before_the_last_and_never_for_later_work() -> None:
    came, begun, polls = queued(10, on_host=0.0, on_device=1.0)
    assert AHEAD == 2
    # Unit i is queued when the device begins unit i - 2: it has two units to do meanwhile
    assert came == [0.0, 0.0, *begun[:-2]] and begun == [float(i) for i in range(10)]
    assert polls == 10 - 3  # the device has nothing to do before unit 0


def test_the_host_does_not_wait_if_the_device_keeps_up() -> None:
    came, begun, polls = queued(10, on_host=2.0, on_device=1.0)
    assert polls == 0 and came == [2.0 * i for i in range(10)] and begun == [t + 2.0 for t in came]


def test_several_calls_for_one_unit_count_once() -> None:
    gpu = Gpu("by hand", "", 1 << 40, {"bf16": 1.0}, 1.0, 1.0, 1.0, 1.0)
    clock = Clock(Prices(Machine(gpu, 1, 1, None, Host(1.0, 1.0, 1.0, 1.0, 1.0))))
    with clocked(clock):
        ahead = RunAhead(CPU, 1.0, no_peer_is_late)
        for _ in range(5):
            ahead.comes(7, "backward")
        assert len(ahead._marks) == 1
        ahead.comes(7, "forward", again=True)
        ahead.comes(7, "forward", again=True)
        assert len(ahead._marks) == AHEAD


class Late:
    """An event that comes after some questions; None: never."""

    def __init__(self, questions: int | None) -> None:
        self.questions = questions

    def query(self) -> bool:
        if self.questions is None:
            return False
        self.questions -= 1
        return self.questions < 0


def test_a_long_kernel_is_not_taken_for_a_peer_that_hangs() -> None:
    """Only a wait that the device has begun and not ended is."""
    gather, reduction = (
        CollectiveContext(move, "blocks.1", 4, "backward")
        for move in ("all-gather", "reduce-scatter")
    )

    class Lost(Exception):
        pass

    def lost(context: CollectiveContext, seconds: float) -> Exception:
        return Lost(str(context))

    ahead = RunAhead(CPU, 0.001, lost)
    ended, begun, coming = (gather, Late(0), Late(0)), Late(0), Late(None)
    ahead._reach(Late(2000), [ended, (reduction, coming, coming)])
    assert ahead.polls == 1
    with pytest.raises(Lost, match=r"reduce-scatter of unit 'blocks.1' \(backward, step 4\)"):
        ahead._reach(Late(None), [ended, (reduction, begun, coming)])


def test_nothing_bounds_the_host_where_it_waits_itself() -> None:
    """On a CPU no unit asks for anything."""
    assert run_ranks(2, bounded) == [False, False]


def bounded() -> bool:
    model = onefold.shard(nn.Linear(4, 4), onefold.Recipe.zero(3))
    return onefold.engine_of(model).group.run_ahead is not None


def beside_a_peer_that_hangs(stage: int, phase: str, frozen: bool, at: int) -> tuple[str, int]:
    """(the error on rank 0, how many blocks it had come to); rank 1 does not take part in step
    `at`, or in its backward pass. `frozen`: all blocks but the first, which nothing reduces.
    """
    virtual.start(seed=0)
    standin.register("cpu", "virtual")
    group = standin.new_group()
    schedule.SMALL_TRAFFIC = 0  # each unit is one whose reduction is waited for
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(BLOCKS))).to("virtual")
    for block in plain[1:] if frozen else ():
        block.requires_grad_(False)
    recipe = onefold.Recipe.zero(stage, stall_timeout=2.0)
    model = onefold.shard(plain, recipe, group=group, units=(nn.Linear,))
    come: list[str] = []

    def comes(block: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        come.append("forward")
        output.register_hook(lambda _: come.append("backward"))

    for block in model:
        block.register_forward_hook(comes)
    said = ""
    for step in range(at + 1):
        hangs = dist.get_rank() == 1 and step == at
        come.clear()
        if hangs and phase == "forward":
            break
        try:
            loss = model(torch.ones(2, 6).to("virtual")).square().mean()
            if hangs:
                break
            loss.backward()
        except onefold.StallError as error:
            said = str(error)
    dist.barrier()
    return said, come.count(phase)


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@pytest.mark.parametrize(
    ("stage", "phase", "move", "frozen", "at"),
    [
        (3, "forward", "all-gather", False, 2),
        (3, "forward", "all-gather", False, 0),
        (3, "backward", "(all-gather|reduce-scatter)", False, 2),
        (3, "backward", "all-gather", True, 2),
        (2, "backward", "reduce-scatter", False, 2),
    ],
)
def test_a_peer_that_hangs_is_named_in_the_middle_of_the_pass(
    stage: int, phase: str, move: str, frozen: bool, at: int
) -> None:
    (said, come), _ = run_ranks(2, beside_a_peer_that_hangs, stage, phase, frozen, at)
    assert re.search(rf"gave up waiting in {move} of unit '\d+' \({phase}, step {at}\)", said), said
    assert "rank 1: not waiting in any collective" in said, said
    assert come == 0 if at == 0 else 0 < come < BLOCKS - 2, come
