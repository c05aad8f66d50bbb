"""What a trace on fake tensors says runs in a pass, against the same pass on real tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from calibrations import calibration
from onefold.machine.kernels import count
from onefold.models.build import checkpoint_activations
from onefold.plan.activity import Activity
from onefold.plan.choose import Question
from onefold.plan.efficiency import shares_of
from onefold.plan.hardware import calibrated
from onefold.plan.job import Job, Scheme
from onefold.plan.modules import model_shape
from onefold.tracing.trace import trace

transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 64, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **COMMON))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**DECODER, **experts, **COMMON)
    )


def batch(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (samples, 16), generator=torch.Generator().manual_seed(samples))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_trace_counts_what_real_passes_run(name: str, checkpointing: Any) -> None:
    said = trace(model(name), batch(2), checkpointing=checkpointing).kernels
    real, given = model(name).train(), batch(2)
    checkpoint_activations(real, checkpointing)
    ran = count(lambda: real(**given).loss.backward())
    assert said == ran


def test_a_calibrated_plan_prices_operations_and_says_how_steps_compare() -> None:
    found = calibration(1, 2)
    there = calibrated(found, 2)
    shape, job = (
        model_shape(model("llama"), seq=16),
        Job(seq=16, micro_batch=2, global_batch=12, precision="fp32"),
    )
    traced = Activity.from_trace(trace(model("llama"), batch(2)))

    def seconds(activity: Activity) -> float:
        candidate = Question(shape, lambda micro, how: activity, there, job).answer(
            Scheme(1, "none", "none", 2)
        )
        assert any(
            "training steps measured on this machine reach" in note for note in candidate.notes
        )
        return candidate.account.seconds["compute"]

    assert traced.kernels is not None
    handed = 3 * shape.trainable * shares_of(found, ranks=2).handed_s
    passes = 3 * found.pass_seconds(traced.kernels, ranks=2) / shares_of(found, ranks=2).step_share
    assert seconds(traced) == pytest.approx(passes + handed, rel=1e-6)
    assert seconds(replace(traced, kernels=None)) != pytest.approx(passes + handed, rel=1e-3)
    # Of frozen parameters there are no gradients: what was traced does not hold
    fewer = replace(traced, flops=traced.flops / 2)
    assert seconds(fewer) == pytest.approx(seconds(replace(fewer, kernels=None)))
