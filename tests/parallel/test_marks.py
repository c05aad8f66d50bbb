"""Which ranks have the same gradient, which have parts of it, and what is each rank's own: marks are
right, or mistakes end in a sentence on every rank.

The model computes along tp by hand, without DTensors: rows are divided around a norm, whose gradient
is therefore partial.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from axes_models import added_up
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import onefold
from on_ranks import on_ranks, slow
from reference import NEAR, differences
from zoo import features_of

PARTIAL = ["norm.weight", "norm.bias", "b"]


class Sequence(nn.Module):
    """`zeros`: the adapter begins with zeros, so that the other half of it has no gradient at first."""

    def __init__(self, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.head = nn.LayerNorm(6), nn.Parameter(torch.randn(6))
        self.b = nn.Parameter(torch.randn(6, 6))
        if zeros:
            nn.init.zeros_(self.head)

    def forward(self, x: Tensor, group: Any = None, scale: float = 1.0) -> Tensor:
        size, at = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        total = self.norm(x.chunk(size)[at] @ self.b.t()).pow(2).sum(0)
        return (added_up(total, group) * self.head).sum() / len(x) * scale


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (2, 2), mesh_dim_names=names)


def over(mesh: DeviceMesh, model: Any, stage: int, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(
        stage, stall_timeout=20.0, reduce_op=options.pop("reduce_op", "mean")
    )
    return onefold.shard(model, recipe, mesh=mesh, **{"data": "dp", **options})


def train(
    model: Any, dps: tuple[int, ...], share: float, group: Any = None, micro_batches: int = 1
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for i in range(micro_batches):
            waits = group is not None and i + 1 < micro_batches
            for dp in dps:
                with onefold.no_sync(model) if waits else contextlib.nullcontext():
                    (model(features_of(10 * dp + 5 * step + i, 8, 6), group) * share).backward()
        optimizer.step()
        optimizer.zero_grad()


def as_one(model: Any, mesh: DeviceMesh, share: float = 0.5, micro_batches: int = 1) -> None:
    plain = Sequence()
    train(model, (mesh.get_local_rank("dp"),), 1.0, mesh.get_group("tp"), micro_batches)
    train(plain, (0, 1), share, None, micro_batches)
    weights = onefold.full_state_dict(model)
    assert not weights or not differences(plain.state_dict(), weights, **NEAR)


@on_ranks(4)
@pytest.mark.parametrize(
    ("stage", "reduce_op"), [(0, "mean"), (3, "sum"), pytest.param(2, "mean", marks=slow)]
)
def test_a_marked_partial_gradient_is_summed_over_the_copies(stage: int, reduce_op: str) -> None:
    mesh = mesh_of()
    model = over(mesh, Sequence(), stage, partial=PARTIAL, reduce_op=reduce_op)
    as_one(model, mesh, 0.5 if reduce_op == "mean" else 1.0)


@on_ranks(4)
@pytest.mark.parametrize(("stage", "partial", "words"), [
    (1, None, "have different gradients of '(norm|b)"),
    (3, PARTIAL[:2], r"have different gradients of 'b'.*give partial="),
    (2, [*PARTIAL, "head"], "'head' is marked partial, and ranks . and ., apart along 'tp', have"),
])  # fmt: skip
def test_a_missing_and_a_wrong_mark_are_found_in_the_first_step(
    stage: int, partial: list[str] | None, words: str
) -> None:
    mesh = mesh_of()
    with pytest.raises(ValueError, match=words):
        as_one(over(mesh, Sequence(), stage, partial=partial), mesh)


@on_ranks(4)
@pytest.mark.parametrize("deferred", [False, pytest.param(True, marks=slow)])
def test_a_missing_mark_is_found_once_there_is_a_gradient(deferred: bool) -> None:
    """The gradient of all but the head is zero in the first step; an overflow says nothing either."""
    mesh = mesh_of()
    model = over(mesh, Sequence(zeros=True), 1, partial=["norm.bias", "b"])
    optimizer, group = torch.optim.SGD(model.parameters(), lr=0.1), mesh.get_group("tp")
    with pytest.raises(ValueError, match=r"have different gradients of 'norm.weight'"):
        for scale in (math.inf, 1.0, 1.0, 1.0, 1.0):  # it looks again in steps 1, 2, 4
            batch = features_of(mesh.get_local_rank("dp"), 8, 6)
            with onefold.no_sync(model) if deferred else contextlib.nullcontext():
                model(batch, group, scale).backward()
            if deferred:
                model(batch, group, scale).backward()
            if scale == 1.0:
                optimizer.step()
            optimizer.zero_grad()


def hooked(mesh: DeviceMesh, stage: int, micro_batches: int) -> None:
    """A user's hook adds up the parts over tp, in each micro-batch."""
    model, group = over(mesh, Sequence(), stage), mesh.get_group("tp")
    for name in PARTIAL:
        model.get_parameter(name).register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad, group=group)
        )
    as_one(model, mesh, micro_batches=micro_batches)


@on_ranks(4)
@pytest.mark.parametrize(
    ("stage", "micro_batches"), [(1, 1), pytest.param(3, 1, marks=slow), (2, 2)]
)
def test_a_hook_that_adds_up_parts_once_trains_as_one_process(
    stage: int, micro_batches: int
) -> None:
    hooked(mesh_of(), stage, micro_batches)


# -- what is refused -------------------------------------------------------------------------------


def a_data_axis_left_out() -> None:
    model = over(mesh_of(names=("dp", "cp")), nn.Linear(6, 2), 2)
    model(features_of(dist.get_rank(), 4, 6)).sum().backward()


