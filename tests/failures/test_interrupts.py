"""An interrupt (Ctrl-C in a notebook), or memory that runs out, leaves a model that goes on as in plain
PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import linecache
import os
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import looks
import onefold
from on_ranks import on_ranks, slow
from ranks import outcomes_of
from reference import NEAR, built, differences, weights
from zoo import ResidualBlock, TinyMLP, features_of

SOURCE = os.path.join("src", "onefold")
INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.model.reach("backward")
        return grad, None


class Interrupted(TinyMLP):
    """Raises `kind` where it comes to the place `at`."""

    at, kind = "", KeyboardInterrupt
    entered = 0

    def reach(self, place: str) -> None:
        if place == self.at:
            self.at = ""
            raise self.kind

    def part(self, x: Tensor) -> Tensor:
        self.entered += 1
        x = self.blocks[1](x)
        if self.entered > 1:
            self.reach("recomputation")
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.entered = 0
        x = self.blocks[0](torch.tanh(self.enter(x)))
        self.reach("forward")
        x = checkpoint(self.part, _InBackward.apply(x, self), use_reentrant=False)  # type: ignore[no-untyped-call]
        try:
            self.blocks[2](x)
            self.reach("caught")
        except BaseException:
            x = x * 1
        return self.leave(self.blocks[2](x))


class InterruptedSGD(torch.optim.SGD):
    """Steps by `.data`, which no version counter tells of, and may be interrupted after two."""

    interrupted = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, p in enumerate(self.param_groups[0]["params"]):
            if self.interrupted and number == 2:
                self.interrupted = False
                raise KeyboardInterrupt
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.1)


def interrupted_everywhere(model: Any, average: bool) -> list[float]:
    """In each step, passes are interrupted at every place, and then the step itself: the cell is
    called again. `average`: the gradients over ranks by hand, where DDP cannot go on.
    """
    optimizer, losses = InterruptedSGD(model.parameters(), lr=0.1), []

    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        for parameter in model.parameters() if average else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        return loss.item()

    for number in range(3):
        batch = features_of(10 * number + dist.get_rank(), 4, 7)
        for place in ("forward", "caught", "backward", "recomputation", "block", "part"):
            model.at, model.kind = place, INTERRUPTS[number % 3]
            optimizer.zero_grad()
            hook = {"block": model.blocks[1], "part": model.enter}.get(place)
            handle = hook and hook.register_forward_hook(lambda *_, p=place: model.reach(p))
            with contextlib.suppress(BaseException):
                if place == "part":
                    model.enter(batch)
                model(batch).square().mean().backward()
            model.at = ""
            if handle:
                handle.remove()
        if number == 1:
            optimizer.interrupted = True
            with contextlib.suppress(KeyboardInterrupt):
                step(batch)
        losses.append(step(batch))
    return losses


@on_ranks(2)
def test_a_loop_that_is_interrupted_everywhere_and_goes_on_trains_as_in_plain_pytorch() -> None:
    plain: Any = built(Interrupted)
    losses = interrupted_everywhere(plain, average=True)
    for stage in range(4):
        recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
        model = onefold.shard(built(Interrupted), recipe, units=(ResidualBlock,))
        assert interrupted_everywhere(model, average=False) == pytest.approx(losses, rel=1e-5)
        assert differences(plain.state_dict(), weights(model), **NEAR) == []


class Nth:
    """Interrupts, as a signal does, at the n-th call of a function of Onefold's; or, of functions
    that must be safe there, at the n-th line. Python handles no signal at `try:`, and what ends a
    `with` is torch's (`no_grad`).
    """

    def __init__(self, n: int, lines_of: frozenset[Any] = frozenset()) -> None:
        self.left, self.lines_of = n, lines_of

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        if self.lines_of and code not in self.lines_of:
            return None
        counts = event == "call" and SOURCE in code.co_filename
        if self.lines_of:
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            counts = event == "line" and not text.startswith(("try:", "with "))
        if counts:
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def during(self, use: Any) -> bool:
        """Whether it came to that place."""
        with contextlib.suppress(KeyboardInterrupt):
            sys.settrace(self)
            try:
                use()
            finally:
                sys.settrace(None)
        return self.left <= 0


def read(model: nn.Module) -> None:
    with onefold.full_params(model):
        pass


#: (stage, options, every n-th call)
RECIPES: list[tuple[int, dict[str, Any], int]] = [
    (0, {"precision": "fp32"}, 7), (2, {"precision": "bf16"}, 37), (3, {"precision": "bf16"}, 37), (3, {"offload_optimizer": "cpu"}, 37),
    (2, {"moments": "int8"}, 37),
]  # fmt: skip


@on_ranks(1)
@pytest.mark.parametrize(
    ("stage", "options", "stride", "lines"),
    [
        pytest.param(*row, lines, marks=slow if lines and row != RECIPES[2] else ())
        for row in RECIPES
        for lines in (False, True)
    ],
)
def test_an_interrupt_inside_onefold_leaves_no_trace_in_the_numbers(
    stage: int, options: dict[str, Any], stride: int, lines: bool
) -> None:
    models = [built(TinyMLP), built(TinyMLP)]
    for model in models:
        onefold.shard(model, onefold.Recipe.zero(stage, **options))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    x, guarded = features_of(0, 4, 7), looks.guarded_at_every_line() if lines else frozenset()

    def loss(which: int) -> Tensor:
        optimizers[which].zero_grad()
        return models[which](x).float().square().mean()

    def step(which: int) -> float:
        value = loss(which)
        value.backward()
        optimizers[which].step()
        return value.item()

    uses: dict[str, Any] = {
        "forward": lambda: loss(0),
        "backward": lambda: pending.backward(),
        "full_state_dict": lambda: onefold.full_state_dict(models[0]),
        "full_params": lambda: read(models[0]),
    }
    for name, use in uses.items():
        at, reached = 1, True
        while reached:  # else it has fewer calls or lines
            pending = loss(0) if name == "backward" else x
            reached = Nth(at, guarded).during(use)
            values = step(0), step(1)
            assert values[0] == values[1], f"{name}, {at}"
            taken, whole = looks.known_as_weights(models[0])
            assert taken <= whole, f"{name}, {at}: an activation may be taken for a weight"
            at += 1 if lines else stride
    # A step may be half done; the next one is whole
    group, at, reached = optimizers[0].param_groups[0], 1, True
    while reached:
        step(0)
        pending = loss(0)
        pending.backward()
        reached = Nth(at, guarded).during(optimizers[0].step)
        before = onefold.full_state_dict(models[0])
        step(0)
        stays = [n for n, v in onefold.full_state_dict(models[0]).items() if v.equal(before[n])]
        assert not stays and len(group["params"]) == 16 and group["foreach"] is None, at
        at += 1 if lines else stride
    assert at > 8, "it was hardly interrupted"


def one_rank_alone(stage: int) -> list[float]:
    """Rank 0 is interrupted in two forward passes and goes on, rank 1 notices nothing."""

    torch.manual_seed(0)
    inner: Any = Interrupted()
    recipe = onefold.Recipe.zero(stage, stall_timeout=3.0)
    model = onefold.shard(inner, recipe, units=(ResidualBlock,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step and dist.get_rank() == 0:
            inner.at = "forward"
            with contextlib.suppress(KeyboardInterrupt):
                model(features_of(step, 4, 7))
        optimizer.zero_grad()
        model(features_of(step, 4, 7)).square().mean().backward()
        optimizer.step()
    return [p.double().sum().item() for p in onefold.full_state_dict(model).values()]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_interrupt_on_one_rank_alone_ends_in_an_error_or_changes_nothing(stage: int) -> None:
    outcomes = outcomes_of(2, one_rank_alone, stage, timeout=60.0)
    if any(o.error for o in outcomes):  # its gathers were other ones
        assert [o.error for o in outcomes] == ["StallError"] * 2, outcomes
        return
    reference = outcomes_of(1, one_rank_alone, stage, timeout=60.0)
    assert outcomes[0].value == pytest.approx(reference[0].value)


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 1, fails: bool = False) -> Tensor:
        x = self.linear(x)
        x = self(x, times - 1) if times else x
        if fails:
            raise ValueError("after the inner call")
        return x


class HasPartThatCallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.block = CallsItself(), ResidualBlock(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.part(x))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_that_calls_itself_may_raise_and_is_one_pass(stage: int) -> None:

    recipe = onefold.Recipe.zero(stage, stall_timeout=10.0)
    for model in (CallsItself(), HasPartThatCallsItself()):
        plain = {name: p.detach().clone() for name, p in model.named_parameters()}
        onefold.shard(model, recipe)
        part: Any = getattr(model, "part", model)
        with pytest.raises(ValueError, match="after the inner call"):
            part(torch.ones(2, 4), fails=True)
        with onefold.full_params(model):
            assert all(torch.equal(p, plain[name]) for name, p in model.named_parameters())
        w, b = (
            plain[next(k for k in plain if k.endswith(f"linear.{n}"))] for n in ("weight", "bias")
        )
        expected = (torch.ones(2, 4) @ w.T + b) @ w.T + b
        out = part(torch.ones(2, 4))
        assert torch.allclose(out, expected), (out, expected)
        out.sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_memory_that_runs_out_in_full_params_or_unshard_leaves_the_model_sharded(
    stage: int,
) -> None:
    from onefold.runtime.state import start

    def fails(function: Any, at: int) -> Any:
        calls = iter(range(at))

        def failing(*args: Any) -> Any:
            if next(calls, None) is None:
                raise torch.OutOfMemoryError("no memory is left")
            return function(*args)

        return failing

    torch.manual_seed(0)
    model = TinyMLP()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0))
    parameters, engine = list(model.parameters()), onefold.engine_of(model)

    @contextlib.contextmanager
    def unsharded(model: Any) -> Any:
        yield onefold.unshard(model)

    gathered = engine.memory.now().get("gathered", 0)
    for module, name, enter in (
        (start, "whole_masters", onefold.full_params),
        (start, "within_holders", lambda m: onefold.full_params(m, write=True)),
        (importlib.import_module("onefold.sharding"), "whole_masters", unsharded),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, fails(getattr(module, name), 2))
            with pytest.raises(torch.OutOfMemoryError), enter(model):
                pass
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True)), name
        assert engine.memory.now().get("gathered", 0) == gathered, name
        with onefold.full_params(model):
            assert all(torch.equal(p, plain[key]) for key, p in model.named_parameters())
        model(features_of(0, 4, 7)).sum().backward()


@on_ranks(1)
def test_a_model_that_was_interrupted_is_freed() -> None:

    def interrupted() -> weakref.ref[Any]:
        model: Any = onefold.shard(Interrupted(), onefold.Recipe.zero(3, precision="bf16"))
        model.at = "forward"
        with contextlib.suppress(KeyboardInterrupt):
            model(features_of(0, 4, 7))
        return weakref.ref(model)

    gone = interrupted()
    other = onefold.shard(TinyMLP(), onefold.Recipe.zero(3, precision="bf16"))
    other(features_of(0, 4, 7))  # the next pass in this thread
    gc.collect()
    assert gone() is None
