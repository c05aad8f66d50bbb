"""DTensor parameters of a sharded model as user code sees them: inside passes DTensors over real
memory, outside the global tensor. The models of this file look at their own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axes_models import (
    Case,
    Seen,
    batches_of,
    built,
    in_one_process,
    look,
    mesh_of_case,
    parallelized,
    sharded,
    whole,
)  # fmt: skip
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import onefold
import standin
from on_ranks import on_ranks, slow
from reference import NEAR, differences
from zoo import features_of

NAME = "layers.0.feed_forward.w2.weight"  # [16, 40], Shard(1)
STAGES = pytest.mark.parametrize("stage", [0, pytest.param(1, marks=slow), 3])


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b, **NEAR))


def after_a_pass(stage: int, case: Case) -> tuple[Any, torch.Tensor, nn.Module, list[Any]]:
    """A model behind a backward pass, its loss; a plain one with the mean of the gradients, and the
    gradients of each data rank.
    """
    job, plain = sharded(stage, case), built(case)
    loss = job.model(batches_of(case, job.data_rank)[0])
    loss.backward(retain_graph=True)
    each = [
        torch.autograd.grad(plain(batches_of(case, i)[0]), [*plain.parameters()]) for i in range(2)
    ]
    for p, *grads in zip(plain.parameters(), *each, strict=True):
        p.grad = sum(grads) / 2
    return job, loss, plain, each


def halved(weight: torch.Tensor) -> None:
    weight.mul_(0.5)


READS: list[Callable[[Any], torch.Tensor]] = [
    lambda p: p.norm(), lambda p: p.mean(), lambda p: p.max(), lambda p: p.abs().sum(), lambda p: p.sum(1),
    lambda p: p @ torch.ones(40), lambda p: p.data.norm(), lambda p: torch.tensor(p.shape), lambda p: torch.zeros_like(p).add_(1).sum(),
]  # fmt: skip


@on_ranks(4)
@STAGES
def test_outside_passes_a_parameter_is_the_global_tensor(stage: int) -> None:
    job, _, plain, _ = after_a_pass(stage, Case())
    param, weight = (m.get_parameter(NAME) for m in (job.model, plain))
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert close(whole(nn.utils.get_total_norm([p.grad for p in job.model.parameters()])), norm)
    for kind in (1.0, 2.0, 2.5, float("inf")):
        wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()], kind)
        assert float(onefold.clip_grad_norm_(job.model, 1e9, kind)) == pytest.approx(
            float(wanted), rel=2e-5
        )
    with torch.no_grad():
        for i, of in enumerate(READS):
            assert close(torch.as_tensor(of(param)), of(weight)), i
        with pytest.raises(onefold.ShardedParameterError, match="cannot be done on a part"):
            _ = param[0]
        param.mul_(2.0)
        assert torch.equal(param.onefold.gather(), weight * 2)
        param.copy_(weight * 3)
        assert torch.equal(param.onefold.gather(), weight * 3)
        param.data = weight.detach() * 4
        assert torch.equal(param.onefold.gather(), weight * 4)
        for p in (param, weight):
            torch.manual_seed(5)
            nn.init.normal_(p)
        assert torch.equal(param.onefold.gather(), weight)


@on_ranks(4)
@STAGES
def test_the_gradient_of_a_dtensor_is_that_of_the_global_tensor(stage: int) -> None:
    """Gradients of norms come in parts; `torch.autograd.grad` returns none of either."""
    job, loss, plain, _ = after_a_pass(stage, Case(plan="sequence"))
    job.model.zero_grad()
    params = dict(job.model.named_parameters())
    with pytest.raises(ValueError, match=r"gradient of .* a DTensor. Use loss.backward"):
        torch.autograd.grad(loss, [*params.values()])
    penalty = (params[NAME] * params[NAME]).sum()  # outside of a pass
    job.model(
        batches_of(job.case, 1)[0]
    ).backward()  # other buffers come and go before its backward
    job.model.zero_grad()
    (job.model(batches_of(job.case, job.data_rank)[0]) + whole(penalty)).backward()
    plain.get_parameter(NAME).grad += 2 * plain.get_parameter(NAME).detach()
    wanted = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert float(onefold.clip_grad_norm_(job.model, 1e9)) == pytest.approx(float(wanted), rel=1e-5)


@on_ranks(4)
@STAGES
def test_what_a_module_writes_to_its_dtensor_in_a_pass_stays(stage: int) -> None:
    job = sharded(stage, Case())
    of = job.model.get_submodule(NAME.removesuffix(".weight"))
    param = job.model.get_parameter(NAME)
    before = param.onefold.gather()
    with torch.no_grad():
        hook = of.register_forward_pre_hook(lambda module, _: halved(module.weight))
        job.model(batches_of(job.case, job.data_rank)[0])
        hook.remove()
    assert torch.equal(param.onefold.gather(), before * 0.5)


class Behind(nn.Linear):
    """Gathers its weight, and sums its gradient, behind other work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        weight = weight.redistribute(placements=[Replicate()], async_op=True)
        return x @ weight.to_local(grad_placements=[Partial()]).t()


