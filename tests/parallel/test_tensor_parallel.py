"""ZeRO beside tensor parallelism: at every stage the same as one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from axes_models import Case, in_one_process, trained

from ranks import run_ranks

STAGES = [0, 1, 2, 3]

CASES = {
    "Llama": Case(),
    "Llama, sequence parallel": Case(plan="sequence"),
    "Llama, loss parallel": Case(plan="loss"),
    "GPT": Case(model="gpt"),
    "tensor parallel alone": Case(dp=1),
    "three data ranks": Case(dp=3),
    "uneven parts": Case(dp=1, tp=3, hidden=41, plan="layers"),
    "accumulation": Case(micro_batches=3),
    "accumulation, sequence parallel": Case(micro_batches=2, plan="sequence"),
    "checkpointing": Case(checkpointing=True),
    "checkpointing, sequence parallel": Case(checkpointing=True, plan="sequence"),
    "frozen": Case(frozen=("tok_embeddings", "layers.0.feed_forward", "layers.1.ffn_norm")),
    "frozen, sequence parallel": Case(plan="sequence", frozen=("layers.0", "norm")),
    "adapters beside a frozen base": Case(
        adapters=True, frozen=("tok_embeddings", "layers.0.attention", "output")
    ),
    "tied": Case(tied=True),
    "meta": Case(meta=True),
    "plain parameters only": Case(plan="none"),
    "fp16 scaling": Case(scaler=True),
    "offloaded": Case(options={"offload_optimizer": "cpu"}),
    "kept for backward": Case(options={"reshard_after_forward": False}),
    "reduced at the boundary": Case(micro_batches=2, options={"reduce_at": "boundary"}),
}


def close(got: Any, expected: Any) -> bool:
    return bool(torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=2e-5, atol=1e-6))


@pytest.mark.parametrize("name", CASES)
def test_every_stage_trains_as_one_process(name: str) -> None:
    case = CASES[name]
    expected = in_one_process(case)
    first = None
    for stage in STAGES:
        ranks = run_ranks(case.dp * case.tp, trained, stage, case)
        weights = ranks[0]["weights"]
        for seen in ranks:
            told = f"{name}, stage {stage}, rank {seen['rank']} at {seen['coordinate']}"
            assert close(seen["losses"], expected["losses"][seen["coordinate"][0]]), (
                f"{told}: losses {seen['losses']}, expected {expected['losses']}"
            )
            assert close(seen["norms"], expected["norms"]), (
                f"{told}: norms {seen['norms']}, expected {expected['norms']}"
            )
            assert seen["norms"] == ranks[0]["norms"], f"{told}: norms differ between ranks"
            assert seen["shapes"] == expected["shapes"], f"{told}: shapes"
            assert stage < 3 or seen["gathered"] == 0, f"{told}: units stay gathered"
        assert weights.keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"{name}, stage {stage}: {key} differs by {difference}"
        bits = [ranks[0]["norms"], [seen["losses"] for seen in ranks]]
        # Stages 2 and 3 reduce in every micro-batch, and so add up in another order
        if first is None or (stage == 2 and case.micro_batches > 1):
            first = bits, weights
        assert bits == first[0], f"{name}: stage {stage} has other bits than stage 0"
        for key, value in weights.items():
            assert torch.equal(value, first[1][key]), f"{name}: {key} at stage {stage}"


def test_a_narrow_wire_is_scaled_late() -> None:
    """bf16 on the wire: all stages have the same bits, and the norm is near that in fp32."""
    case = Case(options={"precision": "bf16"})
    expected = in_one_process(replace(case, options={}))
    runs = [run_ranks(4, trained, stage, case) for stage in STAGES]
    for ranks in runs:
        assert ranks[0]["norms"] == runs[0][0]["norms"]
        for got, wanted in zip(ranks[0]["norms"], expected["norms"], strict=True):
            assert abs(got - wanted) < 0.03 * wanted, (ranks[0]["norms"], expected["norms"])
