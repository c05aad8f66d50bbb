"""A model on the host that is sharded onto a device: it gets there unit by unit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
import virtual
from ranks import run_ranks

WIDTH, LAYERS = 128, 8


def build() -> nn.Sequential:
    torch.manual_seed(dist.get_rank())  # rank 0's are everybody's
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model.register_buffer("offset", torch.ones(3))
    return model


def lay_out(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    virtual.start(seed=0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before, kept = torch.accelerator.memory_allocated(), list(model.parameters())
    torch.accelerator.reset_peak_memory_stats()
    recipe = onefold.Recipe.zero(stage, **options)
    onefold.shard(model, recipe, device="virtual", units=[str(n) for n in range(LAYERS)])
    peak = torch.accelerator.max_memory_allocated() - before
    whole = onefold.full_state_dict(model)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        plain = build().state_dict()
        assert all(torch.equal(plain[name], whole[name]) for name in plain)
    return {
        "peak": peak,
        "same": all(a is b for a, b in zip(kept, model.parameters(), strict=True)),
        "stepped": optimizer.param_groups[0]["params"][0] is kept[0],
        "buffer": str(model.offset.device),
        "devices": sorted({p.device.type for p in model.parameters()}),
    }


@pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())
@pytest.mark.parametrize(
    ("stage", "options", "shards", "devices"),
    [
        (3, {}, 1 / 2, ["virtual"]),
        (3, {"precision": "bf16"}, 1 / 2, ["virtual"]),
        (3, {"offload_param": "cpu", "offload_optimizer": "cpu"}, 0, ["cpu"]),
        (1, {}, 3 / 2, ["virtual"]),  # the whole that is computed with stays
    ],
)
def test_a_device_holds_its_shards_and_one_unit_on_the_way(
    stage: int, options: dict[str, Any], shards: float, devices: list[str]
) -> None:
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    for seen in run_ranks(2, lay_out, stage, options):
        assert seen["peak"] <= LAYERS * unit * shards + 2 * unit + 2**16, seen
        assert seen["same"] and seen["stepped"]
        assert seen["buffer"] == "virtual:0" and seen["devices"] == devices


def said_of_the_device(**given: Any) -> str:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onefold")
    logger.addHandler(handler)
    onefold.shard(nn.Linear(2, 2), onefold.Recipe.zero(3), **given)
    logger.removeHandler(handler)
    return " ".join(said)


@virtual.alone
def what_is_said_where_there_are_devices() -> None:
    dist.destroy_process_group()
    said = said_of_the_device()
    assert "the model is on the CPU, and trains there: torch finds 4 virtual devices here" in said
    assert "shard(..., device='virtual')" in said
    assert said_of_the_device(device="cpu") == said_of_the_device(device="virtual") == ""


def test_a_model_that_was_left_on_the_cpu_is_told_of_where_there_are_devices() -> None:
    what_is_said_where_there_are_devices()
    assert said_of_the_device() == "", "this process has none"
