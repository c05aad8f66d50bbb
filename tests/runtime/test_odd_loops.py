"""Training loops of every kind: evaluation and generation in between, errors, several models,
accumulation, schedules.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from trials import (
    STAGES,
    Case,
    Curve,
    GPTCase,
    MLPCase,
    assert_trains_as_ddp,
    differences,
    fresh,
    train,
    train_sharded,
)
from zoo import Block, TinyGPT, TinyMLP, features_of, tokens_of


class EvaluationAndGeneration(GPTCase):
    """Between steps: a loss without gradients in eval mode, and greedy generation, whose numbers
    are DDP's.
    """

    units = (Block, "tokens", "head")

    def build(self) -> nn.Module:
        return TinyGPT(dropout=0.3)

    def after_step(self, model: nn.Module, inner: nn.Module, step: int, curve: Curve) -> None:
        model.eval()
        with torch.no_grad():
            curve.losses.append(model(self.batch(9, step)).item())
        curve.extras[f"text after step {step}"] = self.generate(inner, step)
        model.train()

    def generate(self, inner: nn.Module, step: int) -> list[int]:
        tokens = tokens_of(step + dist.get_rank(), batch=1, length=3)
        with torch.no_grad(), self.reading(inner):
            for _ in range(4):
                tokens = torch.cat([tokens, inner.logits(tokens)[:, -1:].argmax(-1)], 1)  # type: ignore[operator]
        return tokens.flatten().tolist()

    def reading(self, inner: nn.Module) -> Any:
        return whole_if_sharded(inner)


def whole_if_sharded(inner: nn.Module) -> Any:
    """full_params for a sharded model, nothing for the reference: `logits` is a method that no hook
    of the root sees.
    """
    import onefold

    try:
        onefold.engine_of(inner)
    except (ValueError, KeyError, TypeError, AttributeError, LookupError):
        return contextlib.nullcontext()
    return onefold.full_params(inner)


class GenerationThroughForward(MLPCase):
    """no_grad forwards of the whole model between steps, without any context of Onefold; ranks do
    as many, however.
    """

    def after_step(self, model: nn.Module, inner: nn.Module, step: int, curve: Curve) -> None:
        with torch.inference_mode(step % 2 == 1), torch.no_grad():
            for _ in range(3):
                curve.losses.append(model(self.batch(3, step)).sum().item())


class Oops(Exception):
    pass


class FailingBlock(TinyMLP):
    fail = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](torch.tanh(self.enter(x)))
        if self.fail:
            raise Oops("a batch that the model does not like")
        return self.leave(self.blocks[2](self.blocks[1](x)))


class ErrorInTheMiddleOfForward(MLPCase):
    """A forward fails half way on every rank, is caught, and training goes on as if nothing had
    been.
    """

    steps = 4

    def build(self) -> nn.Module:
        return FailingBlock()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        inner = next(m for m in model.modules() if isinstance(m, FailingBlock))
        if step in (1, 2):
            inner.fail = True
            with contextlib.suppress(Oops):
                model(self.batch(rank, step))
            inner.fail = False
        return super().step(model, optimizer, rank, step)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise Oops("a backward that fails")


class FailingBackward(FailingBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](torch.tanh(self.enter(x)))
        if self.fail:
            x = FailsInBackward.apply(x)
        return self.leave(self.blocks[2](self.blocks[1](x)))


class ErrorInTheMiddleOfBackward(MLPCase):
    """A backward fails half way; the gradients so far are dropped by zero_grad, and training goes
    on.
    """

    reference = "mean"  # DDP cannot go on after such an error

    def build(self) -> nn.Module:
        return FailingBackward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        inner = next(m for m in model.modules() if isinstance(m, FailingBackward))
        if step == 1:
            inner.fail = True
            with contextlib.suppress(Oops):
                model(self.batch(rank, step)).square().mean().backward()
            inner.fail = False
        return super().step(model, optimizer, rank, step)


class ForwardWithoutBackward(MLPCase):
    """A forward in training mode whose loss is thrown away (a batch skipped for a NaN, a
    warm-up).
    """

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        thrown_away = model(self.batch(rank, step + 70)).sum()
        del thrown_away
        return super().step(model, optimizer, rank, step)


class GroupsAndSchedule(GPTCase):
    """Two parameter groups by name and a schedule with warm-up: torch's own, unchanged."""

    steps = 5

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        decay = [
            p
            for name, p in model.named_parameters()
            if not name.endswith("bias") and "norm" not in name
        ]
        rest = [
            p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name
        ]
        groups = [
            {"params": decay, "weight_decay": 0.3},
            {"params": rest, "weight_decay": 0.0, "lr": 0.002},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.02, 0.004], total_steps=6
        )
        return optimizer

    def after_step(self, model: nn.Module, inner: nn.Module, step: int, curve: Curve) -> None:
        self.schedule.step()
        curve.extras[f"lr after {step}"] = self.schedule.get_last_lr()