@on_ranks(2)
def test_a_gradient_under_way_is_waited_for() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Behind(3, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh["tp"], [Shard(0)]))
    model = onefold.shard(model, onefold.Recipe.zero(2), mesh=mesh, data="dp")
    model(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert model.weight.onefold.gather().eq(-2.0).all()


@on_ranks(4)
def test_a_dtensor_that_code_keeps_is_usable_while_it_is_gathered() -> None:
    job, kept = sharded(3, Case()), []
    of = job.model.get_submodule(NAME.removesuffix(".weight"))
    of.register_forward_hook(lambda module, *_: kept.append(module.weight))
    batch = batches_of(job.case, job.data_rank)[0]
    job.model(batch).backward()
    with pytest.raises(RuntimeError, match="kept it from an earlier pass"):
        kept[0].to_local().sum()
    job.model(batch)
    of.register_forward_hook(lambda module, *_: kept[0].to_local().sum())
    job.model(batch)


@on_ranks(4)
@STAGES
def test_state_dicts_and_contexts_know_the_global_tensors(stage: int) -> None:
    case = Case()
    job, plain = sharded(stage, case), in_one_process(case)[0]
    model, (optimizer,) = job.model, job.optimizers
    for batches in job.batches():
        job.step(batches, Seen())
    seen, batch = look(job, Seen()), batches_of(case, 0)[0]
    assert not seen.weights or not differences(plain.weights, seen.weights, 1e-4, 2e-5)
    with torch.no_grad():
        losses = [model(batch)]
        with onefold.keep_gathered(model):
            losses += [model(batch) for _ in range(2)]
        with onefold.full_params(model):
            losses.append(model(batch))
            weight = model.get_parameter(NAME)
            assert (type(weight), weight.shape) == (DTensor, (16, 40))
        assert len({loss.item() for loss in losses}) == 1
        with onefold.full_params(model, write=True):
            model.get_parameter(NAME).mul_(2)
    doubled, states = onefold.full_state_dict(model), optimizer.state_dict()
    assert not doubled or torch.equal(doubled[NAME], 2 * seen.weights[NAME])
    other = sharded(3 - stage, case, scale=0.5)
    onefold.load_full_state_dict(other.model, seen.weights if dist.get_rank() == 0 else None)
    other.optimizers[0].load_state_dict(states)
    again = look(other, Seen())
    assert not differences(seen.weights, again.weights) and not differences(
        seen.states, again.states
    )
    with pytest.raises(Exception, match="DTensors"):
        onefold.unshard(model)


@on_ranks(4)
@pytest.mark.parametrize("away", [0, 1, 3])
def test_parts_on_the_meta_device_beside_others_with_values(away: int) -> None:
    """Rank 1 has another part than rank 0; rank 3 the same as rank 1, which is asked for it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(12.0).view(4, 3)
    weight = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    if dist.get_rank() == away:
        weight = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh["tp"], [Shard(0)])
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(weight)

    def model() -> Any:
        return onefold.shard(layer, onefold.Recipe.zero(3), mesh=mesh, data="dp")

    if away == 3:
        assert not (state := onefold.full_state_dict(model())) or state["weight"].equal(whole)
        return
    with pytest.raises(ValueError, match="'weight' is on the meta device on some ranks"):
        model()


# -- packed weights --------------------------------------------------------------------------------


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
        local = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        gate, up = (local @ x).chunk(2, self.dim)
        return (gate.sigmoid() * up).square().sum()


def trains_as_in_one_process(
    stage: int, shape: tuple[int, ...], meta: bool, whole: Callable[[Any], Any]
) -> None:
    """`whole`: the global tensors that this rank sees of the model."""
    mesh, plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), Packed(shape)
    with torch.device("meta" if meta else "cpu"):
        model: Any = Packed(shape, mesh["tp"])

    def init(module: Any) -> None:
        with torch.no_grad():
            module.weight.copy_(plain.weight)

    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    model = onefold.shard(model, recipe, mesh=mesh, data="dp", init=init if meta else None)
    assert all(torch.equal(t, plain.weight) for t in whole(model))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        if step:  # whole states are the same again after they were loaded
            states, weights = optimizers[0].state_dict(), onefold.full_state_dict(model)
            onefold.load_full_state_dict(model, weights)
            optimizers[0].load_state_dict(states)
        model(features_of(10 * mesh.get_local_rank("dp") + step, 6, 2)).backward()
        for i in range(2):
            (plain(features_of(10 * i + step, 6, 2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for t in whole(model):
        torch.testing.assert_close(t, plain.weight.detach())


PACKED = [(3, (8, 6), False), (1, (3, 12, 6), False), (0, (8, 6), True)]


@on_ranks(4)
@pytest.mark.parametrize(("stage", "shape", "meta"), PACKED)
def test_packed_weights_train_as_in_one_process(
    stage: int, shape: tuple[int, ...], meta: bool
) -> None:
    trains_as_in_one_process(stage, shape, meta, lambda model: [model.weight.onefold.gather()])


@on_ranks(4, fresh=True)
def test_parts_move_where_an_exchange_is_one_operation_of_all_ranks(folder: Path) -> None:
    """As on NCCL, which has no messages between two ranks alone."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    standin.register()
    store = dist.FileStore(str(folder / "again"), 4)
    dist.init_process_group("cpu:standin", store=store, rank=rank, world_size=4)
    for case in PACKED:
        trains_as_in_one_process(*case, lambda model: onefold.full_state_dict(model).values())
    assert standin.launched["all_to_all"] > 0


# -- what is refused -------------------------------------------------------------------------------


def over(mesh: Any, model: Any) -> Any:
    recipe = onefold.Recipe.zero(2, stall_timeout=20.0)
    return onefold.shard(model, recipe, mesh=mesh, data="dp")


def given_to_fully_shard(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["dp"])
    over(mesh, model)


def another_plan(model: Any, mesh: Any) -> None:
    if dist.get_rank() == 3:
        model.output = nn.Linear(16, 61, bias=False)
    over(mesh, model)


def stepped_by_muon(model: Any, mesh: Any) -> None:
    model = over(mesh, model)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    model(batches_of(Case(), 0)[0]).backward()
    optimizer.step()


REFUSED: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda model, mesh: onefold.shard(model, onefold.Recipe.zero(2)), "Give shard"),
    (lambda model, mesh: over(mesh["dp"], model), "ranks that the given mesh lacks"),
    (given_to_fully_shard, "was given to fully_shard"),
    (another_plan, "by the same plan"),
    (stepped_by_muon, r"(?s)Muon steps whole matrices.*tok_embeddings.weight.*over tp"),
]


@on_ranks(4)
def test_what_cannot_be_divided_is_refused_on_every_rank() -> None:
    mesh = mesh_of_case(Case())
    for call, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            call(parallelized(Case(), mesh), mesh)
