"""What is put around methods of torch's optimizers: their steps are counted, they are met in time."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import onefold
from onefold.runtime.parameters import parameter
from ranks import run_ranks
from zoo import TinyMLP, features_of


class Careful(torch.optim.AdamW):
    """Calls the `step` of its base in several ways."""

    ways: tuple[str, ...] = ("once",)

    def step(self, closure: Any = None) -> Any:
        for way in self.ways:
            if way == "caught":
                rate = self.param_groups[0].pop("lr")
                with pytest.raises(KeyError):
                    super().step()
                self.param_groups[0]["lr"] = rate
            elif way == "raises":
                raise OverflowError("in the middle of a step")
            else:
                super().step()


def built(stage: int | None) -> Any:
    torch.manual_seed(0)
    model = TinyMLP(depth=2)
    return model if stage is None else sharded(model, stage)


def sharded(model: Any, stage: int) -> Any:
    return onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=20.0))


def train(model: Any, optimizer: Any, first: int, steps: int) -> list[torch.Tensor]:
    """The whole weights afterwards. All ranks have the same data, so that plain PyTorch in each of
    them has the same bits.
    """
    for step in range(first, first + steps):
        model(features_of(step, 4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (p.onefold.gather() if hasattr(p, "onefold") else p.detach()).clone()
        for p in model.parameters()
    ]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def shapes_of(optimizer: Any) -> list[Any]:
    return [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]


def state_shapes_of(optimizer: Any) -> list[Any]:
    return [tuple(state["exp_avg"].shape) for state in optimizer.state.values()]


# -- steps -----------------------------------------------------------------------------------------


def nested(ways: tuple[str, ...], stage: int, late: bool) -> list[str]:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch hooks its step from now on, too
    out: list[Any] = []
    for each in (None, stage):
        model = built(None)
        optimizer = Careful(model.parameters(), lr=0.01, foreach=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if late else None
        optimizer.ways = ways
        if each is not None:
            sharded(model, each)
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda o, *_, s=seen: s.append(shapes_of(o)))
        optimizer.register_step_post_hook(lambda o, *_, s=seen: s.append(shapes_of(o)))
        weights = train(model, optimizer, 0, 3)
        if schedule is not None:
            schedule.step()
        out.append((weights, [seen[0], seen[-1]]))
        out[-1] += ([float(s["step"]) for s in optimizer.state.values()],)
    (plain, shapes, steps), (ours, ours_shown, counted) = out
    once = len(set(ways)) == len(ways)
    return [
        "other weights" * (not same(plain, ours)),
        f"hooks saw {ours_shown}" * (ours_shown != shapes),
        f"{counted} for {steps}" * (once and counted != steps),
    ]


@pytest.mark.parametrize(
    "ways",
    [("once",), ("once", "once"), ("caught", "once"), ("once", "caught")],
    ids=", ".join,
)
@pytest.mark.parametrize("late", [False, True], ids=["", "a schedule from before shard()"])
def test_a_step_that_calls_that_of_its_base_is_one_step(ways: tuple[str, ...], late: bool) -> None:
    for stage in (1, 3):
        assert run_ranks(2, nested, ways, stage, late) == [["", "", ""]] * 2, stage


def raised(schedule: str) -> list[str]:
    """A step raises and its traceback is kept; the next ones go on."""
    kind: Any = Careful
    if schedule == "none, of a class that is new":
        held = sharded(TinyMLP(), 1)
        assert held is not None
        kind = type("Late", (Careful,), {"step": lambda self, closure=None: Careful.step(self)})
    out: list[Any] = []
    kept: list[BaseException] = []
    wrong: list[str] = []
    for stage in (None, 2):
        model = built(None)
        optimizer = kind(model.parameters(), lr=0.01, foreach=False)
        if schedule == "before shard()":
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if stage is not None:
            sharded(model, stage)
        if schedule == "after shard()":
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, 0, 1)
        whole = shapes_of(optimizer), state_shapes_of(optimizer)
        model(features_of(1, 4, 7)).square().mean().backward()
        optimizer.ways = ("once", "raises")
        try:
            optimizer.step()
        except OverflowError as error:
            kept.append(error)
        else:
            wrong.append("nothing was raised")
        now = shapes_of(optimizer), state_shapes_of(optimizer)
        wrong += [f"{now} shown behind the error, {whole} before"] * (now != whole)
        optimizer.ways = ("once",)
        optimizer.zero_grad()
        out.append(train(model, optimizer, 2, 2))
    return wrong + ["other weights"] * (not same(*out))


@pytest.mark.parametrize(
    "schedule", ["none", "none, of a class that is new", "before shard()", "after shard()"]
)
def test_a_step_that_raises_is_over_at_once_though_its_traceback_is_kept(schedule: str) -> None:
    assert run_ranks(2, raised, schedule) == [[], []]


class FailsOutside(torch.optim.SGD):
    """Raises where nothing is left to be stepped: around the steps of what is offloaded."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        if all(p.grad is None for group in self.param_groups for p in group["params"]):
            raise OverflowError("around the step")


