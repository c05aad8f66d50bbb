"""A tier that is made up, by the lines that recipe/tiers.py asks for: recipes check it, models train
with it, the plan counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from extended import Changes, extended, run_there

#: Parameters and states may be there, in files of a folder. It is slower than NVMe.
CHANGES: Changes = {
    "recipe/tiers.py": {
        '"on NVMe", ROWS, "nvme")': '"on NVMe", ROWS, "nvme")\n    REMOTE = ("remote", "remote", "Remote", "remotely",'
        ' ("parameters", "optimizer"), "remote", Disk(1e15, 1e9, 5e8))'
    },
    "recipe/options.py": {
        'OffloadTier = Literal["cpu", "nvme"]': 'OffloadTier = Literal["cpu", "nvme", "remote"]',
        "    nvme_threads: int = ": "    remote: Folders | None = _tiers(None, 'Folder there.', check=_folders)\n"
        "    nvme_threads: int = ",
    },
    "offload/tiers.py": {
        "Tier.NVME: NvmeStorage}": "Tier.NVME: NvmeStorage, Tier.REMOTE: NvmeStorage}"
    },
}
STATES = {"offload_optimizer": "remote", "offload_param": "remote"}
ON_NVME = {"offload_optimizer": "nvme", "offload_param": "nvme", "offload_gradients": "cpu"}


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


def recipes() -> dict[str, Any]:
    from onefold import Recipe
    from onefold.recipe.options import OPTIONS

    found = Recipe.zero(3, remote="/far", **STATES)
    there = replace(found.gradients, tier=found.optimizer.tier)
    rows = (found.parameters, found.gradients, found.optimizer)
    zero = {
        "no folder": STATES,
        "gradients": {**STATES, "offload_gradients": "remote", "remote": "/far"},
        "parameters alone": {**STATES, "offload_optimizer": "cpu", "remote": "/far"},
        "neither": {"offload_param": "far"},
    }
    return {
        "tiers": [row.tier.value for row in rows],
        "described": found.describe(),
        "kept": found.replace(prefetch=2).remote,
        "help": OPTIONS["offload_optimizer"].help,
        "notes": Recipe.zero(3, remote="/far", nvme="/near", chunk=65536, **STATES).notes,
        "unused": Recipe.zero(3, remote="/far").notes,
        "row by row": refusal(lambda: found.replace(gradients=there)),
        "refused": {
            name: refusal(lambda given=given: Recipe.zero(3, **given))  # type: ignore[misc]
            for name, given in zero.items()
        },
    }


def trained(folder: str) -> dict[str, Any]:
    import onefold
    from onefold.observe import Meter
    from zoo import TinyGPT, tokens_of

    def run(name: str, load: str = "", **options: Any) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        recipe = onefold.Recipe.zero(3, precision="bf16", chunk=65536, **options)
        model = onefold.shard(TinyGPT(width=64, heads=4), recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if load:
            onefold.load(f"{folder}/{load}", model=model, optimizer=optimizer)
        losses = []
        for step in range(2):
            losses.append(model(tokens_of(step)).float().square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        onefold.save(f"{folder}/{name}", model=model, optimizer=optimizer)
        row = Meter(model, optimizer).step()
        weights = onefold.full_state_dict(model)
        seen = {tier: row[tier] for tier in ("host", "nvme", "remote")}
        return [loss.item() for loss in losses], {"row": seen, "weights": weights}

    with pytest.raises(RuntimeError) as missing:
        run("e", **STATES, remote=f"{folder}/missing")
    near, there = run("a", **ON_NVME, nvme=folder), run("b", **STATES, remote=folder)
    again, moved = run("c", "b", **STATES, remote=folder), run("d", "a")
    return {
        "losses": [near[0], there[0]],
        "later losses": [again[0], moved[0]],
        "different": [
            name
            for name, value in near[1]["weights"].items()
            if not torch.equal(value, there[1]["weights"][name])
        ],
        "missing": str(missing.value),
        "rows": [near[1]["row"], there[1]["row"]],
    }


def planned() -> dict[str, Any]:
    import onefold
    import timed
    from onefold import Tier
    from onefold.plan import tables
    from onefold.plan.hardware import machine
    from onefold.simulation.timeline import READ, WRITTEN

    job: dict[str, Any] = {"seq": 1024, "precision": "bf16", "micro_batch": 1, "largest": False}
    job["stage"] = 3
    gpus = machine(8, gpu="a100-80")
    on = {"remote": {**STATES, "remote": "/far"}, "nvme": {**ON_NVME, "nvme": "/near"}}
    plans = {tier: onefold.plan("gpt2", gpus, **job, **given) for tier, given in on.items()}
    accounts = {tier: plan.recommended.account for tier, plan in plans.items()}  # type: ignore[union-attr]
    full = replace(gpus, host=gpus.host.with_room(Tier.REMOTE, 1.0))
    table = tables.tiers_table(plans["remote"].recommended)  # type: ignore[arg-type]
    assert table is not None
    # By hand NVMe reads or writes a block's part in a second
    steps = {tier: timed.run(disk=1.0, **given) for tier, given in on.items()}
    each = steps["remote"]
    return {
        "held": {t: {k.value: n for k, n in a.by_tier.items()} for t, a in accounts.items()},
        "moved": {tier: account.moved for tier, account in accounts.items()},
        "disk": {tier: account.tiers["disk"] for tier, account in accounts.items()},
        "simulated": {tier: step.busy["disk"] for tier, step in steps.items()},
        "read": sum(span.nbytes for span in timed.of(each, READ)),
        "written": sum(span.nbytes for span in timed.of(each, WRITTEN)),
        "folders": plans["remote"].recipe.remote,
        "no folder": refusal(lambda: onefold.plan("gpt2", gpus, **job, **STATES).recipe),
        "full": onefold.plan("gpt2", full, **job, **on["remote"]).why_not,
        "columns": [column.header for column in table.columns],
        "lines": [name for name, _, _ in accounts["remote"].lines()],
    }


@pytest.fixture
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extended(tmp_path_factory.mktemp("package"), CHANGES)


def test_recipes_check_a_new_tier_by_its_facts(package: Path) -> None:
    found = run_there(package, recipes)
    assert found["tiers"] == ["remote", "host", "remote"], "it holds no gradients"
    assert found["kept"] == ["/far"] and "Remote: /far" in found["described"]
    assert "cpu, nvme, remote, a share" in found["help"]
    assert found["notes"] == ["nvme=('/near',) has no effect where no state is stored on NVMe."]
    assert found["unused"] == ["remote=('/far',) has no effect where no state is stored remotely."]
    said = found["refused"]
    assert (
        "gradients row is stored on 'remote', which holds parameters and optimizer only"
        in found["row by row"]
    )
    assert "keeps state remotely but names no folder: give remote='/path" in said["no folder"]
    assert "expected 'cpu', 'nvme', or None" in said["gradients"]
    assert "give offload_optimizer='remote' too" in said["parameters alone"]
    assert "expected 'cpu', 'nvme', 'remote', or None" in said["neither"]


def test_a_model_trains_on_a_new_tier_with_the_bits_of_nvme(package: Path, tmp_path: Path) -> None:
    found = run_there(package, trained, str(tmp_path))
    assert found["losses"][0] == found["losses"][1] and found["different"] == []
    assert found["later losses"][0] == found["later losses"][1], (
        "its checkpoint loads on the device"
    )
    assert "missing for states remotely is not there" in found["missing"]
    assert "another one in remote=" in found["missing"]
    near, there = found["rows"]
    assert there["remote"] == near["nvme"] > 0 == there["nvme"] == near["remote"]
    assert there["host"] == near["host"]


def test_the_plan_counts_a_new_tier_at_its_own_speed(package: Path) -> None:
    found = run_there(package, planned)
    near, there = found["held"]["nvme"], found["held"]["remote"]
    assert there["remote"] == near["nvme"] > 0 == there["nvme"] == near["remote"]
    assert there["host"] == near["host"] and found["moved"]["remote"] == found["moved"]["nvme"]
    assert found["disk"]["remote"] > 2 * found["disk"]["nvme"]
    seconds = found["read"] / (1e9 / 2) + found["written"] / (5e8 / 2)
    assert found["simulated"]["remote"] == pytest.approx(seconds)
    assert found["simulated"]["nvme"] > 10 * seconds
    assert found["folders"] == ["/far"] and "give remote='/path/on/the/disk'" in found["no folder"]
    assert "of Remote" in found["full"]
    assert found["columns"] == ["", "device", "host", "NVMe", "Remote"]
    assert "remote: all" in found["lines"] and "nvme: all" not in found["lines"]
