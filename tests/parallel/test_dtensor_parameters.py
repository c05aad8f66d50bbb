"""DTensor parameters of a sharded model as user code sees them: inside passes DTensors over real
memory, outside the global tensor.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axes_models import (
    LENGTH,
    VOCABULARY,
    Case,
    built,
    initialize,
    mesh_of_case,
    parallelized,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ranks import run_ranks
from zoo import tokens_of

pytestmark = pytest.mark.one_in(4)

NAME = "layers.0.feed_forward.w2.weight"  # [16, 40], Shard(1)


def sharded(stage: int, case: Case | None = None, **options: Any) -> tuple[nn.Module, Any]:
    import onefold

    case = case or Case()
    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0, **options)
    return onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp"), mesh


def batch(rank: int = 0) -> torch.Tensor:
    return tokens_of(rank, batch=2, length=LENGTH + 1, vocabulary=VOCABULARY)


def looked_at(stage: int) -> dict[str, Any]:
    """What code outside passes finds out about one parameter, beside the plain global tensor."""
    import onefold

    model, mesh = sharded(stage)
    plain = dict(built(Case()).named_parameters())[NAME]
    param = dict(model.named_parameters())[NAME]
    model(batch(mesh.get_local_rank("dp"))).backward()
    found: dict[str, Any] = {
        "shape": (tuple(param.shape), param.ndim, param.numel(), param.dim(), tuple(param.size())),
        "wanted": (tuple(plain.shape), 2, plain.numel(), 2, tuple(plain.shape)),
        "numel": sum(p.numel() for p in model.parameters()),
        "numel wanted": sum(p.numel() for p in built(Case()).parameters()),
    }
    with torch.no_grad():
        for name, of in {
            "norm": lambda p: p.norm(),
            "sum": lambda p: p.sum(),
            "mean": lambda p: p.mean(),
            "max": lambda p: p.max(),
            "abs sum": lambda p: p.abs().sum(),
            "row": lambda p: p.sum(1),
            "product": lambda p: p @ torch.ones(40),
            "norm of data": lambda p: p.data.norm(),
        }.items():
            found[name] = bool(torch.allclose(of(param), of(plain), rtol=1e-5, atol=1e-6))
        found["gathered"] = torch.equal(param.onefold.gather(), plain)
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
        found["total norm"] = abs(float(norm) - float(onefold.clip_grad_norm_(model, 1e9))) < 1e-5
        param.mul_(2.0)
        found["in place"] = torch.equal(param.onefold.gather(), plain * 2)
        param.copy_(plain * 3)
        found["copied"] = torch.equal(param.onefold.gather(), plain * 3)
        param.data = plain.detach() * 4
        found["assigned"] = torch.equal(param.onefold.gather(), plain * 4)
        torch.manual_seed(5)
        nn.init.normal_(param)
        torch.manual_seed(5)
        found["drawn"] = torch.equal(
            param.onefold.gather(), nn.init.normal_(plain.detach().clone())
        )
        zeros = torch.zeros_like(param)
        found["like"] = (
            tuple(zeros.shape) == tuple(plain.shape) and float(zeros.add_(1).sum()) == 640
        )
        try:
            param[0]
            found["view"] = "given"
        except onefold.ShardedParameterError as error:
            found["view"] = str(error)
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_outside_passes_a_parameter_is_the_global_tensor(stage: int) -> None:
    for seen in run_ranks(4, looked_at, stage):
        view = seen.pop("view")
        assert "cannot be done on a part" in view, view
        assert seen.pop("shape") == seen.pop("wanted")
        assert seen.pop("numel") == seen.pop("numel wanted")
        assert all(seen.values()), f"stage {stage}: {seen}"


class Looks(nn.Module):
    """Reads the weight of another module, keeps one, and checks what it sees."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[Any] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.inner.layers[0].feed_forward.w2.weight
        self.seen.append((type(weight).__name__, tuple(weight.shape), weight.requires_grad))
        loss = self.inner(tokens)
        # A penalty on a weight of another unit, in the pass: it counts as under plain DTensor
        return loss + (weight * weight).sum().full_tensor() * 0.01


def penalized(stage: int) -> dict[str, Any]:
    import onefold

    case = Case()
    mesh = mesh_of_case(case)
    model = Looks(parallelized(case, mesh))
    recipe = onefold.Recipe.zero(stage, stall_timeout=30.0)
    model = onefold.shard(model, recipe, mesh=mesh, data="dp")
    model(batch(mesh.get_local_rank("dp"))).backward()
    return {"seen": model.seen, "norm": onefold.clip_grad_norm_(model, 1e9).item()}


