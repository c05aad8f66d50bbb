"""`onefold.plan(...)` is a call and a room at once, and says what it cannot do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import onefold


def test_the_room_answers_a_call_before_and_after_its_modules_are_imported() -> None:
    code = (
        "import onefold, sys; assert 'onefold.plan' not in sys.modules; a = onefold.plan('gpt2',"
        " gpus=8, largest=False); import onefold.plan.states; b = onefold.plan('gpt2', gpus=8,"
        " largest=False); assert a.recommended.scheme == b.recommended.scheme;"
        " print(a.recipe.stage)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "1", done.stderr


def test_the_recipe_of_a_plan_for_this_machine_shards_the_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    found = onefold.plan(
        model, precision="fp32", batch=lambda n: (torch.randn(n, 8),), largest=False
    )
    assert found.recommended is not None and found.recommended.fits
    sharded = onefold.shard(model, found.recipe)
    sharded(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "expected 0, 1, 2 or 3"),
        ({"sequence": 3}, "does not know sequence"),
        ({"gpus": 8, "gpu": "h100"}, "Did you mean"),
        ({"gpus": 12}, "do not fill nodes of 8"),
        ({"precision": "fp8"}, "expected one of fp32, bf16, fp16"),
        ({"gpus": 8, "global_batch": 9}, "does not divide"),
    ],
)
def test_what_cannot_be_gets_a_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        onefold.plan("gpt2", **options)


def test_a_name_that_nobody_knows_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="llama-3-8b"):
        onefold.plan("llama-3-8bb", gpus=8)
