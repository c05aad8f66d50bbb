"""ZeRO beside tensor parallelism: at every stage the same as one process."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axes_models import Case, at_stages, batches_of, in_one_process, parallelized
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks

pytestmark = pytest.mark.one_in(8)

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
    "bordered": Case(options={"borders": True}),
    "bordered, sequence parallel": Case(plan="sequence", options={"borders": True}),
    "bordered, adapters": Case(
        adapters=True, frozen=("tok_embeddings", "layers.0.attention"), options={"borders": True}
    ),
}


def close(got: Any, expected: Any) -> bool:
    return bool(torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=2e-5, atol=1e-6))


@pytest.mark.parametrize("name", CASES)
def test_every_stage_trains_as_one_process(name: str) -> None:
    case = CASES[name]
    expected = in_one_process(case)
    first = None
    bordered = "borders" in case.options
    stages = STAGES[1:] if bordered else STAGES  # nothing is cut at stage 0
    found = run_ranks(case.dp * case.tp, at_stages, stages, case)
    for stage, ranks in zip(stages, zip(*found, strict=True), strict=True):
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
            assert seen["reordered"] == bordered, f"{told}: reordered {seen['reordered']}"
        assert weights.keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"{name}, stage {stage}: {key} differs by {difference}"
        bits = [ranks[0]["norms"], [seen["losses"] for seen in ranks]]
        # Stages 2 and 3 reduce in every micro-batch, and so add up in another order
        if first is None or (stage == 2 and case.micro_batches > 1):
            first = bits, weights
        assert bits == first[0], f"{name}: stage {stage} has other bits than stage {stages[0]}"
        for key, value in weights.items():
            assert torch.equal(value, first[1][key]), f"{name}: {key} at stage {stage}"


def test_a_narrow_wire_is_scaled_late() -> None:
    """bf16 on the wire: all stages have the same bits, and the norm is near that in fp32."""
    case = Case(options={"precision": "bf16"})
    expected = in_one_process(replace(case, options={}))
    runs = list(zip(*run_ranks(4, at_stages, STAGES, case), strict=True))
    for ranks in runs:
        assert ranks[0]["norms"] == runs[0][0]["norms"]
        for got, wanted in zip(ranks[0]["norms"], expected["norms"], strict=True):
            assert abs(got - wanted) < 0.03 * wanted, (ranks[0]["norms"], expected["norms"])


def hybrid(stage: int, micro_batches: int, borders: bool) -> dict[str, Any]:
    """Two replicas of two data ranks, each of two ranks of tensor parallelism."""
    import onefold

    case = Case(dp=4, micro_batches=micro_batches)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = parallelized(case, mesh)
    recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, borders=borders)
    model = onefold.shard(model, recipe, mesh=mesh, data=("dp_replicate", "dp_shard"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dp = dist.get_rank() // 2
    losses, norms = [], []
    for step in range(case.steps):
        for i in range(micro_batches):
            last = i + 1 == micro_batches
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                loss = model(batches_of(case, dp)[step * micro_batches + i])
                losses.append(loss.item())
                (loss / micro_batches).backward()
        norms.append(onefold.clip_grad_norm_(model, case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    engine = onefold.engine_of(model)
    return {
        "losses": losses,
        "norms": norms,
        "weights": onefold.full_state_dict(model),
        "owned": [
            (
                flat.group.size,
                flat.group.topology.inner,
                flat.owned[1] - flat.owned[0],
                flat.layout.numel,
            )
            for unit in engine.units
            for flat in unit.flats
        ],
    }


@pytest.mark.parametrize(
    ("stage", "micro_batches", "borders"), [(2, 1, False), (3, 2, False), (3, 1, True)]
)
def test_an_axis_of_replicas_divides_state_inside_each(
    stage: int, micro_batches: int, borders: bool
) -> None:
    expected = in_one_process(Case(dp=4, micro_batches=micro_batches))
    seen = run_ranks(8, hybrid, stage, micro_batches, borders)
    for rank, each in enumerate(seen):
        assert close(each["losses"], expected["losses"][rank // 2]), (rank, each, expected)
        assert close(each["norms"], expected["norms"]), (rank, each, expected)
        # Divided over tp: four data ranks hold a box, two of them in each replica
        assert {(size, inner) for size, inner, *_ in each["owned"]} == {(4, 2), (8, 4)}
        assert all(own * inner == numel for _, inner, own, numel in each["owned"])
    for key, value in expected["weights"].items():
        torch.testing.assert_close(seen[0]["weights"][key], value, rtol=1e-4, atol=2e-5)


def compiled(stage: int) -> list[float]:
    import onefold

    case = Case(dp=1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(case, mesh)
    for layer in model.layers:
        layer.compile(backend="eager")
    model = onefold.shard(
        model, onefold.Recipe.zero(stage, stall_timeout=60.0), mesh=mesh, data="dp"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches_of(case, 0):
        loss = model(batch)
        loss.backward()
        onefold.clip_grad_norm_(model, case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2, "nothing was compiled"
    return losses


@pytest.mark.slow
def test_compiled_blocks_of_dtensors_train_as_one_process() -> None:
    expected = in_one_process(Case(dp=1))
    for losses in run_ranks(2, compiled, 3):
        assert close(losses, expected["losses"][0]), (losses, expected["losses"])
