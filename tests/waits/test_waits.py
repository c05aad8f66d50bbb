"""Invariant 9: every use of a buffer on another stream is behind a wait.

On the virtual device (tests/virtual) every copy and kernel runs as late, and in as strange an
order, as the waits allow, by a seed; and a checker names two uses of the same bytes that no wait
orders. Collectives are those of the stand-in for NCCL (tests/standin), each communicator on a
stream of its own. What is compared with is the same program with each operation done at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
import standin
import virtual
from on_ranks import on_ranks, slow
from onefold.ema import EMA
from waits.trials import Trial, under_schedules
from zoo import TinyGPT, tokens_of

pytestmark = pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())

STATES: dict[str, Any] = {"offload_optimizer": "cpu"}
HOST: dict[str, Any] = {**STATES, "offload_param": "cpu"}
DISK: dict[str, Any] = {"offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536}
BF16: dict[str, Any] = {"precision": "bf16"}


def recomputed() -> TinyGPT:
    return TinyGPT(checkpointing="non-reentrant")


def of(stage: int, how: str = "", build: Any = TinyGPT, **options: Any) -> Trial:
    return Trial(stage, options, frozenset(how.split()), build=build)


def rows(in_ci: list[Trial], others: list[Trial]) -> list[Any]:
    def title(trial: Trial) -> str:
        return f"{trial.stage} {' '.join(sorted(trial.how))} {' '.join(map(str, trial.options.values()))}"

    return [pytest.param(t, id=title(t)) for t in in_ci] + [
        pytest.param(t, id=title(t), marks=slow) for t in others
    ]


ALONE = rows(
    [
        of(0, "clips accumulates decays", **STATES),
        of(3, "elsewhere", **BF16, **HOST, step_in_backward=True),
        of(3, "clips accumulates zeroes", **HOST),
        of(3, "evaluates", **BF16, **DISK),
        of(0, offload_activations="cpu"),
        of(3, "saves writes", **HOST),
        of(0, "clips writes", offload_optimizer="nvme", chunk=65536),
        of(3, "frozen", **BF16, frozen="int8"),
    ],
    [
        of(0, "clips evaluates elsewhere"), of(0, "evaluates decays", **BF16, **STATES), of(0, "saves fused"),
        of(0, "elsewhere", **STATES, step_in_backward=True), of(3, "evaluates writes", **HOST),
        of(3, "frozen", recomputed, **BF16, **HOST),
        of(3, "elsewhere accumulates", **BF16, **HOST, step_in_backward=True),
    ],
)  # fmt: skip
OF_TWO = rows(
    [
        of(0, "clips accumulates raises"),
        of(3, "elsewhere saves accumulates decays", **BF16),
        of(3, "saves writes decays", **BF16, **HOST),
        of(2, "clips accumulates", **BF16, **STATES),
        of(2, "clips", **BF16, reduce_codec="int4"),
    ],
    [
        of(2, "clips raises"), of(1, "evaluates writes", **BF16),
        of(3, "clips evaluates"), of(3, "frozen", recomputed), of(3, prefetch=0, in_flight=0),
        of(1, "evaluates writes decays", **BF16, **STATES), of(3, **BF16, **HOST, step_in_backward=True),
        of(3, "clips", **BF16, **DISK), of(2, offload_activations="cpu"),
    ],
)  # fmt: skip
OF_FOUR = rows(
    [of(3, "accumulates raises", shard_group=2)],
    [of(3, "clips", group=2), of(3, **BF16, group=2, second_copy=True, gather_codec="int8")],
)


def check(trial: Trial, every: bool, folder: Path) -> None:
    seeds = 60 if every else int(os.environ.get("ONEFOLD_TEST_SEEDS", "2"))
    assert under_schedules(trial, range(seeds), str(folder)) == []


@on_ranks(1, fresh=True, seconds=600)
@pytest.mark.parametrize("trial", ALONE)
def test_one_rank_has_the_same_bits_under_every_schedule(
    trial: Trial, every: bool, folder: Path
) -> None:
    check(trial, every, folder)


@on_ranks(2, fresh=True, seconds=600)
@pytest.mark.parametrize("trial", OF_TWO)
def test_two_ranks_have_the_same_bits_under_every_schedule(
    trial: Trial, every: bool, folder: Path
) -> None:
    check(trial, every, folder)


@on_ranks(4, fresh=True, seconds=600)
@pytest.mark.parametrize("trial", OF_FOUR)
def test_four_ranks_have_the_same_bits_under_every_schedule(
    trial: Trial, every: bool, folder: Path
) -> None:
    check(trial, every, folder)


# -- masters on the host are overwritten behind the copies of them ---------------------------------


def zeros_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def by_the_whole(model: Any, at: str) -> None:
    onefold.load_full_state_dict(model, zeros_of(onefold.full_state_dict(model)))


def inside_full_params(model: Any, at: str) -> None:
    with onefold.full_params(model, write=True):
        in_place(model, at)


def by_dcp(model: Any, at: str) -> None:
    state = onefold.dcp_state_dict(model)["model"]
    read = state.state_dict()
    for value in read.values():  # torch.distributed.checkpoint reads into these
        value.zero_()
    state.load_state_dict(read)


@torch.no_grad()
def in_place(model: Any, at: str) -> None:
    for parameter in model.parameters():
        parameter.zero_()


@torch.no_grad()
def all_together(model: Any, at: str) -> None:
    torch._foreach_zero_(list(model.parameters()))


def through_data(model: Any, at: str) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def by_other_data(model: Any, at: str) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.shape)


def by_views_kept_since(model: Any, at: str) -> None:
    for view in model.views:
        view.view(-1).zero_()


def by_a_load(model: Any, at: str) -> None:
    onefold.load(at, model=model)


def unseen(model: Any, at: str) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        in_place(model, at)


OVERWRITING = [
    by_a_load, by_the_whole, inside_full_params, by_dcp, in_place, all_together, through_data, by_other_data, by_views_kept_since,
    unseen,
]  # fmt: skip


class Dropping(TinyGPT):
    """Rank 1 leaves the last block out."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks[: 3 - dist.get_rank()]:
            x = block(x)
        return self.head(x)


