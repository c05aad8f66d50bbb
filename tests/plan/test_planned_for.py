"""Each kind of model that a plan takes, odd ones that it refuses, and the convention by which it
counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_plans import gpus
from torch import nn

import onefold
from onefold.plan.api import planned as plan
from onefold.plan.hardware import machine
from onefold.plan.job import Job
from zoo import Language

pytestmark = pytest.mark.one_in(3)


def make_gpt() -> nn.Module:
    return Language(width=32, depth=4, length=64)


def test_a_number_a_name_a_folder_a_factory_and_a_module_are_all_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64,
    }  # fmt: skip
    folder = tmp_path / "gpt2"  # called as a public architecture is
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {
        "number": 1e7,
        "name": "gpt2",
        "folder": folder,
        "file": str(folder / "config.json"),
        "factory": "onefold_tests_factory:make_gpt",
        "module": make_gpt(),
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
        assert one.activations == (
            "from dimensions" if kind == "number" else "traced from the module"
        )
        assert [c.scheme.stage for c in one.stages] == [0, 1, 2, 3]
    assert found["folder"].model.numel == found["file"].model.numel
    assert found["factory"].stages[1].account == found["module"].stages[1].account
    assert found["number"].model.numel == 10_000_000
    assert [any("heads of 128" in note for note in one.assumptions) for one in found.values()] == [
        kind == "number" for kind in found
    ]
    assert next(p.device.type for p in asked["module"].parameters()) == "cpu"


@pytest.mark.parametrize(
    ("job", "total"),
    [
        (Job(), 18), (Job(precision="fp32"), 16), (Job(precision="fp16", accumulate_dtype="fp16"), 16), (Job(optimizer="sgd"), 10),
    ],
)  # fmt: skip
def test_the_convention_is_that_of_the_recipe(job: Job, total: int) -> None:
    found = plan(1e8, gpus(1), job, largest=False)
    assert f"= {total}; gradients are gone between steps" in found.assumptions[0]
    gradients = {"fp32": 4, "fp16": 2}[job.accumulate_dtype]
    assert found.stages[0].account.rest_bytes == pytest.approx(
        (total - gradients) * found.model.numel, rel=0.01
    )


def test_recipe_auto_plans_with_the_options_it_hands_on_and_says_the_micro_batch() -> None:
    recipe = onefold.plan.recipe_for(
        make_gpt(), seq=16, micro_batch=0, global_batch=8, units=["inner.blocks.1"], prefetch=0
    )
    assert recipe.units == ("inner.blocks.1",) and recipe.prefetch == 0
    assert "micro-batch 8: " in recipe.notes[-1], recipe.notes
    assert onefold.plan.recipe_for("gpt2", seq=16).stage == 0
    with pytest.raises(ValueError, match=r"chooses the stage; for stage 1 write Recipe\.zero\(1"):
        onefold.plan.recipe_for(make_gpt(), stage=1)
    with pytest.raises(
        ValueError, match=r"recipe_for does not know prefetsch. Did you mean 'prefetch'"
    ):
        onefold.plan.recipe_for(make_gpt(), prefetsch=1)


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


class Raising(Language):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        raise RuntimeError("broken at x=3")


class Needing(Language):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.inner(input_ids)


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
        (Lazy, "lazy parameters .head.weight.*run one batch"),
    ],
)
def test_whatever_a_module_raises_is_a_sentence(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(kind(), gpus(2), Job(seq=16), largest=False)