def raised_with_gradients_aside() -> list[int]:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(2, stall_timeout=20.0, offload_optimizer="cpu")
    model: Any = onefold.shard(TinyMLP(depth=2), recipe)
    optimizer = FailsOutside(model.parameters(), lr=0.1)
    model(features_of(0, 4, 7)).square().mean().backward()
    try:
        optimizer.step()
    except OverflowError as kept:
        return [sum(p.grad is not None for p in model.parameters()), len(kept.args)]
    return []


def test_gradients_of_an_offloaded_step_that_raises_are_there_at_once() -> None:
    assert run_ranks(2, raised_with_gradients_aside) == [[12, 1], [12, 1]]


def sharded_by_a_closure() -> list[str]:
    """The first model is sharded while an optimizer of it steps."""
    model = built(None)
    optimizer = Careful(model.parameters(), lr=0.01, foreach=False)
    others = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    others.step(lambda: sharded(model, 1))
    weights = train(model, optimizer, 0, 3)
    plain = built(None)
    wanted = train(plain, Careful(plain.parameters(), lr=0.01, foreach=False), 0, 3)
    return ["other weights"] * (not same(weights, wanted))


def test_a_model_may_be_sharded_while_an_optimizer_steps() -> None:
    assert run_ranks(2, sharded_by_a_closure) == [[], []]


def copied() -> list[str]:
    """Optimizers are copied and pickled as in plain PyTorch; a copy is counted like the original."""
    sharded(TinyMLP(), 1)
    wrong: list[str] = []
    plain = built(None)
    wanted = train(plain, Careful(plain.parameters(), lr=0.01), 0, 2)
    for way in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        model, optimizer = way((m := built(None), Careful(m.parameters(), lr=0.01)))
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        sharded(model, 1)
        wrong += ["other weights"] * (not same(train(model, optimizer, 0, 2), wanted))
        optimizer.ways = ("raises",)
        with pytest.raises(OverflowError):
            optimizer.step()
        shapes = [tuple(p.shape) for p in plain.parameters()]
        wrong += ["parts are shown"] * (shapes_of(optimizer) != shapes)
    twin = copy.copy(optimizer)
    twin.ways = ("once",)
    train(model, twin, 2, 1)
    state = twin.state_dict()["state"]
    wrong += ["the copy's states are no whole ones"] * (len(state) != 12 * (dist.get_rank() == 0))
    return wrong


def test_copies_of_optimizers_are_counted_and_met() -> None:
    assert run_ranks(2, copied) == [[], []]


def test_a_step_compiles_as_in_plain_pytorch_while_no_model_is_sharded() -> None:
    assert run_ranks(1, compiled, timeout=250.0) == [[]]


def compiled() -> list[str]:
    model = onefold.shard(TinyMLP(), onefold.Recipe.zero(1))
    del model
    gc.collect()
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(3)
    ours, torchs = (torch.optim.SGD([w], lr=0.1, foreach=False) for w in weights)
    counts = []
    for optimizer, step in ((ours, type(ours).step), (torchs, type(torchs).step.__wrapped__)):
        graphs: list[Any] = []
        torch.compile(
            lambda step=step, optimizer=optimizer: step(optimizer),
            backend=lambda graph, _, graphs=graphs: (graphs.append(graph), graph.forward)[1],
        )()
        counts.append(len(graphs))
    return [f"{counts} graphs"] * (counts[0] != counts[1]) + [f"{weights}"] * (
        not torch.equal(*weights)
    )


def compiled_over_parts() -> list[str]:
    model, plain = built(2), built(None)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, plain))
    ours.step = torch.compile(ours.step, backend="eager")  # type: ignore[method-assign]
    wrong = ["other weights"] * (not same(train(model, ours, 0, 3), train(plain, theirs, 0, 3)))
    return wrong + ["parts are shown"] * (shapes_of(ours) != shapes_of(theirs))


def test_a_compiled_step_has_the_bits_of_plain_pytorch() -> None:
    assert run_ranks(2, compiled_over_parts, timeout=250.0) == [[], []]


# -- state dicts -----------------------------------------------------------------------------------


