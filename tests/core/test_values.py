"""What code is given: averages of weights, states of optimizers, clones without their group."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import looks
import onefold
from on_ranks import on_ranks
from reference import NEAR, built, ddp, differences, first, sgd, train
from zoo import TinyMLP, features_of

STAGES = (0, 1, 2, 3)


def sharded(stage: int, make: Any = TinyMLP, seed: int = 0, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(stage, **{"stall_timeout": 20.0, **options})
    return onefold.shard(built(make, seed), recipe)


def one_step(model: Any, optimizer: Any, update: Any, step: int) -> None:
    train(model, optimizer, [features_of(10 * step + dist.get_rank(), 4, 7)])
    update()


# -- averages of weights ---------------------------------------------------------------------------


class Normed(TinyMLP):
    """With a buffer that moves, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(width=40)
        self.register_buffer("seen", torch.zeros(()))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        return super().forward(x) * (1 + 0.01 * self.seen)


def torchs_average(decay: float | None) -> AveragedModel:
    """After three steps under DDP."""
    plain = ddp(built(Normed))
    average = AveragedModel(plain.module, multi_avg_fn=decay and get_ema_multi_avg_fn(decay))
    optimizer = sgd(plain)
    for step in range(3):
        one_step(plain, optimizer, lambda: average.update_parameters(plain.module), step)
    return average


AVERAGED: list[tuple[float | None, dict[str, Any]]] = [
    *((decay, {"stage": stage}) for stage in STAGES for decay in (0.7, None)),
    (0.7, {"stage": 3, "offload_optimizer": "cpu"}),
    (0.7, {"stage": 3, "shard_group": 1}),
]


@on_ranks(2)
@pytest.mark.parametrize("decay, options", AVERAGED, ids=str)
def test_an_average_is_averaged_models_on_every_tier(
    decay: float | None, options: dict[str, Any]
) -> None:
    theirs = torchs_average(decay)
    model = sharded(make=Normed, **options)
    average, optimizer = onefold.ema.EMA(model, decay), sgd(model)
    nothing = onefold.ema.EMA(sharded(make=lambda: TinyMLP().requires_grad_(False), **options))
    nothing.update()
    for step in range(3):
        one_step(model, optimizer, average.update, step)
    held = looks.held(model)
    counted = sum(tier.get("averages", 0) for tier in held.values())
    whole = 4 * sum(numel for _, numel in looks.units(model))
    alone = options["stage"] == 0 or "shard_group" in options
    assert 0 < counted <= whole // (1 if alone else 2)
    weights, state = onefold.full_state_dict(model), average.state_dict()
    assert not first(differences(theirs.state_dict(), state, **NEAR))
    x = features_of(99, 8, 7)
    with average.applied() as applied, torch.no_grad():
        assert torch.allclose(applied.eval()(x), theirs.module.eval()(x), **NEAR)
        assert not differences(state, average.state_dict())
        inside = onefold.full_state_dict(model)
        named = {n.removeprefix("module."): t for n, t in state.items() if n != "n_averaged"}
        assert not first(differences(named, inside))
    model.train()
    assert not differences(weights, onefold.full_state_dict(model))
    other = sharded(make=Normed, seed=1, **options)
    again = onefold.ema.EMA(other, decay)
    onefold.load_full_state_dict(other, first(weights))
    again.load_state_dict(first(state))
    assert again.updates == 3 and not differences(state, again.state_dict())
    again.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(state if dist.get_rank() == 0 else theirs.state_dict())


@on_ranks(1)
def test_the_average_of_a_weight_in_another_memory_format_is_read_and_loaded() -> None:
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = onefold.shard(layer, onefold.Recipe.zero(0))
    average, optimizer = onefold.ema.EMA(model, 0.5), torch.optim.SGD(model.parameters(), lr=0.1)
    before = onefold.full_state_dict(model)
    average.update()
    model(features_of(0, 1, 3, 8, 8)).sum().backward()
    optimizer.step()
    average.update()
    after, state = onefold.full_state_dict(model), average.state_dict()
    for name, weight in after.items():
        assert torch.allclose(state[f"module.{name}"], (before[name] + weight) / 2, atol=1e-6)
    again = onefold.ema.EMA(model, 0.5)
    again.load_state_dict(state)
    assert not differences(state, again.state_dict())


