"""Activations from dimensions are those of the code: transformers' families and plain PyTorch, held
against the tracer.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch
from benchmarks.gpt import GPT, Shape
from torch import nn

from onefold.plan.activity import Activity
from onefold.plan.formulas import CODES
from onefold.plan.hardware import machine
from onefold.plan.job import Job
from onefold.plan.modules import build, class_for
from onefold.plan.planner import plan
from onefold.plan.shapes import Transformer, model_of
from onefold.simulation.stand_in import _config
from onefold.tracing.trace import trace

pytestmark = pytest.mark.one_in(12)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LENGTH = 256
DIMS = {
    "": Transformer(4, 256, 8, 1024, 1000, LENGTH),
    "gpt2": Transformer(4, 256, 8, 1024, 1000, LENGTH),
    "llama": Transformer(4, 256, 8, 688, 1000, LENGTH, kv_heads=4, gated=True, tied=False),
    "mixtral": Transformer(
        4, 256, 8, 448, 1000, LENGTH, kv_heads=4, gated=True, experts=8, active=2, tied=False
    ),
    "bloom": Transformer(4, 256, 8, 1024, 1000, LENGTH),
}


class Plain(nn.Module):
    """A GPT of torch.nn: one kernel for each norm, GELU and attention."""

    def __init__(self, dims: Transformer) -> None:
        super().__init__()
        self.gpt = GPT(Shape(dims.layers, dims.hidden, dims.heads, dims.vocab, dims.seq))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.gpt(input_ids, labels)


@cache
def module(code: str) -> nn.Module:
    dims = DIMS[code]
    if not code:
        with torch.device("meta"):
            return Plain(dims)
    import transformers

    config = _config(transformers, code, dims)
    config.use_cache = False
    made: nn.Module = build(class_for(config), config)
    return made


every = pytest.mark.parametrize(
    "code", [pytest.param(c, id=c or "plain", marks=needs_transformers if c else ()) for c in CODES]
)


@every
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_from_dimensions_are_the_traces_and_never_less(
    code: str, precision: Any, checkpointing: Any
) -> None:
    dims, element = DIMS[code], 2 if precision == "bf16" else 4
    shape = model_of("test", code or "gpt", dims)
    for samples, length in ((2, LENGTH), (8, 128)):
        ids = torch.zeros(samples, length, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        said = Activity.from_trace(
            trace(
                module(code), batch, precision=precision, device="cuda", checkpointing=checkpointing
            )
        )
        found = Activity.from_dims(shape, dims, samples, length, element, checkpointing, code)
        told = (
            f"{samples} × {length}: kept {said.saved:,} and {found.saved:,} by the formula, logits"
            f" {said.logits:,} and {found.logits:,}"
        )
        assert (
            said.saved - 128 <= found.saved <= 1.10 * said.saved and said.logits == found.logits
        ), told
        real, planned = (max(s.peak for s in a.slots) for a in (said, found))
        # The gradient of the largest parameter need not meet the highest moment: the fewer the
        # tokens, the more that is worth.
        assert real <= planned <= 1.15 * real, (
            f"{samples} × {length}: a peak of {real:,}, by the formula {planned:,}"
        )


@needs_transformers
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
def test_a_plan_by_name_fits_where_the_traced_code_fits(name: str) -> None:
    """The same question asked of a name and of transformers' code for it: peaks within 5 %, the
    name's never below.
    """
    from onefold.simulation.stand_in import code_of

    there, job = (
        machine(8, 8, "h100-80"),
        Job(seq=1024, micro_batch=4, checkpointing="none", offload="none"),
    )
    real = code_of(name)
    assert real is not None
    real.config.use_cache = False  # as a folder's model is traced
    said, traced = (plan(m, there, job, largest=False).stages[3].account for m in (name, real))
    assert traced.peak_bytes <= said.peak_bytes <= 1.05 * traced.peak_bytes, (
        traced.peak,
        said.peak,
    )
    assert said.rest == traced.rest and said.wire == traced.wire
