"""Which ranks have the same gradient, and which have parts of it: mistakes end in a sentence."""

from __future__ import annotations

import contextlib
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from onefold.runtime.marks import Marks, _equal
from ranks import RankFailure, run_ranks
from zoo import features_of

pytestmark = pytest.mark.one_in(4)


class SumBackwardSame(torch.autograd.Function):
    """The gradient of what all ranks along `tp` add up reaches each of them whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Sequence(nn.Module):
    """Rows are divided over `tp` around `norm`, whose gradient is therefore partial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, group: Any = None) -> Tensor:
        size, at = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        rows = self.norm(x.chunk(size)[at])
        total = rows.pow(2).sum(0)
        total = total if group is None else SumBackwardSame.apply(total, group)
        return (total * self.head).sum() / len(x)


def batches(dp: int, steps: int) -> list[Tensor]:
    return [features_of(10 * dp + i, 8, 6) for i in range(steps)]


def trained_by_hand(stage: int, partial: Any, data: Any, gradients: str = "mean") -> Any:
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0, gradients=gradients)
    model = onefold.shard(Sequence(), recipe, mesh=mesh, data=data, partial=partial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for batch in batches(mesh.get_local_rank("dp"), 3):
        model(batch, mesh["tp"].get_group()).backward()
        norms.append(onefold.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, onefold.full_state_dict(model)


def in_one_process(divided_by: int = 2) -> Any:
    model = Sequence()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for pair in zip(batches(0, 3), batches(1, 3), strict=True):
        for batch in pair:
            (model(batch) / divided_by).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_a_marked_partial_gradient_is_summed_over_the_copies(stage: int, gradients: str) -> None:
    norms, weights = in_one_process(2 if gradients == "mean" else 1)
    partial = ["norm.weight", "norm.bias"]
    seen = run_ranks(4, trained_by_hand, stage, partial, "dp", gradients)
    for got, _ in seen:
        torch.testing.assert_close(got, norms, rtol=1e-5, atol=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(seen[0][1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_mark_is_found_in_the_first_step(stage: int) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(4, trained_by_hand, stage, None, "dp")
    said = str(failure.value)
    assert said.count("have different gradients of 'norm.weight'") == 4, said
    assert "apart along 'tp' only" in said and "give partial=['norm.weight']" in said, said
    assert "StallError" not in said, said


def test_a_wrong_mark_is_found_in_the_first_step() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(4, trained_by_hand, 2, ["norm.weight", "norm.bias", "head"], "dp")
    said = str(failure.value)
    assert said.count("'head' is marked partial, and ranks 0 and 1, apart along 'tp', have") == 4, (
        said
    )


def data_left_out() -> None:
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = onefold.shard(
        nn.Linear(6, 2), onefold.Recipe.zero(2, stall_timeout=20.0), mesh=mesh, data="dp"
    )
    model(features_of(dist.get_rank(), 4, 6)).sum().backward()


def test_a_data_axis_left_out_is_named() -> None:
    with pytest.raises(RankFailure, match="add 'cp' to data") as failure:
        run_ranks(4, data_left_out)
    assert str(failure.value).count("add 'cp' to data") == 4


def other_meshes(how: str) -> None:
    import onefold

    rank, names, sizes, data = dist.get_rank(), ("dp", "tp"), (2, 2), "dp"
    if how == "names" and rank == 3:
        names = ("dp", "cp")
    if how == "data" and rank:
        data = "tp"
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if how == "order" and rank == 3:
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=names, _init_backend=False)
    given = {} if how == "none" and rank == 3 else {"mesh": mesh, "data": data}
    recipe = onefold.Recipe.zero(2, stall_timeout=10.0)
    onefold.shard(nn.Linear(6, 2), recipe, **given)


@pytest.mark.parametrize("how", ["names", "data", "none", "order"])
def test_ranks_with_other_meshes_are_told_so_on_every_rank(how: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(4, other_meshes, how)
    assert str(failure.value).count("ranks were given different meshes, or different axes") == 4


def refused(how: str) -> str:
    import onefold

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model, recipe = nn.Linear(4, 2), onefold.Recipe.zero(1, stall_timeout=10.0)
    given: dict[str, Any] = {
        "no data": {"mesh": mesh},
        "unknown data": {"mesh": mesh, "data": "batch"},
        "data twice": {"mesh": mesh, "data": ("dp", "dp")},
        "data without a mesh": {"data": "dp"},
        "group and mesh": {"mesh": mesh, "data": "dp", "group": dist.group.WORLD},
        "several axes as group": {"group": mesh},
        "unknown partial": {"mesh": mesh, "data": "dp", "partial": ["wieght"]},
        "partial without copies": {"mesh": mesh, "data": "dp", "partial": ["weight"]},
        "no mesh": {"mesh": [0, 1], "data": "dp"},
    }[how]
    try:
        onefold.shard(model, recipe, **given)
    except ValueError as error:
        return str(error)
    return "accepted"


SENTENCES = {
    "no data": "give data=(...) the names of those whose ranks compute with different",
    "unknown data": "data names 'batch', and the mesh has the axes 'dp', 'tp'",
    "data twice": "data names the axis 'dp' twice",
    "data without a mesh": "names axes of a mesh, and shard() was given none",
    "group and mesh": "given both group=... and mesh=...",
    "several axes as group": "Give several axes as mesh=..., with data=(...)",
    "unknown partial": "Did you mean 'weight'?",
    "partial without copies": "no two ranks have the same data",
    "no mesh": "expected a DeviceMesh",
}


def all_refused() -> dict[str, str]:
    return {how: refused(how) for how in SENTENCES}


def test_mistakes_in_the_arguments_end_in_a_sentence() -> None:
    for seen in run_ranks(2, all_refused):
        for how, sentence in SENTENCES.items():
            assert sentence in seen[how], f"{how}: {seen[how]}"


# -- marks of which the first backward pass says nothing -------------------------------------------


class Adapted(nn.Module):
    """Rows are divided over `tp` around an adapter, half of which starts as zeros: the other half has
    no gradient in the first step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.zeros(2, 6))

    def forward(self, x: Tensor, group: Any = None, scale: float = 1.0) -> Tensor:
        size, at = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        rows = x.chunk(size)[at]
        total = (rows + rows @ self.a @ self.b).pow(2).sum(0)
        total = total if group is None else SumBackwardSame.apply(total, group)
        return total.sum() * scale


def adapted(stage: int, partial: list[str], scales: list[float], deferred: bool) -> list[str]:
    """Steps until a sentence comes; of each step what was said."""
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    model = onefold.shard(Adapted(), recipe, mesh=mesh, data="dp", partial=partial)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    said = []
    for scale, batch in zip(scales, batches(mesh.get_local_rank("dp"), len(scales)), strict=True):
        try:
            with onefold.no_sync(model) if deferred else contextlib.nullcontext():
                model(batch, mesh["tp"].get_group(), scale).backward()
            if deferred:
                model(batch, mesh["tp"].get_group(), scale).backward()
        except ValueError as error:
            return [*said, str(error)]
        said.append("")
        if math.isfinite(scale):
            optimizer.step()
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize(("stage", "deferred"), [(1, False), (1, True), (3, False)])
def test_a_missing_mark_is_found_once_there_is_a_gradient(stage: int, deferred: bool) -> None:
    for seen in run_ranks(4, adapted, stage, ["b"], [1.0] * 3, deferred):
        assert seen[0] == "" and len(seen) == 2, seen
        assert "have different gradients of 'a'" in seen[1], seen


def test_right_marks_are_never_complained_of() -> None:
    for seen in run_ranks(4, adapted, 1, ["a", "b"], [1.0] * 5, False):
        assert seen == [""] * 5, seen


class Centred(Sequence):
    """A layer norm after what `tp` divides, so the gradient of each column of `b` sums to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor, group: Any = None) -> Tensor:
        size, at = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        rows = self.norm(x.chunk(size)[at][:, :2] @ self.b.t())
        total = rows.pow(3).sum(0)
        total = total if group is None else SumBackwardSame.apply(total, group)
        return (total * self.head).sum() / len(x)


def centred(stage: int, partial: list[str]) -> Any:
    import onefold

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    model = onefold.shard(Centred(), recipe, mesh=mesh, data="dp", partial=partial)
    try:
        model(features_of(0, 8, 6), mesh["tp"].get_group()).backward()
    except ValueError as error:
        return str(error)
    return onefold.clip_grad_norm_(model, 1e9).item()


def marked_and_not() -> list[Any]:
    marks = ["norm.weight", "norm.bias", "b"]
    return [centred(0, marks), centred(3, marks), centred(2, marks[:2])]


def test_parts_of_a_gradient_that_sum_to_zero_are_parts() -> None:
    plain = Centred()
    plain(features_of(0, 8, 6)).backward()
    assert plain.b.grad is not None and plain.b.grad.sum().abs() < 1e-4 * plain.b.grad.norm()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    for *norms, said in run_ranks(2, marked_and_not):
        assert norms == pytest.approx([norm, norm], rel=1e-5)
        assert "have different gradients of 'b'" in said, said


def test_random_parts_never_count_as_equal() -> None:
    entry: Any = SimpleNamespace(number=0, box=None)

    def seen(grad: Tensor) -> Tensor:
        marks = Marks.__new__(Marks)
        marks._numbers, marks._seen = {0}, {}
        marks.note(entry, grad)
        return marks._seen[0]

    drawn = torch.randn(20_000, 6, generator=torch.Generator().manual_seed(0))
    numbers = [seen(grad) for grad in drawn]
    assert not any(_equal(*pair) for pair in zip(numbers, numbers[1:], strict=False))
    # What rounding to bf16 changes does
    assert all(_equal(seen(g), seen(g.bfloat16())) for g in drawn[:500])


def of_some_ranks() -> str:
    """A weight that some of the ranks with the same data use, and others do not."""
    import onefold

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            used = self.second(x).square().sum() if both else 0.0
            return self.first(x).square().sum() + used

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    recipe = onefold.Recipe.zero(2, stall_timeout=20.0)
    model = onefold.shard(Uneven(), recipe, mesh=mesh, data="dp")
    try:
        model(features_of(0, 4, 6), dist.get_rank() == 0).backward()
    except ValueError as error:
        return str(error)
    return "trained on"


def test_a_weight_that_some_copies_do_not_use_is_told() -> None:
    for said in run_ranks(2, of_some_ranks):
        assert "have different gradients of 'second." in said and "(rank 1 has none)" in said, said


class Twice(nn.Module):
    """A replicated DTensor that is used for rows that `tp` divides, and for whole ones."""

    def __init__(self, mesh: Any, parts_first: bool) -> None:
        super().__init__()
        self.mesh, self.parts_first = mesh, parts_first
        weight = torch.randn(6, generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter(
            weight if mesh is None else distribute_tensor(weight, mesh, [Replicate()])
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return (x * self.weight).square().sum() + (x * self.weight).pow(3).sum()
        each = distribute_tensor(x, self.mesh, [Shard(0)], src_data_rank=None)
        every = DTensor.from_local(x, self.mesh, [Replicate()])

        def parts() -> Tensor:
            return (each * self.weight).square().sum().full_tensor()

        def wholes() -> Tensor:
            return (every * self.weight).pow(3).sum().full_tensor()

        if self.parts_first:
            return parts() + wholes()
        return wholes() + parts()


# -- axes that are among data and carry none -------------------------------------------------------


def warned(names: tuple[str, ...], data: Any, same: bool) -> list[str]:
    """What is logged in two steps of layers that `tp` divides."""
    import onefold

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))
    plan = {"1": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    recipe = onefold.Recipe.zero(2, stall_timeout=20.0)
    model = onefold.shard(model, recipe, mesh=mesh, data=data)
    for step in range(2):
        # Of other samples tensor parallelism makes nonsense, but it runs
        number = 0 if same else mesh.get_local_rank("tp")
        number += 10 * mesh.get_local_rank("dp") if "dp" in names else 0
        model(features_of(100 * step + number, 4, 6)).square().sum().backward()
        model.zero_grad()
    return [words for words in said if "have the same gradients" in words]


@pytest.mark.parametrize(
    ("names", "data", "same", "warns"),
    [
        (("dp", "tp"), ("dp", "tp"), True, True),
        (("tp",), None, True, True),
        (("dp", "tp"), "dp", True, False),
        (("dp", "tp"), ("dp", "tp"), False, False),
    ],
)
def test_an_axis_among_data_that_carries_none_is_warned_of_once(
    names: tuple[str, ...], data: Any, same: bool, warns: bool
) -> None:
    seen = run_ranks(2 ** len(names), warned, names, data, same)
    assert [len(words) for words in seen] == [int(warns)] + [0] * (len(seen) - 1), seen
    if warns:
        assert "apart along 'tp'" in seen[0][0] and "leave 'tp' out of data" in seen[0][0]
