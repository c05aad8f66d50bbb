"""What cannot be right with a sharded model is refused in a sentence, on every rank, before it
changes a number.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from ranks import run_ranks
from trials import STAGES
from zoo import ResidualBlock, TinyMLP, features_of

SHARDED = (1, 2, 3)  # stages at which a rank's optimizer sees less than the whole


def sharded(stage: int, model: nn.Module | None = None, **options: Any) -> Any:
    import onefold

    recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, **options)
    return onefold.shard(TinyMLP() if model is None else model, recipe, units=(ResidualBlock,))


def run(model: nn.Module) -> None:
    model(features_of(0, 4, 7)).square().mean().backward()


# -- other models ----------------------------------------------------------------------------------


class Around(nn.Module):
    """A model with a part that somebody else has sharded."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first(x))


def shard_around(stage: int) -> None:
    sharded(stage, Around(sharded(stage)))


def shard_a_tensor_parallel_one(stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded(stage, parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel()))


def shard_a_part(stage: int) -> None:
    sharded(stage, sharded(stage).blocks)


def share_a_module(stage: int) -> None:
    first = sharded(stage)
    second = TinyMLP()
    second.blocks[1] = first.blocks[1]
    sharded(stage, second)


def share_a_parameter(stage: int) -> None:
    first = sharded(stage)
    second = TinyMLP()
    second.blocks[1].up.weight = first.blocks[1].up.weight  # type: ignore[union-attr]
    sharded(stage, second)


# -- copies ----------------------------------------------------------------------------------------


def copy_the_model(stage: int) -> None:
    copy.deepcopy(sharded(stage))


def copy_a_block(stage: int) -> None:
    model = sharded(stage)
    copy.deepcopy(model.blocks[1])


def copy_a_parameter(stage: int) -> None:
    model = sharded(stage)
    copy.deepcopy(model.blocks[1].up.weight)


# -- state dicts -----------------------------------------------------------------------------------


def state_of_the_model(stage: int) -> None:
    sharded(stage).state_dict()


def state_of_a_block(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].state_dict()


def state_of_a_leaf(stage: int) -> None:
    model = sharded(stage)
    model.enter.state_dict()


def load_into_the_model(stage: int) -> None:
    sharded(stage).load_state_dict(TinyMLP().state_dict())


def load_into_a_block(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].load_state_dict(TinyMLP().blocks[1].state_dict())


def load_into_a_leaf(stage: int) -> None:
    model = sharded(stage)
    model.enter.load_state_dict(TinyMLP().enter.state_dict())


# -- another structure -----------------------------------------------------------------------------


def assign_a_parameter(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(20, 10))
    run(model)


def assign_a_parameter_of_the_root(stage: int) -> None:
    model = sharded(stage)
    model.leave.bias = nn.Parameter(torch.zeros(5))
    run(model)


def assign_between_steps(stage: int) -> None:
    model = sharded(stage)
    run(model)
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(20, 10))
    run(model)


def replace_a_module(stage: int) -> None:
    model = sharded(stage)
    model.leave = nn.Linear(10, 5)
    run(model)


def tie_anew(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].extra = nn.Identity()  # it would be found without this too, some passes later
    model.blocks[0].up.weight = model.blocks[1].up.weight
    run(model)


def add_a_module(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].extra = nn.Linear(10, 10)
    run(model)


