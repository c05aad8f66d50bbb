"""Bytes by axis: what a rank sends for each flat buffer is the formula over that buffer's holders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from axes_models import Case, batches_of, mesh_of_case, parallelized

from promises.formulas import counted_sends
from ranks import run_ranks

STEPS = 2


def sent(stage: int, case: Case) -> dict[str, Any]:
    import onefold

    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
    model = onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp")
    engine = onefold.engine_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = batches_of(case, mesh.get_local_rank("dp"))
    for batch in batches[:2] * 2:  # to learn the order, and be in a steady state
        step(batch)
    engine.traffic.reset()
    engine.memory.record = True  # events of the ledger are kept
    with counted_sends() as given:
        for batch in batches[:STEPS]:
            step(batch)
    units, last = engine.units, engine.units[-1]
    around = [u for u in units if u is last or u.path == "" or last.path.startswith(u.path + ".")]
    wanted = {"dp": 0, "dp and tp": 0}
    for unit in units:
        for flat in unit.flats:
            # An embedding's backward pass reads no weight: it is not gathered a second time
            gathers = 1 if stage < 3 or unit in around or unit.looks_up_only else 2
            each = flat.layout.numel * 4 * (flat.size - 1) // flat.size
            wanted["dp" if flat.in_boxes else "dp and tp"] += (gathers + 1) * each
    by_ranks: dict[str, int] = {}
    for event in engine.traffic.events:
        by_ranks[event.group] = by_ranks.get(event.group, 0) + event.nbytes
    return {
        "counted": given.payload / STEPS,
        "ledger": engine.traffic.total() / STEPS,
        "wanted": wanted,
        "others": given.others,
        "by ranks": {name: n / STEPS for name, n in by_ranks.items()},
        "names": {
            flat.group.name: "dp" if flat.in_boxes else "dp and tp"
            for unit in units
            for flat in unit.flats
        },
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tp", [2, 1])
def test_each_buffer_sends_the_formula_over_its_holders(stage: int, tp: int) -> None:
    case = Case(tp=tp, plan="plain" if tp > 1 else "none")
    for rank, seen in enumerate(run_ranks(2 * tp, sent, stage, case)):
        total = sum(seen["wanted"].values())
        told = f"rank {rank}, stage {stage}, tp {tp}: {seen}"
        assert seen["counted"] == seen["ledger"] == total > 0, told
        found = dict.fromkeys(seen["wanted"], 0.0)
        for name, nbytes in seen["by ranks"].items():
            found[seen["names"][name]] += nbytes
        assert found == seen["wanted"], told
