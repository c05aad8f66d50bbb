"""Train one case by DDP and at every stage of Onefold, on the ranks of this process group, and say
where they differ.

A case is a class: how to build the model, what a rank's batch is, what the loss is, how a step
goes. Its methods are the ordinary loop of PyTorch and know nothing of who wraps the model, so that
DDP and every stage run the very same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from zoo import TinyGPT, TinyMLP, features_of, tokens_of

STAGES = (0, 1, 2, 3)
STALL_TIMEOUT = 30.0  # seconds: long for a busy machine, short for a test that fails


@dataclass
class Curve:
    """What a training run leaves: this rank's losses, and (on rank 0) the final weights and
    buffers, whole.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


def _nothing(model: nn.Module) -> None:
    pass


class Case:
    """One model and its training loop. Override what the case is about."""

    steps = 3
    units: Sequence[str | type] | None = None  # as in onefold.shard
    options: Mapping[str, Any] = {}  # further arguments of Recipe.zero
    # Or "mean": plain backward passes, then the mean of gradients over ranks, where DDP itself
    # cannot run
    reference = "ddp"
    ddp_options: Mapping[str, Any] = {"find_unused_parameters": True}
    rtol, atol = 1e-5, 1e-6  # to the reference; between stages the tolerance is zero

    def build(self) -> nn.Module:
        raise NotImplementedError

    def batch(self, rank: int, step: int) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Momentum without normalization: a parameter whose true gradient is zero stays within
        # rounding of it.
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def clip(self, model: nn.Module) -> None:
        """Between backward and step; `clip_norm` fits both worlds."""

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
    ) -> float:
        optimizer.zero_grad()
        loss = self.loss(model, self.batch(rank, step))
        loss.backward()
        self.before_update(model)
        self.clip(model)
        optimizer.step()
        return loss.item()

    def after_step(self, model: nn.Module, inner: nn.Module, step: int, curve: Curve) -> None:
        """Between steps. `inner` is the model without its DDP wrapper."""

    def __init__(self) -> None:
        self.before_update: Callable[[nn.Module], None] = _nothing


class GPTCase(Case):
    """A GPT of three blocks on random tokens."""

    def build(self) -> nn.Module:
        return TinyGPT()

    def batch(self, rank: int, step: int) -> Any:
        return tokens_of(10 * step + rank)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch)


class MLPCase(Case):
    """Three residual blocks of linear layers on random features, batch 4."""

    def build(self) -> nn.Module:
        return TinyMLP()

    def batch(self, rank: int, step: int) -> Any:
        return features_of(10 * step + rank, 4, 7)


class MeanOverRanks(nn.Module):
    """The reference where DDP cannot run: forward as it is, gradients averaged by hand before the
    update.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def average(self) -> None:
        """A gradient that some rank has is the mean over all of them, counting zeros; one that no
        rank has stays None.
        """
        for parameter in self.module.parameters():
            present = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(present)
            if present.item() == 0:
                continue
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            parameter.grad = grad / dist.get_world_size()


def _average(model: nn.Module) -> None:
    assert isinstance(model, MeanOverRanks)
    model.average()


def train(
    case: Case, model: nn.Module, inner: nn.Module, whole: Callable[[], dict[str, Tensor]]
) -> Curve:
    """Run the case's steps on `model` and read the weights through `whole` at the end."""
    curve = Curve()
    optimizer = case.optimizer(model)
    torch.manual_seed(100 + dist.get_rank())  # dropout draws the same numbers in every run
    for step in range(case.steps):
        curve.losses.append(case.step(model, optimizer, dist.get_rank(), step))
        case.after_step(model, inner, step, curve)
    weights = whole()
    if dist.get_rank() == 0:
        curve.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    return curve


def fresh(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def train_reference(case: Case) -> Curve:
    inner = fresh(case)
    if case.reference == "mean":
        model: nn.Module = MeanOverRanks(inner)
        case.before_update = _average
    else:
        model = DistributedDataParallel(inner, **case.ddp_options)
    return train(case, model, inner, inner.state_dict)


def train_sharded(case: Case, stage: int, process_group: Any = None, **options: Any) -> Curve:
    """`process_group`: the ranks to shard over, as `onefold.shard` has them as `group`. `options`:
    of Recipe.zero.
    """
    import onefold

    inner = fresh(case)
    recipe = onefold.Recipe.zero(
        stage, **{"stall_timeout": STALL_TIMEOUT, **case.options, **options}
    )
    model = onefold.shard(inner, recipe, units=case.units, group=process_group)
    return train(case, model, inner, lambda: onefold.full_state_dict(model))


def differences(name: str, expected: Curve, actual: Curve, rtol: float, atol: float) -> list[str]:
    """One sentence for each way in which `actual` differs from `expected`; rtol = atol = 0 asks for
    equal bits.
    """
    found = []
    for step, (a, b) in enumerate(zip(expected.losses, actual.losses, strict=True)):
        if not (a == b or abs(a - b) <= atol + rtol * abs(a)):
            found.append(f"{name}: loss of step {step} is {b!r}, expected {a!r}")
    if missing := sorted(set(expected.weights) ^ set(actual.weights)):
        found.append(f"{name}: names in one state dict only: {missing}")
    for key in sorted(set(expected.weights) & set(actual.weights)):
        a, b = expected.weights[key], actual.weights[key]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(
                f"{name}: {key} is {tuple(b.shape)} {b.dtype}, expected {tuple(a.shape)} {a.dtype}"
            )
            continue
        far = (
            (a != b)
            if rtol == atol == 0.0
            else ~torch.isclose(b.double(), a.double(), rtol=rtol, atol=atol)
        )
        if far.any():
            gap = (a.double() - b.double()).abs().max().item()
            found.append(
                f"{name}: {key} differs in {int(far.sum())} of {a.numel()} elements, by up to"
                f" {gap:.3e}"
            )
    return found


def compare_case(case_class: type[Case], stages: Iterable[int] = STAGES) -> tuple[list[str], Curve]:
    """On one rank: train by the reference and at each stage; return the differences and the
    reference's curve.
    """
    reference = train_reference(case_class())
    found: list[str] = []
    first: tuple[int, Curve] | None = None
    for stage in stages:
        case = case_class()
        curve = train_sharded(case, stage)
        found += differences(
            f"stage {stage} against {case.reference}", reference, curve, case.rtol, case.atol
        )
        if first is None:
            first = (stage, curve)
        else:
            found += differences(
                f"stage {stage} against stage {first[0]}, bit by bit", first[1], curve, 0.0, 0.0
            )
        for key in reference.extras:
            if curve.extras.get(key) != reference.extras[key]:
                found.append(
                    f"stage {stage}: {key} is {curve.extras.get(key)!r}, expected"
                    f" {reference.extras[key]!r}"
                )
    return found, reference


def assert_trains_as_ddp(
    case_class: type[Case],
    world_size: int = 2,
    stages: Iterable[int] = STAGES,
    timeout: float = 120.0,
) -> None:
    """The case trains at every stage as by DDP: losses of every rank, final weights, and bit-equal
    between stages.
    """
    results = run_ranks(world_size, compare_case, case_class, tuple(stages), timeout=timeout)
    problems = [
        f"rank {rank}: {sentence}" for rank, (found, _) in enumerate(results) for sentence in found
    ]
    assert not problems, f"{len(problems)} differences:\n" + "\n".join(problems)
    losses = [loss for _, curve in results for loss in curve.losses]
    assert all(loss == loss for loss in losses), f"the reference itself lost its numbers: {losses}"
