"""Training loops of every kind: several passes, errors, several models, freezing, writes in a pass."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.loop import Script
from scripts.registry import EITHER, ROUNDING, habit
from scripts.subjects.kinds import number, x4
from zoo import ResidualBlock, TinyGPT, TinyMLP, features_of, tokens_of


class Loop:
    """Of an MLP, with the mean square of its output as its loss."""

    def build(self) -> nn.Module:
        return TinyMLP()

    def batch(self, seed: int) -> Any:
        return x4(seed)

    def forward(self, s: Script) -> Tensor:
        return number(s.model(s.batch))


def second(s: Script) -> Tensor:
    return number(s.model(s.next_batch(1)))


# -- several passes --------------------------------------------------------------------------------


@habit("two forward passes, one backward pass", expect=ROUNDING, reference="mean", alike=True)
class TwoForwards(Loop):
    def forward(self, s: Script) -> Tensor:
        first, other = s.model(s.batch), s.model(s.batch.flip(0) * 0.5)
        return number(first - other) + number(first)


@habit("the inputs' own gradients", expect=ROUNDING, reference="mean")
class Inputs(Loop):
    def batch(self, seed: int) -> Tensor:
        return x4(seed).requires_grad_()

    def gradients(self, s: Script) -> None:
        s.note("inputs", s.batch.grad)


@habit("a forward pass whose loss is thrown away", expect=ROUNDING)
class ThrownAway(Loop):
    def zero(self, s: Script) -> None:
        number(s.model(x4(70 + s.step)))
        s.optimizer.zero_grad()


@habit("two micro-batches inside one autocast", expect=ROUNDING)
class InOneAutocast(Loop):
    def build(self) -> nn.Module:
        return TinyGPT(checkpointing="non-reentrant")

    def batch(self, seed: int) -> Tensor:
        return tokens_of(seed)

    def forward(self, s: Script) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            s.model(s.next_batch(1)).backward()
            return s.model(s.batch)

    def backward(self, s: Script, loss: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()


@habit("a method that is not forward, inside `onefold.full_params`", expect=ROUNDING)
class Generates(InOneAutocast):
    def build(self) -> nn.Module:
        return TinyGPT(dropout=0.3)

    def forward(self, s: Script) -> Tensor:
        return s.model(s.batch)

    def log(self, s: Script) -> None:
        s.model.eval()
        tokens = s.batch[:1, :3]
        with torch.no_grad(), s.gathered():
            for _ in range(4):
                tokens = torch.cat([tokens, s.module.logits(tokens)[:, -1:].argmax(-1)], 1)
        s.note("text", tokens)
        s.model.train()


@habit("a pass with the adapters off between forward and backward (DPO)", expect=ROUNDING)
class AdaptersOff(Loop):
    def build(self) -> nn.Module:
        model = TinyMLP()
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    def backward(self, s: Script, loss: Tensor) -> None:
        trained = [p for p in s.parameters() if p.requires_grad]
        for p in trained:
            p.requires_grad_(False)
        with torch.no_grad():
            s.module(s.batch)
        for p in trained:
            p.requires_grad_(True)
        loss.backward()


# -- errors ----------------------------------------------------------------------------------------


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("a backward pass that fails")


class Failing(TinyMLP):
    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](torch.tanh(self.enter(x)))
        if self.fails == "forward":
            raise ArithmeticError("a batch that the model does not like")
        x = FailsInBackward.apply(x) if self.fails else x
        return self.leave(self.blocks[2](self.blocks[1](x)))


@habit("a forward pass fails half way, is caught, and training goes on", expect=ROUNDING, steps=4)
class ErrorInForward(Loop):
    where = "forward"

    def build(self) -> nn.Module:
        return Failing()

    def forward(self, s: Script) -> Tensor:
        if s.step in (1, 2):
            s.module.fails = self.where
            with contextlib.suppress(ArithmeticError):
                number(s.model(s.batch)).backward()
            s.module.fails = ""
            s.optimizer.zero_grad()
        return super().forward(s)


@habit("a backward pass fails half way, and `zero_grad` drops its gradients", expect=ROUNDING, steps=4, reference="mean")  # fmt: skip
class ErrorInBackward(ErrorInForward):
    where = "backward"


# -- several models --------------------------------------------------------------------------------


@habit("two models that learn from each other (GAN)", expect=ROUNDING, reference="mean")
class Adversaries:
    def build(self) -> nn.Module:
        return TinyMLP(4, 8, 2, 7)

    def script(self, s: Script) -> None:
        torch.manual_seed(1)
        judge, make = s.wrap(TinyMLP(7, 6, 3, 1)), s.model
        other = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
        for step in range(3):
            seed = 10 * step + s.rank
            real, noise = x4(seed), features_of(seed + 500, 4, 4)
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(make(noise).detach())).mean()
            s.update(loss, other, judge)
            s.note("judge", loss)
            loss = F.softplus(-judge(make(noise))).mean()
            s.update(loss)
            other.zero_grad()
            s.note("make", loss)


class TwoNetworks(nn.Module):
    """Their heads are too small for units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = TinyMLP(7, 10, 2, 7), TinyMLP(7, 10, 2, 1)

    def forward(self, z: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.make(z)
        return fake, self.judge(real), self.judge(fake.detach())


@habit("a GAN in one model", expect=ROUNDING, reference="mean")
class OfParts:
    """A second optimizer over other parameters steps between forward and backward."""

    def build(self) -> nn.Module:
        return TwoNetworks()

    def script(self, s: Script) -> None:
        make, judge = s.module.make, s.module.judge
        of_make, of_judge = (torch.optim.SGD(list(m.parameters()), lr=0.1) for m in (make, judge))
        for step in range(3):
            z, real = x4(100 + 10 * step + s.rank), x4(200 + 10 * step + s.rank)
            fake, on_real, on_fake = s.model(z, real)
            of_judge.zero_grad()
            loss = (on_real - 1).square().mean() + on_fake.square().mean()
            s.update(loss, of_judge)
            judged = (judge(fake) - 1).square().mean()
            of_make.zero_grad()
            s.update(judged, of_make)
            s.note("losses", [loss.item(), judged.item()])


# -- frozen and thawed -----------------------------------------------------------------------------


@habit("blocks frozen and thawed between steps", expect=ROUNDING, steps=5, reference="mean")
class Thawed(InOneAutocast):
    def build(self) -> nn.Module:
        model = TinyGPT()
        model.blocks[1].requires_grad_(False)
        return model

    forward, backward = Generates.forward, lambda self, s, loss: loss.backward()  # type: ignore[assignment]

    def log(self, s: Script) -> None:
        if s.step == 0:
            s.module.blocks[0].requires_grad_(False)
            s.module.blocks[1].requires_grad_(True)
            for parameter in s.module.parameters():
                parameter.grad = None
        if s.step == 2:
            s.module.blocks[0].requires_grad_(True)


class Headless(TinyMLP):
    short = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return x if self.short else self.leave(x)


class Between(Loop):
    """Three micro-batches a step: what is frozen in each, and (rank, micro-batch) without the head.
    What is frozen keeps the gradient that it has, and is stepped.
    """

    frozen: tuple[tuple[str, ...], ...] = ((), (), ())
    short: tuple[tuple[int, int], ...] = ((1, 0),)

    def build(self) -> nn.Module:
        return Headless()

    def forward(self, s: Script) -> Tensor:
        for micro, frozen in enumerate(self.frozen):
            for name, param in s.named():
                param.requires_grad_(not name.startswith(frozen))
            s.module.short = (s.rank, micro) in self.short
            with s.no_sync() if micro < 2 else contextlib.nullcontext():
                loss = number(s.model(s.next_batch(micro)))
                if micro < 2:
                    loss.backward()
        return loss


BETWEEN: dict[str, Any] = {
    "left out by one rank, then by all": {"short": ((1, 0), (0, 2), (1, 2))},
    "thawed one after the other": {"frozen": (("blocks.0.down", "blocks.2.up.weight", "leave"), ("blocks.1.up",), ())},
}  # fmt: skip
for _title, _given in BETWEEN.items():
    for _options in ({}, {"offload_optimizer": "cpu"}):
        habit(f"between micro-batches {_title}, {_options}", expect=ROUNDING, reference="mean", options=_options,
              units=(ResidualBlock, "leave"), slow=bool(_options))(
            type("Between", (Between,), {**_given, "__module__": __name__})
        )  # fmt: skip


# -- weights written in a forward pass -------------------------------------------------------------


def _clamped(weight: Any) -> None:
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)


