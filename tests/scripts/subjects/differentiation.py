"""torch.autograd, torch.func and hooks."""

from __future__ import annotations

from typing import Any

import torch

from scripts.loop import Script
from scripts.registry import EITHER, ROUNDING, habit

PLAIN: dict[str, Any] = {"reference": "plain"}


@habit(
    "`torch.autograd.grad(loss, model.parameters())`, then `p.grad = g`",
    "backward",
    three=EITHER,
    **PLAIN,
)
def grad(s: Script, loss: Any) -> None:
    for p, g in zip(s.parameters(), torch.autograd.grad(loss, s.parameters()), strict=True):
        p.grad = g


@habit(
    "first-order MAML: inner steps on `p.data`, gradients of the second loss, weights put back",
    expect=ROUNDING,
)
class FirstOrder:
    def backward(self, s: Script, loss: Any) -> None:
        kept = [p.data.clone() for p in s.model.parameters()]
        loss.backward()
        for p in s.model.parameters():
            p.data.sub_(0.1 * p.grad)
        s.optimizer.zero_grad()
        s.cross_entropy(s.next_batch(1)).backward()
        for p, k in zip(s.model.parameters(), kept, strict=True):
            p.data.copy_(k)


@habit(
    "a gradient with respect to the embedding's output, `h.retain_grad()`",
    "forward",
    three=EITHER,
    **PLAIN,
)
def retained(s: Script) -> Any:
    kept: list[Any] = []
    handle = s.module.tokens.register_forward_hook(
        lambda m, a, out: (out.retain_grad(), kept.append(out))[1]
    )
    loss = s.cross_entropy()
    handle.remove()
    loss.backward(retain_graph=True)
    s.note("grad", kept[0].grad.abs().max().item())
    s.optimizer.zero_grad()
    return loss


@habit("`p.register_hook` that clamps: `g.clamp(-0.01, 0.01)` (before the reduction)", "after")
def hook_clamp(s: Script) -> None:
    for p in s.module.parameters():
        p.register_hook(lambda g: torch.clamp(g, -0.01, 0.01))


@habit("`register_full_backward_hook` that logs gradients of blocks", expect=ROUNDING)
class BackwardHooks:
    def after(self, s: Script) -> None:
        for i, block in enumerate(s.module.blocks):
            block.register_full_backward_hook(
                lambda m, gi, go, i=i: s.note(f"grad of block {i}", go[0].norm().item())
            )


@habit(
    "adaptive weight of VQGAN: `grad(nll, last_layer)`, `grad(g, last_layer)` inside no_sync",
    "loss",
    expect=ROUNDING,
    three=EITHER,
    **PLAIN,
)
def vqgan(s: Script, loss: Any) -> Any:
    last = s.module.head.weight
    other = s.model(s.batch[:, :-1]).pow(2).mean()
    first = torch.autograd.grad(loss, last, retain_graph=True)[0]
    second = torch.autograd.grad(other, last, retain_graph=True)[0]
    weight = torch.clamp(first.norm() / (second.norm() + 1e-4), 0.0, 10.0).detach()
    return loss + weight * 0.1 * other
