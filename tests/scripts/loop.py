"""The ordinary training loop around habits: the same code under DDP, on one process, and at every
stage.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.registry import REPLACES, Habit
from zoo import Block

VOCABULARY, WIDTH, LENGTH = 17, 10, 6


class Net(nn.Module):
    """tokens (batch, length) -> logits (batch, length, vocabulary): two transformer blocks of a few
    hundred parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 2) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sample(seed: int) -> Tensor:
    """Tokens (2, LENGTH + 1)."""
    return torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


@dataclass
class Result:
    """What a run leaves on a rank: its losses, what habits noted, buffers; whole weights on rank
    0.
    """

    losses: list[float] = field(default_factory=list)
    notes: dict[str, list[Any]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class World:
    """Who wraps the model, and how its whole weights are read: DDP, nobody, or Onefold."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def whole(self, model: nn.Module, module: nn.Module) -> dict[str, Tensor]:
        """The whole state dict, on rank 0 at least."""
        return module.state_dict()

    def load(
        self, model: nn.Module, module: nn.Module, state: dict[str, Tensor], strict: bool
    ) -> None:
        module.load_state_dict(state, strict=strict)

    def gathered(self, model: nn.Module, write: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def unsharded(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Unshard the model, and shard it again at the end."""
        return contextlib.nullcontext()

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()

    def reduce(self, model: nn.Module) -> None:
        """After the last backward pass of a step: gradients are the mean over ranks."""


class Script:
    """What a training script has at hand.

    Attributes:
        model: what is called: DDP's wrapper, or the sharded model. module: the user's own
        (`model.module` of DDP). optimizer, optimizers, scheduler, step, rank, batch, loss: as in
        any loop.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.step = world, rank, 0
        self.result = Result()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.optimizer: Any = None
        self.model: Any = None
        self.module: Any = None
        self.batch: Any = None
        self.loss: Any = None
        self.batch_of: Callable[[int], Any] = sample

    def note(self, key: str, value: Any) -> None:
        """Remember a number, a shape, a text, or lists of them: the same habit notes the same under
        every wrapper.
        """
        self.result.notes.setdefault(key, []).append(plain(value))

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def next_batch(self, offset: int = 0) -> Any:
        return self.batch_of(
            1000 * (offset + 1) + 10 * self.step + (0 if self.rank is None else self.rank)
        )

    def cross_entropy(self, batch: Tensor | None = None) -> Tensor:
        tokens = self.batch if batch is None else batch
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def whole(self) -> dict[str, Tensor]:
        return self.world.whole(self.model, self.module)

    def load_whole(self, state: dict[str, Tensor], strict: bool = True) -> None:
        self.world.load(self.model, self.module, state, strict)

    def gathered(self, write: bool = False) -> contextlib.AbstractContextManager[Any]:
        """`onefold.full_params(model, write)`: a script that knows Onefold."""
        return self.world.gathered(self.model, write)

    def unsharded(self) -> contextlib.AbstractContextManager[Any]:
        """`onefold.unshard(model)`, and `shard` at the end: a script that knows Onefold."""
        return self.world.unsharded(self.model)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.world.no_sync(self.model)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Another model, as this one is wrapped. `update(..., model=)` trains it."""
        return self.world.wrap(module)

    def update(self, loss: Tensor, optimizer: Any = None, model: Any = None) -> None:
        """What a loop does with a loss."""
        loss.backward()
        self.world.reduce(self.model if model is None else model)
        optimizer = optimizer or self.optimizer
        optimizer.step()
        optimizer.zero_grad()


def plain(value: Any) -> Any:
    """`value` as plain data; a tensor as its numbers, for which it must not be part of something
    larger.
    """
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value.item()
        return plain(value.tolist())
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    assert value is None or isinstance(value, (bool, int, float, complex, str)), (
        f"cannot note {type(value)}"
    )
    return value


def run(habits: Sequence[Habit], world: World, rank: int, same_batch: bool) -> Result:
    """Train by the loop with these habits in it."""
    live = [h.make() for h in habits]

    def at(place: str) -> list[Any]:
        found = [getattr(thing, place) for thing in live if hasattr(thing, place)]
        assert place not in REPLACES or len(found) < 2, f"two habits replace {place}"
        return found

    def one(place: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return found[0] if (found := at(place)) else default

    s = Script(world, 0 if same_batch else rank)
    torch.manual_seed(0)
    s.batch_of = one("batch", sample)
    s.module = s.model = one("build", Net)()
    for before in at("before"):
        before(s)
    s.optimizers = _listed(one("optimizer_before", lambda _: [])(s))
    s.model = world.wrap(s.module)
    s.rank = rank if not same_batch else 0
    torch.manual_seed(100)
    for after in at("after"):
        after(s)
    if not s.optimizers:
        s.optimizers = _listed(one("optimizer", default_optimizer)(s))
    s.optimizer = s.optimizers[0] if s.optimizers else None
    steps = max(h.steps for h in habits)
    scripts = at("script")
    for script in scripts:
        script(s)
    for s.step in range(0 if scripts else steps):
        s.batch = s.next_batch()
        one("zero", _zero)(s)
        loss = one("forward", Script.cross_entropy)(s)
        for term in at("loss"):
            loss = term(s, loss)
        s.loss = loss
        one("backward", lambda s, loss: loss.backward())(s, loss)
        world.reduce(s.model)
        for hook in at("gradients"):
            hook(s)
        one("step", _step)(s)
        s.result.losses.append(float(loss.detach()))
        for hook in (*at("weights"), *at("log")):
            hook(s)
        s.loss = loss = None
    for end in at("end"):
        end(s)
    whole = world.whole(s.model, s.module)
    s.result.weights = {k: v.detach().clone() for k, v in whole.items()} if rank == 0 else {}
    s.result.buffers = {k: v.detach().clone() for k, v in s.module.named_buffers()}
    return s.result


def default_optimizer(s: Script) -> torch.optim.Optimizer:
    # Momentum without normalization: a parameter whose true gradient is zero stays within rounding
    # of it.
    return torch.optim.SGD(s.model.parameters(), lr=0.1, momentum=0.9)


def _zero(s: Script) -> None:
    for optimizer in s.optimizers:
        optimizer.zero_grad()


def _step(s: Script) -> None:
    for optimizer in s.optimizers:
        optimizer.step()


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def differences(expected: Result, actual: Result, rtol: float, atol: float) -> list[str]:
    """One sentence for each thing in which `actual` differs; rtol = atol = 0 asks for equal
    bits.
    """
    found = _compare("loss", expected.losses, actual.losses, rtol, atol)
    for kind in ("notes", "weights", "buffers"):
        a, b = getattr(expected, kind), getattr(actual, kind)
        if set(a) != set(b):
            found.append(f"{kind} in one of both only: {sorted(set(a) ^ set(b))[:4]}")
        for key in sorted(set(a) & set(b)):
            found += _compare(f"{kind[:-1]} {key!r}", a[key], b[key], rtol, atol)
    return found


def _compare(what: str, a: Any, b: Any, rtol: float, atol: float) -> list[str]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (
            what.startswith("weight")
            and a.dtype in (torch.bfloat16, torch.float16)
            and b.dtype == torch.float32
        ):
            b = b.to(a.dtype)  # its master
        if a.shape != b.shape or a.dtype != b.dtype:
            return [f"{what} is {tuple(b.shape)} {b.dtype}, expected {tuple(a.shape)} {a.dtype}"]
        near = (a == b) | (a.isnan() & b.isnan())
        if rtol or atol:
            wide = torch.complex128 if a.is_complex() else torch.float64
            near = near | torch.isclose(b.to(wide), a.to(wide), rtol=rtol, atol=atol)
        if bool(near.all()):
            return []
        gap = (
            (a.double() - b.double()).abs().max().item()
            if not a.is_complex()
            else (a - b).abs().max().item()
        )
        return [
            f"{what} differs in {int((~near).sum())} of {a.numel()} elements, by up to {gap:.3e}"
        ]
    if type(a) is not type(b):
        return [f"{what} is {b!r}, expected {a!r}"]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{what} has length {len(b)}, expected {len(a)}"]
        return [
            line
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for line in _compare(f"{what}[{i}]", x, y, rtol, atol)
        ][:3]
    if isinstance(a, dict):
        if set(a) != set(b):
            return [f"{what} has {sorted(b)[:4]}, expected {sorted(a)[:4]}"]
        return [line for k in a for line in _compare(f"{what}[{k}]", a[k], b[k], rtol, atol)][:3]
    if isinstance(a, (float, complex)):
        if (
            a == b
            or (a != a and b != b)
            or (isinstance(a, float) and math.isfinite(a) and abs(a - b) <= atol + rtol * abs(a))
        ):
            return []
        if isinstance(a, complex) and abs(a - b) <= atol + rtol * abs(a):
            return []
    return [] if a == b else [f"{what} is {b!r}, expected {a!r}"]
