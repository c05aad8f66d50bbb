"""`reduce="native"`: the backend adds gradients up; what that changes, what it does not, and where
it is refused.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
import standin
from comm.test_native import Frozen, FrozenLater, Scaled
from invariants.test_same_numbers import Run
from ranks import run_ranks
from trials import STAGES, differences, train_sharded
from zoo import TinyMLP, features_of

RECIPES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    **{
        f"stage {stage}": (Run(kind="fused adamw", max_norm=0.5, steps=3), stage, {})
        for stage in STAGES
    },
    **{
        f"stage {stage}, accumulating": (Run(kind="sgd", micro_batches=2, steps=2), stage, {})
        for stage in STAGES
    },
    "HSDP": (Run(kind="sgd", micro_batches=2, steps=2), 3, {"shard_group": 2}),
    "stage 0 in groups": (Run(max_norm=0.5, steps=3), 0, {"group": 2}),
    "stage 1 in groups": (Run(max_norm=0.5, steps=3), 1, {"group": 2}),
    "frozen": (Frozen(steps=2), 3, {}),
    "offloaded": (Run(steps=2), 2, {"offload_optimizer": "cpu"}),
}
#: 16 bits travel: whoever adds in them is further off.
COARSE: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "bf16, added in fp32": (
        Run(kind="sgd", steps=3),
        2,
        {"precision": "bf16", "wire": "fp32"},
    ),
    "bf16, stage 0": (Run(kind="sgd", steps=3), 0, {"precision": "bf16"}),
    "bf16, HSDP": (Run(kind="sgd", steps=3), 3, {"precision": "bf16", "shard_group": 2}),
    "fp16, scaled": (Scaled(kind="sgd", max_norm=0.5, steps=4), 3, {"precision": "fp16"}),
}


def compare(names: list[str]) -> list[str]:
    group, found = standin.new_group(), []
    for table, rtol, atol in ((RECIPES, 2e-5, 2e-6), (COARSE, 0.05, 0.02)):
        for name in [name for name in table if name in names]:
            case, stage, options = table[name]
            ordered = train_sharded(case, stage, **options)
            before = dict(standin.launched)
            native = train_sharded(case, stage, process_group=group, reduce="native", **options)
            found += differences(name, ordered, native, rtol, atol)
            new = {op for op, count in standin.launched.items() if count > before.get(op, 0)}
            expected = "all_reduce" if stage == 0 else "reduce_scatter"
            if expected not in new:
                found.append(f"{name}: launched {new}, expected {expected}")
    return found


def test_gradients_are_within_rounding_of_those_added_in_order(sample: Any) -> None:
    names = [*sample(RECIPES, 4), *sample(COARSE, 3)]
    assert run_ranks(4, compare, names) == [[]] * 4


def one_step(
    stage: int, reduce: str, **options: Any
) -> tuple[dict[str, int], dict[str, int], list[torch.Tensor]]:
    """(bytes by move, operations launched, gradients) of one backward pass on the stand-in."""
    torch.manual_seed(0)
    model = onefold.shard(
        TinyMLP(8, 24, 2, 6),
        onefold.Recipe.zero(stage, reduce=reduce, **options),
        group=standin.new_group(),
    )
    engine = onefold.engine_of(model)
    model(features_of(1, 3, 8)).sum().backward()
    engine.traffic.reset()
    before = dict(standin.launched)
    model.zero_grad()
    model(features_of(dist.get_rank(), 3, 8)).square().mean().backward()
    launched = {
        op: count - before.get(op, 0)
        for op, count in standin.launched.items()
        if count > before.get(op, 0)
    }
    grads = [
        torch.as_tensor(p.grad.detach().as_subclass(torch.Tensor))
        for p in model.parameters()
        if p.grad is not None
    ]
    return engine.traffic.by_move(), launched, grads


ON_THE_WIRE: list[tuple[int, dict[str, Any]]] = [
    (stage, options)
    for options in ({}, {"precision": "bf16"}, {"shard_group": 2})
    for stage in STAGES
    if stage or "shard_group" not in options
]


def bytes_and_operations(cases: list[tuple[int, dict[str, Any]]]) -> list[str]:
    found = []
    for stage, options in cases:
        (a, ordered, _), (b, native, _) = (
            one_step(stage, "ordered", **options),
            one_step(stage, "native", **options),
        )
        # Nobody stepped: also resident copies are gathered anew
        gathers = {"all_gather"} if stage else set()
        spread = {"all_gather"} if stage == 0 or "shard_group" in options else set()
        wanted = {"all_reduce"} if stage == 0 else {"reduce_scatter"} | gathers | spread
        if a != b:
            found.append(f"stage {stage}, {options}: {b} bytes, in order {a}")
        if set(native) != wanted or set(ordered) != {"all_to_all"} | gathers | spread:
            found.append(f"stage {stage}, {options}: launched {native}, in order {ordered}")
    return found


def test_it_sends_the_same_bytes_in_the_backends_own_operations(sample: Any) -> None:
    assert run_ranks(4, bytes_and_operations, sample(ON_THE_WIRE, 3)) == [[]] * 4


def in_the_wires_dtype() -> list[list[float]]:
    """The sum of 256 and three times 1 over four ranks, in bf16 and with fp32 on the wire."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * x).sum()

    out = []
    for options in (
        {"reduce": "ordered"},
        {"reduce": "native"},
        {"reduce": "native", "wire": "fp32"},
    ):
        recipe = onefold.Recipe.zero(0, precision="bf16", **options)
        model = onefold.shard(One(), recipe, group=standin.new_group())
        mine = 256.0 if dist.get_rank() == 0 else 1.0
        model(torch.full((4,), mine)).backward()
        grad = model.w.grad
        assert grad is not None
        out.append([float(x) for x in grad.detach().float().flatten()])
    return out


