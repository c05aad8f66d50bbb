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

import standin
import virtual
from late_steps import Trial, under_schedules
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

pytestmark = pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())

HOST = {"offload_optimizer": "cpu", "offload_param": "cpu"}
DISK = {"offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536}


class Checkpointed(TinyGPT):
    def __init__(self) -> None:
        super().__init__(checkpointing="non-reentrant")


def of(stage: int, how: str = "", steps: int = 3, build: Any = TinyGPT, **options: Any) -> Trial:
    return Trial(stage, options, frozenset(how.split()), steps, build)


ALONE = {
    "as it is": of(0, "clips evaluates elsewhere"),
    "states on the host": of(0, "clips accumulates decays", offload_optimizer="cpu"),
    "bf16, states on the host": of(
        0, "evaluates decays", precision="bf16", offload_optimizer="cpu"
    ),
    "stepped in the backward pass": of(
        0, "elsewhere", offload_optimizer="cpu", step_in_backward=True
    ),
    "bf16, stepped in the backward pass": of(
        3, "elsewhere", precision="bf16", **HOST, step_in_backward=True
    ),
    "all on the host": of(3, "evaluates writes", **HOST),
    "bf16, all on the host, checkpointed": of(
        3, "frozen", precision="bf16", build=Checkpointed, **HOST
    ),
    "all on the host, added up on the device": of(3, "clips accumulates zeroes", **HOST),
    "bf16, added up and stepped in the backward pass": of(
        3, "elsewhere accumulates", precision="bf16", **HOST, step_in_backward=True
    ),
    "states on NVMe": of(0, "clips writes", offload_optimizer="nvme", chunk=65536),
    "bf16, all on NVMe": of(3, "evaluates", precision="bf16", **DISK),
    "activations on the host": of(0, offload_activations="cpu"),
    "saved and loaded": of(0, "saves fused"),
    "saved and loaded, all on the host": of(3, "saves writes", **HOST),
}
TOGETHER = {
    "stage 0": (2, of(0, "clips accumulates raises")),
    "stage 1, bf16": (2, of(1, "evaluates writes", precision="bf16")),
    "stage 2": (2, of(2, "clips raises")),
    "stage 3": (2, of(3, "clips evaluates")),
    "stage 3, bf16": (2, of(3, "elsewhere saves accumulates decays", precision="bf16")),
    "stage 3, checkpointed, frozen parts": (2, of(3, "frozen", build=Checkpointed)),
    "stage 3, nothing prefetched": (2, of(3, overlap=False)),
    "stage 1, states on the host": (
        2,
        of(1, "evaluates writes decays", precision="bf16", offload_optimizer="cpu"),
    ),
    "stage 3, all on the host": (2, of(3, "saves writes decays", precision="bf16", **HOST)),
    "stage 2, added up on the device": (
        2,
        of(2, "clips accumulates", precision="bf16", offload_optimizer="cpu"),
    ),
    "stage 3, stepped in the backward pass": (
        2,
        of(3, precision="bf16", **HOST, step_in_backward=True),
    ),
    "stage 3, all on NVMe": (2, of(3, "clips", precision="bf16", **DISK)),
    "stage 2, activations on the host": (2, of(2, offload_activations="cpu")),
    "two levels": (4, of(3, "clips", group=2)),
    "HSDP": (4, of(3, "accumulates raises", shard_group=2)),
    "a second copy, int8": (
        4,
        of(3, precision="bf16", group=2, second_copy=True, gather_codec="int8"),
    ),
    "int4 gradients": (2, of(2, "clips", precision="bf16", reduce_codec="int4")),
}


def seeds(everything: bool) -> range:
    return range(100 if everything else int(os.environ.get("ONEFOLD_TEST_SEEDS", "4")))


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_has_the_same_bits_under_every_schedule(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = run_ranks(
        1,
        under_schedules,
        ALONE[name],
        seeds(request.config.getoption("--all")),
        str(tmp_path),
        timeout=1200,
    )
    assert found == [[]]


@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_have_the_same_bits_under_every_schedule(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world_size, trial = TOGETHER[name]
    found = run_ranks(
        world_size,
        under_schedules,
        trial,
        seeds(request.config.getoption("--all")),
        str(tmp_path),
        timeout=1200,
    )
    assert found == [[]] * world_size


def by_a_load(model: Any, at: str) -> None:
    import onefold

    onefold.load(at, model=model)


def by_the_whole(model: Any, at: str) -> None:
    import onefold

    onefold.load_full_state_dict(
        model, {name: torch.zeros_like(t) for name, t in onefold.full_state_dict(model).items()}
    )


def inside_full_params(model: Any, at: str) -> None:
    import onefold

    with onefold.full_params(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def by_dcp(model: Any, at: str) -> None:
    import onefold

    state = onefold.dcp_state_dict(model)["model"]
    state.load_state_dict(
        {name: torch.zeros_like(value) for name, value in state.state_dict().items()}
    )


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


OVERWRITING = [
    by_a_load,
    by_the_whole,
    inside_full_params,
    by_dcp,
    in_place,
    all_together,
    through_data,
    by_other_data,
    by_views_kept_since,
]


def evaluated_and_overwritten(
    overwrite: Callable[[Any, str], None], folder: str, several: bool = False
) -> list[str]:
    """What differs between the loss of an evaluation behind which masters are overwritten, and that
    of one with each operation at once.
    """
    import onefold

    torch.manual_seed(0)
    host: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    virtual.start(seed=None, check=False)
    group = None
    if several:
        standin.register("cpu", "virtual")
        group = standin.new_group()
    recipe = onefold.Recipe.zero(3, precision="fp32", **host)
    model: Any = onefold.shard(TinyGPT(), recipe, device="virtual", group=group)
    first = onefold.full_state_dict(model)
    in_place(model, "")
    at = str(onefold.save(f"{folder}/zeros", model=model))
    found: list[str] = []
    for seed in (None, *range(6)):
        virtual.start(seed=seed)
        onefold.load_full_state_dict(model, first)
        views = overwrite is by_views_kept_since
        model.views = [p.data for p in model.parameters()] if views else []
        with torch.no_grad():
            loss = model(tokens_of(9).to("virtual"))
            overwrite(model, at)
            after = model(tokens_of(9).to("virtual"))
        if seed is None:
            expected = float(loss), float(after)
        elif (float(loss), float(after)) != expected:
            found.append(f"seed {seed}: {float(loss), float(after)} instead of {expected}")
        virtual.drain()
        found += [str(violation) for violation in virtual.violations()[:1]]
    return found if expected[0] != expected[1] else ["nothing was overwritten"]


@pytest.mark.parametrize("overwrite", OVERWRITING, ids=lambda way: way.__name__)
def test_masters_on_the_host_are_overwritten_behind_the_copies_of_them(
    overwrite: Callable[[Any, str], None], tmp_path: Path
) -> None:
    assert run_ranks(1, evaluated_and_overwritten, overwrite, str(tmp_path)) == [[]]


def test_intervals_on_the_host_that_code_kept_are_overwritten_behind_the_copies_of_them(
    tmp_path: Path,
) -> None:
    for found in run_ranks(2, evaluated_and_overwritten, by_views_kept_since, str(tmp_path), True):
        assert found == []


def averages_evaluated(folder: str) -> list[str]:
    """As `evaluated_and_overwritten`: the averages are evaluated with, and the weights take their
    place again.
    """
    import onefold
    from onefold.ema import EMA

    found: list[str] = []
    for seed in (None, *range(6)):
        virtual.start(seed=seed)
        torch.manual_seed(0)
        host: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}
        model: Any = onefold.shard(
            TinyGPT(), onefold.Recipe.zero(3, precision="fp32", **host), device="virtual"
        )
        average = EMA(model, 0.9)
        average.update()
        in_place(model, "")
        with torch.no_grad():
            with average.applied():
                with pytest.raises(RuntimeError, match=r"written to .* inside ema.applied"):
                    onefold.load(str(onefold.save(f"{folder}/{seed}", model=model)), model=model)
                losses = [model(tokens_of(9).to("virtual"))]
            losses.append(model(tokens_of(9).to("virtual")))
        if seed is None:
            expected = [float(loss) for loss in losses]
        elif (got := [float(loss) for loss in losses]) != expected:
            found.append(f"seed {seed}: {got} instead of {expected}")
        virtual.drain()
        found += [str(violation) for violation in virtual.violations()[:1]]
    return found if expected[0] != expected[1] else ["the averages are the weights"]


def test_weights_on_the_host_take_the_averages_place_behind_the_copies_of_these(
    tmp_path: Path,
) -> None:
    assert run_ranks(1, averages_evaluated, str(tmp_path)) == [[]]