def early(stepped: bool) -> list[str]:
    """An optimizer from before shard(): its dict is whole on rank 0, and rank 0's is loaded, before
    its first step over sharded parameters.
    """
    wrong: list[str] = []
    first = dist.get_rank() == 0
    plain, model = built(None), built(None)
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model))
    train(plain, theirs, 0, 2)
    if stepped:
        train(model, ours, 0, 2)
    sharded(model, 2)
    saved = theirs.state_dict()
    if stepped:
        seen = [s["exp_avg"] for s in ours.state.values()]
        wanted = [s["exp_avg"] for s in theirs.state.values()]
        wrong += ["other states are shown"] * (not same(seen, wanted))
        state = ours.state_dict()["state"]
        wrong += [f"{len(state)} states"] * (len(state) != (len(wanted) if first else 0))
        wrong += ["other states are saved"] * (
            first and not same([s["exp_avg"] for s in state.values()], wanted)
        )
    ours.load_state_dict(saved if first else {**saved, "state": {}})
    held = sum(s["exp_avg"].untyped_storage().nbytes() for s in ours.state.values())
    total = sum(4 * p.numel() for p in plain.parameters())
    wrong += [f"{held} bytes of {total} are held"] * (held > 0.6 * total)
    with torch.no_grad():
        onefold.load_full_state_dict(model, plain.state_dict() if first else {})
    wrong += ["other weights"] * (not same(train(model, ours, 2, 2), train(plain, theirs, 2, 2)))
    return wrong


@pytest.mark.parametrize("stepped", [False, True])
def test_an_optimizer_from_before_shard_is_met_when_its_state_dict_is_asked_for(
    stepped: bool,
) -> None:
    assert run_ranks(2, early, stepped) == [[], []]


def early_in_checkpoints(folder: str, way: str) -> list[str]:
    """The same, where Onefold is given the optimizer to save it, or to load into it."""
    wrong: list[str] = []
    plain, model = built(None), built(None)
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model))
    train(plain, theirs, 0, 2)
    train(model, ours, 0, 2)
    sharded(model, 2)
    if way == "save":
        onefold.save(f"{folder}/a", model=model, optimizer=ours)
    else:
        dcp.save(onefold.dcp_state_dict(model, ours), checkpoint_id=f"{folder}/a")
    other = built(None)
    its = torch.optim.AdamW(other.parameters(), lr=0.5)
    sharded(other, 3)
    if way == "save":
        onefold.load(f"{folder}/a", model=other, optimizer=its)
    else:
        dcp.load(onefold.dcp_state_dict(other, its), checkpoint_id=f"{folder}/a")
    wrong += [f"{state_shapes_of(its)}"] * (state_shapes_of(its) != state_shapes_of(theirs))
    wanted = train(plain, theirs, 2, 2)
    for at, (m, o) in enumerate(((model, ours), (other, its))):
        wrong += [f"other weights of {at}"] * (not same(train(m, o, 2, 2), wanted))
    return wrong


@pytest.mark.parametrize("way", ["save", "dcp"])
def test_an_optimizer_from_before_shard_may_be_saved_and_loaded_into(
    way: str, tmp_path: Path
) -> None:
    assert run_ranks(2, early_in_checkpoints, str(tmp_path), way) == [[], []]


# -- what torch's methods read ---------------------------------------------------------------------


def intervals_of_zero_grad() -> list[int]:
    seen: list[Any] = []
    own = parameter.seen_grad
    parameter.seen_grad = lambda p: (seen.append(p), own(p))[1]
    model = built(2)
    optimizer = torch.optim.AdamW(model.parameters())
    counts = []
    for zero in (
        optimizer.zero_grad,
        model.zero_grad,
        lambda: [p.grad for p in model.parameters()],
    ):
        model(features_of(0, 4, 7)).square().mean().backward()
        seen.clear()
        zero()
        counts.append(len(seen))
    return counts


def test_zero_grad_makes_no_intervals() -> None:
    assert run_ranks(2, intervals_of_zero_grad) == [[0, 0, 12], [0, 0, 12]]


def loaded_dtypes() -> list[str]:
    """States of a model declared in bf16 are loaded in the precision of the masters."""
    model = sharded(built(None).bfloat16(), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(features_of(step, 4, 7).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(onefold.optim.local_state_dict(optimizer))
    onefold.optim.load_local_state_dict(optimizer, state)
    again = onefold.optim.local_state_dict(optimizer)
    assert any("exp_avg" in values for values in state["state"].values())
    wrong = [str(p.dtype) for p in model.parameters() if p.dtype != torch.bfloat16]
    for number, values in state["state"].items():
        if "exp_avg" not in values:
            continue  # the other rank has its elements
        now = again["state"][number]["exp_avg"]
        wrong += [f"{now.dtype}"] * (now.dtype != torch.float32)
        wrong += ["other values"] * (not torch.equal(now, values["exp_avg"]))
    return wrong


def test_states_are_loaded_in_the_precision_of_the_masters() -> None:
    assert run_ranks(2, loaded_dtypes) == [[], []]
