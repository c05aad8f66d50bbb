"""The timeline of a step with state on the host: by hand on a machine of round figures, and Llama 3
8B on H100s against the plan's own figure.

`python tests/simulation/test_tiers_timed.py` prints the table of docs/measured.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer

import onefold
from onefold.device import clocked, host_device, on_host
from onefold.plan import hardware
from onefold.plan.evaluate import evaluate
from onefold.plan.job import Job, Scheme
from onefold.plan.subject import subject_of
from onefold.simulation import places
from onefold.simulation.clock import Clock
from onefold.simulation.places import fused_there, place_of
from onefold.simulation.prices import Prices
from onefold.simulation.result import Simulation
from onefold.simulation.simulate import simulate
from onefold.simulation.timeline import COPIES, HOST
from timed import ADAM, BLOCKS, CAST, HIDDEN, ROWS, SHORT, by_hand, of, run, seconds, short_llama

with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
UP, DOWN = COPIES["up"], COPIES["down"]
STEPPED = "_fused_adamw_"


# -- states on the host ----------------------------------------------------------------------------


def test_a_step_with_states_on_the_host_takes_its_copies_and_its_update_too() -> None:
    plain, found = run(), run(offload_optimizer="cpu")
    down, up = seconds(of(found, DOWN)), seconds(of(found, UP))
    assert down == pytest.approx(BLOCKS * 1.0), "fp32 gradients"
    assert up == pytest.approx(BLOCKS * 0.5), "bf16 parameters"
    assert found.busy["host link down"] == pytest.approx(down)
    update = BLOCKS * (1.0 + CAST / ADAM)
    assert found.parts.optimizer == pytest.approx(update)
    assert found.busy["host"] == pytest.approx(update)
    assert found.step >= down + update
    assert found.parts.model == pytest.approx(plain.parts.model)
    assert found.step == pytest.approx(plain.step + update + found.parts.copies + 0.5), (
        "0.5: the first gather waits for the last copy up of the step before"
    )
    assert found.bound == "compute"


def test_copies_down_run_beside_the_backward_pass() -> None:
    found = run(offload_optimizer="cpu")
    apart = sum(found.busy[name] for name in ("host link down", "host link up", "host"))
    assert found.step < run().step + apart - 3
    first, *others = of(found, DOWN)
    assert [c.unit for c in (first, *others)] == [f"blocks.{i}" for i in (3, 2, 1, 0)]
    last = [s for s in found.spans if s.kind == "model"][-1]
    assert (last.unit, first.begin) == ("blocks.0", pytest.approx(last.begin))
    # A sum lands when two more reductions are launched (`in_flight`): that of block 3 behind the
    # backward pass of block 1, and the other three have little left to hide behind
    assert sum(c.begin >= last.end for c in others) == 3
    assert found.parts.exposed[DOWN] == pytest.approx(2.0)
    assert found.exposed["blocks.0"][DOWN] == pytest.approx(2.0), "the host waits for the last one"


def test_a_slower_link_exposes_more() -> None:
    waits = [run(offload_optimizer="cpu", down=down).parts.copies for down in (0.5, 1.0, 2.0, 4.0)]
    assert all(a < b for a, b in pairwise(waits)), waits
    assert waits[-1] - waits[-2] > waits[-2] - waits[-3], "nothing is left to hide behind"


def test_half_the_hosts_rate_takes_the_update_once_more() -> None:
    fast, slow = (run(offload_optimizer="cpu", update=update) for update in (1.0, 2.0))
    more = BLOCKS * (1.0 + CAST / ADAM)
    assert slow.parts.optimizer - fast.parts.optimizer == pytest.approx(more)
    assert slow.step - fast.step == pytest.approx(more)


def test_masters_go_up_while_the_host_steps_the_next_block() -> None:
    found = run(offload_optimizer="cpu")
    steps, ups = of(found, STEPPED), of(found, UP)
    assert len(steps) == len(ups) == BLOCKS
    for up, following in zip(ups[:-1], steps[1:], strict=True):
        assert up.begin == pytest.approx(following.begin)
    assert found.exposed["blocks.0"]["all-gather"] == pytest.approx(1.5), (
        "the first gather waits on their stream for the last copy up"
    )


def test_parameters_on_the_host_go_up_for_every_gather() -> None:
    found = run(offload_optimizer="cpu", offload_param="cpu")
    ups = of(found, UP)
    assert len(ups) == 2 * BLOCKS - 1, "the last block stays gathered between its passes"
    assert {s.phase for s in ups} == {"forward", "backward"}
    gathers = [s for s in found.spans if s.kind == "collective" and s.name == "all-gather"]
    for gather in gathers:
        copy = found.spans[gather.after]
        assert (copy.name, copy.unit) == (UP, gather.unit)
        assert gather.begin >= copy.end
    assert found.exposed["blocks.0"][UP] == pytest.approx(0.5), "the first block waits for both"
    assert found.exposed["blocks.0"]["all-gather"] == pytest.approx(1.0)


@pytest.mark.parametrize("stage", [1, 2])
def test_resident_parameters_are_gathered_behind_the_copies_up(stage: int) -> None:
    found = run(stage=stage, offload_optimizer="cpu")
    first = min((s for s in found.spans if s.kind == "collective"), key=lambda s: s.begin)
    assert (first.unit, first.begin) == ("blocks.0", 0.5)
    assert seconds(of(found, DOWN)) == pytest.approx(BLOCKS)


def test_sums_of_later_micro_batches_go_up_are_added_and_come_down() -> None:
    one, two = (run(stage=2, micro_batches=n, offload_optimizer="cpu") for n in (1, 2))
    sums = [s for s in two.spans if s.stream == "sums up" and s.kind == "copy"]
    assert [s.unit for s in sums] == [f"blocks.{i}" for i in (3, 2, 1, 0)]
    assert seconds(of(two, DOWN)) == pytest.approx(2 * BLOCKS)
    assert seconds(sums) == pytest.approx(BLOCKS)
    for up in sums:
        down = next(s for s in of(two, DOWN) if s.unit == up.unit and s.begin >= up.end)
        assert down.begin >= up.end, "it comes down when the device has added to it"
    assert two.parts.optimizer == pytest.approx(one.parts.optimizer), "the host adds nothing"


def test_a_third_of_micro_batches_in_the_middle_waits_as_they_do() -> None:
    three, five = (run(stage=2, micro_batches=n, offload_optimizer="cpu") for n in (3, 5))
    assert three.of(5).step == pytest.approx(five.step)
    assert three.middle is not None and three.middle.copies > 0


def test_a_part_on_the_host_takes_a_part_of_the_copies() -> None:
    whole, part = (run(offload_optimizer=where) for where in ("cpu", "cpu:0.5"))
    assert len(of(part, DOWN)) == len(of(part, UP)) == len(of(part, STEPPED)) // 2 + 1 == 2
    assert part.parts.optimizer < whole.parts.optimizer
    assert part.step < whole.step


def test_the_hosts_update_is_priced_by_what_the_optimizer_moves() -> None:
    adam, momentum, plain = (
        run(offload_optimizer="cpu", optimizer=name).parts.optimizer
        for name in ("adamw", "sgd-momentum", "sgd")
    )
    moved = [28, 20, 12]
    assert [adam, momentum, plain] == pytest.approx([BLOCKS * (n + CAST) / ADAM for n in moved])


# -- activations -----------------------------------------------------------------------------------


def test_activations_go_down_in_the_forward_pass_and_come_up_before_they_are_read() -> None:
    plain, found = run(), run(offload_activations="16MB")
    downs, ups = of(found, DOWN), of(found, UP)
    assert {s.phase for s in downs} == {"forward"} and {s.phase for s in ups} == {"backward"}
    assert {s.stream for s in (*downs, *ups)} == {"activations"}
    assert {s.unit for s in (*downs, *ups)} == {"activations"}
    assert 0 < len(ups) < len(downs), "the last ones are still on the device"
    assert all(s.nbytes == 2 * ROWS * HIDDEN for s in (*downs, *ups))
    assert found.step == plain.step, "they hide behind the passes"


def test_activations_over_a_slow_link_make_the_passes_wait() -> None:
    plain, slow = run(), run(offload_activations="16MB", down=8.0)
    assert slow.parts.copies > 0
    assert slow.step == pytest.approx(plain.step + slow.parts.copies, abs=8.0)
    assert slow.bound in ("host link down", "host link up")


# -- what it is made of ----------------------------------------------------------------------------


def test_a_recipe_on_the_device_has_no_host_in_its_timeline() -> None:
    found = run()
    assert HOST not in found.streams
    assert found.parts.copies == 0.0
    assert not {"host link up", "host link down"} & set(found.busy)
    assert found.step == 11 * 2 + 2


def test_the_hosts_memory_is_another_device_inside_a_clock_with_tiers() -> None:
    cpu = torch.empty(1)
    assert host_device() == torch.device("cpu")
    with clocked(Clock(Prices(by_hand()))):
        assert host_device() == torch.device("cpu") and on_host(cpu)
    with clocked(Clock(Prices(by_hand()), tiers=True)):
        assert host_device() == places.HOST and not on_host(cpu)
    assert on_host(cpu)


def test_fused_optimizers_step_the_hosts_tensors_only_inside() -> None:
    before = torch_optimizer._get_fused_kernels_supported_devices
    with fused_there():
        assert places.HOST.type in torch_optimizer._get_fused_kernels_supported_devices()
    assert torch_optimizer._get_fused_kernels_supported_devices is before


def test_what_is_no_copy_between_host_and_device_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        here, there = torch.empty(4), torch.empty(4, device=places.HOST)
    assert place_of("copy_", (here, there), {}, here) == "up"
    assert place_of("copy_", (there, here), {}, there) == "down"
    assert place_of("_to_copy", (here,), {}, there) == "down"
    assert place_of("add", (here, here), {}, here) == "device"
    assert place_of("add", (there, there), {}, there) == "host"
    with pytest.raises(ValueError, match="the operation add works on tensors of the host and of"):
        place_of("add", (here, there), {}, here)


# -- the plan's own figure -------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def of_few_blocks() -> Iterator[None]:
    with short_llama():
        yield


def offloaded(stage: int, offload: str, seq: int = 2048) -> tuple[Any, Simulation]:
    """The plan's account of a short Llama 3 8B on eight H100s, and the simulation."""
    machine = hardware.machine(8, 8, "h100-80")
    job, scheme = Job(seq=seq, global_batch=8), Scheme(stage, "none", offload)
    subject = subject_of(SHORT, job, None, None, machine)
    told = evaluate(subject.shape, subject.activities(1, "none"), machine, job, scheme).account
    return told, simulate(SHORT, scheme.recipe(job), 8, seq=seq, machine=machine)


