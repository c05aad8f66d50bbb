"""Every optimizer whose update is element-wise trains on sharded parameters exactly as in DDP; the
others are recognised and refused before they change a weight. An optimizer is never silently
different.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from onefold.optim.verdict import refuse_unless_elementwise
from ranks import run_ranks
from trials import STAGES, MLPCase, compare_case, fresh, train_reference, train_sharded


class Lion(Optimizer):
    """An optimizer of one's own, element-wise (Chen et al. 2023)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (a, b), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - lr * group["decay"]).sub_(
                    torch.tanh(1e3 * (a * momentum + (1 - a) * p.grad)), alpha=lr
                )
                momentum.lerp_(p.grad, 1 - b)


class Lamb(Optimizer):
    """An optimizer of one's own that scales each layer by a ratio of norms (You et al. 2020): not
    element-wise.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / (p.grad.norm() + 1e-6)
                    p.sub_(p.grad * ratio, alpha=group["lr"])


class RowNormalized(Optimizer):
    """Divides a matrix's gradient by the mean of its row: needs rows."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.abs().mean(-1, keepdim=True) + 1e-6), alpha=group["lr"])


class LayerNormOfMomentum(Optimizer):
    """Element-wise for the first step, and by a norm from the second on."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("before")
                    p.sub_(p.grad if before is None else p.grad * before.norm(), alpha=group["lr"])
                    self.state[p]["before"] = p.grad.clone()


def packaged(package: str, name: str, **options: Any) -> Callable[[Any], Optimizer]:
    """An optimizer of a library that people install; one with modes is put into the one for
    training.
    """

    def make(params: Any) -> Optimizer:
        optimizer: Any = getattr(importlib.import_module(package), name)(params, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer  # type: ignore[no-any-return]

    return make


Make = Callable[[Any], Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD, dampened, maximizing": lambda p: torch.optim.SGD(
        p, lr=0.001, momentum=0.5, dampening=0.3, maximize=True
    ),
    "Adam, AMSGrad": lambda p: torch.optim.Adam(
        p, lr=0.01, amsgrad=True, weight_decay=0.1, eps=1e-4
    ),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4, momentum_decay=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, eps=1e-4),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-4),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Lion of one's own": lambda p: Lion(p, lr=0.01, decay=0.1),
    "Lion of lion-pytorch": packaged("lion_pytorch", "Lion", lr=0.003),
    "AdamW of schedulefree": packaged("schedulefree", "AdamWScheduleFree", lr=0.01, eps=1e-4),
    "SGD of schedulefree": packaged("schedulefree", "SGDScheduleFree", lr=0.1),
}
WHOLE: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.01),
    "LAMB of one's own": Lamb,
    "rows of one's own": RowNormalized,
    "a norm from the second step on": LayerNormOfMomentum,
}
TOGETHER: dict[str, Make] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "Prodigy of prodigyopt": packaged("prodigyopt", "Prodigy", lr=1.0),
}


class With(MLPCase):
    name = ""
    steps = 4

    def optimizer(self, model: nn.Module) -> Optimizer:
        return {**ELEMENTWISE, **WHOLE, **TOGETHER}[self.name](model.parameters())


def compare_optimizer(name: str) -> list[str]:
    return compare_case(type("Named", (With,), {"name": name}))[0]


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_optimizers_train_as_in_ddp_at_every_stage(name: str) -> None:
    problems = [sentence for found in run_ranks(2, compare_optimizer, name) for sentence in found]
    assert not problems, "\n".join(problems)


def refused(stage: int, name: str) -> tuple[str, str, float]:
    """The error of the first two steps, and how far the weights had moved by then."""
    import onefold

    case = MLPCase()
    model = onefold.shard(fresh(case), onefold.Recipe.zero(stage, stall_timeout=10.0))
    before = [p.detach().clone() for p in model.parameters()]
    kind = message = ""
    try:
        optimizer = TOGETHER[name](model.parameters())
        for step in range(2):
            optimizer.zero_grad()

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = case.loss(model, case.batch(dist.get_rank(), step))
                loss.backward()
                return loss

            loss = closure()
            optimizer.step(closure) if name == "LBFGS" else optimizer.step()
            del loss
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    moved = max(
        (a - b.detach()).abs().max().item()
        for a, b in zip(before, model.parameters(), strict=True)
        if a.numel()
    )
    return kind, message, moved


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", TOGETHER)
def test_other_optimizers_are_refused_before_they_change_a_weight(name: str, stage: int) -> None:
    for rank, (kind, message, moved) in enumerate(run_ranks(2, refused, stage, name)):
        told = f"rank {rank}, stage {stage}, {name}: {kind}: {message!r}, weights moved by {moved}"
        assert kind == "ValueError", told
        assert moved == 0.0, told
        assert name.split()[0] in message, told
        if name.startswith("Prodigy"):
            assert (
                "'d_numerator' of its groups" in message and "sums over all elements" in message
            ), told
        assert "stage 0" in message and "elementwise_optimizer" in message, told


def replicated(name: str) -> list[str]:
    """At stage 0 the optimizer has all parameters whole: it trains as in DDP."""
    from trials import differences

    class Whole(MLPCase):
        def optimizer(self, model: nn.Module) -> Optimizer:
            return TOGETHER[name](model.parameters())

    reference = train_reference(Whole())
    return differences(name, reference, train_sharded(Whole(), 0), 1e-4, 1e-5)


@pytest.mark.parametrize("name", [name for name in TOGETHER if name != "LBFGS"])
def test_other_optimizers_train_as_in_ddp_where_parameters_are_whole(name: str) -> None:
    assert run_ranks(2, replicated, name) == [[], []]


def with_tensor_learning_rate(stage: int) -> list[str]:
    """A learning rate that is a tensor, set anew every step, and a closure."""
    from trials import differences

    class Scheduled(MLPCase):
        def optimizer(self, model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), eps=1e-4)

        def step(self, model: nn.Module, optimizer: Optimizer, rank: int, step: int) -> float:
            optimizer.param_groups[0]["lr"].fill_(0.01 / (step + 1))

            def closure() -> Any:
                optimizer.zero_grad()
                loss = self.loss(model, self.batch(rank, step))
                loss.backward()
                return loss

            return optimizer.step(closure).item()

    return differences(
        "closure", train_reference(Scheduled()), train_sharded(Scheduled(), stage), 1e-5, 1e-6
    )


@pytest.mark.parametrize("stage", STAGES)
def test_closures_and_tensor_learning_rates_work(stage: int) -> None:
    assert run_ranks(2, with_tensor_learning_rate, stage) == [[], []]


def optimizer_made_before(stage: int) -> list[str]:
    """An optimizer over the parameters from before shard() is as good as one from after."""
    import onefold
    from trials import differences, train

    class Early(MLPCase):
        def optimizer(self, model: nn.Module) -> Optimizer:
            return self.early

    case = Early()
    inner = fresh(case)
    case.early = torch.optim.AdamW(inner.parameters(), lr=0.01, eps=1e-4)
    model = onefold.shard(inner, onefold.Recipe.zero(stage, stall_timeout=10.0))
    early = train(case, model, inner, lambda: onefold.full_state_dict(model))

    class Late(MLPCase):
        def optimizer(self, model: nn.Module) -> Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)

    return differences(
        "an optimizer from before shard()", train_sharded(Late(), stage), early, 0.0, 0.0
    )


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_made_before_sharding_works(stage: int) -> None:
    assert run_ranks(2, optimizer_made_before, stage) == [[], []]


class Counted(torch.optim.SGD):
    """Counts its instances."""

    #: Whether an update is of the gradient's norm
    looks_around = False

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        COUNTS.append(1)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups if self.looks_around else ():
            for param in group["params"]:
                param.grad /= param.grad.norm()
        return super().step(closure)


COUNTS: list[int] = []


def test_a_second_optimizer_of_a_kind_is_not_tried_again_and_a_changed_class_is() -> None:
    def tried(**arguments: Any) -> int:
        optimizer = Counted([torch.nn.Parameter(torch.ones(4, 4))], **arguments)
        COUNTS.clear()
        refuse_unless_elementwise(optimizer)
        return len(COUNTS)

    first = tried()
    assert first > 0
    assert tried() == 0
    assert tried(lr=0.5) == 0  # each trial has a rate of its own
    assert tried(momentum=0.9) == first
    Counted.looks_around = True
    try:
        with pytest.raises(ValueError, match="Counted cannot step sharded parameters"):
            tried()
    finally:
        Counted.looks_around = False
