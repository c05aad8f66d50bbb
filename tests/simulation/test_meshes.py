"""The engine as one rank of a mesh of several axes: its ledgers, and what torch's pipelines send, are
the closed forms of the plan of meshes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.plan.degrees import Degrees
from onefold.plan.modules import built, model_shape, module_of
from onefold.plan.rank import stages_of
from onefold.simulation.simulate import Simulation, StandIn, simulate
from ranks import run_ranks

pytestmark = pytest.mark.one_in(3)

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = model_shape(built("small mixtral", {**SIZES, **EXPERTS, "vocab_size": 512}))
PLAIN = model_shape(built("small llama", {**SIZES, "model_type": "llama", "vocab_size": 509}))
MODELS = {"llama": PLAIN, "mixtral": ROUTED}


def check(found: Simulation) -> None:
    told = f"{found.degrees}, rank {found.rank}, stage {found.stage} of the pipeline: "
    assert found.account.rest == found.predicted.rest, (told, found.account, found.predicted)
    assert found.account.wire == found.predicted.wire, (told, found.account, found.predicted)
    sent = found.account.sent
    assert sent == found.predicted.sent and sent, (told, sent, found.predicted.sent)
    assert found.exact
    in_all = sum(n for axes, n in sent.items() if axes != "pp")
    assert in_all == sum(found.account.wire.values()), told


MESHES = [
    ("llama", Degrees(dp=4, tp=2), 3, {"rank": 5}),  # 509 rows of a vocabulary are uneven parts
    ("llama", Degrees(dp=2, tp=2, cp=2), 1, {"micro_batches": 2}),
    ("mixtral", Degrees(dp=8, ep=2, cp=2, tp=4), 3, {"micro_batches": 2, "rank": 37}),
    ("mixtral", Degrees(dp=8, ep=4, tp=2), 2, {"per_node": 4, "rank": 9}),
    ("mixtral", Degrees(dp=4, ep=2, tp=2, pp=2), 3, {"micro_batches": 3, "rank": 9}),
    ("llama", Degrees(dp=2, tp=2, pp=4), 2, {"micro_batches": 4, "rank": 15}),
    ("llama", Degrees(dp=2, cp=2, pp=2), 1, {"micro_batches": 2}),
]


@pytest.mark.parametrize(("model", "degrees", "zero", "asked"), MESHES, ids=str)
def test_a_rank_of_a_mesh_holds_and_sends_the_closed_forms_to_the_byte(
    model: str, degrees: Degrees, zero: int, asked: dict[str, Any]
) -> None:
    recipe = onefold.Recipe.zero(zero, precision="bf16")
    check(simulate(MODELS[model], recipe, degrees, **asked))
    assert not dist.is_initialized()


# -- against real ranks ----------------------------------------------------------------------------


def real(zero: int) -> dict[str, Any]:
    """What real ranks of dp 2 × tp 2 have in their ledgers, with the parameters of `PLAIN`."""
    from torch.distributed.device_mesh import init_device_mesh

    degrees = Degrees(dp=2, tp=2)
    (stage,) = stages_of(PLAIN, degrees)
    mesh = init_device_mesh("cpu", (2, 1, 1, 2), mesh_dim_names=("dp", "ep", "cp", "tp"))
    number = dist.get_rank()
    own: Any = SimpleNamespace(
        stage=stage, degrees=degrees, cut={("tp",): mesh["tp"]}, number=number, mesh=None
    )
    own.part = lambda p: StandIn.part(own, p)
    module, given = StandIn.twin(own)
    for param in module.parameters():
        local: Any = param.to_local() if hasattr(param, "to_local") else param  # type: ignore[attr-defined]
        local.detach().fill_(0.1)
    recipe = onefold.Recipe.zero(zero, precision="bf16", stall_timeout=30.0)
    model = onefold.shard(module, recipe, mesh=mesh, data=("dp", "ep", "cp"), units=given["units"])
    engine, optimizer = onefold.engine_of(model), torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(2):
        if step:
            engine.memory.now()
            engine.memory.reset_peak()
            engine.traffic.reset()
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "rest": engine.memory.now(),
        "peak": engine.memory.peak(),
        "wire": {k: v for k, v in engine.traffic.by_move().items() if k != "control"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_real_ranks_of_a_mesh_do_what_the_simulation_says(zero: int) -> None:
    recipe = onefold.Recipe.zero(zero, precision="bf16")
    for rank, seen in enumerate(run_ranks(4, real, zero)):
        found = simulate(PLAIN, recipe, Degrees(dp=2, tp=2), rank=rank)
        assert {k: v for k, v in found.account.rest.items() if k != "moments"} == seen["rest"]
        assert found.account.wire == seen["wire"]
        assert found.account.ledger == seen["peak"]


# -- thousands of ranks ----------------------------------------------------------------------------


def test_a_rank_of_1024_with_experts_is_exact() -> None:
    recipe = onefold.Recipe.zero(3, precision="bf16")
    found = simulate(ROUTED, recipe, Degrees.on(1024, tp=4, cp=2, ep=4), rank=777, per_node=8)
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 256 * 7 + 9, 4095])
def test_llama_3_405b_on_4096_ranks_is_exact(rank: int) -> None:
    recipe = onefold.Recipe.zero(1, precision="bf16")
    degrees = Degrees.on(4096, tp=8, pp=16)
    found = simulate(
        model_shape(module_of("llama-3-405b"), name="llama-3-405b"), recipe, degrees, rank=rank, micro_batches=16, seq=8192, per_node=8
    )  # fmt: skip
    check(found)
    assert found.stage == rank // 256


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "asked", "options", "said"),
    [
        (Degrees(pp=2, chunks=2), {"micro_batches": 2}, {}, "2 chunks a stage"),
        (Degrees(pp=4), {"micro_batches": 2}, {}, "2 micro-batches in 4 stages.*--global-batch"),
        (Degrees(tp=2), {}, {"offload_optimizer": "cpu"}, "offload or steps"),
        (Degrees(tp=2), {"rank": 2}, {}, "rank 2 of 2"),
    ],
    ids=str,
)
def test_what_has_no_simulation_is_refused_by_a_sentence(
    degrees: Degrees, asked: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        simulate(PLAIN, onefold.Recipe.zero(2, **options), degrees, **asked)
    assert not dist.is_initialized()
