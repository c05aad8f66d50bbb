"""What cannot be right with a sharded model is refused in a sentence, on every rank, before it
changes a number: a table of calls, stages and words of the sentence.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import onefold
from on_ranks import on_ranks
from zoo import ResidualBlock, TinyGPT, TinyMLP, features_of, tokens_of

ALL, SHARDED = (0, 1, 2, 3), (1, 2, 3)


def sharded(stage: int, model: nn.Module | None = None, **options: Any) -> Any:
    recipe = onefold.Recipe.zero(stage, stall_timeout=60.0, **options)
    model = TinyMLP() if model is None else model
    units = (ResidualBlock,) if any(isinstance(m, ResidualBlock) for m in model.modules()) else None
    return onefold.shard(model, recipe, units=units)


def run(model: nn.Module, passes: int = 1) -> None:
    for _ in range(passes):
        model(features_of(0, 4, 7)).float().square().mean().backward()


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(7, 7), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first(x))


class Adapter(nn.Module):
    """A low-rank adapter around a layer."""

    def __init__(self, around: nn.Linear) -> None:
        super().__init__()
        self.around = around
        self.down, self.up = nn.Linear(10, 2, bias=False), nn.Linear(2, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(x) + self.up(self.down(x))


def tensor_parallel(stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    sharded(stage, parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel()))


def sharing(m: Any, stage: int) -> None:
    other: Any = TinyMLP()
    other.blocks[1].up.weight = m.blocks[1].up.weight
    sharded(stage, other)


def after(change: Callable[[Any], Any], passes: int = 0) -> Any:
    """A change behind so many passes, and then a pass."""

    def call(m: Any, stage: int) -> None:
        run(m, passes)
        change(m)
        run(m)

    return call


def hook(what: Any) -> Any:
    def call(m: Any, stage: int) -> None:
        weight = m.blocks[1].up.weight
        weight.register_post_accumulate_grad_hook(what(weight))
        run(m)

    return call


def in_ddp(m: nn.Module) -> None:
    run(nn.parallel.DistributedDataParallel(m))


def buffer_of_a_part(m: Any, stage: int) -> None:
    m.leave.register_buffer("old", m.leave.weight.data.clone())
    run(m)


def pruned(m: Any, stage: int) -> None:
    import torch.nn.utils.prune

    torch.nn.utils.prune.l1_unstructured(m.enter, "weight", amount=0.5)
    run(m)


def given(value: Any) -> Any:
    """A load of what `value` makes of whole weights, which must change nothing."""

    def call(m: Any, stage: int) -> None:
        before = onefold.full_state_dict(m)
        try:
            onefold.load_full_state_dict(m, value(TinyMLP().state_dict()))
        finally:
            after = onefold.full_state_dict(m)
            assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())

    return call


def shard_with(**options: Any) -> Any:
    return lambda m, stage: onefold.shard(TinyMLP(), onefold.Recipe.zero(stage), **options)


def over(group: Any) -> Any:
    return lambda m, stage: shard_with(group=group())(m, stage)


def inside(context: Any, of: Any = onefold.unshard) -> Any:
    def call(m: Any, stage: int) -> None:
        with context(m):
            of(m)

    return call


def waiting(m: Any, stage: int) -> None:
    with onefold.no_sync(m):
        run(m)
    onefold.unshard(m)


def thawed(**options: Any) -> Any:
    """A call that trains a weight which was frozen when another model was sharded."""

    def call(m: Any, stage: int) -> None:
        model: Any = TinyGPT().requires_grad_(False)
        model.norm.requires_grad_(True)
        onefold.shard(model, onefold.Recipe.zero(3, **options))
        model(tokens_of(0)).backward()
        model.blocks[1].mlp[0].weight.requires_grad_(True)
        model(tokens_of(0))

    return call


SHAPE = ("'blocks.1.up.weight'", "replaced")
CAST = ("moved or cast after shard()", "before shard()", "precision")
COLLECTIVE = ("of 'enter.weight'", "parameter.onefold.gather()")
HOOK = ("step_in_backward", "ordinary order")

#: {what is done: (the call, of a sharded model and its stage, the stages, words of the sentence)}
CALLS: dict[str, tuple[Any, tuple[int, ...], tuple[str, ...]]] = {
    # other models
    "a part is sharded": (
        lambda m, s: sharded(s, Around(m)),
        ALL,
        ("'part'", "another sharded model", "once"),
    ),
    "a DTensor": (
        lambda m, s: tensor_parallel(s),
        ALL,
        ("is a DTensor (S(0))", "Give shard() the mesh="),
    ),
    "twice": (lambda m, s: sharded(s, m), ALL, ("already",)),
    "a shared parameter": (
        sharing,
        ALL,
        ("'blocks.1.up'", "another sharded model"),
    ),
    "DDP around it": (lambda m, s: in_ddp(m), ALL, ("DistributedDataParallel", "onefold.shard()")),
    # copies and files
    "a copy": (lambda m, s: copy.deepcopy(m), ALL, ("deepcopy", "enter.weight", "full_state_dict")),
    "torch.save": (
        lambda m, s: torch.save(m, io.BytesIO()),
        ALL,
        ("pickling", "torch.save(onefold.full_state_dict(model), path)"),
    ),
    "state_dict": (
        lambda m, s: m.state_dict(),
        SHARDED,
        ("onefold.full_state_dict", "full_params"),
    ),
    "load_state_dict": (
        lambda m, s: m.load_state_dict(TinyMLP().state_dict()),
        SHARDED,
        ("onefold.load_full_state_dict", "write=True"),
    ),
    # another structure
    "a parameter replaced": (
        after(lambda m: setattr(m.blocks[1].up, "weight", nn.Parameter(torch.zeros(20, 10)))),
        ALL,
        (*SHAPE, "full_params(model, write=True)"),
    ),
    "a module added": (
        after(lambda m: setattr(m.blocks[1], "extra", nn.Linear(10, 10))),
        ALL,
        ("had 16 parameters", "has 18 now", "added 'blocks.1.extra.weight'", "before shard()"),
    ),
    "an adapter, late": (
        after(lambda m: setattr(m.blocks[1], "up", Adapter(m.blocks[1].up)), 1),
        ALL,
        ("has 18 now", "adapters"),
    ),
    "an adapter, later still, at the next save": (
        lambda m, s: (
            run(m, 3),
            setattr(m.blocks[1], "up", Adapter(m.blocks[1].up)),
            run(m),
            onefold.full_state_dict(m),
        ),
        ALL,
        ("has 18 now", "adapters"),
    ),
    "a module replaced": (
        after(lambda m: setattr(m, "leave", nn.Linear(10, 5))),
        ALL,
        ("replaced 'leave.weight', 'leave.bias'",),
    ),
    "weights tied": (
        after(lambda m: setattr(m.blocks[0].up, "weight", m.blocks[1].up.weight)),
        ALL,
        ("blocks.0.up.weight",),
    ),
    "half()": (after(lambda m: m.half()), ALL, CAST),
    "an encoded weight thawed": (
        thawed(frozen="int8"),
        (3,),
        ("'blocks.1.mlp.0.weight' was frozen", "stored encoded"),
    ),
    "a weight on the host thawed": (
        thawed(precision="bf16", offload_optimizer="cpu", offload_param="cpu"),
        (3,),
        ("'blocks.1.mlp.0.weight' was frozen", "without fp32 master weights"),
    ),
    # gradients
    "a step in a hook": (
        hook(lambda w: (o := torch.optim.SGD([w], lr=0.1), lambda p: o.step())[1]),
        ALL,
        HOOK,
    ),
    "a write to data in a hook": (
        hook(lambda w: lambda p: p.data.sub_(p.grad, alpha=0.1)),
        ALL,
        HOOK,
    ),
    "a gradient of another shape": (
        lambda m, s: setattr(m.leave.bias, "grad", torch.ones(3)),
        SHARDED,
        ("'leave.bias.grad' of shape (5,) was given a tensor of shape (3,)",),
    ),
    "torch.func.grad": (
        lambda m, s: torch.func.grad(
            lambda p: functional_call(m, p, (features_of(0, 4, 7),)).sum()
        )(dict(m.named_parameters())),
        SHARDED,
        ("full_params(model)",),
    ),
    "a buffer made of a part": (
        buffer_of_a_part,
        (1, 3),
        ("buffer 'old' was made of parameter 'leave.weight'", "gather()"),
    ),
    "a mask made of a part": (
        pruned,
        (1, 3),
        (
            "buffer 'weight_mask' was made of parameter 'enter.weight'",
            "onefold.unshard(model)",
        ),
    ),
    **{
        f"dist.{name}": (call, (1, 3), (name, *COLLECTIVE))
        for name, call in {
            "all_reduce": lambda m, s: dist.all_reduce(m.enter.weight.data),
            "broadcast": lambda m, s: dist.broadcast(m.enter.weight, 0),
        }.items()
    },
    # unshard
    "unshard inside full_params": (inside(onefold.full_params), (3,), ("inside", "full_params")),
    "a whole state dict inside full_params": (
        inside(onefold.full_params, onefold.full_state_dict),
        (1, 3),
        ("full_state_dict() was called inside full_params()", "outside"),
    ),
    "unshard while gradients wait": (waiting, (1,), ("no_sync", "optimizer.step()")),
    # arguments
    **{
        f"clip to {args}": (
            lambda m, s, a=args: (run(m), onefold.clip_grad_norm_(m, *a)),
            (0, 2),
            ("norm", f"={args[-1]!r}: expected a number"),
        )
        for args in ((None,), (-1.0,), (float("nan"),), (1.0, 0))
    },
    "arrays as weights": (
        given(lambda w: {n: t.numpy() for n, t in w.items()}),
        (3,),
        ("expected torch.Tensor",),
    ),
    "weights of another shape": (
        given(lambda w: {**w, "enter.weight": torch.zeros(3, 3)}),
        (0, 3),
        ("enter.weight",),
    ),
    "a weight that is missing": (
        given(lambda w: {n: t for n, t in w.items() if n != "leave.bias"}),
        (0, 3),
        ("leave.bias",),
    ),
    "init=3": (shard_with(init=3), (3,), ("init=3", "function")),
    "units that are not there": (shard_with(units=("blocks.9",)), (3,), ("blocks.9",)),
    "a stage as the recipe": (lambda m, s: onefold.shard(TinyMLP(), s), (3,), ("Recipe",)),
    **{
        f"{name} of a model that is not sharded": (
            lambda m, s, n=name: getattr(onefold, n)(
                TinyMLP(), *((1.0,) if "clip" in n else ())
            ).__enter__(),
            (3,),
            ("onefold.shard",),
        )
        for name in (
            "clip_grad_norm_",
            "full_params",
            "full_state_dict",
            "no_sync",
            "engine_of",
            "GradScaler",
        )
    },
    # groups
    "a destroyed group": (over(lambda: destroyed()), (3,), ("destroyed",)),
}


def destroyed() -> Any:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return group


@on_ranks(2)
@pytest.mark.parametrize("name", list(CALLS))
def test_it_is_refused_in_a_sentence(name: str) -> None:
    call, stages, words = CALLS[name]
    for stage in stages:
        model = sharded(stage)
        with pytest.raises((ValueError, RuntimeError, TypeError)) as error:
            call(model, stage)
        raised = str(error.value)
        for word in words:
            assert word in raised, f"stage {stage}: {word!r} is not in: {raised}"


@on_ranks(2)
@pytest.mark.parametrize("stage", ALL)
def test_a_refused_change_that_is_taken_back_leaves_no_trace(stage: int) -> None:
    found = []
    for mistaken in (False, True):
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
        found.append(onefold.full_state_dict(model))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_is_read_from_or_written_to_parameters_that_left_the_model(stage: int) -> None:
    model = sharded(stage)
    state = onefold.full_state_dict(model)
    model.leave = nn.Linear(10, 5)
    for call in (
        lambda: onefold.load_full_state_dict(model, state),
        lambda: onefold.full_state_dict(model),
        lambda: onefold.full_params(model).__enter__(),
        lambda: onefold.save("nowhere", model=model),
    ):
        with pytest.raises(RuntimeError, match=r"replaced 'leave.weight', 'leave.bias'"):
            call()


@on_ranks(2, fresh=True)
def test_a_refused_shard_leaves_no_process_group_no_thread_and_no_hook() -> None:
    recipe, rank, world = onefold.Recipe.zero, dist.get_rank(), dist.distributed_c10d._world

    def fails(module: nn.Module) -> None:
        raise KeyError("no values")

    with torch.device("meta"):
        meta = TinyMLP()
    refused: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (TinyMLP(depth=3 + rank), recipe(3, stall_timeout=10.0), {}),
        (TinyMLP(), recipe(1 + rank, stall_timeout=10.0), {}),
        (TinyMLP(), recipe(3, reduce="native", stall_timeout=10.0), {}),
        (TinyMLP(), recipe(3, stall_timeout=10.0), {"weights": "/no/such/folder"}),
        (meta, recipe(3, stall_timeout=10.0), {"init": fails}),
    ]
    for model, chosen, options in refused:
        before = len(world.pg_map), threading.active_count()
        with pytest.raises((ValueError, KeyError, RuntimeError, OSError)):
            onefold.shard(model, chosen, **options)
        assert (len(world.pg_map), threading.active_count()) == before
        assert not any(m._forward_hooks for m in model.modules())