def _assigned(weight: Any) -> None:
    weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.4)


WRITES: dict[str, Any] = {
    "`w.clamp_()` under no_grad": _clamped,
    "`w.data.clamp_()`": lambda weight: weight.data.clamp_(-0.2, 0.2),
    "`w.data = torch.renorm(w.data)`": _assigned,
}


class Constrained(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(12, 40), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.layer.weight)
        return torch.relu(self.layer(x))


def writing(title: str, build: Any, **more: Any) -> None:
    kind = type("Writes", (Loop,), {"build": lambda self: build(), "__module__": __name__})
    given = {"expect": ROUNDING, "ddp": {"find_unused_parameters": False}, "steps": 4}
    habit(f"in forward: {title}", **{**given, **more})(kind)


for _title, _write in WRITES.items():

    def _build(write: Any = _write) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 12), Constrained(write), nn.Linear(40, 3))

    writing(_title, _build)
    # Masters that cannot follow a write: a refusal
    writing(f"{_title}, all on the host", _build, options={"offload_optimizer": "cpu", "offload_param": "cpu"},
            one=EITHER, zero=EITHER, sharded=EITHER)  # fmt: skip


class Momentum(nn.Module):
    """MoCo: the outer module writes to weights of units of their own, behind their forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = (
            nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3)) for _ in range(2)
        )
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.online(x) - self.slow(x)
        for ours, theirs in zip(self.slow.parameters(), self.online.parameters(), strict=True):
            ours.data = ours.data * 0.9 + theirs.data * 0.1
        return out


writing("`slow.data = ...` of other units, behind their pass", Momentum, units=("online", "slow.0", "slow.2"))  # fmt: skip