@on_ranks(2)
def test_what_an_average_cannot_do_is_said(folder: Path) -> None:
    model, on_disk = sharded(2, Normed), sharded(3, offload_optimizer="nvme", nvme=str(folder))
    optimizer, average = sgd(model), onefold.ema.EMA(model, 0.7)
    one_step(model, optimizer, average.update, 0)
    before = onefold.full_state_dict(model)
    with average.applied():
        model(features_of(0, 8, 7)).sum().backward()
        saving = onefold.save_async(folder / "averages", model=model)
        for call in (
            optimizer.step,
            optimizer.step,
            average.update,
            average.applied().__enter__,
            lambda: onefold.unshard(model),
        ):
            with pytest.raises((RuntimeError, ValueError), match=r"inside (ema.applied|itself)"):
                call()
        optimizer.zero_grad()
        saving.wait()
    changed = {
        line.partition(":")[0] for line in differences(before, onefold.full_state_dict(model))
    }
    assert changed <= {"seen"}
    wrong = {"n_averaged": torch.tensor(1), "module.enter.weight": torch.ones(2)}
    for call, words in (
        (lambda: onefold.ema.EMA(model, 1.5), "decay=1.5: expected a number"),
        (lambda: onefold.ema.EMA(on_disk), "are on NVMe, and averages are kept in memory"),
        (lambda: onefold.ema.EMA(nn.Linear(2, 2)), "was not sharded"),
        (lambda: average.load_state_dict(before), "given no state of an average"),
        (
            lambda: average.load_state_dict(wrong),
            r"enter.weight: .* shape torch.Size\(\[2\]\) .* torch.Size\(\[40, 7\]\)",
        ),
        (lambda: AveragedModel(model), r"onefold.ema.EMA\(model, decay\)"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words):
            call()


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_averaged_model_made_before_shard_averages_whole_weights(stage: int) -> None:
    model: Any = built(Normed)
    ours = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    onefold.shard(model, onefold.Recipe.zero(stage))
    optimizer = sgd(model)
    for step in range(3):
        one_step(model, optimizer, lambda: ours.update_parameters(model), step)
    assert not differences(torchs_average(0.7).state_dict(), ours.state_dict(), **NEAR)


# -- optimizers ------------------------------------------------------------------------------------


class Late(nn.Module):
    """Small parameters, which one rank alone has; `late` is used from the third call on, and `never`
    not at all. All ranks have the same data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(6, 40), nn.Linear(6, 6), nn.Linear(40, 3)
        self.never, self.calls = nn.Parameter(torch.ones(5)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.late(x) if self.calls > 2 else x
        return self.last(torch.tanh(self.first(x))).square().mean()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: [torch.optim.AdamW(p.values(), lr=0.01)],
    "groups with other keys": lambda p: [
        torch.optim.AdamW(
            [
                {"params": [t for n, t in p.items() if "late" in n], "amsgrad": True},
                {"params": [t for n, t in p.items() if "late" not in n]},
            ],
            lr=0.01,
        )
    ],
    "one for each": lambda p: [torch.optim.AdamW([t], lr=0.01) for t in p.values()],
    "SGD": lambda p: [torch.optim.SGD(p.values(), lr=0.01, momentum=0.9)],
}


def shown(model: Any, optimizers: list[Any]) -> Any:
    """{parameter: {key: (shape, norm)}}, read by the same code on every rank."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        for optimizer in (o for o in optimizers if p in o.state):
            found[name] = {
                key: (tuple(v.shape), pytest.approx(v.double().norm().item(), rel=1e-4))
                for key, v in optimizer.state[p].items()
                if v is not None
            }
    return found, [len(optimizer.state) for optimizer in optimizers]


@on_ranks(2)
@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("how", ["trained", "frozen", "thawed", "popped", "cleared"])
def test_every_rank_sees_the_states_of_plain_pytorch(name: str, how: str) -> None:
    """After any history: freezes, parameters that are used late or never, states that are dropped."""
    models = [built(Late), *(sharded(stage, Late) for stage in (1, 2, 3))]
    optimizers = [OPTIMIZERS[name](dict(model.named_parameters())) for model in models]
    for step in range(7):
        for model, mine in zip(models, optimizers, strict=True):
            if step in (4, 6) and how in ("frozen", "thawed"):
                model.first.requires_grad_(step == 6 and how == "thawed")
            for optimizer in mine:
                if step == 3 and how == "popped":
                    optimizer.state.pop(model.first.bias, None)
                if step == 4 and how == "cleared":
                    optimizer.state.clear()
            for optimizer in mine:
                optimizer.zero_grad()
            model(features_of(step, 4, 6)).backward()
            for optimizer in mine:
                optimizer.step()
        if step != 1:
            expected, *found = [shown(m, o) for m, o in zip(models, optimizers, strict=True)]
            for stage, one in enumerate(found, 1):
                assert one == expected, f"stage {stage}, step {step}"


def whole(model: Any) -> list[Tensor]:
    return [
        (p.onefold.gather() if hasattr(p, "onefold") else p.detach()).clone()
        for p in model.parameters()
    ]


LOADERS = ("onefold.load", "dcp.load", "load_state_dict")


@on_ranks(2)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_from_before_shard_is_saved_loaded_into_and_seen_at_once(
    stage: int, loader: str, folder: Path
) -> None:
    batches = [features_of(step, 4, 7) for step in range(6)]
    plain = built(TinyMLP)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, theirs, batches[:2])
    model: Any = built(TinyMLP)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, ours, batches[:2])
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    onefold.shard(model, recipe)
    assert shown(model, [ours])[0] == shown(plain, [theirs])[0]
    other: Any = built(TinyMLP, 1)
    its = torch.optim.AdamW(other.parameters(), lr=0.01)
    train(other, its, batches[4:])
    onefold.shard(other, recipe)
    if loader == "onefold.load":
        onefold.save(folder / "a", model=model, optimizer=ours)
        onefold.load(folder / "a", model=other, optimizer=its)
    elif loader == "dcp.load":
        dcp.save(onefold.dcp_state_dict(model, ours), checkpoint_id=folder / "b")
        dcp.load(onefold.dcp_state_dict(other, its), checkpoint_id=folder / "b")
    else:
        onefold.load_full_state_dict(other, first(onefold.full_state_dict(model)))
        its.load_state_dict(ours.state_dict())
    assert shown(other, [its]) == shown(plain, [theirs])
    train(plain, theirs, batches[2:4])
    for m, o in ((model, ours), (other, its)):
        train(m, o, batches[2:4])
        assert all(map(torch.equal, whole(m), whole(plain)))


