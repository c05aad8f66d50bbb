"""The unit that a forward pass uses last, and the units around it, stay gathered until the backward
pass, and no longer.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.memory import GATHERED
from ranks import run_ranks
from trials import MLPCase, differences, fresh, train_sharded
from zoo import Block, ResidualBlock, TinyGPT, TinyMLP, features_of, tokens_of

TIMEOUT = 30.0


class Launched:
    """Counts the gathers of each unit of a model while the block runs."""

    def __init__(self, model: nn.Module) -> None:
        import onefold

        self.gather, self.units = onefold.engine_of(model).gather, Counter[str]()

    def __enter__(self) -> Counter[str]:
        launch = self.gather.launch

        def counted(unit: Any) -> None:
            self.units[unit.name] += 1
            launch(unit)

        self.gather.launch = counted
        return self.units

    def __exit__(self, *_: object) -> None:
        del self.gather.launch


def gathered(model: nn.Module) -> list[str]:
    """The names of the units that are gathered now."""
    import onefold

    engine = onefold.engine_of(model)
    units = [u for u in engine.units if not u.resident and not u.ungathered]
    assert engine.memory.now().get(GATHERED, 0) == sum(u.gathered_bytes for u in units), (
        engine.memory.now()
    )
    return [u.name for u in units]


def sharded(
    build: Callable[[], nn.Module], stage: int = 3, units: Any = None, **options: Any
) -> tuple[nn.Module, Any]:
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(
        build(), onefold.Recipe.zero(stage, stall_timeout=TIMEOUT, **options), units=units
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    if isinstance(model, TinyGPT):
        return model(tokens_of(seed + 100 * dist.get_rank()))
    return model(features_of(seed + 100 * dist.get_rank(), 4, 7)).square().mean()


def step(model: nn.Module, optimizer: Any, seed: int, micro_batches: int = 1) -> list[float]:
    import onefold

    losses = []
    for k in range(micro_batches):
        with contextlib.nullcontext() if k + 1 == micro_batches else onefold.no_sync(model):
            loss = loss_of(model, 10 * seed + k)
            loss.backward()
            losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


class Nested(nn.Module):
    """Two stacks with a norm each, of which the second is the last: units inside a unit inside the
    root.
    """

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(ResidualBlock(7) for _ in range(2))
            self.norm = nn.LayerNorm(7)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 7)
        self.first, self.second = self.Stack(), self.Stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.enter(x)))


class Shared(nn.Module):
    """A block that is used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(ResidualBlock(7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


def only_blocks() -> nn.Module:
    return nn.Sequential(*(ResidualBlock(7) for _ in range(3)))


#: name: (model, units, options, units that are gathered once in a micro-batch, those that are
#: gathered twice)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], set[str], set[str]]] = {
    "root": (TinyGPT, (Block,), {}, {"(root)", "blocks.2"}, {"blocks.0", "blocks.1"}),
    "tied": (partial(TinyGPT, tied=True), (Block,), {}, {"(root)", "blocks.2"}, {"blocks.0", "blocks.1"}),
    "head": (TinyGPT, (Block, "tokens", "head"), {}, {"(root)", "head", "tokens"}, {"blocks.0", "blocks.1", "blocks.2"}),
    "blocks": (only_blocks, (ResidualBlock,), {}, {"2"}, {"0", "1"}),
    "nested": (
        Nested, (Nested.Stack, ResidualBlock), {},
        {"(root)", "second", "second.blocks.1"}, {"first", "first.blocks.0", "first.blocks.1", "second.blocks.0"},
    ),
    "nothing ahead": (TinyGPT, (Block,), {"prefetch": 0}, {"(root)", "blocks.2"}, {"blocks.0", "blocks.1"}),
    "everything ahead": (TinyGPT, (Block,), {"prefetch": 9}, {"(root)", "blocks.2"}, {"blocks.0", "blocks.1"}),
    "checkpointed": (
        partial(TinyGPT, checkpointing="non-reentrant"), (Block,), {}, {"(root)", "blocks.2"}, {"blocks.0", "blocks.1"},
    ),
    "re-entrant": (partial(TinyGPT, checkpointing="reentrant"), (Block,), {}, {"(root)", "blocks.2"}, {"blocks.0", "blocks.1"}),
}  # fmt: skip


def gathers_by_unit() -> list[str]:
    wrong = []
    for name, (build, units, options, once, twice) in MODELS.items():
        plain, model = sharded(build, 0, units), sharded(build, 3, units, **options)
        for seed, micro_batches in enumerate((1, 1, 3)):
            expected = step(*plain, seed, micro_batches)
            with Launched(model[0]) as counted:
                losses = step(*model, seed, micro_batches)
            if losses != expected:
                wrong.append(f"{name}: losses of step {seed} are {losses}, at stage 0 {expected}")
            if gathered(model[0]):
                wrong.append(f"{name}: {gathered(model[0])} stayed behind step {seed}")
            told = dict.fromkeys(once, micro_batches) | dict.fromkeys(twice, 2 * micro_batches)
            if seed and counted != told:  # the first step shows the order
                wrong.append(f"{name}: step {seed} gathered {dict(counted)}, expected {told}")
    return wrong


def test_last_units_are_gathered_once_in_each_micro_batch() -> None:
    assert run_ranks(2, gathers_by_unit) == [[]] * 2


def gathers_of_a_shared_block() -> tuple[Counter[str], list[list[float]]]:
    plain, (model, optimizer) = (
        sharded(Shared, 0, (ResidualBlock,)),
        sharded(Shared, 3, (ResidualBlock,)),
    )
    losses = [[*step(*plain, 0), *step(*plain, 1)], step(model, optimizer, 0)]
    with Launched(model) as counted:
        losses[1] += step(model, optimizer, 1)
    return counted, losses


def test_a_unit_that_a_pass_uses_several_times_is_released_after_its_last_use() -> None:
    for counted, (expected, losses) in run_ranks(2, gathers_of_a_shared_block):
        assert counted["blocks.0"] > 1 and counted["(root)"] == 1, counted
        assert losses == expected


def gathers_over_groups() -> list[str]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    wrong = []
    for options in (
        {}, {"second_copy": True}, {"shard_group": "node"}, {"gather_codec": "int8"}, {"second_copy": True, "gather_codec": "fp8"},
    ):  # fmt: skip
        expected: list[float] | None = None
        # Kept from forward to backward there is no second gather to differ
        for reshard_after_forward in (False, True):
            model, optimizer = sharded(
                TinyGPT, 3, (Block,), reshard_after_forward=reshard_after_forward, **options
            )
            losses = step(model, optimizer, 0)
            with Launched(model) as counted:
                losses += step(model, optimizer, 1, 2)
            expected = losses if expected is None else expected
            if losses != expected:
                wrong.append(f"{options}: losses {losses}, expected {expected}")
        if counted != {"(root)": 2, "blocks.0": 4, "blocks.1": 4, "blocks.2": 2}:
            wrong.append(f"{options}: {dict(counted)}")
    return wrong


def test_over_groups_with_a_second_copy_and_encoded_they_are_gathered_once_too() -> None:
    assert run_ranks(4, gathers_over_groups) == [[]] * 4


class Breaks(Exception):
    pass


def _raise(*_: object) -> None:
    raise Breaks


def states_of_a_loop() -> dict[str, list[str]]:
    """What is gathered behind each line of a loop that does other things than one backward pass for
    each forward pass.
    """
    import onefold

    model, optimizer = sharded(TinyMLP, 3, (ResidualBlock,))
    found = {"before the order is known": []}
    loss = loss_of(model, 0)
    found["before the order is known"] = gathered(model)
    loss.backward()
    optimizer.step()
    found["step"] = gathered(model)

    loss = loss_of(model, 1)
    found["forward"] = gathered(model)
    with torch.no_grad():
        loss_of(model, 2)
    found["evaluated in between"] = gathered(model)
    loss.backward()
    found["backward"] = gathered(model)

    # No backward pass follows: a loss that raised, an evaluation with gradients
    loss = loss_of(model, 3)
    optimizer.step()
    found["stepped instead"] = gathered(model)

    loss = loss_of(model, 3)
    found["another forward"] = gathered(model)
    del loss
    found["its graph has gone"] = gathered(model)

    two = [loss_of(model, 4), loss_of(model, 5)]
    found["two forwards"] = gathered(model)
    two[1].backward()
    found["backward of the second"] = gathered(model)
    with Launched(model) as counted:
        two[0].backward()
    found["gathered by backward of the first"] = sorted(counted.elements())

    hook = model.leave.register_forward_hook(_raise)
    with contextlib.suppress(Breaks):
        loss_of(model, 6)
    hook.remove()
    found["forward raised"] = gathered(model)

    out = loss_of(model, 7)
    out.register_hook(_raise)
    with contextlib.suppress(Breaks):
        out.backward()
    with torch.no_grad():
        loss_of(model, 8)
    found["backward raised, then a pass"] = gathered(model)

    loss = loss_of(model, 9)
    torch.autograd.grad(loss, [model.leave.weight])
    found["autograd.grad"] = gathered(model)

    loss = loss_of(model, 10)
    with onefold.keep_gathered(model), torch.no_grad():
        loss_of(model, 11)
    found["kept gathered, then not"] = gathered(model)

    loss = loss_of(model, 12)
    onefold.load_full_state_dict(model, onefold.full_state_dict(model))
    found["loaded"] = gathered(model)

    loss = loss_of(model, 13)
    (model.leave.weight.square().sum() + loss).backward()  # an operation outside, with gradients
    found["penalty"] = gathered(model)
    optimizer.zero_grad()

    loss = loss_of(model, 14)
    with onefold.full_params(model):
        pass
    loss.backward()
    found["full params in between"] = gathered(model)
    return found


def test_they_stay_until_a_backward_pass_or_the_next_pass_or_step_and_no_longer() -> None:
    turn = ["(root)", "blocks.2"]
    for found in run_ranks(2, states_of_a_loop):
        stayed = {when: names for when, names in found.items() if names}
        assert stayed == {
            "forward": turn,
            "another forward": turn,
            "two forwards": turn,
            "gathered by backward of the first": ["(root)", "blocks.0", "blocks.1", "blocks.2"],
        }


def gradients_after_a_write(stage: int) -> list[Tensor]:
    """Weights are written to between a forward pass and its backward pass."""
    import onefold

    model, optimizer = sharded(TinyMLP, stage, (ResidualBlock,))
    step(model, optimizer, 0)
    loss = loss_of(model, 1)
    for parameter in (model.leave.weight, model.blocks[2].down.weight):  # type: ignore[index, union-attr]
        parameter.data.mul_(2)
    loss.backward()
    optimizer.step()
    return list(onefold.full_state_dict(model).values())  # empty, but on rank 0


def test_a_write_between_the_passes_is_seen_by_the_backward_pass_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (0, 1):
        optimizer.zero_grad()
        loss = torch.stack(
            [
                model(features_of(seed * 10 ** (1 - seed) + 100 * rank, 4, 7)).square().mean()
                for rank in (0, 1)
            ]
        ).mean()
        if seed:
            for parameter in (model.leave.weight, model.blocks[2].down.weight):  # type: ignore[union-attr]
                parameter.data.mul_(2)  # type: ignore[operator]
        loss.backward()
        optimizer.step()
    found = run_ranks(2, gradients_after_a_write, 3)[0]
    for expected, actual in zip(model.state_dict().values(), found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def losses_around_a_write() -> list[bool]:
    """Whether a forward pass sees what was written behind an earlier one whose backward pass has
    not come.
    """
    import onefold

    model, optimizer = sharded(TinyMLP, 3, (ResidualBlock,))
    step(model, optimizer, 0)
    waiting = loss_of(model, 1)
    for parameter in (model.leave.weight, model.blocks[2].down.weight):  # type: ignore[index, union-attr]
        parameter.data.mul_(2)
    seen = loss_of(model, 1)
    with onefold.full_params(model):
        expected = loss_of(model, 1)
    return [seen.item() == expected.item(), seen.item() != waiting.item()]


def test_a_write_behind_a_forward_pass_is_seen_by_the_next() -> None:
    assert run_ranks(2, losses_around_a_write) == [[True, True]] * 2


class Diverges(MLPCase):
    """Ranks walk alike, so that the order is known; from the second step on one of them passes over
    the last blocks.

    `how`: it does not run them ("skips"), or its loss does not look at what they return
    ("ignores"), or it runs what is in the unit around them but not that unit ("enters").
    """

    steps = 5
    units = (ResidualBlock, Nested.Stack)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(7, 7)
            self.blocks = nn.ModuleList(ResidualBlock(7) for _ in range(8))
            self.around = Nested.Stack()
            self.leave = nn.Linear(7, 5)

        def forward(self, x: Tensor, blocks: int, looked_at: int, around: bool) -> Tensor:
            x, seen = self.enter(x), []
            for block in self.blocks[:blocks]:
                x = block(x)
                seen.append(x)
            if blocks == looked_at == 8:
                for part in [self.around] if around else self.around.blocks:
                    x = part(x)
                return self.leave(x)
            return self.leave(seen[min(looked_at, blocks) - 1])

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build(self) -> nn.Module:
        return self.Model()

    def batch(self, rank: int, step: int) -> Any:
        short = step > 0 and rank == step % 2
        few = 8 if not short else 6 if step < 4 else 1
        blocks, looked_at = (
            (few if self.how == "skips" else 8),
            (8 if self.how == "enters" else few),
        )
        return (
            features_of(10 * step + rank, 4, 7),
            blocks,
            looked_at,
            not (short and self.how == "enters"),
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(*batch).square().mean()


def in_one_process(case: Diverges) -> dict[str, Tensor]:
    """The mean of every rank's loss over every rank's batch, one backward pass, one update."""
    model, world = fresh(case), dist.get_world_size()
    optimizer = case.optimizer(model)
    for number in range(case.steps):
        optimizer.zero_grad()
        torch.stack(
            [case.loss(model, case.batch(rank, number)) for rank in range(world)]
        ).mean().backward()
        optimizer.step()
    return model.state_dict()


def diverging(how: str) -> list[str]:
    expected, found, first = in_one_process(Diverges(how)), [], None
    for stage, options in (
        (1, {}),
        (3, {}),
        (3, {"prefetch": 0}),
        (3, {"prefetch": 0, "in_flight": 0}),
        (3, {"prefetch": 3}),
    ):
        curve = train_sharded(Diverges(how), stage, **options)
        first = first or curve
        found += differences(f"{how}, stage {stage}, {options}, bit by bit", first, curve, 0.0, 0.0)
        for name, weight in curve.weights.items():
            if not torch.allclose(weight, expected[name], rtol=1e-5, atol=1e-6):
                found.append(f"{how}, stage {stage}, {options}: {name} differs from one process")
    return found


@pytest.mark.parametrize("how", ["skips", "ignores", "enters"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_pass_over_them_train_as_in_one_process(world_size: int, how: str) -> None:
    assert run_ranks(world_size, diverging, how) == [[]] * world_size


def memory_at_the_turn() -> dict[str, int]:
    """What the engine holds between the passes, and at its peak, beside what the last units
    have.
    """
    import onefold

    model, optimizer = sharded(
        partial(TinyGPT, vocabulary=401, width=64, depth=4), 3, (Block, "tokens", "head")
    )
    engine, seen = onefold.engine_of(model), {}
    step(model, optimizer, 0)
    engine.memory.reset_peak()
    loss = loss_of(model, 1)
    seen["between"] = engine.memory.now()[GATHERED]
    loss.backward()
    seen["turn"] = sum(u.gathered_bytes for u in engine.units if u.name in ("(root)", "head"))
    seen["behind"] = engine.memory.now().get(GATHERED, 0)
    return seen


def test_between_the_passes_only_the_last_units_are_gathered() -> None:
    for seen in run_ranks(2, memory_at_the_turn):
        assert seen["between"] == seen["turn"] > 0 == seen["behind"], seen
