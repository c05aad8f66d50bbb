"""What tests of the served name `deepspeed` share: the name, an engine of a small model, a plain
model that is trained beside it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold.deepspeed
from reference import built
from zoo import TinyMLP, features_of

T = TypeVar("T")
Make = Callable[[], nn.Module]
STAGES, RATE = (0, 1, 2, 3), 0.1
HOST = {"offload_optimizer": {"device": "cpu"}}


def served() -> Any:
    """The module `deepspeed`, as a script under `python -m onefold.deepspeed` imports it. Call it on
    a rank only: the name stays served in the process.
    """
    onefold.deepspeed.serve(say=False)
    import deepspeed  # type: ignore[import-not-found]

    return deepspeed


def some(rows: Iterable[T], every: bool, at: int = 0) -> list[T]:
    """All of them with `--all`; every second one otherwise, from the first or the second on."""
    return list(rows) if every else list(rows)[at % 2 :: 2]


def json_of(stage: int, zero: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        **more,
    }


def adam(**params: Any) -> dict[str, Any]:
    """The section of an optimizer."""
    return {"type": "AdamW", "params": {"lr": 0.01, **params}}


def made(stage: int, model: nn.Module | None = None, zero: Any = None, **more: Any) -> Any:
    """An engine by the served name; of a `TinyMLP` if no model is given."""
    model = built(TinyMLP) if model is None else model
    return served().initialize(model=model, config=json_of(stage, zero, **more))[0]


def batch(index: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return features_of(100 * rank + index, 4, 7)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def train(engine: Any, micro_batches: range, dtype: torch.dtype = torch.float32) -> list[float]:
    """The losses of these micro-batches."""
    losses = []
    for index in micro_batches:
        loss = loss_of(engine(batch(index).to(dtype)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine: Any) -> list[Tensor]:
    """Whole master weights of the parameters that are trained."""
    found = [served().utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return [whole.clone() for whole in found if whole is not None]


def whole_gradients(engine: Any) -> list[Tensor]:
    """In the order of the parameters; zeros where there is none."""
    found = []
    for p in engine.module.parameters():
        grad = served().utils.safe_get_full_grad(p)
        found.append(torch.zeros(p.shape) if grad is None else grad.clone())
    return found


def apart(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    largest = max(float(t.abs().max()) for t in theirs)
    assert largest > 0
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True)) / largest


class Plain:
    """A model beside the engine's, trained by SGD on the mean of all ranks' gradients."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = built(TinyMLP) if model is None else model

    def own_gradients(self) -> list[Tensor]:
        wholes = [(p, p.grad) for p in self.model.parameters()]
        return [torch.zeros_like(p) if grad is None else grad.clone() for p, grad in wholes]

    def gradients(self) -> list[Tensor]:
        own = self.own_gradients()
        flat = torch.cat([grad.flatten() for grad in own])
        dist.all_reduce(flat)
        parts = (flat / dist.get_world_size()).split([grad.numel() for grad in own])
        return [part.view(grad.shape) for part, grad in zip(parts, own, strict=True)]

    def step(self, clip: float = 0.0) -> float:
        """Returns the norm of the gradients before it is clipped."""
        grads = self.gradients()
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        factor = min(1.0, clip / norm) if clip else 1.0
        with torch.no_grad():
            for p, grad in zip(self.model.parameters(), grads, strict=True):
                p -= RATE * factor * grad
        self.model.zero_grad()
        return norm

    def train(self, count: int) -> None:
        for index in range(count):
            loss_of(self.model(batch(index))).backward()
            self.step()

    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters() if p.requires_grad]


@contextlib.contextmanager
def warnings_of() -> Iterator[list[str]]:
    """What is logged inside, at WARNING or above."""
    kept: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield kept
    finally:
        logging.getLogger().removeHandler(handler)