class Careful(torch.optim.AdamW):
    """Calls the `step` of its base in several ways."""

    ways: tuple[str, ...] = ("once",)

    def step(self, closure: Any = None) -> Any:
        for way in self.ways:
            if way == "raises":
                raise OverflowError("in the middle of a step")
            super().step()


@on_ranks(2)
@pytest.mark.parametrize("ways", [("once",), ("once", "once"), ("once", "raises")])
@pytest.mark.parametrize("scheduled", [False, True])
def test_steps_inside_steps_that_raise_and_of_copies_are_those_of_plain_pytorch(
    ways: tuple[str, ...], scheduled: bool
) -> None:
    found, kept = [], []
    for stage in (None, 1, 3):
        model: Any = built(TinyMLP)
        optimizer = Careful(model.parameters(), lr=0.01, foreach=False)
        if scheduled:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
        if stage is not None:
            onefold.shard(model, onefold.Recipe.zero(stage))
        train(model, optimizer, [features_of(0, 4, 7)])
        optimizer.ways = ways
        model(features_of(1, 4, 7)).square().mean().backward()
        try:
            optimizer.step()
        except OverflowError as error:
            kept.append(error)  # with its traceback
        shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
        assert shapes == [tuple(p.shape) for p in built(TinyMLP).parameters()]
        optimizer.zero_grad()
        optimizer.ways = ("once",)
        train(model, optimizer, [features_of(step, 4, 7) for step in (2, 3)])
        found.append((whole(model), [float(s["step"]) for s in optimizer.state.values()]))
    for weights, steps in found[1:]:
        assert all(map(torch.equal, weights, found[0][0]))
        assert len(ways) > 1 or steps == found[0][1]


@on_ranks(2)
def test_a_clone_says_that_its_model_is_gone() -> None:
    model: Any = onefold.shard(built(TinyMLP), onefold.Recipe.zero(3))
    clone = model.enter.weight.detach().clone()
    del model
    with pytest.raises(onefold.ShardedParameterError, match="whose model is gone"):
        clone.sum()


@on_ranks(2)
def test_a_frozen_parameter_without_elements_is_gathered_in_codes() -> None:
    model: Any = built(TinyMLP)
    model.none = nn.Parameter(torch.empty(0), requires_grad=False)
    model = onefold.shard(model, onefold.Recipe.zero(3, gather_codec="int8"))
    model(features_of(0, 4, 7)).square().mean().backward()
    assert model.none.numel() == 0