@with_transformers
@pytest.mark.parametrize(("stage", "offload"), [(2, "optimizer"), (3, "parameters")])
def test_llama_with_states_on_the_host_takes_what_the_plan_says(stage: int, offload: str) -> None:
    """A copy down begins when its reduction lands, which the plan does not know: the last ones have
    less to hide behind.
    """
    told, found = offloaded(stage, offload)
    assert found.exact, f"{found.account.moved} against {found.predicted.moved}"
    assert found.account.moved == told.moved
    assert found.timeline is not None
    parts, plan = found.timeline.parts, told.seconds
    said = f"plan {plan}, timeline {found.timeline.step:.4f} s, {parts}"
    assert parts.optimizer == pytest.approx(plan["optimizer"], rel=0.001), said
    assert parts.copies == pytest.approx(plan["io"], rel=0.2), said
    assert plan["step"] == pytest.approx(found.timeline.step, rel=0.05), said


# -- figures of docs/measured.md -------------------------------------------------------------------


def _waits(model: str, gpus: int, micro_batches: int) -> float:
    """Seconds for which a step's passes wait for copies of gradients to the host."""
    found = simulate(
        model,
        onefold.Recipe.zero(2, precision="bf16", offload_optimizer="cpu"),
        gpus,
        seq=8192,
        micro_batches=micro_batches,
        checkpointing="full",
        machine=hardware.machine(gpus, 8, "h100-80"),
    )
    assert found.timeline is not None
    return found.timeline.parts.exposed.get(DOWN, 0.0)


if __name__ == "__main__":
    for model, gpus, batches in (("llama-3-8b", 4, 1), ("llama-3-8b", 8, 4), ("llama-3-70b", 8, 1)):
        print(f"| {model} on {gpus}, {batches} | {1e3 * _waits(model, gpus, batches):.0f} ms |")