def test_sums_are_made_in_the_dtype_of_the_wire_which_can_be_fp32() -> None:
    # The mean is 64.75. bf16 has 64.5 and 65 near it; steps of 2 above 256, so that 256 + 1 is 256.
    for ordered, native, wide in run_ranks(4, in_the_wires_dtype):
        assert wide == [64.75] * 4, wide
        assert set(ordered) <= {64.5, 65.0}, ordered
        assert (
            len(native) == 4 and all(64.0 <= x <= 65.0 for x in native) and 64.75 not in native
        ), native


def refused(over_gloo: bool) -> str:
    try:
        onefold.shard(
            TinyMLP(),
            onefold.Recipe.zero(2, reduce="native"),
            group=None if over_gloo else standin.new_group(),
        )
    except ValueError as error:
        return str(error)
    return "nothing"


def test_gloo_has_no_reduce_scatter_and_says_so() -> None:
    for said in run_ranks(2, refused, True):
        assert "gloo has none" in said and "leave it out" in said, said
    assert run_ranks(2, refused, False) == ["nothing"] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduce": "nativ"}, "expected 'ordered' or 'native'"),
        ({"reduce": True}, "expected 'ordered' or 'native'"),
        ({"reduce": "native", "reduce_codec": "int8"}, "leave one of them out"),
    ],
)
def test_what_it_cannot_be_is_refused_with_the_recipe(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        onefold.Recipe.zero(2, **options)


def test_one_rank_says_that_it_means_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onefold"):
        onefold.shard(TinyMLP(), onefold.Recipe.zero(3, reduce="native"))
    assert "reduce='native': no effect on one rank" in caplog.text, caplog.text
    assert "added by the backend" in onefold.Recipe.zero(3, reduce="native").describe()


def frozen_later() -> list[str]:
    """Parts of a flat buffer are not even: Onefold adds those up itself, whichever is asked for."""
    case = FrozenLater(kind="sgd", steps=4)
    ordered = train_sharded(case, 3)
    return differences(
        "frozen later",
        ordered,
        train_sharded(case, 3, process_group=standin.new_group(), reduce="native"),
        2e-5,
        2e-6,
    )


def test_uneven_parts_are_added_by_onefold() -> None:
    assert run_ranks(2, frozen_later) == [[]] * 2
