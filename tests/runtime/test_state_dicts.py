"""Reading and writing a sharded model: whole state dicts, whole parameters, and what code sees that
looks at a shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from trials import STAGES, GPTCase, fresh
from zoo import Block, TinyGPT, TinyMLP, features_of, tokens_of


def sharded_gpt(
    stage: int, tied: bool = False, **options: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A sharded model, and the state dict that it had before."""
    import onefold

    torch.manual_seed(0)
    model = TinyGPT(tied=tied)
    model.register_buffer("scale", torch.tensor([1.5, 2.5]))
    model.register_buffer("hidden", torch.ones(3), persistent=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0, **options)), before


def same(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    """Names in order, shapes, dtypes and bits."""
    problems = (
        []
        if list(expected) == list(actual)
        else [f"names {list(actual)}, expected {list(expected)}"]
    )
    for name in expected.keys() & actual.keys():
        if expected[name].dtype != actual[name].dtype or not torch.equal(
            expected[name], actual[name]
        ):
            problems.append(f"{name}: {actual[name].dtype} {tuple(actual[name].shape)} differs")
    return problems


def full_state(stage: int, tied: bool) -> list[str]:
    import onefold

    model, before = sharded_gpt(stage, tied)
    state = onefold.full_state_dict(model)
    if dist.get_rank() != 0:
        return (
            []
            if state == {}
            else [f"rank {dist.get_rank()} got {len(state)} tensors, expected none"]
        )
    problems = same(before, state)
    if any(t.requires_grad or isinstance(t, nn.Parameter) for t in state.values()):
        problems.append("the state dict holds parameters instead of tensors")
    for tensor in state.values():
        tensor.add_(1)  # the host's copy is nobody else's
    return problems


def changed_copies(stage: int) -> list[str]:
    import onefold

    model, before = sharded_gpt(stage)
    for tensor in onefold.full_state_dict(model).values():
        tensor.add_(1)
    state = onefold.full_state_dict(model)
    return same(before, state) if dist.get_rank() == 0 else []


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_full_state_dict_is_the_unsharded_models_on_rank_0(stage: int, tied: bool) -> None:
    assert run_ranks(3, full_state, stage, tied) == [[], [], []]


@pytest.mark.parametrize("stage", STAGES)
def test_changing_a_state_dict_changes_no_model(stage: int) -> None:
    assert run_ranks(2, changed_copies, stage) == [[], []]


def round_trip(stage: int, other: int, tied: bool) -> list[str]:
    import onefold

    model, _ = sharded_gpt(stage, tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens_of(dist.get_rank())).backward()
    optimizer.step()
    trained = onefold.full_state_dict(model)
    again, _ = sharded_gpt(other, tied)
    onefold.load_full_state_dict(again, trained if dist.get_rank() == 0 else None)
    problems = same(trained, onefold.full_state_dict(again))
    losses = [m(tokens_of(5)).item() for m in (model, again)]
    return (
        problems
        if losses[0] == losses[1]
        else [*problems, f"losses differ after loading: {losses}"]
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("stage", "other"), [(0, 3), (3, 0), (1, 2), (3, 3), (2, 1)])
def test_a_full_state_dict_loads_at_any_stage_bit_by_bit(
    stage: int, other: int, tied: bool
) -> None:
    assert run_ranks(2, round_trip, stage, other, tied) == [[], []]


def load_wrong(stage: int, how: str) -> tuple[str, str]:
    import onefold

    model, state = sharded_gpt(stage)
    if how == "missing":
        del state["head.weight"]
    elif how == "unexpected":
        state["no.such"] = torch.zeros(3)
    elif how == "shape":
        state["head.weight"] = torch.zeros(3, 3)
    try:
        onefold.load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("how", "named"),
    [("missing", "head.weight"), ("unexpected", "no.such"), ("shape", "head.weight")],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_wrong_state_dict_is_the_same_error_on_every_rank(
    stage: int, how: str, named: str
) -> None:
    for kind, message in run_ranks(2, load_wrong, stage, how):
        assert kind in ("ValueError", "RuntimeError") and named in message, (kind, message)


def load_loosely(stage: int) -> tuple[list[str], list[str]]:
    import onefold

    model, state = sharded_gpt(stage)
    del state["head.weight"]
    state["no.such"] = torch.zeros(3)
    missing, unexpected = onefold.load_full_state_dict(
        model, state if dist.get_rank() == 0 else None, strict=False
    )
    return list(missing), list(unexpected)


@pytest.mark.parametrize("stage", STAGES)
def test_without_strict_names_that_do_not_match_are_returned(stage: int) -> None:
    assert run_ranks(2, load_loosely, stage) == [(["head.weight"], ["no.such"])] * 2


def read_whole(stage: int) -> list[str]:
    import onefold

    model, before = sharded_gpt(stage)
    tokens = tokens_of(1)
    expected = model(tokens).item()
    problems = []
    with onefold.full_params(model) as whole, torch.no_grad():
        problems += same(before, dict(model.state_dict()))
        if whole is not model:
            problems.append("full_params yields something else than the model")
        if model.logits(tokens).shape != (2, 12, 61):  # type: ignore[operator]
            problems.append("a method other than forward does not work inside")
        if (loss := model(tokens).item()) != expected:
            problems.append(f"loss inside {loss!r}, outside {expected!r}")
    with onefold.full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # without write=True nothing of this lasts
    if (loss := model(tokens).item()) != expected:
        problems.append(f"loss after a change without write=True {loss!r}, expected {expected!r}")
    return problems


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inside_full_params_a_model_is_whole_and_outside_as_before(stage: int) -> None:
    assert run_ranks(2, read_whole, stage) == [[], []]


def write_whole(stage: int) -> list[str]:
    import onefold

    model, before = sharded_gpt(stage, tied=True)
    with onefold.full_params(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if dist.get_rank() == 0 else 5.0)  # rank 0's changes are everybody's
    expected = {name: t if name in ("scale", "hidden") else t * 2 for name, t in before.items()}
    state = onefold.full_state_dict(model)
    problems = same(expected, state) if dist.get_rank() == 0 else []
    plain = TinyGPT(tied=True)
    plain.load_state_dict({k: v for k, v in expected.items() if k not in ("scale", "hidden")})
    losses = model(tokens_of(1)).item(), plain(tokens_of(1)).item()
    return problems if losses[0] == losses[1] else [*problems, f"losses {losses}"]


@pytest.mark.parametrize("stage", STAGES)
def test_changes_inside_full_params_with_write_last(stage: int) -> None:
    assert run_ranks(2, write_whole, stage) == [[], []]


def error_inside(stage: int) -> list[str]:
    import onefold

    model, before = sharded_gpt(stage)
    try:
        with onefold.full_params(model):
            raise KeyError("an error of the user's own")
    except KeyError:
        pass
    state = onefold.full_state_dict(model)
    model(tokens_of(0)).backward()
    return same(before, state) if dist.get_rank() == 0 else []


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_inside_full_params_leaves_the_model_sharded_and_usable(stage: int) -> None:
    assert run_ranks(2, error_inside, stage) == [[], []]


def call(action: str, stage: int) -> tuple[str, str, bool]:
    """What ordinary code meets that looks at a sharded model outside of its forward pass: an error,
    or the whole's answer.
    """
    model, state = sharded_gpt(stage)
    layer: Any = model.blocks[1].attention.qkv  # type: ignore[index, union-attr]
    weight, whole = layer.weight, state["blocks.1.attention.qkv.weight"].clone()
    actions: dict[str, Callable[[Tensor, Any], Any]] = {
        "linear": lambda w, _: F.linear(torch.ones(1, 20), w),
        "matmul": lambda w, _: torch.ones(1, 60) @ w,
        "transpose": lambda w, _: w.t(),
        "T": lambda w, _: w.T,
        "index": lambda w, _: w[0, 0],
        "row": lambda w, _: w[59],
        "view": lambda w, _: w.view(30, 40),
        "norm along a dim": lambda w, _: w.norm(dim=1),
        "copy": lambda w, _: w.copy_(torch.arange(1200.0).view(60, 20)),
        "submodule": lambda w, module: (
            module(torch.ones(1, 20)) if module else F.linear(torch.ones(1, 20), w)
        ),
        "state_dict": lambda w, _: model.state_dict() if w is weight else None,
        "load_state_dict": lambda w, _: model.load_state_dict(state) if w is weight else None,
    }
    try:
        with torch.no_grad():
            answer, expected = actions[action](weight, layer), actions[action](whole, None)
            return (
                "",
                "",
                not isinstance(answer, Tensor)
                or (answer.shape == expected.shape and torch.equal(answer, expected)),
            )
    except Exception as error:
        return type(error).__name__, str(error), False


GIVEN = ["linear", "matmul", "index", "row", "view", "norm along a dim", "copy", "submodule"]
REFUSED = ["transpose", "T"]


@pytest.mark.parametrize("action", GIVEN)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_parameter_looked_at_gives_the_wholes_answer(stage: int, action: str) -> None:
    assert run_ranks(2, call, action, stage) == [("", "", True)] * 2


@pytest.mark.parametrize("action", REFUSED)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_parameter_used_as_no_part_can_be_says_its_name_shape_and_remedy(
    stage: int, action: str
) -> None:
    for rank, (kind, message, _) in enumerate(run_ranks(2, call, action, stage)):
        told = f"rank {rank}, stage {stage}, {action}: {kind}: {message}"
        assert kind == "ShardedParameterError", told
        for word in (
            "blocks.1.attention.qkv.weight",
            "(60, 20)",
            "full_params",
            "onefold.unsharded",
        ):
            assert word in message, f"{word!r} is not in it: {told}"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_dict_of_a_sharded_model_points_to_the_full_one(stage: int) -> None:
    for kind, message, _ in run_ranks(2, call, "state_dict", stage):
        assert kind and "onefold.full_state_dict" in message, (kind, message)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_load_state_dict_of_a_sharded_model_points_to_the_full_one(stage: int) -> None:
    for kind, message, _ in run_ranks(2, call, "load_state_dict", stage):
        assert kind and "onefold.load_full_state_dict" in message, (kind, message)


@pytest.mark.parametrize("stage", STAGES)
def test_a_whole_parameter_is_an_ordinary_one(stage: int) -> None:
    """At stage 0, and on one rank at every stage, nothing is sharded: everything works as ever."""
    for world_size in (1, 2) if stage == 0 else (1,):
        for action in [*GIVEN, *REFUSED, "state_dict", "load_state_dict"]:
            assert run_ranks(world_size, call, action, stage) == [("", "", True)] * world_size, (
                action
            )


def attributes(stage: int) -> list[str]:
    from onefold.runtime.parameters.interval import local_part

    model, before = sharded_gpt(stage)
    problems, held = [], {}
    for name, parameter in model.named_parameters():
        info = parameter.onefold  # type: ignore[attr-defined]
        start, stop = info.interval
        with torch.no_grad():
            mine = local_part(parameter).clone()
        if (info.name, tuple(info.shape)) != (name, tuple(before[name].shape)):
            problems.append(f"{name}: .onefold says {info.name} {info.shape}")
        if (
            parameter.shape != before[name].shape
            or parameter.numel() != before[name].numel()
            or parameter.dtype != torch.float32
        ):
            problems.append(
                f"{name}: shape {tuple(parameter.shape)}, {parameter.numel()} elements, expected"
                " the whole's"
            )
        if mine.shape != (stop - start,) or not torch.equal(
            mine, before[name].flatten()[start:stop]
        ):
            problems.append(f"{name}: the interval holds other elements")
        if not torch.equal(info.gather(), before[name]):
            problems.append(f"{name}: gather() differs")
        held[name] = stop - start
        if name not in repr(parameter):
            problems.append(f"{name} is not in its repr: {parameter!r}")
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, held)
    for name in held:
        if sum(t[name] for t in totals) != before[name].numel():
            problems.append(
                f"{name}: the ranks hold {[t[name] for t in totals]} of {before[name].numel()}"
                " elements"
            )
    return problems


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_name_shape_interval_and_gather_are_one_attribute_away(stage: int) -> None:
    assert run_ranks(3, attributes, stage) == [[], [], []]