class Adapter(nn.Module):
    """A low-rank adapter around a layer."""

    def __init__(self, around: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.around = around
        self.down = nn.Linear(10, rank, bias=False)
        self.up = nn.Linear(rank, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(x) + self.up(self.down(x))


def wrap_a_layer(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].up = Adapter(model.blocks[1].up)
    run(model)


def take_a_parameter_away(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].up.bias = None
    run(model)


# -- moved or cast ---------------------------------------------------------------------------------


def halve(stage: int) -> None:
    model = sharded(stage)
    model.half()
    model(features_of(0, 4, 7).half())


def double_with_to(stage: int) -> None:
    model = sharded(stage)
    model.to(torch.float64)
    model(features_of(0, 4, 7).double())


def halve_one_block(stage: int) -> None:
    model = sharded(stage)
    model.blocks[1].half()
    run(model)


def halve_between_steps(stage: int) -> None:
    model = sharded(stage)
    run(model)
    model.bfloat16()
    run(model)


def cast_a_mixed_one(stage: int) -> None:
    model = sharded(stage, precision="bf16")
    model.to(torch.bfloat16)
    run(model)


Action = Callable[[int], None]

#: what was done, the stages at which it is refused, what the sentence must say
ANOTHER_MODEL: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (shard_around, STAGES, ("'part'", "another sharded model", "once")),
    (shard_a_tensor_parallel_one, STAGES, ("is a DTensor (S(0))", "Give shard() the mesh=")),
    (shard_a_part, STAGES, ("another sharded model", "once")),
    (share_a_module, STAGES, ("'blocks.1", "another sharded model", "once")),
    (share_a_parameter, STAGES, ("'blocks.1.up'", "another sharded model", "once")),
]
COPIES: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (copy_the_model, STAGES, ("deepcopy", "enter.weight", "full_state_dict")),
    (copy_a_block, STAGES, ("deepcopy", "blocks.1.up.weight", "before shard()")),
    (copy_a_parameter, STAGES, ("deepcopy", "blocks.1.up.weight", "before shard()")),
]
STATES: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (action, SHARDED, ("onefold.full_state_dict", "full_params"))
    for action in (state_of_the_model, state_of_a_block, state_of_a_leaf)
] + [
    (action, SHARDED, ("onefold.load_full_state_dict", "write=True"))
    for action in (load_into_the_model, load_into_a_block, load_into_a_leaf)
]
REPLACED: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (
        assign_a_parameter,
        STAGES,
        ("'blocks.1.up.weight'", "replaced after shard()", "full_params(model, write=True)"),
    ),
    (assign_a_parameter_of_the_root, STAGES, ("'leave.bias'", "replaced after shard()")),
    (assign_between_steps, STAGES, ("'blocks.1.up.weight'", "replaced after shard()")),
]
ADDED: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (
        add_a_module,
        STAGES,
        (
            "had 16 parameters",
            "has 18 now",
            "added 'blocks.1.extra.weight', 'blocks.1.extra.bias'.",
            "before shard()",
        ),
    ),
    (
        wrap_a_layer,
        STAGES,
        (
            "had 16 parameters",
            "has 18 now",
            "added 'blocks.1.up.down.weight', 'blocks.1.up.up.weight'.",
            "adapters",
        ),
    ),
    (
        take_a_parameter_away,
        STAGES,
        (
            "had 16 parameters",
            "has 15 now",
            "removed 'blocks.1.up.bias'.",
            "onefold.unsharded(model)",
        ),
    ),
    (
        replace_a_module,
        STAGES,
        ("replaced 'leave.weight', 'leave.bias'.", "onefold.unsharded(model)"),
    ),
    (tie_anew, STAGES, ("tied 'blocks.0.up.weight' to 'blocks.1.up.weight'.", "has 15 now")),
]
CAST: list[tuple[Action, tuple[int, ...], tuple[str, ...]]] = [
    (halve, STAGES, ("moved or cast after shard()", "before shard()", "precision")),
    (double_with_to, STAGES, ("moved or cast after shard()", "before shard()", "precision")),
    (halve_one_block, STAGES, ("'blocks.1.", "moved or cast after shard()")),
    (halve_between_steps, STAGES, ("moved or cast after shard()", "before shard()", "precision")),
    (cast_a_mixed_one, STAGES, ("moved or cast after shard()", "before shard()", "precision")),
]


def told(actions: list[tuple[Action, tuple[int, ...], tuple[str, ...]]]) -> list[str]:
    """On one rank: do each of these at each of its stages; a complaint for each that was not
    refused in the sentence expected.
    """
    complaints = []
    for action, stages, words in actions:
        for stage in stages:
            try:
                action(stage)
                complaints.append(f"{action.__name__} at stage {stage} was let pass")
            except (ValueError, RuntimeError) as error:
                missing = [word for word in words if word not in str(error)]
                if missing:
                    complaints.append(
                        f"{action.__name__} at stage {stage} does not say {missing}:"
                        f" {type(error).__name__}: {error}"
                    )
    return complaints


def test_a_model_with_a_part_of_another_sharded_model_is_refused() -> None:
    assert run_ranks(2, told, ANOTHER_MODEL) == [[], []]


def test_a_copy_of_a_sharded_model_or_of_a_part_is_refused() -> None:
    assert run_ranks(2, told, COPIES) == [[], []]


def test_state_dicts_of_a_sharded_model_and_of_its_parts_point_to_the_whole_ones() -> None:
    assert run_ranks(2, told, STATES) == [[], []]


def test_a_parameter_replaced_after_sharding_is_named() -> None:
    assert run_ranks(2, told, REPLACED) == [[], []]


def test_a_structure_changed_after_sharding_is_told_by_the_names_of_its_parameters() -> None:
    assert run_ranks(2, told, ADDED) == [[], []]


def test_a_model_moved_or_cast_after_sharding_is_refused_at_its_next_forward() -> None:
    assert run_ranks(2, told, CAST) == [[], []]


