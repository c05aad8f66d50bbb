"""Each kind of model that a plan takes, what it refuses, and what comes out: JSON, a recipe, the
convention.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_plans import gpus
from torch import nn

import onefold
from onefold.plan.hardware import machine
from onefold.plan.job import Job
from onefold.plan.planner import Plan, plan
from zoo import TinyGPT

pytestmark = pytest.mark.one_in(3)


def make_gpt() -> nn.Module:
    return TokenModel()


class TokenModel(nn.Module):
    """A language model of its own: takes input_ids and labels, returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyGPT(width=32, depth=4, length=64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids)


def test_a_number_a_name_a_folder_a_factory_and_a_module_are_all_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {
        "number": 1e7,
        "name": "gpt2",
        "folder": tmp_path,
        "file": str(tmp_path / "config.json"),
        "factory": "onefold_tests_factory:make_gpt",
        "module": TokenModel(),
    }
    sys.modules["onefold_tests_factory"] = sys.modules[__name__]
    try:
        found = {
            kind: plan(model, gpus(2), Job(seq=12), largest=False) for kind, model in asked.items()
        }
    finally:
        del sys.modules["onefold_tests_factory"]
    for kind, one in found.items():
        assert one.recommended is not None and one.recommended.scheme.stage == 1, kind
        assert one.source == (
            "from dimensions" if kind in ("number", "name") else "traced from the module"
        )
        assert [c.scheme.stage for c in one.stages] == [0, 1, 2, 3]
    assert found["folder"].model.numel == found["file"].model.numel
    assert found["factory"].stages[1].account == found["module"].stages[1].account
    assert found["number"].model.numel == 10_000_000
    assert next(p.device.type for p in asked["module"].parameters()) == "cpu"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gtp2", "Did you mean 'gpt2'"),
        (0, "positive"),
        (math.inf, "positive"),
        (math.nan, "positive"),
        (True, "positive"),
        ([], "expected"),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(model, machine(8))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"seq": 0}, "seq=0"),
        ({"micro_batch": -1}, "0 or more"),
        ({"precision": "int8"}, "expected one of"),
        ({"optimizer": "adamm"}, "adamw"),
        ({"checkpointing": "half"}, "none, selective, full"),
        ({"offload": "tape"}, "nvme"),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_a_sentence(job: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Job(**job)


def test_a_global_batch_that_does_not_divide_names_one_that_does() -> None:
    with pytest.raises(ValueError, match="use 16"):
        plan("gpt2", gpus(8), Job(global_batch=15, micro_batch=2))
    with pytest.raises(ValueError, match="use 16"):
        plan("gpt2", gpus(8), Job(global_batch=15, micro_batch=0))


# -- what comes out --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan(TokenModel(), gpus(2), Job(seq=12, global_batch=16))


def test_the_recipe_that_comes_out_shards_the_model(small: Plan) -> None:
    recipe = small.recipe
    assert recipe.stage == 1 and recipe.compute_dtype is torch.bfloat16
    model = onefold.shard(TokenModel(), recipe)
    ids = torch.zeros((1, 12), dtype=torch.long)
    model(input_ids=ids, labels=ids).float().backward()
    assert onefold.engine_of(model).memory.now()


@pytest.mark.parametrize(
    ("job", "total"),
    [
        (Job(), 18), (Job(precision="fp32"), 16), (Job(precision="fp16", accumulate_dtype="fp16"), 16), (Job(optimizer="sgd"), 10),
    ],
)  # fmt: skip
def test_the_convention_is_that_of_the_recipe(job: Job, total: int) -> None:
    found = plan(1e8, gpus(1), job, largest=False)
    assert f"= {total}; gradients are gone between steps" in found.notes[0]
    gradients = {"fp32": 4, "fp16": 2}[job.accumulate_dtype]
    assert found.stages[0].account.rest_bytes == pytest.approx(
        (total - gradients) * found.model.numel, rel=0.01
    )
