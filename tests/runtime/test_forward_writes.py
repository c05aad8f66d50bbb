"""Modules that write to their own parameters in the forward pass: nothing of it is lost, at any
stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import onefold
from onefold.runtime.parameters.interval import ShardedParameterError
from ranks import run_ranks
from trials import Case, differences, train_reference, train_sharded
from zoo import features_of


def clamped(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)


def through_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.2, 0.2)


def assigned(weight: nn.Parameter) -> None:
    """As layers with a norm constraint do (`Conv2dWithConstraint`, say)."""
    weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.4)


WRITES = {f.__name__: f for f in (clamped, through_data, assigned)}


class Constrained(nn.Module):
    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(12, 40), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.layer.weight)
        return torch.relu(self.layer(x))


class Writing(Case):
    ddp_options = {"find_unused_parameters": False}

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = WRITES[write]

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 12), Constrained(self.write), nn.Linear(40, 3))

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 4, 7)


def compared(write: str) -> list[str]:
    reference = train_reference(Writing(write))
    problems = []
    for stage in (0, 1, 2, 3):
        problems += differences(
            f"stage {stage}, {write}", reference, train_sharded(Writing(write), stage), 1e-5, 1e-6
        )
    return problems


@pytest.mark.parametrize("write", WRITES)
def test_what_a_forward_pass_writes_to_parameters_is_kept_as_under_ddp(write: str) -> None:
    assert run_ranks(2, compared, write) == [[], []]


def refused(write: str, options: dict[str, Any]) -> str:
    recipe = onefold.Recipe.zero(options.pop("stage"), **options)
    model = onefold.shard(Writing(write).build(), recipe)
    try:
        model(features_of(0, 4, 7)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "kept"


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2, "offload_optimizer": "cpu"},
        {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
        {"stage": 3, "gather_codec": "int8"},
    ],
    ids=["states on the host", "all on the host", "codec"],
)
def test_a_write_that_masters_cannot_follow_is_refused(write: str, options: dict[str, Any]) -> None:
    for said in run_ranks(2, refused, write, options):
        assert "'1.layer.weight' was written to in the forward pass" in said


def read_only(options: dict[str, Any]) -> list[float]:
    """Losses of a module that reads `.data` of its weight in each pass, one of which raises."""
    torch.manual_seed(0)
    norms: list[float] = []
    layer: nn.Module = Constrained(lambda weight: norms.append(float(weight.data.norm())))
    model = onefold.shard(
        nn.Sequential(nn.Linear(7, 12), layer, nn.Linear(40, 3)), onefold.Recipe.zero(3, **options)
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        with pytest.raises(RuntimeError):
            model(features_of(step, 4, 5))  # of another width
        loss = model(features_of(step, 4, 7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses + norms


def test_reading_data_in_a_pass_is_no_write() -> None:
    on_device = run_ranks(2, read_only, {})
    assert (
        run_ranks(2, read_only, {"offload_optimizer": "cpu", "offload_param": "cpu"}) == on_device
    )


def blended_by_assignment(ours: nn.Parameter, theirs: nn.Parameter) -> None:
    """MoCo's momentum encoder."""
    ours.data = ours.data * 0.9 + theirs.data * 0.1


def blended_in_place(ours: nn.Parameter, theirs: nn.Parameter) -> None:
    ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)


BLENDS = {f.__name__: f for f in (blended_by_assignment, blended_in_place)}


class Momentum(nn.Module):
    """The outer module writes to weights of units of their own, before their forward pass or behind
    it.
    """

    def __init__(self, blend: Callable[[Any, Any], None], behind: bool) -> None:
        super().__init__()
        self.online, self.slow = (
            nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3)) for _ in range(2)
        )
        self.slow.requires_grad_(False)
        self.blend, self.behind = blend, behind

    @torch.no_grad()
    def follow(self) -> None:
        for theirs, ours in zip(self.online.parameters(), self.slow.parameters(), strict=True):
            self.blend(ours, theirs)

    def forward(self, x: Tensor) -> Tensor:
        if not self.behind:
            self.follow()
        with torch.no_grad():
            target = self.slow(x)
        out = self.online(x) - target
        if self.behind:
            self.follow()
        return out


class Following(Case):
    units = ("online", "slow.0", "slow.2")
    steps = 4

    def __init__(self, blend: str, behind: bool) -> None:
        super().__init__()
        self.blend, self.behind = BLENDS[blend], behind

    def build(self) -> nn.Module:
        return Momentum(self.blend, self.behind)

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 4, 7)


def followed(blend: str, behind: bool) -> list[str]:
    reference = train_reference(Following(blend, behind))
    problems = []
    for stage in (0, 1, 2, 3):
        problems += differences(
            f"stage {stage}, {blend}",
            reference,
            train_sharded(Following(blend, behind), stage),
            1e-5,
            1e-6,
        )
    return problems


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("blend", BLENDS)
def test_what_the_outer_module_writes_to_weights_of_other_units_is_kept(
    blend: str, behind: bool
) -> None:
    assert run_ranks(2, followed, blend, behind) == [[], []]