def whole_again(stage: int) -> list[str]:
    """Inside full_params the very same calls are ordinary, on the model and on its parts."""
    import onefold

    model = sharded(stage)
    found = []
    with onefold.full_params(model, write=True):
        block = {
            name: torch.full_like(tensor, 0.5)
            for name, tensor in model.blocks[1].state_dict().items()
        }
        model.blocks[1].load_state_dict(block)
        pickle.loads(pickle.dumps(model.enter.state_dict()))
        if model.blocks[1].up.weight.shape != (20, 10):
            found.append("a block is not whole inside full_params")
    state = onefold.full_state_dict(model)
    found += [
        name
        for name, tensor in state.items()
        if name.startswith("blocks.1.") and not (tensor == 0.5).all()
    ]
    try:
        model.blocks[1].state_dict()
        found.append("state_dict() of a block was let pass after full_params")
    except RuntimeError:
        pass
    run(model)
    return found


@pytest.mark.parametrize("stage", SHARDED)
def test_what_is_refused_outside_full_params_works_inside(stage: int) -> None:
    assert run_ranks(2, whole_again, stage) == [[], []]


def taken_from_a_changed_model(stage: int) -> list[str]:
    """What reads or writes by the parameters of before says which have changed. On one rank the
    model is plain: values are the new.
    """
    import onefold

    model = sharded(stage)
    alone = onefold.engine_of(model).unsharded
    state = onefold.full_state_dict(model)
    model.leave = nn.Linear(10, 5)
    calls: dict[str, Callable[[], object]] = {
        "load_full_state_dict": lambda: onefold.load_full_state_dict(model, state),
        "full_state_dict": lambda: onefold.full_state_dict(model),
        "full_params": lambda: onefold.full_params(model).__enter__(),
        "save": lambda: onefold.save("nowhere", model=model),
    }
    found = []
    for name, call in calls.items():
        if alone and name in ("full_state_dict", "full_params"):
            continue
        try:
            call()
            found.append(f"{name} at stage {stage} was let pass")
        except RuntimeError as error:
            found += (
                []
                if "replaced 'leave.weight', 'leave.bias'" in str(error)
                else [f"{name}: {error}"]
            )
    if alone and not onefold.full_state_dict(model)["leave.weight"].equal(model.leave.weight):
        found.append("full_state_dict gave the weights that were replaced")
    return found


def test_nothing_is_read_from_or_written_to_parameters_that_left_the_model() -> None:
    assert taken_from_a_changed_model(3) == []
    assert run_ranks(2, taken_from_a_changed_model, 0) == [[], []]
    assert run_ranks(2, taken_from_a_changed_model, 3) == [[], []]


