"""Where the numbers of a step first were not finite.

[Note: the step is done once more] Hooks that watch every step would cost a pass over every output,
and a synchronization with a GPU. So no hooks are set while all is well. When a run must end because
loss or gradients came out non-finite, the weights are still those that the step began with, and the
random generators' states from before it are kept. So `locate` runs the same step again, bit for bit,
with a hook on each unit, and names the culprit:

    forward    the first unit in forward order whose output is bad
    backward   the first output, in backward order, to which a bad gradient comes: the unit that ran behind it made it; failing
               that, the last unit in forward order with a bad gradient of its own parameters

The backward pass must be searched in backward order. Every unit before the culprit has bad
gradients too, so the first unit in forward order would always be the embedding.
"""

from __future__ import annotations

import contextlib
from functools import partial
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

ROOT = "(root)"


def locate(run: Run, step: int, generators: dict[str, Any]) -> str:
    """Run a step again, and say where its numbers first were not finite. Collective. The run ends
    afterwards: gradients and random generators are left as they come.

    Args:
        generators: the random generators' states at the step's beginning.
    """
    engine, ranks = onefold.engine_of(run.model), run.ranks
    names = [unit.name for unit in engine.units]
    weights = _bad_units(engine, gradients=False)
    ran: list[str] = []  # the units, as their forward passes ended
    found: list[
        tuple[bool, int, int, str]
    ] = []  # (in the backward pass, in which order, rank, where)

    def note(backward: bool, what: str) -> None:
        found.append((backward, len(found), ranks.rank, f"{what}, on rank {ranks.rank}"))

    def came(at: int, gradient: torch.Tensor) -> None:
        if not _finite(gradient):
            behind = ROOT if ran[at] == ROOT else [*ran, ROOT][at + 1]
            note(True, f"a gradient in the backward pass of unit {behind!r}")

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        # The tensors of a recomputation were looked at in the forward pass
        for t in tensors_in(output) if not in_autograd() else ():
            if t.is_floating_point() and t.requires_grad:
                t.register_hook(partial(came, len(ran)))
            if not _finite(t):
                note(False, f"the output of unit {name!r}")
        ran.append(name)

    run.optimizer.zero_grad()
    restore(generators)
    with contextlib.ExitStack() as stack:
        for unit in engine.units:
            if (module := unit.module()) is not None:
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


def _finite(t: torch.Tensor) -> bool:
    return not t.is_floating_point() or bool(torch.isfinite(t.detach()).all())


def _bad_units(engine: Engine, gradients: bool) -> list[str]:
    """Return the units with a non-finite weight or gradient on this rank, in forward order."""
    out = []
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            tensors = [e.param.grad if gradients else e.param for e in unit.entries]
            if not all(_finite(t) for t in tensors if t is not None):
                out.append(unit.name)
    return out