@pytest.mark.parametrize("stage", [1, 3])
def test_inside_a_pass_a_weight_is_a_dtensor_and_its_gradient_counts(stage: int) -> None:
    plain = built(Case())
    for rank in range(2):
        weight = dict(plain.named_parameters())[NAME]
        ((plain(batch(rank)) + weight.pow(2).sum() * 0.01) / 2).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for each in run_ranks(4, penalized, stage):
        assert each["seen"] == [("DTensor", (16, 40), True)], each
        assert each["norm"] == pytest.approx(wanted, rel=1e-5), (each, wanted)


def penalized_outside(stage: int) -> dict[str, Any]:
    """The penalty is computed from `parameters()`, outside of the pass."""
    import onefold

    model, mesh = sharded(stage)
    param = dict(model.named_parameters())[NAME]
    loss = model(batch(mesh.get_local_rank("dp")))
    penalty = (param * param).sum().full_tensor() * 0.01
    model(batch(5)).backward()  # other buffers come and go before the penalty's backward pass
    model.zero_grad()
    (loss + penalty).backward()
    return {"penalty": penalty.item(), "norm": onefold.clip_grad_norm_(model, 1e9).item()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_outside_of_a_pass_is_of_the_global_tensor(stage: int) -> None:
    plain = built(Case())
    weight = dict(plain.named_parameters())[NAME]
    penalty = weight.pow(2).sum() * 0.01
    for rank in range(2):
        (plain(batch(rank)) / 2).backward()
    penalty.backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    for each in run_ranks(4, penalized_outside, stage):
        assert each["penalty"] == pytest.approx(penalty.item(), rel=1e-5), each
        assert each["norm"] == pytest.approx(wanted, rel=1e-5), (each, wanted)


def other_uses(stage: int) -> dict[str, Any]:
    """State dicts, contexts and evaluation."""
    import onefold

    model, mesh = sharded(stage)
    dp = mesh.get_local_rank("dp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(batch(10 * dp + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, weights = optimizer.state_dict(), onefold.full_state_dict(model)
    with torch.no_grad():
        before = model(batch(7)).item()
        with onefold.keep_gathered(model):
            kept = [model(batch(7)).item() for _ in range(2)]
        with onefold.full_params(model):
            full = model(batch(7)).item()
            weight = model.layers[0].feed_forward.w2.weight
            shown = (type(weight).__name__, tuple(weight.shape), float(weight.full_tensor().norm()))
        with onefold.full_params(model, write=True):
            model.layers[0].feed_forward.w2.weight.mul_(2)
        doubled = onefold.full_state_dict(model)
    onefold.load_full_state_dict(model, weights if dist.get_rank() == 0 else None)
    again = onefold.full_state_dict(model)
    optimizer.load_state_dict(state)
    once_more = optimizer.state_dict()
    refused = {}
    for name, call in {
        "unsharded": lambda: onefold.unsharded(model).__enter__(),
        "deepcopy": lambda: __import__("copy").deepcopy(model),
    }.items():
        try:
            call()
            refused[name] = "done"
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"
    return {
        "losses": {before, *kept, full},
        "shown": shown,
        "norm": float(weights[NAME].norm()) if weights else None,
        "doubled": torch.equal(doubled[NAME], 2 * weights[NAME]) if weights else True,
        "again": all(torch.equal(v, again[k]) for k, v in weights.items()),
        "states": {
            i: {k: tuple(v.shape) for k, v in s.items() if torch.is_tensor(v)}
            for i, s in state["state"].items()
        }
        if weights
        else None,
        "same states": all(
            torch.equal(v, once_more["state"][i][k])
            for i, s in state["state"].items()
            for k, v in s.items()
            if torch.is_tensor(v) and weights
        ),
        "exp_avg": {i: s["exp_avg"] for i, s in state["state"].items()} if weights else None,
        "refused": refused,
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_dicts_and_contexts_know_the_global_tensors(stage: int) -> None:
    plain = built(Case())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(2):
        for dp in range(2):
            (plain(batch(10 * dp + step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = optimizer.state_dict()["state"]
    for rank, seen in enumerate(run_ranks(4, other_uses, stage)):
        assert len(seen["losses"]) == 1, seen
        assert seen["shown"][:2] == ("DTensor", (16, 40)), seen
        assert seen["doubled"] and seen["again"] and seen["same states"], seen
        assert "DTensors" in seen["refused"]["unsharded"], seen["refused"]
        if rank == 0:
            assert seen["shown"][2] == pytest.approx(seen["norm"], rel=1e-6)
            for i, state in wanted.items():
                assert seen["states"][i]["exp_avg"] == tuple(state["exp_avg"].shape), (i, seen)
                torch.testing.assert_close(
                    seen["exp_avg"][i], state["exp_avg"], rtol=1e-4, atol=1e-7
                )


def refused_starts(how: str) -> str:
    from torch.distributed.fsdp import fully_shard

    import onefold

    case = Case()
    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(2, stall_timeout=20.0)
    given: dict[str, Any] = {"mesh": mesh, "data": "dp"}
    model = parallelized(case, mesh)
    if how == "meta on some" and dist.get_rank() == 1:
        there: Any = model.output.weight
        empty = DTensor.from_local(
            there.to_local().to("meta"),
            there.device_mesh,
            there.placements,
            run_check=False,
            shape=there.shape,
            stride=there.stride(),
        )
        model.output.weight = nn.Parameter(empty)
    if how == "no mesh":
        given = {}
    if how == "fully_shard":
        fully_shard(model, mesh=mesh["dp"])
    if how == "other mesh":
        given = {"mesh": mesh["dp"], "data": "dp"}
    if how == "other plan" and dist.get_rank() == 3:
        model.output = nn.Linear(16, 61, bias=False)
    if how == "init":
        given["init"] = initialize
    try:
        onefold.shard(model, recipe, **given)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("no mesh", "Give shard() the mesh=... of all ranks that run this module"),
        ("fully_shard", "was given to fully_shard, which divides the same parameters"),
        ("other mesh", "is a DTensor over ranks that the given mesh lacks"),
        ("other plan", "Every rank must parallelize the same model by the same plan"),
        ("meta on some", "Build the model on the meta device on every rank, or on none"),
    ],
)
def test_what_cannot_be_divided_is_refused_on_every_rank(how: str, sentence: str) -> None:
    for rank, said in enumerate(run_ranks(4, refused_starts, how)):
        assert sentence in said, f"rank {rank}: {said}"


class Packed(nn.Module):
    """Two weights packed along `dim`, [2n, 6] or [3, 2n, 6], divided as transformers divides them."""

    def __init__(self, shape: tuple[int, ...], mesh: Any = None) -> None:
        super().__init__()
        weight = torch.arange(float(torch.Size(shape).numel())).view(shape) * 0.01
        self.dim = len(shape) - 2
        if mesh is not None:
            placed = [_StridedShard(self.dim, split_factor=2)]
            weight = distribute_tensor(weight, mesh, placed, src_data_rank=None)
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        gate, up = (local @ x).chunk(2, self.dim)
        return (gate.sigmoid() * up).square().sum()


def packed(stage: int, shape: tuple[int, ...], meta: bool) -> dict[str, Any]:
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = Packed(shape, mesh["tp"])
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)

    def initialize(module: Any) -> None:
        with torch.no_grad():
            module.weight.copy_(Packed(shape).weight)

    init = initialize if meta else None
    model = onefold.shard(model, recipe, mesh=mesh, data="dp", init=init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    out: dict[str, Any] = {"start": model.weight.onefold.gather()}
    for step in range(3):
        if step == 2:  # whole states are the same again after they were loaded
            states, weights = optimizer.state_dict(), onefold.full_state_dict(model)
            onefold.load_full_state_dict(model, weights)
            optimizer.load_state_dict(states)
        model(batch_of_rows(mesh.get_local_rank("dp"), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    out["end"] = model.weight.onefold.gather()
    out["full"] = onefold.full_state_dict(model)
    try:
        _ = onefold.engine_of(model).entries[0].box.here
    except ValueError as error:
        out["said"] = str(error)
    return out


def batch_of_rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 2, generator=torch.Generator().manual_seed(10 * rank + step))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("shape", "meta"), [((8, 6), False), ((3, 12, 6), False), ((8, 6), True)])
def test_packed_weights_train_as_in_one_process(
    stage: int, shape: tuple[int, ...], meta: bool
) -> None:
    plain = Packed(shape)
    start = plain.weight.detach().clone()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            (plain(batch_of_rows(rank, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks = run_ranks(4, packed, stage, shape, meta)
    torch.testing.assert_close(ranks[0]["full"]["weight"], plain.weight.detach())
    for seen in ranks:
        torch.testing.assert_close(seen["start"], start)
        torch.testing.assert_close(seen["end"], plain.weight.detach())
        assert "placed as _S(0, 2) over tp" in seen["said"] or len(shape) == 3, seen["said"]