def meshes_that_differ() -> None:
    over(mesh_of(), nn.Linear(6, 2), 2, data="tp" if dist.get_rank() == 3 else "dp")


def plain_parts() -> None:
    """A parameter that is a part along tp, as layers without DTensors have it."""
    torch.manual_seed(dist.get_rank() % 2)
    over(mesh_of(), nn.Linear(6, 2), 1)


def used_by_some() -> None:
    torch.manual_seed(0)
    model = over(mesh_of(1, 4), nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), 2)
    model.forward = lambda x, both: sum(
        layer(x).square().sum() for layer in list(model)[: 1 + both]
    )
    model(features_of(0, 4, 6), dist.get_rank() == 0).backward()


def given(**options: Any) -> Callable[[], Any]:
    def call() -> None:
        mesh = mesh_of(4, 1)
        named = {k: mesh if v == "the mesh" else v for k, v in options.items()}
        onefold.shard(nn.Linear(4, 2), onefold.Recipe.zero(1, stall_timeout=10.0), **named)

    return call


def groups_beside_replicas() -> None:
    mesh, recipe = mesh_of(names=("dp_replicate", "dp")), onefold.Recipe.zero(2, group="flat")
    onefold.shard(nn.Linear(6, 2), recipe, mesh=mesh, data=("dp_replicate", "dp"))


MESH: dict[str, Any] = {"mesh": "the mesh"}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (a_data_axis_left_out, "add 'cp' to data"),
    (meshes_that_differ, "different meshes, or different axes"),
    (plain_parts, r"(?s)apart along 'tp' only have different values of 'weight'.*\[Shard\(dim\)\]"),
    (used_by_some, r"have different gradients of '1\..*rank . has none"),
    (given(**MESH), "give data="),
    (given(**MESH, data="batch"), "'batch', and the mesh has the axes 'dp', 'tp'"),
    (given(**MESH, data=("dp", "dp")), "'dp' twice"),
    (groups_beside_replicas, "2 replicas of 2 data ranks"),
    (given(data="dp"), "names axes of a mesh"),
    (given(group="the mesh"), "several axes as mesh"),
    (given(**MESH, data="dp", partial=["wieght"]), "Did you mean 'weight'"),
    (given(**MESH, data="dp", partial=["weight"]), "no two ranks have the same data"),
    (given(mesh=[0, 1], data="dp"), "expected a DeviceMesh"),
]  # fmt: skip


@on_ranks(4)
def test_mistakes_end_in_a_sentence_on_every_rank() -> None:
    for call, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            call()
        dist.barrier()


# -- buffers ---------------------------------------------------------------------------------------


class Running(nn.Module):
    """Columns over tp, less a running mean of each by a slope of its own; a count of steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 2)
        for name, value in (
            ("slopes", torch.arange(1.0, 9)),
            ("mean", torch.zeros(8)),
            ("steps", torch.tensor(0)),
        ):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        out = h - self.mean.clone() * self.slopes
        self.mean.mul_(0.5).add_(h.detach().mean(0), alpha=0.5)
        self.steps += 1
        return self.down(out.tanh()).square().sum()


def running(stage: int) -> tuple[Any, DeviceMesh]:
    mesh, model = mesh_of(), Running()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name in ("slopes", "mean"):
        setattr(model, name, getattr(model, name).chunk(2)[mesh.get_local_rank("tp")].clone())
    return over(mesh, model, stage), mesh


def steps_of(model: Any, dp: int, first: int) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in (first, first + 1):
        loss = model(features_of(10 * dp + step, 4, 6))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_ranks(4)
def test_buffers_of_columns_are_each_ranks_own_also_in_a_checkpoint(folder: Path) -> None:
    """Over the data axes they are one: those of the first data rank."""
    model, mesh = running(3)
    dp, tp, plain = mesh.get_local_rank("dp"), mesh.get_local_rank("tp"), Running()
    losses = steps_of(model, dp, 0)
    assert losses[0] == pytest.approx(plain(features_of(10 * dp, 4, 6)).item(), rel=1e-5)
    own = {name: b.clone() for name, b in model.named_buffers()}
    onefold.save(folder / "saved", model=model)
    losses = steps_of(model, dp, 2)
    again, _ = running(1)
    again.slopes.zero_()
    onefold.load(folder / "saved", model=again)
    assert dp or not differences(own, dict(again.named_buffers()))
    assert torch.equal(again.slopes, plain.slopes.chunk(2)[tp])
    assert steps_of(again, dp, 2) == losses
    whole = plain.state_dict()
    for call in (
        onefold.full_state_dict,
        lambda m: onefold.load_full_state_dict(m, whole),
        lambda m: list(onefold.stream_params(m)),
    ):
        with pytest.raises(ValueError, match="of each buffer"):
            call(model)
    one = onefold.shard(Running(), onefold.Recipe.zero(0))
    with pytest.raises(onefold.CheckpointError, match="has other values of buffer"):
        onefold.load(folder / "saved", model=one)
    assert onefold.load(folder / "saved", model=one, strict=False).missing == ("slopes", "mean")
    assert one.slopes[7] == 8


@on_ranks(2)
def test_tensor_parallelism_along_a_data_axis_is_warned_of() -> None:
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(listener)
    for name in ("tp", "ep"):
        mesh = mesh_of(2, names=(name,))
        model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
        over(mesh, model, 2, data=name)
    logging.getLogger("onefold").removeHandler(listener)
    told = [text for text in said if "names the axis 'tp'" in text]
    assert len(told) == (dist.get_rank() == 0), said
