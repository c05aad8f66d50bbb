"""Where the numbers of a step first were not finite.

[Note: the step is done once more] Hooks that watch every step would cost a pass over every output,
and a synchronization with a GPU. So no hooks are set while all is well. When a run must end because
loss or gradients came out non-finite, the weights are still those that the step began with, and the
random generators' states from before it are kept. So `locate` runs the same step again, bit for bit,
with hooks on each unit, and names the culprit:

    forward    the first unit in forward order whose output is bad while its input was not; between units it is the root's code
    backward   the first unit in backward order that passes on a bad gradient but received a good one; failing that, the
               last unit in forward order with a bad gradient of its own parameters

The backward pass must be searched in backward order. Every unit before the culprit has bad
gradients too, so the first unit in forward order would always be the embedding.
"""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.per_rank import restore
from onefold.runtime.differentiate import in_autograd, tensors_in
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.train.prepare import Run
from onefold.train.step import forward_backward


def locate(run: Run, step: int, generators: dict[str, Any]) -> str:
    """Run a step again, and say where its numbers first were not finite. Collective. The run ends
    afterwards: gradients and random generators are left as they come.

    Args:
        generators: the random generators' states at the step's beginning.
    """
    engine, ranks = onefold.engine_of(run.model), run.ranks
    names = [unit.name for unit in engine.units]
    weights = _bad_units(engine, gradients=False)
    received: set[str] = set()
    turn = count()
    # (in the backward pass, how many hooks had been called before, rank, where)
    found: list[tuple[bool, int, int, str]] = []

    def note(backward: bool, at: int, what: str) -> None:
        found.append((backward, at, ranks.rank, f"{what}, on rank {ranks.rank}"))

    def passed_on(name: str, gradient: torch.Tensor) -> None:
        at = next(turn)
        if not _finite(gradient):
            culprit = "(root)" if name in received else name
            note(True, at, f"a gradient in the backward pass of unit {culprit!r}")

    def got(name: str, gradient: torch.Tensor) -> None:
        if not _finite(gradient):
            received.add(name)

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        at = next(turn)
        for t in _numbers((args, kwargs)):
            if t.requires_grad:  # a mask may hold infinities
                t.register_hook(partial(passed_on, name))
                if not _finite(t):
                    note(False, at, f"the code of unit '(root)' before {name!r}")

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        at = next(turn)
        for t in _numbers(output):
            if t.requires_grad:
                t.register_hook(partial(got, name))
            if not _finite(t):
                note(False, at, f"the output of unit {name!r}")

    run.optimizer.zero_grad()
    restore(generators, 0, 1)
    with contextlib.ExitStack() as stack:
        for unit in engine.units:
            if (module := unit.module()) is not None:
                hook = partial(before, unit.name)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(partial(after, unit.name)).remove)
        forward_backward(run, step)
    gathered = ranks.gather((weights, found, _bad_units(engine, gradients=True)))
    if broken := next((name for ours, _, _ in gathered for name in ours), ""):
        return f"weights of unit {broken!r} are not finite themselves: an earlier update broke them"
    if places := [place for _, ours, _ in gathered for place in ours]:
        return f"the first that was not finite: {min(places)[-1]}"
    if bad := {name for *_, ours in gathered for name in ours}:
        last = max(bad, key=names.index)
        return f"the first that was not finite: the gradient of a parameter of unit {last!r}"
    return (
        "run once more, the same step was finite everywhere: this computation is not repeatable, or"
        " a device or its memory is faulty"
    )


def _numbers(value: Any) -> list[torch.Tensor]:
    # The tensors of a recomputation were looked at in the forward pass
    return [] if in_autograd() else [t for t in tensors_in(value) if t.is_floating_point()]


def _finite(t: torch.Tensor) -> bool:
    return bool(torch.isfinite(t.detach()).all())


def _bad_units(engine: Engine, gradients: bool) -> list[str]:
    """Return the units with a non-finite weight or gradient on this rank, in forward order."""
    out = []
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            tensors = [e.param.grad if gradients else e.param for e in unit.entries]
            if not all(_finite(t) for t in tensors if t is not None and t.is_floating_point()):
                out.append(unit.name)
    return out