def refused_then_trains(stage: int) -> list[bool]:
    """A refused change that is taken back leaves a model that trains as if nothing had been."""
    import onefold

    def weights(mistaken: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = sharded(stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run(model)
        if mistaken:
            mine = model.blocks[1].up.weight
            model.blocks[1].up.weight = nn.Parameter(torch.zeros(20, 10))
            with pytest.raises(RuntimeError, match="replaced"):
                run(model)
            model.blocks[1].up.weight = mine
        run(model)
        optimizer.step()
        return onefold.full_state_dict(model)

    expected, actual = weights(False), weights(True)
    return [torch.equal(tensor, actual[name]) for name, tensor in expected.items()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_refused_replacement_that_is_taken_back_leaves_no_trace(stage: int) -> None:
    rank_0, rank_1 = run_ranks(2, refused_then_trains, stage)
    assert len(rank_0) == 16 and all(rank_0) and rank_1 == []


def single_precision_only_when_asked() -> str:
    """One process in one precision is not divided at all: there the same calls are plain
    PyTorch's.
    """
    import onefold

    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(3))
    copied = copy.deepcopy(model.blocks)
    model.load_state_dict(model.state_dict())
    run(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return type(copied).__name__


def test_on_one_rank_nothing_of_this_is_refused() -> None:
    assert single_precision_only_when_asked() == "ModuleList"


def test_what_is_no_module_is_told_by_its_type() -> None:
    import onefold

    with pytest.raises(TypeError, match="a str was given where the model is expected"):
        onefold.engine_of("runs/one")  # type: ignore[arg-type]


def test_a_list_of_what_ddp_is_to_leave_out_is_refused_by_name() -> None:
    import onefold

    model = torch.nn.Linear(2, 2)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["bias"]
    )
    with pytest.raises(ValueError, match=r"leave out 'bias'.*_ddp_params_and_buffers_to_ignore"):
        onefold.shard(model, onefold.Recipe.zero(1))


class Multiplies(nn.Module):
    """A model whose forward pass uses a parameter of another model."""

    def __init__(self, other: nn.Parameter) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.other = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.other[0]


def parameters_of_freed_models(stage: int) -> list[str]:
    """What a pass says of a parameter whose model is freed; then where something else still holds
    what the engine knows about the parameter.
    """
    import onefold

    recipe, said = onefold.Recipe.zero(stage, stall_timeout=60.0), []
    for held in (False, True):
        freed: Any = onefold.shard(nn.Linear(4, 4), recipe)
        weight, entries = freed.weight, [*onefold.engine_of(freed).entries] if held else []
        del freed
        assert [entry.engine() for entry in entries] == [None, None] * held
        model = onefold.shard(Multiplies(weight), recipe)
        for graded in (True, False):
            with torch.set_grad_enabled(graded), pytest.raises(RuntimeError) as error:
                model(torch.ones(2, 4))
            said.append(f"{type(error.value).__name__}: {error.value}")
    return said


@pytest.mark.parametrize("stage", SHARDED)
def test_a_parameter_of_a_freed_model_is_refused_in_a_pass_of_another(stage: int) -> None:
    expected = (
        "ShardedParameterError: 'weight' is a parameter of a model that is gone, and was used in a"
        " pass of another model, which cannot train it: keep the model, or use a clone of it."
    )
    assert run_ranks(2, parameters_of_freed_models, stage) == [[expected] * 4] * 2


def collectives_of_scripts(stage: int) -> dict[str, str]:
    """What functions of torch.distributed say that are given a parameter, and whether it changed."""
    model = onefold.shard(nn.Linear(6, 4), onefold.Recipe.zero(stage))
    weight = model.weight
    whole = weight.onefold.gather()
    seen = [torch.zeros(4, 6) for _ in range(2)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(weight),
        "all_reduce without gradients": lambda: torch.no_grad()(dist.all_reduce)(weight),
        "all_reduce of data": lambda: dist.all_reduce(weight.data),
        "reduce": lambda: dist.reduce(weight, 0),
        "broadcast": lambda: dist.broadcast(weight, 0),
        "all_gather": lambda: dist.all_gather(seen, weight),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except onefold.ShardedParameterError as error:
            said[name] = str(error)
        said[name] += "" if torch.equal(weight.onefold.gather(), whole) else " and it changed"
    said["gathered"] = "" if all(torch.equal(t, whole) for t in seen) else "another whole"
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_collectives_that_write_to_a_parameter_are_refused(stage: int) -> None:
    """They wrote to a gathered copy, which was dropped: weights averaged by hand became half."""
    for said in run_ranks(2, collectives_of_scripts, stage):
        assert said.pop("all_gather") == "" and said.pop("gathered") == ""
        for name, words in said.items():
            assert words.startswith(f"torch.distributed.{name.split()[0]} was given 'weight'"), said
            assert words.endswith("parameter.onefold.gather()."), said


def refuse_and_count() -> list[str]:
    """Refuse shard() in several ways, each at another moment; say what a refusal leaves behind."""
    from onefold.optim.state_parts import engines

    world: Any = dist.distributed_c10d._world
    recipe, rank, found = onefold.Recipe.zero, dist.get_rank(), []

    def fails(module: nn.Module) -> None:
        raise KeyError("no values")

    def meta() -> nn.Module:
        with torch.device("meta"):
            return TinyMLP()

    refused: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (TinyMLP(depth=3 + rank), recipe(3, stall_timeout=10.0), {}),
        (TinyMLP(), recipe(1 + rank, stall_timeout=10.0), {}),
        (TinyMLP(), recipe(3, reduce="native", stall_timeout=10.0), {}),
        (TinyMLP(), recipe(3, stall_timeout=10.0), {"weights": "/no/such/folder"}),
        (meta(), recipe(3, stall_timeout=10.0), {"init": fails}),
    ]
    for number, (model, chosen, options) in enumerate(refused):
        before = len(world.pg_map), threading.active_count(), len(engines)
        with pytest.raises((ValueError, KeyError, RuntimeError, OSError)):
            onefold.shard(model, chosen, **options)
        after = len(world.pg_map), threading.active_count(), len(engines)
        hooks = sum(len(m._forward_hooks) for m in model.modules())
        if after != before or hooks:
            found.append(f"refusal {number}: {before} before, {after} after, {hooks} hooks")
    return found


def test_a_refused_shard_leaves_no_process_group_no_thread_and_no_hook() -> None:
    assert run_ranks(2, refuse_and_count) == [[], []]
