"""What ranks hold of a parameter: each element is one rank's to account for, and is read and
written wherever it rests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from ranks import run_ranks

Interval = tuple[str, tuple[int, ...], int, int, list[float]]


def read_and_written(recipes: list[tuple[int, dict[str, Any]]]) -> list[list[Interval]]:
    """For each recipe this rank's elements of every parameter, read after 1 was added to them."""
    from onefold.runtime.storage import OnDisk

    found = []
    for stage, options in recipes:
        torch.manual_seed(0)
        model = onefold.shard(
            nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5)),
            onefold.Recipe.zero(stage, **options),
        )
        engine, mine = onefold.engine_of(model), []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for entry in engine.entries:
                storage = entry.flat.storage
                held = storage.elements(entry, "", entry.param, *entry.owned())
                if isinstance(held, OnDisk):
                    held.write(0, held.read() + 1)
                else:
                    held.add_(1)
                storage.renew()
                x, y = entry.accounted()
                part = storage.elements(entry, "", entry.param, x, y)
                values = (part.read() if isinstance(part, OnDisk) else part).tolist()
                mine.append((entry.part.names[0], *entry.outside(x, y), values))
        found.append(mine)
    return found


def test_each_element_is_one_ranks_and_is_read_and_written_wherever_it_rests(
    tmp_path: Path,
) -> None:
    nvme: dict[str, Any] = {"offload_optimizer": "nvme", "nvme": str(tmp_path)}
    host: dict[str, Any] = {"offload_optimizer": "cpu"}
    plain: list[tuple[int, dict[str, Any]]] = [(stage, {}) for stage in range(4)]
    recipes = [*plain, (1, host), (3, host), (2, nvme), (3, {**nvme, "offload_param": "nvme"})]
    torch.manual_seed(0)
    before = dict(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5)).named_parameters())
    ranks = run_ranks(2, read_and_written, recipes)
    for number, recipe in enumerate(recipes):
        whole: dict[str, list[float]] = {}
        for rank in ranks:
            for name, shape, start, stop, values in rank[number]:
                assert shape == tuple(before[name].shape) and stop - start == len(values)
                so_far = whole.setdefault(name, [])
                assert not values or start == len(so_far), f"{recipe}: {name} from {start} on"
                so_far += values
        for name, values in whole.items():
            expected = (before[name].detach() + 1).reshape(-1).tolist()
            assert values == expected, f"{recipe}: {name}"