def held(precision: str = "fp32") -> onefold.Recipe:
    return onefold.Recipe.zero(3, precision=precision, **HOST)


def overwritten(
    overwrite: Callable[[Any, str], None],
    folder: Path,
    recipe: onefold.Recipe,
    several: bool = False,
    build: Callable[[], Any] = TinyGPT,
) -> None:
    """The loss of an evaluation behind which masters are overwritten, and the loss after it, are
    those of each operation at once.
    """
    torch.manual_seed(0)
    virtual.start(seed=None, check=False)
    group = None
    if several:
        standin.register("cpu", "virtual")
        group = standin.new_group()
    model: Any = onefold.shard(build(), recipe, device="virtual", group=group)
    first = onefold.full_state_dict(model)
    in_place(model, "")
    at = str(onefold.save(folder / "zeros", model=model))
    for seed in (None, *range(6)):
        virtual.start(seed=seed)
        onefold.load_full_state_dict(model, first)
        views = overwrite is by_views_kept_since
        model.views = [p.data for p in model.parameters()] if views else []
        batch = tokens_of(9).to("virtual")
        with torch.no_grad():
            loss = model(batch)
            overwrite(model, at)
            after = model(batch)
        if seed is None:
            expected = float(loss), float(after)
            assert expected[0] != expected[1], "nothing was overwritten"
        assert (float(loss), float(after)) == expected, f"seed {seed}"
        virtual.drain()
        assert virtual.violations() == []


@on_ranks(1, fresh=True)
@pytest.mark.parametrize("overwrite", OVERWRITING, ids=lambda way: way.__name__)
def test_masters_on_the_host_are_overwritten_behind_the_copies_of_them(
    overwrite: Callable[[Any, str], None], folder: Path
) -> None:
    # A copy in another dtype than the masters' is written anew after writes that nothing tells of
    overwritten(overwrite, folder, held("bf16" if overwrite is unseen else "fp32"))


@on_ranks(2, fresh=True)
def test_masters_are_overwritten_behind_gathers_that_a_rank_did_not_use(folder: Path) -> None:
    recipe = onefold.Recipe.zero(1, precision="fp32")
    overwritten(in_place, folder, recipe, several=True, build=Dropping)


@on_ranks(2, fresh=True)
def test_intervals_on_the_host_that_code_kept_are_overwritten_behind_the_copies_of_them(
    folder: Path,
) -> None:
    overwritten(by_views_kept_since, folder, held(), several=True)


@on_ranks(1, fresh=True)
def test_weights_on_the_host_take_the_averages_place_behind_the_copies_of_these(
    folder: Path,
) -> None:
    for seed in (None, *range(6)):
        virtual.start(seed=seed)
        torch.manual_seed(0)
        model: Any = onefold.shard(TinyGPT(), held(), device="virtual")
        average = EMA(model, 0.9)
        average.update()
        in_place(model, "")
        with torch.no_grad():
            with average.applied():
                with pytest.raises(RuntimeError, match=r"written to .* inside ema.applied"):
                    onefold.load(str(onefold.save(folder / str(seed), model=model)), model=model)
                losses = [model(tokens_of(9).to("virtual"))]
            losses.append(model(tokens_of(9).to("virtual")))
        got = [float(loss) for loss in losses]
        if seed is None:
            expected = got
            assert expected[0] != expected[1], "the averages are the weights"
        assert got == expected, f"seed {seed}"
        virtual.drain()
        assert virtual.violations() == []
