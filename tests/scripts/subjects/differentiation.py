"""torch.autograd, torch.func and hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

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
    "`torch.autograd.grad(loss, params, retain_graph=True)` for a norm, then backward",
    "loss",
    expect=ROUNDING,
    three=EITHER,
    **PLAIN,
)
def grad_norm(s: Script, loss: Any) -> Any:
    grads = torch.autograd.grad(loss, s.parameters(), retain_graph=True)
    s.note("norm", torch.stack([g.norm() for g in grads]).norm().item())
    return loss


@habit(
    "a MAML inner step: `w' = w - lr * grad(..., create_graph=True)`, `functional_call`",
    "forward",
    expect=ROUNDING,
    one=ROUNDING,
    three=EITHER,
    **PLAIN,
)
def maml(s: Script) -> Any:
    params = dict(s.module.named_parameters())
    inner = s.cross_entropy()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
    batch = s.next_batch(1)
    logits = torch.func.functional_call(s.module, fast, (batch[:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


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


@habit("Reptile: inner SGD on `p.data`, then `p.data = start + 0.5 * (p.data - start)`")
class Reptile:
    def weights(self, s: Script) -> None:
        start = {n: p.data.clone() for n, p in s.named()}
        s.optimizer.zero_grad()
        s.cross_entropy(s.next_batch(1)).backward()
        for n, p in s.named():
            p.data.add_(p.grad, alpha=-0.1)
            p.data = start[n] + 0.5 * (p.data - start[n])


@habit(
    "`functional_call` with weights of one's own: `{n: torch.zeros_like(p)}`",
    "log",
    expect=ROUNDING,
    sharded=EITHER,
    zero=EITHER,
    **PLAIN,
)
def functional_zeros(s: Script) -> None:
    with torch.no_grad():
        out = torch.func.functional_call(
            s.module,
            {n: torch.zeros_like(p) for n, p in s.module.named_parameters()},
            (s.batch[:, :-1],),
        )
    s.note("sum", out.abs().sum().item())


@habit(
    "a Hessian-vector product: grad of `(g * v).sum()`",
    "log",
    expect=ROUNDING,
    one=ROUNDING,
    three=EITHER,
    **PLAIN,
)
def hvp(s: Script) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        params = s.parameters()
        grads = torch.autograd.grad(s.cross_entropy(), params, create_graph=True)
        products = torch.autograd.grad(sum((g * torch.ones_like(g)).sum() for g in grads), params)
    s.note("trace", sum(h.sum().item() for h in products))


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


@habit(
    "`loss.backward(inputs=list(model.head.parameters()))`",
    "backward",
    sharded=EITHER,
    zero=EITHER,
    **PLAIN,
)
def inputs(s: Script, loss: Any) -> None:
    loss.backward(inputs=list(s.module.head.parameters()))


@habit("`loss.backward(retain_graph=True)` twice", "backward", sharded=EITHER, reference="plain")
def retain(s: Script, loss: Any) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


class ScaleHook:
    def put(self, s: Script) -> None:
        for p in s.module.parameters():
            p.register_hook(lambda g: g * 0.5)


@habit("`p.register_hook(lambda g: g * 0.5)` before shard()")
class HookBefore(ScaleHook):
    before = ScaleHook.put


@habit("`p.register_hook` that clamps: `g.clamp(-0.01, 0.01)` (before the reduction)", "after")
def hook_clamp(s: Script) -> None:
    for p in s.module.parameters():
        p.register_hook(lambda g: torch.clamp(g, -0.01, 0.01))


@habit("`p.register_hook` that masks rows of an embedding (frozen rows)", "after")
def hook_rows(s: Script) -> None:
    mask = torch.ones(17, 1)
    mask[:5] = 0
    s.module.tokens.weight.register_hook(lambda g: g * mask)


@habit("a hook removed after a step: `handle.remove()`")
class HookRemoved:
    def after(self, s: Script) -> None:
        self.handles = [p.register_hook(lambda g: g * 0.0) for p in s.module.head.parameters()]

    def weights(self, s: Script) -> None:
        for handle in self.handles:
            handle.remove()


@habit("gradient reversal and scaling in a layer (`torch.autograd.Function`)")
class Reversal:
    def after(self, s: Script) -> None:
        class Reverse(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, *g: Any) -> Any:
                return -0.5 * g[0]

        s.module.tokens.register_forward_hook(lambda m, a, out: Reverse.apply(out))


def _clip(p: Any) -> None:
    p.grad.clamp_(-0.01, 0.01)


@habit(
    "`register_post_accumulate_grad_hook` that clips `p.grad`", zero=EITHER, sharded=EITHER, **PLAIN
)
class PostClip:
    def after(self, s: Script) -> None:
        for p in s.module.parameters():
            p.register_post_accumulate_grad_hook(_clip)


@habit("forward hooks that read the weight: `m.weight.norm()`", expect=ROUNDING)
class WeightInHook:
    def after(self, s: Script) -> None:
        for n, m in s.module.named_modules():
            if isinstance(m, torch.nn.Linear):
                m.register_forward_hook(
                    lambda m, a, out, n=n: s.note(
                        f"norm of {n}", (m.weight.detach().norm().item(), tuple(m.weight.shape))
                    )
                )


@habit("`register_full_backward_hook` that logs gradients of blocks", expect=ROUNDING)
class BackwardHooks:
    def after(self, s: Script) -> None:
        for i, block in enumerate(s.module.blocks):
            block.register_full_backward_hook(
                lambda m, gi, go, i=i: s.note(f"grad of block {i}", go[0].norm().item())
            )


@habit("`torch.autograd.set_detect_anomaly(True)` around a step", "backward")
def anomaly(s: Script, loss: Any) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss.backward()


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
