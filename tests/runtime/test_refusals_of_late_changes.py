"""More that is refused in a sentence: saving a sharded model as an object, wrapping it, changing it
late, arguments that cannot be.
"""

from __future__ import annotations

import io
import pickle
import re

import pytest
import torch
from test_refusals import SHARDED, Action, Adapter, run, sharded, told
from torch import nn

from ranks import run_ranks
from trials import STAGES
from zoo import TinyMLP

# -- saved as objects ------------------------------------------------------------------------------


class OwnWeight(nn.Module):
    """A root with a parameter of its own, which pickle meets before the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.inner = TinyMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale)


def save_the_model(stage: int) -> None:
    torch.save(sharded(stage), io.BytesIO())


def save_a_root_with_a_parameter(stage: int) -> None:
    torch.save(sharded(stage, OwnWeight()), io.BytesIO())


def pickle_a_block(stage: int) -> None:
    model = sharded(stage)
    pickle.dumps(model.blocks[1])


def pickle_a_leaf(stage: int) -> None:
    model = sharded(stage)
    pickle.dumps(model.enter)


def pickle_a_parameter(stage: int) -> None:
    model = sharded(stage)
    pickle.dumps(model.enter.weight)


# -- around and after the model --------------------------------------------------------------------


def wrap_in_ddp(stage: int) -> None:
    run(nn.parallel.DistributedDataParallel(sharded(stage)))


def wrap_a_container_in_ddp(stage: int) -> None:
    run(nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(7, 7), sharded(stage))))


def shard_what_ddp_holds(stage: int) -> None:
    model = TinyMLP()
    wrapped = nn.parallel.DistributedDataParallel(model)
    sharded(stage, model)
    run(wrapped)


def save_a_block_that_is_left(stage: int) -> None:
    block = sharded(stage).blocks[1]  # the model is gone
    block.state_dict()


def load_into_a_block_that_is_left(stage: int) -> None:
    block = sharded(stage).blocks[1]
    block.load_state_dict(TinyMLP().blocks[1].state_dict())


def add_an_adapter_late(stage: int) -> None:
    """Behind the first steps a change is found within some passes: in the next one for a model of
    few modules.
    """
    model = sharded(stage)
    for _ in range(3):
        run(model)
    model.blocks[1].up = Adapter(model.blocks[1].up)
    run(model)


def add_a_parameter_late(stage: int) -> None:
    model = sharded(stage)
    for _ in range(3):
        run(model)
    model.leave.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    run(model)


def add_to_many_modules_late(stage: int) -> None:
    model = sharded(stage, TinyMLP(depth=50))
    for _ in range(3):
        run(model)
    model.blocks[49].extra = nn.Linear(10, 10)
    for _ in range(5):  # 204 modules, 64 a pass
        run(model)


# -- arguments -------------------------------------------------------------------------------------


def clip_to_wrong_norms(stage: int) -> None:
    """Raises the last of what is said; every other one is looked at here."""
    import onefold

    model = sharded(stage)
    run(model)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for arguments in (
        (None,),
        ("1",),
        (-1.0,),
        (float("nan"),),
        (True,),
        (1.0, None),
        (1.0, 0),
        (1.0, "2"),
    ):
        name = "max_norm" if len(arguments) == 1 else "norm_type"
        with pytest.raises(
            ValueError, match=f"{name}={re.escape(repr(arguments[-1]))}: expected a number"
        ):
            onefold.clip_grad_norm_(model, *arguments)
    for then, parameter in zip(before, model.parameters(), strict=True):
        assert then is None or torch.equal(then, parameter.grad)  # type: ignore[arg-type]
    onefold.clip_grad_norm_(model, torch.tensor(1.0))
    onefold.clip_grad_norm_(model, float("inf"), float("inf"))
    onefold.clip_grad_norm_(model, None)  # type: ignore[arg-type]


def load_wrong_values(stage: int) -> None:
    """Every rank is told the same, and nothing is loaded; raises the last of what is said."""
    import onefold

    model = sharded(stage)
    before = onefold.full_state_dict(model)
    whole = TinyMLP().state_dict()
    for given, word in (
        ({**whole, "enter.weight": 3}, "enter.weight is a int"),
        ({name: tensor.numpy() for name, tensor in whole.items()}, "is a ndarray"),
        ([1], "given a list"),
        ("model.pt", "given a str"),
        (TinyMLP(), "given a TinyMLP"),
        ({**whole, "enter.weight": whole["enter.weight"].to(torch.complex64)}, "imaginary"),
    ):
        with pytest.raises(ValueError, match=word):
            onefold.load_full_state_dict(model, given)  # type: ignore[arg-type]
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in onefold.full_state_dict(model).items()
    )
    onefold.load_full_state_dict(model, {**whole, "leave.bias": None})  # type: ignore[dict-item]


def initialize_by_a_number(stage: int) -> None:
    import onefold

    onefold.shard(TinyMLP(), onefold.Recipe.zero(stage), init=3)  # type: ignore[arg-type]


def name_units_by_number(stage: int) -> None:
    import onefold

    onefold.shard(TinyMLP(), onefold.Recipe.zero(stage), units=[3])  # type: ignore[list-item]


SAVED: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (save_the_model, STAGES, ("pickling", "torch.save(onefold.full_state_dict(model), path)")),
    (save_a_root_with_a_parameter, STAGES, ("pickling", "'scale'", "full_state_dict")),
    (pickle_a_block, STAGES, ("pickling", "'blocks.1.", "full_state_dict")),
    (pickle_a_leaf, STAGES, ("pickling", "'enter.", "full_state_dict")),
    (pickle_a_parameter, STAGES, ("pickling", "'enter.weight'", "full_state_dict")),
]
LEFT: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (action, SHARDED, ("ResidualBlock", "outlived", "'blocks.1.", "full_state_dict"))
    for action in (save_a_block_that_is_left, load_into_a_block_that_is_left)
]
LATE: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (add_an_adapter_late, STAGES, ("had 16 parameters", "has 18 now", "adapters")),
    (add_a_parameter_late, STAGES, ("had 16 parameters", "has 17 now", "before shard()")),
    (add_to_many_modules_late, STAGES, ("had 204 parameters", "has 206 now", "before shard()")),
]
ARGUMENTS: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (clip_to_wrong_norms, STAGES, ("max_norm=None", "expected a number", "float('inf')")),
    (load_wrong_values, STAGES, ("leave.bias is a NoneType", "expected tensors")),
    (initialize_by_a_number, STAGES, ("init=3", "function")),
    (name_units_by_number, STAGES, ("units=[3]", "module names or classes")),
]
WRAPPED: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (action, STAGES, ("DistributedDataParallel", "onefold.shard()"))
    for action in (wrap_in_ddp, wrap_a_container_in_ddp, shard_what_ddp_holds)
]


def test_saving_a_sharded_model_as_an_object_points_to_the_whole_state_dict() -> None:
    assert run_ranks(2, told, SAVED) == [[], []]


def test_a_part_that_outlives_its_model_does_not_pass_intervals_off_as_parameters() -> None:
    assert run_ranks(2, told, LEFT) == [[], []]


def test_parameters_added_behind_the_first_steps_are_counted_too() -> None:
    assert run_ranks(2, told, LATE) == [[], []]


def test_arguments_that_cannot_be_are_refused_alike_on_every_rank() -> None:
    assert run_ranks(2, told, ARGUMENTS) == [[], []]


def test_data_parallel_around_a_sharded_model_is_refused() -> None:
    assert run_ranks(2, told, WRAPPED) == [[], []]


def module_without_parameters_comes_and_goes(stage: int) -> int:
    """Other modules may be exchanged at any time."""
    model = TinyMLP()
    model.spare = nn.Dropout(0.1)
    sharded(stage, model)
    for step in range(6):
        if step == 4:
            model.spare = nn.Sequential(nn.GELU(), nn.Identity())
        run(model)
    return len(model.spare)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_without_parameters_may_be_exchanged_at_any_time(stage: int) -> None:
    assert run_ranks(2, module_without_parameters_comes_and_goes, stage) == [2, 2]
