"""A unit that was gathered ahead and that this rank then does not use (LayerDrop, an early exit):
it is dropped, and gathering ahead goes on behind it. A reduction whose turn comes before the pass
has come to it (frozen units have nothing to wait for) gathers nothing that is still to be used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.runtime import gather, schedule
from ranks import run_ranks
from zoo import ResidualBlock, features_of

LAYERS, SKIPPED = 8, 3


class Dropping(nn.Module):
    """Layers that a call may leave out, and what is here whenever one of them computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(LAYERS))
        self.held: list[set[str]] = []

    def forward(self, x: Tensor, without: int | None, watch: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != without:
                x = layer(x).tanh()
                if watch:
                    here = onefold.engine_of(self).gather.gathered
                    self.held.append({unit.name for unit in here.values()})
        return x


def skips_a_layer(differ: bool) -> tuple[list[set[str]], list[set[str]], list[float]]:
    """What was here at each layer of a forward pass that leaves one out, and of its backward pass;
    the losses.
    """
    import torch.distributed as dist

    schedule.SMALL_TRAFFIC = 0  # each unit is a large one
    torch.manual_seed(0)
    model = onefold.shard(Dropping(), onefold.Recipe.zero(3, prefetch=1), units=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = onefold.engine_of(model)
    behind: list[set[str]] = []
    wait = engine.gather.wait

    def waited(unit: gather.Unit) -> None:
        wait(unit)
        if engine.progress.backward_open and watch:
            behind.append({u.name for u in engine.gather.gathered.values()} - {unit.name})

    engine.gather.wait = waited  # type: ignore[method-assign]
    losses = []
    for step in range(4):
        watch = step == 3
        skips = watch and (dist.get_rank() == 0 or not differ)
        loss = model(torch.ones(3, 24), SKIPPED if skips else None, watch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held: list[set[str]] = model.held  # type: ignore[assignment]
    return held, behind, losses


def test_what_was_gathered_ahead_and_skipped_is_dropped_and_the_next_is_gathered_ahead() -> None:
    for differ in (True, False):
        found = run_ranks(2, skips_a_layer, differ)
        for rank, (held, behind, losses) in enumerate(found):
            assert all(loss > 0 for loss in losses)
            if differ and rank:
                continue
            used = [number for number in range(LAYERS) if number != SKIPPED]
            for number, here in zip(used, held, strict=True):
                if number > SKIPPED:  # until then it was to come
                    assert f"layers.{SKIPPED}" not in here, (number, here)
                if number + 1 < LAYERS:
                    assert f"layers.{number + 1}" in here, (number, here)
            # Backwards too: the skipped one goes when the layer below it is used, whose next is
            # then on its way
            last = max(i for i, here in enumerate(behind) if f"layers.{SKIPPED}" in here)
            for below in range(SKIPPED - 1):
                assert any(f"layers.{below}" in here for here in behind[last + 1 :]), behind
            assert all(
                f"layers.{below}" not in here for below in range(2) for here in behind[:last]
            )


class Around(nn.Module):
    """A unit with a unit inside, which a call may leave out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width)
        self.inner = ResidualBlock(width)
        self.without_inner = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.before(x))
        return x if self.without_inner else self.inner(x)


class Leaving(nn.Module):
    """Blocks of which a call leaves some out, between two layers."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.enter = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Around(width) for _ in range(4))
        self.leave = nn.Linear(width, 5)
        self.without: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for number, block in enumerate(self.blocks):
            x = x if number in self.without else block(x)
        return self.leave(x)


#: What is frozen; by rank: the blocks that are left out, and those whose inner unit is.
SKIPPED_BELOW_FROZEN: list[
    tuple[tuple[str, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]
] = [
    (("blocks.3", "leave"), [((), ()), ((0, 1, 2), ())]),
    (("blocks.3", "leave"), [((2,), ()), ((0, 1), ())]),
    (("blocks.2", "blocks.3", "leave"), [((), ()), ((1,), ())]),
    (("blocks.3.inner", "leave"), [((), ()), ((), (2, 3))]),
    (("blocks.2.before", "blocks.3", "leave"), [((), (3,)), ((), (0, 2))]),
    (("blocks.3", "leave"), [((0,), (3,)), ((2,), (0, 1))]),
]


def skips_below_frozen(
    stage: int, options: dict[str, Any]
) -> list[tuple[list[float], list[Tensor]]]:
    """The losses and weights of two steps of each case."""
    rank, out = torch.distributed.get_rank(), []
    for frozen, skipped in SKIPPED_BELOW_FROZEN:
        torch.manual_seed(0)
        recipe = onefold.Recipe.zero(stage, stall_timeout=10.0, **options)
        model = onefold.shard(Leaving(), recipe, units=(Around, ResidualBlock, "leave"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        losses = []
        for step in range(2):
            turn = (rank + step) % 2
            model.without = skipped[turn][0]
            for number, block in enumerate(model.blocks):
                block.without_inner = number in skipped[turn][1]  # type: ignore[assignment]
            loss = model(features_of(2 * step + rank, 4, 7)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = onefold.full_state_dict(model) or {}
        out.append((losses, [state[name].double().sum() for name in sorted(state)]))
    return out


def test_ranks_skip_different_units_below_frozen_ones_in_the_first_step() -> None:
    whole, *divided = (
        run_ranks(2, skips_below_frozen, stage, options)
        for stage, options in ((0, {}), (3, {}), (3, {"prefetch": 0, "overlap": False}))
    )
    for found in divided:
        assert found == whole