def different_starts(stage: int) -> list[str]:
    """Ranks that were seeded differently start from rank 0's weights and buffers, as in DDP."""
    import onefold

    torch.manual_seed(dist.get_rank())
    model = TinyMLP()
    model.register_buffer("noise", torch.randn(3))
    mine = {name: t.clone() for name, t in model.state_dict().items()}
    objects: list[Any] = [mine]
    dist.broadcast_object_list(objects)
    onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0))
    with onefold.full_params(model):
        return same(objects[0], dict(model.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_start_from_rank_0s_weights(stage: int) -> None:
    assert run_ranks(3, different_starts, stage) == [[], [], []]


def optimizer_state_round_trip(stage: int) -> list[str]:
    """An optimizer's own state_dict() works on local tensors: saved and loaded on the same rank it
    continues bit by bit.
    """
    import onefold

    case = GPTCase()

    def losses(resume: bool) -> list[float]:
        model = onefold.shard(fresh(case), onefold.Recipe.zero(stage, stall_timeout=10.0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = []
        for step in range(4):
            if resume and step == 2:
                state, saved = onefold.full_state_dict(model), copy.deepcopy(optimizer.state_dict())
                model = onefold.shard(fresh(case), onefold.Recipe.zero(stage, stall_timeout=10.0))
                onefold.load_full_state_dict(model, state)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
                optimizer.load_state_dict(saved)
            seen.append(case.step(model, optimizer, dist.get_rank(), step))
        return seen

    a, b = losses(False), losses(True)
    return [] if a == b else [f"losses {b}, expected {a}"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizers_state_dict_continues_bit_by_bit_on_the_same_ranks(stage: int) -> None:
    assert run_ranks(2, optimizer_state_round_trip, stage) == [[], []]


def moved_after_sharding(stage: int) -> tuple[str, str]:
    model, _ = sharded_gpt(stage, units=(Block,))
    try:
        model.double()
        model(tokens_of(0)).backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("stage", [1, 3])
def test_casting_after_sharding_is_an_error_that_says_when_to_cast(stage: int) -> None:
    for kind, message in run_ranks(2, moved_after_sharding, stage):
        assert kind and "before shard" in message, (kind, message)


def sizes_do_not_lie(stage: int) -> list[Any]:
    """What a parameter counter sees: the whole model, before and after a forward pass. (What a rank
    holds: `attributes`.)
    """
    import onefold

    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=10.0))
    counts = [sum(p.numel() for p in model.parameters())]
    model(features_of(0, 4, 7))
    return [
        *counts,
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in TinyMLP().parameters()),
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_counted_elements_are_the_models(stage: int) -> None:
    for at_first, later, expected in run_ranks(3, sizes_do_not_lie, stage):
        assert at_first == later == expected
