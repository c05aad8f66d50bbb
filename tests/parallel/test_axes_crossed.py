"""Other axes crossed with what a recipe and a loop may say: accumulation, clipping, loss scaling, frozen
parts, adapters of peft, offload, codecs, checkpointing.

The meshes have 4 ranks, over dp, ep and tp. What rounds as fp32 does trains as one process within
rounding, and stages 1, 2 and 3 have the same bits. What rounds more (fp16, codecs) leads the weights
in the same direction: what they have moved differs by a part of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mixture_models import Case, in_one_process, trained

from examples import ALL
from ranks import run_ranks

SERVER = "libraries"
#: (dp, ep, tp)
MESHES = [(2, 1, 2), (2, 2, 1), (1, 2, 2), (1, 1, 4), (4, 1, 1)]
FROZEN = [(), ("tokens", "blocks.0"), ("blocks.0.experts.up", "blocks.1.attention.wo", "head")]
#: Of what weights have moved in one process: by how much they may differ in the end.
LOOSE: dict[str, float] = {
    "fp16": 0.05,
    "bf16": 0.15,
    "gather int8": 0.15,
    "reduce int8": 0.15,
    "both int8": 0.2,
    "reduce fp8": 0.3,
    "frozen int8": 0.15,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "gather int8": {"gather_codec": "int8"},
    "reduce int8": {"reduce_codec": "int8"},
    "both int8": {"gather_codec": "int8", "reduce_codec": "int8", "error_feedback": True},
    "reduce fp8": {"reduce_codec": "fp8"},
    "frozen int8": {"frozen": "int8"},
}


#: What no example may leave out.
EVERYTHING = Case(
    dp=2,
    ep=1,
    steps=2,
    micro_batches=2,
    max_norm=0.05,
    learned=False,
    checkpointing=True,
    scaler=True,
    lora=True,
    options={"offload_optimizer": "cpu", "borders": True},
)


def few(n: int) -> settings:
    """`n` examples with `--all`, two in `make test`: each starts four ranks."""
    return settings(max_examples=max(2, n * (settings().max_examples == ALL)))


@st.composite
def cases(draw: Any, rounds: Any) -> tuple[Case, str]:
    dp, ep, tp = draw(st.sampled_from(MESHES))
    lora = draw(st.booleans())
    how = draw(rounds)
    options = dict(OPTIONS.get(how, {}))
    if draw(st.booleans()):
        options["offload_optimizer"] = "cpu"
    if draw(st.booleans()):
        options["borders"] = True
    case = Case(
        dp=dp,
        ep=ep,
        tp=tp,
        steps=2,
        micro_batches=draw(st.integers(1, 3)),
        max_norm=draw(st.sampled_from([None, 0.05, 100.0])),
        learned=False,
        checkpointing=draw(st.booleans()),
        scaler=how == "fp16" or draw(st.booleans()),
        lora=lora,
        frozen=() if lora else draw(st.sampled_from(FROZEN)),
        options=options,
    )
    return case, how


@few(32)
@given(cases(st.just("fp32")))
@example((EVERYTHING, "fp32"))
def test_what_rounds_as_fp32_trains_as_one_process(drawn: tuple[Case, str]) -> None:
    case, _ = drawn
    expected = in_one_process(case)
    found = run_ranks(4, trained, case, 1, 2, 3)
    first: Any = None
    for stage, ranks in zip((1, 2, 3), zip(*found, strict=True), strict=True):
        for rank, seen in enumerate(ranks):
            told = f"{case}, stage {stage}, rank {rank}"
            for what, wanted in (
                ("losses", expected["losses"][rank // case.tp]),
                ("norms", expected["norms"]),
            ):
                torch.testing.assert_close(
                    seen[what],
                    wanted,
                    rtol=5e-5,
                    atol=2e-6,
                    msg=f"{told}: {what} {seen[what]}, expected {wanted}",
                )
            assert seen["scale"] == (2.0**8 if case.scaler else None), told
            assert stage < 3 or seen["gathered"] == 0, f"{told}: units stay gathered"
        weights = ranks[0]["weights"]
        assert weights.keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            apart = (weights[key] - value).abs().max().item()
            assert apart < 2e-5, f"{case}, stage {stage}: {key} differs by {apart}"
        bits = [(seen["losses"], seen["norms"]) for seen in ranks]
        # Stages 2 and 3 reduce in every micro-batch, and so add up in another order
        if first is None or (stage == 2 and case.micro_batches > 1):
            first = bits, weights
        assert bits == first[0], f"{case}: stage {stage} has other bits"
        for key, value in weights.items():
            assert torch.equal(value, first[1][key]), f"{case}: {key} at stage {stage}"


@pytest.mark.slow
@few(24)
@given(cases(st.sampled_from(sorted(OPTIONS))), st.sampled_from([1, 2, 3]))
def test_what_rounds_more_moves_the_weights_as_in_one_process(
    drawn: tuple[Case, str], stage: int
) -> None:
    case, how = drawn
    expected = in_one_process(case)
    ranks = run_ranks(4, trained, case, stage)
    bound = LOOSE[how]
    for rank, (seen,) in enumerate(ranks):
        told = f"{how}, {case}, stage {stage}, rank {rank}"
        for got, wanted in zip(seen["losses"], expected["losses"][rank // case.tp], strict=True):
            assert abs(got - wanted) < 0.02 * wanted, f"{told}: loss {got}, expected {wanted}"
        for got, wanted in zip(seen["norms"], expected["norms"], strict=True):
            assert abs(got - wanted) < bound * wanted, f"{told}: norm {got}, expected {wanted}"
        assert seen["norms"] == ranks[0][0]["norms"], f"{told}: norms differ between ranks"
    weights, start, wanted = ranks[0][0]["weights"], expected["start"], expected["weights"]
    # What is frozen may be stored in fewer bits
    moving = [name for name, value in wanted.items() if not torch.equal(value, start[name])]
    moved = torch.cat([(wanted[name] - start[name]).flatten() for name in moving])
    got = torch.cat([(weights[name] - start[name]).flatten() for name in moving])
    apart = ((got - moved).norm() / moved.norm()).item()
    assert apart < bound, f"{how}, {case}, stage {stage}: moved otherwise by {apart:.3f}"
