"""`onefold.plan(...)` is a call and a room at once, and says what it cannot do."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.plan.hardware import machine


def test_the_room_answers_a_call_before_and_after_its_modules_are_imported() -> None:
    code = (
        "import onefold, sys; assert 'onefold.plan' not in sys.modules; a = onefold.plan(1e8,"
        " gpus=8, largest=False); import onefold.plan.rank; b = onefold.plan(1e8, gpus=8,"
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
        ({"stage": 4}, "stage"),
        ({"sequence": 3}, "does not know sequence"),
        ({"reduce_at": "later"}, "reduce_at='later'"),
        ({"units": ["h"]}, "no module name and no module class"),
        ({"gpu": "h100"}, "Did you mean"),
        ({"gpus": None, "gpu": "t4", "per_node": 4}, "per_node, gpu: a machine .* give gpus="),
        ({"machine": machine(8)}, "gpus: a machine .* leave machine= out"),
        ({"gpus": "8"}, "gpus='8': expected a whole number"),
        ({"gpus": 12}, "do not fill nodes of 8"),
        ({"per_node": 0}, "per_node=0"),
        ({"precision": "fp8"}, "expected 'fp32', 'bf16', 'fp16'"),
        ({"micro_batch": -1}, "from 0 to"),
        ({"global_batch": 9}, "does not divide"),
        ({"global_batch": 15, "micro_batch": 2}, "use 16"),
        ({"optimizer": "adamm"}, "adamw"),
        ({"checkpointing": "half"}, "none, selective, full"),
        ({"offload": "nvme"}, "offload_optimizer='cpu' or"),
        ({"model": "gtp2"}, "Did you mean 'gpt2'"),
        ({"model": ""}, "no architecture"),
        ({"model": 0}, "positive"),
        ({"model": math.nan}, "positive"),
        ({"model": []}, "expected"),
    ],
)
def test_what_cannot_be_gets_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        onefold.plan(**{"model": "gpt2", "gpus": 8, **options})
