"""The choice: the lowest stage that fits, then what slows least; the largest that fits; what to do
where nothing does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_plans import GIB, activity, gpus
from torch import nn

from examples import examples
from onefold.plan.account import COMMUNICATOR, CONTEXT, Question
from onefold.plan.activity import of_dims
from onefold.plan.api import planned as plan
from onefold.plan.hardware import machine
from onefold.plan.job import CHECKPOINTING, Job, Scheme
from onefold.plan.modules import model_shape, module_of
from onefold.plan.search import ladder, largest_micro_batch, recommend
from onefold.plan.shapes import ModelShape
from onefold.tracing.trace import Activity

pytestmark = pytest.mark.one_in(3)


def question(shape: ModelShape, ranks: int, capacity: float, job: Job) -> Question:
    return Question(shape, lambda m, c: activity(shape, job, m, c), gpus(ranks, capacity), job)


NAMES, GPUS = (
    ("gpt2-xl", "llama-3-8b", "gpt3-13b", "mixtral-8x7b", "gpt3-175b"),
    (
        "v100-32",
        "a100-40",
        "h100-80",
        "rtx4090",
    ),
)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("gpu", "ranks"), [(gpu, 8) for gpu in GPUS] + [("h100-80", 64)])
def test_behind_the_stages_every_candidate_is_slower_than_the_one_before(
    name: str, gpu: str, ranks: int
) -> None:
    shape, job = model_shape(module_of(name), name=name), Job(seq=1024, precision="fp16")
    assert shape.transformer is not None
    dims = shape.transformer
    asked = Question(
        shape,
        lambda m, c: of_dims(shape, dims, m, job.seq, 2, c),
        machine(ranks, 8, gpu),
        job,
    )
    every = list(ladder(asked))
    first, others = every[:3], every[3:]
    assert [str(c.scheme) for c in first] == ["stage 1", "stage 2", "stage 3"]
    seconds = [round(c.step, 9) for c in others]
    assert seconds == sorted(seconds), seconds
    shares = {c.scheme.share for c in others if c.scheme.offload == "optimizer"}
    assert shares == {0.25, 0.5, 0.75, 1.0} and len({c.scheme for c in every}) == len(every)
    best = recommend(asked)
    # Nothing else that fits is faster
    if best is not None and best not in first:
        assert best.step == pytest.approx(min(c.step for c in others if c.fits), abs=1e-9)


@given(st.floats(1.2, 40), st.sampled_from((1, 2, 4, 8)), st.sampled_from((0, 1, 4)))
@examples(60)
def test_what_is_recommended_is_the_first_of_the_ladder_that_fits(
    capacity: float, ranks: int, micro: int
) -> None:
    asked = question(
        ModelShape.of_size(300_000_000), ranks, capacity * GIB, Job(seq=256, micro_batch=micro)
    )
    best = recommend(asked)
    found = next((c for c in ladder(asked) if c.fits), None)
    if best is None or found is None:
        assert best is found, (best, found)
        return
    assert replace(best.scheme, micro_batch=found.scheme.micro_batch) == found.scheme
    assert best.fits and best.account.peak_bytes <= best.usable < asked.machine.capacity


@given(st.floats(3, 30), st.sampled_from((0, 96, 120)), st.sampled_from(sorted(CHECKPOINTING)))
@examples(40)
def test_the_largest_micro_batch_fits_and_the_next_does_not(
    capacity: float, global_batch: int, checkpointing: str
) -> None:
    job = Job(seq=128, micro_batch=0, global_batch=global_batch)
    asked = question(ModelShape.of_size(100_000_000), 4, capacity * GIB, job)
    found = largest_micro_batch(asked, Scheme(1, checkpointing))
    sizes = [b for b in range(1, 31) if not global_batch or global_batch // 4 % b == 0]
    if found is None:
        assert not asked.answer(Scheme(1, checkpointing, "none", 1)).fits
        return
    assert found.fits
    size = found.scheme.micro_batch
    if global_batch:
        assert global_batch % (4 * size) == 0 and found.accumulation == global_batch // 4 // size
        later = [b for b in sizes if b > size]
    else:
        later = [size + 1]
    for b in later[:1]:
        assert not asked.answer(Scheme(1, checkpointing, "none", b)).fits


def test_what_fits_nowhere_here_is_told_with_what_would_do() -> None:
    # With native sums, what a GPU reserves depends on the number of communicators alone
    native, kept = (("reduce", "native"),), CONTEXT + 2 * COMMUNICATOR
    on_nodes = CONTEXT + 5 * COMMUNICATOR
    shape = ModelShape.of_size(300_000_000)
    fixed = plan(
        shape, gpus(4, 2.6 * GIB + kept), Job(seq=32, options=native), stages=(1,), largest=False
    )
    assert fixed.recommended is not None
    wide = plan(
        shape,
        gpus(2, 3 * GIB + kept),
        Job(seq=256, micro_batch=64, checkpointing="none", offload="none", options=native),
        largest=False,
    )
    assert (
        wide.recommended is None
        and "exceeds" in wide.why_not
        and "micro-batch 1 would fit" in wide.why_not
    )
    tight = Job(seq=256, offload="none", options=native)
    more = plan(shape, gpus(2, 1.0 * GIB + on_nodes), tight, largest=False)
    assert more.recommended is None and " devices stage 3" in more.why_not, more.why_not
    ranks = int(more.why_not.split(" devices")[0].rsplit(" ", 1)[1])
    again = question(shape, ranks, 1.0 * GIB + on_nodes, Job(seq=256, options=native))
    assert recommend(again) is not None
    never = plan(shape, gpus(2, 0.01 * GIB + kept), Job(seq=4096), largest=False)
    assert never.recommended is None and "No number of devices would do" in never.why_not
    # What only some answers can have is left out of the question that is widened
    backward = (("offload_optimizer", "cpu"), ("step_in_backward", True))
    placed = plan(shape, gpus(1, 0.1 * GIB + kept), Job(seq=32, options=backward), largest=False)
    assert "micro-batch 1 would fit" in placed.why_not, placed.why_not
    without_blocks = plan(
        nn.Sequential(nn.Linear(8192, 8192)), gpus(1, 0.1 * GIB), Job(),
        batch=lambda n: (torch.empty(n, 8192),), largest=False,
    )  # fmt: skip
    assert "does not fit" in without_blocks.why_not, without_blocks.why_not
    # Of larger machines those are passed over that the job's own groups do not fill
    thirds = Job(seq=32, offload="none", options=(("shard_group", 3),))
    grouped = plan(shape, replace(gpus(6, 0.1 * GIB + kept), per_node=8), thirds, largest=False)
    assert "does not fit" in grouped.why_not, grouped.why_not
    with pytest.raises(ValueError, match="does not fit"):
        _ = never.recipe


def test_a_few_accounts_find_the_largest_micro_batch_also_where_the_host_is_what_limits_it() -> (
    None
):
    asked, shape = set[int](), ModelShape.of_size(100_000_000)
    job = Job(seq=128, micro_batch=0, options=(("offload_activations", "cpu"),))
    there = gpus(1, 1 << 40)
    there = replace(there, host=there.host.model_copy(update={"memory": 40 * GIB}))

    def counted(micro: int, how: str) -> Activity:
        asked.add(micro)
        return activity(shape, job, micro, how)

    found = largest_micro_batch(Question(shape, counted, there, job), Scheme(0))
    assert found is not None and found.scheme.micro_batch > 100 and len(asked) < 18, asked
