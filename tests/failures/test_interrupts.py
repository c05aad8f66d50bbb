"""An interrupt (Ctrl-C in a notebook), or memory that runs out, leaves a model that goes on as in plain
PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import linecache
import os
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import outcomes_of, run_ranks
from trials import MLPCase, assert_trains_as_ddp
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


class InterruptedEverywhere(MLPCase):
    """In each step, passes are interrupted at every place, and then the step itself: the cell is
    called again.
    """

    units = (ResidualBlock,)
    reference = "mean"  # DDP cannot go on after an interrupted backward pass

    def build(self) -> nn.Module:
        return Interrupted()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return InterruptedSGD(model.parameters(), lr=0.1)

    def step(self, model: nn.Module, optimizer: Any, rank: int, step: int) -> float:
        inner: Any = next(m for m in model.modules() if isinstance(m, Interrupted))
        batch = self.batch(rank, step)
        for place in ("forward", "caught", "backward", "recomputation", "block", "part"):
            inner.at, inner.kind = place, INTERRUPTS[step % 3]
            optimizer.zero_grad()
            hook = {"block": inner.blocks[1], "part": inner.enter}.get(place)
            handle = hook and hook.register_forward_hook(lambda *_, p=place: inner.reach(p))
            with contextlib.suppress(BaseException):
                if place == "part":
                    inner.enter(batch)
                self.loss(model, batch).backward()
            inner.at = ""
            if handle:
                handle.remove()
        if step == 1:
            optimizer.interrupted = True
            with contextlib.suppress(KeyboardInterrupt):
                super().step(model, optimizer, rank, step)
        return super().step(model, optimizer, rank, step)


def test_a_loop_that_is_interrupted_everywhere_and_goes_on_trains_as_in_plain_pytorch() -> None:
    assert_trains_as_ddp(InterruptedEverywhere)


class _Nth:
    """Interrupts the n-th call of a function of Onefold's, as a signal does."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call" and SOURCE in frame.f_code.co_filename:
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt


def interrupt_inside(stage: int, stride: int) -> list[str]:
    import onefold

    torch.manual_seed(0)
    models = [TinyMLP(), TinyMLP()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        onefold.shard(model, onefold.Recipe.zero(stage, precision="bf16"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    x, found = features_of(0, 4, 7), []

    def loss(which: int) -> Tensor:
        optimizers[which].zero_grad()
        return models[which](x).float().square().mean()

    def step(which: int) -> float:
        value = loss(which)
        value.backward()
        optimizers[which].step()
        return value.item()

    for of in ("forward", "backward"):
        at, tracer = 1, _Nth(0)
        while tracer.left <= 0:  # else the pass has fewer calls
            before, tracer = loss(0) if of == "backward" else None, _Nth(at)
            with contextlib.suppress(KeyboardInterrupt):
                sys.settrace(tracer)
                try:
                    loss(0) if before is None else before.backward()
                finally:
                    sys.settrace(None)
            if (values := (step(0), step(1)))[0] != values[1]:
                found.append(f"{of}, call {at}: losses {values}")
            at += stride
        if at < 300:
            found.append(f"{of}: only {at} calls were seen")
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_an_interrupt_inside_onefold_leaves_no_trace_in_the_numbers(stage: int) -> None:
    assert run_ranks(1, interrupt_inside, stage, 37) == [[]]


class _NthLine:
    """Interrupts at the n-th line of one function. Python handles no signal at `try:`,
    and what ends a `with` is torch's (`no_grad`).
    """

    def __init__(self, code: Any, n: int) -> None:
        self.code, self.left = code, n

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not self.code:
            return None
        text = linecache.getline(self.code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith(("try:", "with ")):
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupt_at_every_line(stage: int, precision: Any) -> list[str]:
    import onefold
    from onefold.runtime.forward import Forward
    from onefold.runtime.state import dicts, start

    torch.manual_seed(0)
    models = [TinyMLP(), TinyMLP()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        onefold.shard(model, onefold.Recipe.zero(stage, precision=precision))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    x, found = features_of(0, 4, 7), []

    def step(which: int) -> float:
        optimizers[which].zero_grad()
        value = models[which](x).float().square().mean()
        value.backward()
        optimizers[which].step()
        return value.item()

    def read() -> None:
        with onefold.full_params(models[0]):
            pass

    def unwrapped(function: Any) -> Any:
        return function.__wrapped__.__code__

    for name, code, use in (
        ("showing", unwrapped(dicts.showing), lambda: onefold.full_state_dict(models[0])),
        ("full_params", unwrapped(start.full_params), read),
        ("enter", Forward.enter.__code__, lambda: models[0](x)),
    ):
        at, tracer = 1, _NthLine(code, 0)
        while tracer.left <= 0:  # else the function has fewer lines
            tracer = _NthLine(code, at)
            with contextlib.suppress(KeyboardInterrupt):
                sys.settrace(tracer)
                try:
                    use()
                finally:
                    sys.settrace(None)
            try:
                if (values := (step(0), step(1)))[0] != values[1]:
                    found.append(f"{name}, line {at}: losses {values}")
            except Exception as error:
                found.append(f"{name}, line {at}: {error!r}"[:150])
                break
            at += 1
        if at < 8 and (stage or name != "enter"):  # stage 0 in fp32 on one rank has no passes
            found.append(f"{name}: only {at} lines were seen")
    return found


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (3, "bf16")])
def test_an_interrupt_at_any_line_leaves_the_optimizers_parameters_in_the_model(
    stage: int, precision: str
) -> None:
    assert run_ranks(1, interrupt_at_every_line, stage, precision) == [[]]


def one_rank_alone(stage: int) -> list[float]:
    """Rank 0 is interrupted in two forward passes and goes on, rank 1 notices nothing."""
    import torch.distributed as dist

    import onefold

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


def call_themselves(stage: int) -> list[str]:
    import onefold

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
    return []


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_that_calls_itself_may_raise_and_is_one_pass(stage: int) -> None:
    assert run_ranks(2, call_themselves, stage) == [[], []]


def out_of_memory(stage: int) -> list[str]:
    import onefold
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
    gathered = engine.memory.now().get("gathered", 0)
    for module, name, enter in (
        (start, "whole_masters", onefold.full_params),
        (start, "rewrite_masters", lambda m: onefold.full_params(m, write=True)),
        (importlib.import_module("onefold.unsharded"), "whole_masters", onefold.unsharded),
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
    return []


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_that_runs_out_in_full_params_or_unsharded_leaves_the_model_sharded(
    stage: int,
) -> None:
    assert run_ranks(2, out_of_memory, stage) == [[], []]


def dies_after_an_interrupt() -> bool:
    import onefold

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
    return gone() is None


def test_a_model_that_was_interrupted_is_freed() -> None:
    assert run_ranks(1, dies_after_an_interrupt) == [True]


@pytest.mark.parametrize(
    ("stage", "options"), [(3, {"offload_optimizer": "cpu"}), (2, {"moments": "int8"})]
)
def test_a_step_that_is_interrupted_at_its_end_leaves_groups_whole(
    stage: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import onefold
    import onefold.optim.step_hooks as hooks

    def losses(interrupted: int) -> list[float]:
        torch.manual_seed(0)
        model = onefold.shard(
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
            onefold.Recipe.zero(stage, **options),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        x, out = torch.randn(6, 4), []
        for number in range(6):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            out.append(loss.item())
            with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
                if number == interrupted:
                    show = hooks._Step.show

                    def ctrl_c(step: Any, show: Any = show) -> None:
                        patched.setattr(hooks._Step, "show", show)
                        raise KeyboardInterrupt

                    patched.setattr(hooks._Step, "show", ctrl_c)
                optimizer.step()
            assert len(optimizer.param_groups[0]["params"]) == 4
        return out

    assert losses(2) == losses(-1)


def interrupt_the_step(stage: int, options: dict[str, Any]) -> list[str]:
    import onefold
    import onefold.optim.step_hooks as hooks
    from onefold.runtime import stepper

    torch.manual_seed(0)
    model = onefold.shard(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        onefold.Recipe.zero(stage, **options),
        units=[nn.Linear],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x, found = torch.randn(6, 4), []

    def step(tracer: Any = None) -> None:
        optimizer.zero_grad()
        (model(x).float() - x.sum(1, keepdim=True)).square().mean().backward()
        with contextlib.suppress(KeyboardInterrupt):
            sys.settrace(tracer)
            try:
                optimizer.step()
            finally:
                sys.settrace(None)

    step()
    functions = {f for f in vars(hooks._Step).values() if inspect.isfunction(f)}
    functions |= {hooks._before, hooks._after, stepper.step_parts, inspect.unwrap(stepper.only)}
    functions |= {stepper.raw_step, stepper.note, stepper.undo, stepper._give, stepper._count_apart}
    for function in sorted(functions, key=lambda f: f.__qualname__):
        code = function.__code__
        at, tracer = 1, _NthLine(code, 0)
        while tracer.left <= 0 and code.co_filename != "<string>":
            tracer = _NthLine(code, at)
            try:
                step(tracer)
                before = {k: v.clone() for k, v in onefold.full_state_dict(model).items()}
                step()
                now = onefold.full_state_dict(model)
            except Exception as error:
                return [*found, f"{function.__qualname__}, line {at}: {error!r}"[:150]]
            group = optimizer.param_groups[0]
            if any(torch.equal(now[name], before[name]) for name in now):
                found.append(f"{function.__qualname__}, line {at}: parameters stay as they are")
            if len(group["params"]) != 4 or group["foreach"] is not None or stepper.raw.notes:
                found.append(f"{function.__qualname__}, line {at}: the step is not undone")
            at += 1
    return found


@pytest.mark.parametrize(
    ("stage", "options"), [(3, {"offload_optimizer": "cpu"}), (2, {"moments": "int8"})]
)
def test_a_step_that_is_interrupted_at_any_line_leaves_every_parameter_training(
    stage: int, options: dict[str, Any]
) -> None:
    assert run_ranks(1, interrupt_the_step, stage, options) == [[]]