def given_another_shape() -> str:
    def cut(ours: nn.Parameter, _: nn.Parameter) -> None:
        ours.data = ours.data[:1]

    model = onefold.shard(Momentum(cut, False), onefold.Recipe.zero(3), units=("online", "slow"))
    with pytest.raises(ShardedParameterError) as error:
        model(features_of(0, 4, 7))
    return str(error.value)


def test_data_of_another_shape_in_a_forward_pass_is_refused_with_both_shapes() -> None:
    for said in run_ranks(2, given_another_shape):
        assert "'slow.0.weight' was given data of shape (1, 7)" in said
        assert "expected shape (12, 7)" in said


class Later(nn.Module):
    """Weights that are clamped from the fourth pass on, by the layers themselves or by the module
    around them.
    """

    def __init__(self, outer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Constrained(self.limit) if not outer else nn.Linear(12, 40) for _ in range(1)
        )
        self.first, self.last = nn.Linear(7, 12), nn.Linear(40, 3)
        self.outer, self.passes = outer, 0

    def limit(self, weight: nn.Parameter) -> None:
        if self.passes >= 4:
            weight.data.clamp_(-0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.outer:
            self.limit(self.layers[0].weight)  # type: ignore[arg-type]
        return self.last(self.layers[0](self.first(x)))


class ClampedLater(Case):
    units = ("first", "layers.0", "last")
    steps = 6

    def __init__(self, outer: bool) -> None:
        super().__init__()
        self.outer = outer

    def build(self) -> nn.Module:
        return Later(self.outer)

    def batch(self, rank: int, step: int) -> Tensor:
        return features_of(10 * step + rank, 4, 7)


def clamped_later(outer: bool) -> list[str]:
    reference = train_reference(ClampedLater(outer))
    problems = []
    for stage in (1, 3):
        problems += differences(
            f"stage {stage}", reference, train_sharded(ClampedLater(outer), stage), 1e-5, 1e-6
        )
    return problems


@pytest.mark.parametrize("outer", [False, True], ids=["by the layer", "by the module around it"])
def test_a_write_through_data_that_begins_after_some_passes_is_kept(outer: bool) -> None:
    assert run_ranks(2, clamped_later, outer) == [[], []]


class Wrapped(nn.Module):
    """Puts its frozen weight into a parametrization in each forward pass, and takes it out again, as
    peft's adapters of experts do: torch sets the weight to itself.
    """

    def __init__(self, wraps: bool) -> None:
        super().__init__()
        self.layer, self.wraps = nn.Linear(64, 64, bias=False).requires_grad_(False), wraps
        self.added = nn.Parameter(torch.full((64, 64), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        if not self.wraps:
            return self.layer(x) + x @ self.added.T
        proxy = nn.Identity()
        proxy.forward = lambda weight: weight + self.added  # type: ignore[method-assign]
        parametrize.register_parametrization(self.layer, "weight", proxy)
        try:
            return self.layer(x)
        finally:
            self.layer.parametrizations.weight.original.requires_grad_(False)
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)


def test_an_encoded_weight_may_be_set_to_itself_in_a_forward_pass() -> None:
    """That is no write. A write is refused, since the encoded weight cannot follow."""
    recipe, seen = onefold.Recipe.zero(3, frozen="nf4"), []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = onefold.shard(nn.Sequential(Wrapped(wraps), nn.Linear(64, 3)), recipe)
        for _ in range(3):
            loss = model(features_of(0, 4, 64)).square().mean()
            loss.backward()
        seen.append(loss.item())
    assert seen[1] == pytest.approx(seen[0], rel=1e-6)
    model[0].forward = lambda x: model[0].layer.weight.set_(x) and x
    with pytest.raises(RuntimeError):
        model(torch.randn(64, 64))


def hooks_after_an_error() -> tuple[str, Any, list[float]]:
    """What was raised behind a module's own forward pass; torch's hooks on saved tensors then, and
    a transform of functions, which refuses to run under such hooks.
    """
    recipe = onefold.Recipe.zero(3, offload_optimizer="cpu", offload_param="cpu")
    model = onefold.shard(nn.Sequential(Constrained(clamped)), recipe)
    try:
        model(torch.ones(2, 12))
        said = ""
    except RuntimeError as error:
        said = str(error)
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    gradient = torch.func.grad(lambda x: (x * x).sum())(torch.ones(2))
    return said, None if top is None else str(top), gradient.tolist()


def test_an_error_at_the_end_of_a_forward_pass_takes_the_hooks_on_saved_tensors_back() -> None:
    for said, hooks, gradient in run_ranks(2, hooks_after_an_error):
        assert "was written to in the forward pass" in said
        assert hooks is None and gradient == [2.0, 2.0]
