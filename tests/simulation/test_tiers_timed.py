"""The timeline of a step with state on the host: by hand on a machine of round figures, and Llama 3
8B on H100s against the plan's own figure.

`python tests/simulation/test_tiers_timed.py` prints the table of docs/measured.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

import onefold
from onefold.plan import hardware
from onefold.plan.evaluate import evaluate
from onefold.plan.job import Job, Scheme
from onefold.plan.subject import subject_of
from onefold.simulation.result import Simulation
from onefold.simulation.simulate import simulate
from onefold.simulation.timeline import COPIES
from timed import ADAM, BLOCKS, CAST, HIDDEN, ROWS, SHORT, of, run, seconds, short_llama

pytestmark = pytest.mark.one_in(6)

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


# -- what it is made of ----------------------------------------------------------------------------


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
