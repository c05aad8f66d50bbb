"""The timeline of a step with state on the host: by hand on a machine of round figures, and Llama 3
8B on H100s against the plan's own figure.

`python tests/simulation/test_tiers_timed.py` prints the table of docs/measured.md.
"""

from __future__ import annotations

import importlib.util
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
from timed import ADAM, BLOCKS, CAST, SHORT, of, run, seconds

pytestmark = pytest.mark.one_in(6)

with_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
UP, DOWN = COPIES["up"], COPIES["down"]


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


# -- activations -----------------------------------------------------------------------------------


# -- what it is made of ----------------------------------------------------------------------------


# -- the plan's own figure -------------------------------------------------------------------------


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
