"""A plan answers what it was asked: the recipe's own options, the optimizer, adapters of experts,
positions, depth, odd modules.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import onefold
from examples import examples
from onefold.plan.activity import Activity
from onefold.plan.choose import Question, largest_model
from onefold.plan.hardware import Machine, machine
from onefold.plan.job import Job, Scheme
from onefold.plan.planner import plan
from onefold.plan.subject import subject_of
from onefold.simulation.simulate import simulate
from onefold.tracing.trace import trace
from zoo import TinyGPT

pytestmark = pytest.mark.one_in(9)


class Language(nn.Module):
    """A language model of its own, without a config: `depth` blocks, `length` learned positions."""

    def __init__(self, depth: int = 4, length: int = 64) -> None:
        super().__init__()
        self.inner = TinyGPT(width=32, depth=depth, length=length)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(input_ids)


def here(ranks: int, capacity: float = 1 << 34) -> Machine:
    found = machine(ranks, ranks, "a100-80")
    return replace(found, gpu=replace(found.gpu, capacity=int(capacity)))


# -- the recipe that is planned is the recipe that runs --------------------------------------------


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (2, {"reduce_at": "boundary"}),
        (3, {"reduce_at": "boundary", "reshard_after_forward": False}),
        (3, {"units": ("inner.blocks.0", "inner.blocks.2")}),
        (2, {"accumulate_dtype": "bf16"}),
    ],
    ids=str,
)
def test_the_plan_follows_every_option_of_the_recipe_to_the_byte(
    stage: int, options: dict[str, Any]
) -> None:
    job = Job.of(
        {
            "seq": 16,
            "global_batch": 4,
            "precision": "bf16",
            "checkpointing": "none",
            "offload": "none",
            **options,
        },
        "the test",
    )
    # Whose buffers a simulation has; NCCL's are in promises/test_native.py
    on_gloo = replace(here(2), shared=True)
    found = plan(Language(), on_gloo, job, stages=(stage,), largest=False)
    ran = simulate(Language(), found.recipe, 2, micro_batches=2, seq=16)
    assert found.stages[stage].accumulation == 2
    assert found.stages[stage].account.wire == ran.account.wire
    assert found.stages[stage].account.rest == ran.account.rest
    assert sum(found.stages[stage].account.ledger.values()) == sum(ran.account.ledger.values())
    usual = (
        plan(
            Language(),
            on_gloo,
            replace(job, options=(), accumulate_dtype="fp32"),
            stages=(stage,),
            largest=False,
        )
        .stages[stage]
        .account
    )
    assert (
        usual.ledger != found.stages[stage].account.ledger
        or usual.wire != found.stages[stage].account.wire
    )


def test_recipe_auto_plans_with_the_options_it_hands_on_and_says_the_micro_batch() -> None:
    recipe = onefold.plan.recipe_for(
        Language(), seq=16, micro_batch=0, global_batch=8, units=["inner.blocks.1"], prefetch=0
    )
    assert recipe.units == ("inner.blocks.1",) and recipe.prefetch == 0
    assert "micro-batch 8 on 1 ranks" in recipe.notes[-1], recipe.notes
    assert onefold.plan.recipe_for("gpt2", seq=16).stage == 0
    with pytest.raises(ValueError, match=r"chooses the stage; for stage 1 write Recipe\.zero\(1"):
        onefold.plan.recipe_for(Language(), stage=1)
    with pytest.raises(
        ValueError, match=r"recipe_for does not know prefetsch. Did you mean 'prefetch'"
    ):
        onefold.plan.recipe_for(Language(), prefetsch=1)
    with pytest.raises(ValueError, match="reduce_at='later'"):
        onefold.plan(Language(), seq=16, reduce_at="later")
    with pytest.raises(ValueError, match="planned from its dimensions"):
        onefold.plan("gpt2", gpus=8, units=["h"])


# -- figures ---------------------------------------------------------------------------------------


def test_each_optimizer_moves_its_own_bytes_in_its_own_time() -> None:
    seconds = {
        name: (
            plan("llama-3-8b", machine(8, 8, "h100-80"), Job(optimizer=name), largest=False)
            .stages[1]
            .account.seconds["optimizer"]
        )
        for name in ("adamw", "lion", "sgd")
    }
    assert seconds["lion"] / seconds["adamw"] == pytest.approx(20 / 28)
    assert seconds["sgd"] / seconds["adamw"] == pytest.approx(12 / 28)


# -- depth -----------------------------------------------------------------------------------------


def traced(depth: int, checkpointing: Any = "none") -> Activity:
    ids = torch.zeros((2, 16), dtype=torch.long)
    return Activity.from_trace(
        trace(Language(depth), {"input_ids": ids}, checkpointing=checkpointing)
    )


JOB = Job(seq=32, precision="fp32", checkpointing="none", offload="none")
SUBJECT = cache(lambda: subject_of(Language(), JOB, None, None, here(2)))  # traced once


@given(st.integers(1, 60), st.sampled_from((1, 2, 4)), st.sampled_from((0, 1, 2, 3)))
@examples(40)
def test_the_largest_model_is_at_least_this_one_if_and_only_if_this_one_fits(
    tenths: int, micro: int, stage: int
) -> None:
    asked = Question(SUBJECT().shape, SUBJECT().activities, here(2, (1 << 30) + tenths * 1e5), JOB)
    scheme = Scheme(stage, micro_batch=micro)
    largest = largest_model(asked, scheme, SUBJECT().another)
    assert (largest >= asked.model.numel) == asked.answer(scheme).fits, (
        scheme,
        largest,
        asked.model.numel,
    )


# -- what a run could not do -----------------------------------------------------------------------


# -- what is printed -------------------------------------------------------------------------------


# -- odd modules -----------------------------------------------------------------------------------


class Raising(Language):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        raise RuntimeError("broken at x=3")


class Needing(Language):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.inner(input_ids)


class Numpy(Language):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(torch.from_numpy(input_ids.numpy()))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.LazyLinear(10)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(input_ids))
        return out


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Raising,
            (
                "Raising failed in the trace of its forward and backward pass: RuntimeError: broken"
                " at x=3"
            ),
        ),
        (Needing, "attention_mask.*batch=function"),
        (Numpy, "Numpy failed in the trace"),
        (Lazy, "lazy parameters .head.weight.*run one batch"),
    ],
)
def test_whatever_a_module_raises_is_a_sentence(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(kind(), here(2), Job(seq=16), largest=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": "8"}, "gpus='8': expected a whole number"),
        ({"gpus": 2.5}, "gpus=2.5"),
        ({"gpus": 8, "gpu": None}, "gpu=None: expected a name such as h100-80"),
        ({"gpus": 8, "per_node": 0}, "per_node=0"),
    ],
    ids=str,
)
def test_a_machine_that_cannot_be_is_refused_in_a_sentence(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        onefold.plan("gpt2", **options)
    for nothing in ("", Path("")):
        with pytest.raises(ValueError, match="name is empty"):
            onefold.plan(nothing, gpus=8)