CASES = [
    EvaluationAndGeneration, GenerationThroughForward, ErrorInTheMiddleOfForward, ErrorInTheMiddleOfBackward,
    ForwardWithoutBackward, GroupsAndSchedule,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_odd_loops_train_as_in_ddp(case: type[Case]) -> None:
    assert_trains_as_ddp(case)


def with_and_without_a_failed_forward(stage: int) -> list[str]:
    """Train two steps, fail in forward, train again: losses with and without the failed forward."""
    with_error, without = ErrorInTheMiddleOfForward(), ErrorInTheMiddleOfForward()
    without.step = super(ErrorInTheMiddleOfForward, without).step  # type: ignore[method-assign]
    a, b = train_sharded(with_error, stage), train_sharded(without, stage)
    return differences("with a failed forward", b, a, 0.0, 0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_forward_leaves_no_trace_in_the_numbers(stage: int) -> None:
    assert run_ranks(2, with_and_without_a_failed_forward, stage) == [[], []]


def adversaries(stages: tuple[int, int] | None) -> Curve:
    """Both trained in turns, by Onefold at two stages or by hand-averaged gradients."""
    import onefold

    torch.manual_seed(0)
    pair = [TinyMLP(4, 8, 2, 7), TinyMLP(7, 6, 3, 1)]
    if stages is not None:
        pair = [
            onefold.shard(m, onefold.Recipe.zero(s, stall_timeout=10.0))
            for m, s in zip(pair, stages, strict=True)
        ]
    make, judge = pair
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in pair]

    def update(which: int, loss: Tensor) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if stages is None:
            for p in pair[which].parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
        optimizers[which].step()
        return loss.item()

    curve = Curve()
    for step in range(3):
        seed = 10 * step + dist.get_rank()
        real, noise = features_of(seed, 4, 7), features_of(seed + 500, 4, 4)
        curve.losses.append(
            update(
                1, F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean()
            )
        )
        curve.losses.append(update(0, F.softplus(-judge(make(noise))).mean()))
    for name, model in zip(("make", "judge"), pair, strict=True):
        state = model.state_dict() if stages is None else onefold.full_state_dict(model)
        if dist.get_rank() == 0:
            curve.weights.update(
                {f"{name}.{key}": value.detach().clone() for key, value in state.items()}
            )
    return curve


def compare_adversaries() -> list[str]:
    reference = adversaries(None)
    pairs = [(0, 0), (1, 2), (2, 1), (3, 3), (3, 0), (0, 3)]
    return [
        d
        for pair in pairs
        for d in differences(f"stages {pair}", reference, adversaries(pair), 1e-5, 1e-6)
    ]


def test_two_sharded_models_train_in_one_loop() -> None:
    assert run_ranks(2, compare_adversaries) == [[], []]


def one_inside_a_frozen_teacher(stage: int) -> list[str]:
    """Distillation: a sharded student learns from a sharded teacher that never trains."""
    import onefold

    def curve(sharded: bool) -> Curve:
        torch.manual_seed(0)
        teacher, student = TinyMLP().requires_grad_(False).eval(), TinyMLP()
        if sharded:
            for model in (teacher, student):
                onefold.shard(model, onefold.Recipe.zero(stage, stall_timeout=10.0))

        class Distill(MLPCase):
            def loss(self, model: nn.Module, batch: Any) -> Tensor:
                with torch.no_grad():
                    wanted = teacher(batch)
                return F.mse_loss(model(batch), wanted)

        case = Distill()
        if sharded:
            return train(case, student, student, lambda: onefold.full_state_dict(student))
        model = nn.parallel.DistributedDataParallel(student)
        return train(case, model, student, student.state_dict)

    return differences(f"stage {stage}", curve(False), curve(True), 1e-5, 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_student_learns_from_a_sharded_teacher(stage: int) -> None:
    assert run_ranks(2, one_inside_a_frozen_teacher, stage) == [[], []]


def steps_one_after_another(stage: int) -> list[float]:
    """Loss of 2 + 2 steps with everything deleted and sharded anew from the full state dict in
    between.
    """
    import onefold

    case = GPTCase()
    losses = []
    state: dict[str, Tensor] = {}
    for part in range(2):
        model = onefold.shard(fresh(case), onefold.Recipe.zero(stage, stall_timeout=10.0))
        if part:
            onefold.load_full_state_dict(model, state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses += [case.step(model, optimizer, dist.get_rank(), 2 * part + i) for i in range(2)]
        state = onefold.full_state_dict(model)
        del model, optimizer
    return losses


def steps_in_one_go(stage: int) -> list[float]:
    import onefold

    case = GPTCase()
    model = onefold.shard(fresh(case), onefold.Recipe.zero(stage, stall_timeout=10.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [case.step(model, optimizer, dist.get_rank(), step) for step in range(4)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_sharded_anew_from_its_state_dict_continues_bit_by_bit(stage: int) -> None:
    assert run_ranks(2, steps_one_after_another, stage) == run_ranks(2, steps_in_one_go, stage)
