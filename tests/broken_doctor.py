"""Things that are really broken, for the tests of `onefold doctor --check`: by name, what to patch
before a check runs.

`main` is a rank in place of that of `onefold.doctor.checks`, with what BROKEN names broken: a name, or
"CHECK=NAME,CHECK=NAME".
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist


def _wrong_element(name: str) -> Callable[[], None]:
    """A collective of torch.distributed (whichever of two names it has) brings one wrong element to
    rank 1.
    """

    def breaking() -> None:
        names = [n for n in name.split() if hasattr(dist, n)]
        real = getattr(dist, names[0])

        def wrong(output: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            work = real(output, *arguments, **named)
            if dist.get_rank() == 1:
                output.view(-1)[-1] += 1
            return work

        setattr(dist, names[0], wrong)

    return breaking


def sums(change: Callable[[Any, torch.Tensor, Any], None]) -> Callable[[], None]:
    """Onefold's sums are changed by `change(hop, sums, engine)` after they were made, wherever they
    are made.
    """

    def breaking() -> None:
        from onefold.runtime import reduce

        real = reduce.landed

        def landed(hop: Any) -> torch.Tensor:
            of = hop.gi_frame.f_locals["self"]
            total = real(hop)
            change(of, total, of.flat.entries[0].engine())
            return total

        reduce.landed = landed

    return breaking


def one_bit(r: Any, total: torch.Tensor, engine: Any) -> None:
    """The last bit of one sum of rank 1."""
    if engine.rank == 1 and total.numel():
        total.view(-1)[:1].view(torch.int32 if total.itemsize == 4 else torch.int16)[0] ^= 1


def one_bit_at_stage_3(r: Any, total: torch.Tensor, engine: Any) -> None:
    if engine.recipe.stage == 3:
        one_bit(r, total, engine)


def a_hundredth_more(r: Any, total: torch.Tensor, engine: Any) -> None:
    """Every stage alike: only DDP can tell."""
    total.mul_(1.01)


def a_gather_is_not_waited_for() -> None:
    """Rank 1 goes on with what its buffers held before the gather landed: zeros, as it were."""
    from onefold.comm.group import Group

    real = Group.all_gather

    def all_gather(
        self: Any, full: torch.Tensor, context: Any, *arguments: Any, **named: Any
    ) -> Any:
        pending = real(self, full, context, *arguments, **named)
        if self.rank != 1 or context.phase != "forward":
            return pending
        wait = pending.wait

        class Lost:
            event, context = pending.event, pending.context

            def wait(self) -> None:
                wait()
                full.zero_()

        return Lost()

    Group.all_gather = all_gather


def offloaded_step_does_not_wait() -> None:
    """On rank 1 the optimizer's step on the host begins before all gradients have come down: half
    of each is still zero.
    """
    from onefold.offload import step as offloaded

    real = offloaded.step_flat

    def step_flat(optimizer: Any, engine: Any, flat: Any, entries: Any, *given: Any) -> None:
        for entry in entries if flat.storage.offloaded and engine.rank == 1 else ():
            if entry.param.grad is not None:
                grad = entry.param.grad.view(-1)
                grad[grad.numel() // 2 :] = 0
        real(optimizer, engine, flat, entries, *given)

    offloaded.step_flat = step_flat


def activations_come_back_changed() -> None:
    """Every tensor that autograd kept comes back from the host as half of itself."""
    from onefold.offload.activations import ActivationStore

    real = ActivationStore.unpack

    def unpack(self: Any, saved: Any) -> torch.Tensor:
        whole = real(self, saved)
        return whole * 0.5 if whole.is_floating_point() else whole

    ActivationStore.unpack = unpack


def a_load_is_wrong() -> None:
    """One number of the moments."""
    import onefold

    real = onefold.load

    def load(*arguments: Any, optimizer: torch.optim.Optimizer, **named: Any) -> Any:
        found = real(*arguments, optimizer=optimizer, **named)
        next(s for s in optimizer.state.values() if s)["exp_avg"].view(-1)[:1] += 1.0
        return found

    onefold.load = load


def a_buffer_stays() -> None:
    """Every engine keeps 2 MiB that no formula knows."""
    from onefold.runtime.engine import Engine

    real = Engine.__init__

    def made(self: Any, *given: Any) -> None:
        real(self, *given)
        self.forgotten = torch.ones(1 << 19)

    Engine.__init__ = made


def nothing_is_prefetched() -> None:
    from onefold.recipe import Recipe

    real = Recipe.zero.__func__
    Recipe.zero = classmethod(lambda cls, *a, **named: real(cls, *a, **{**named, "prefetch": 0}))


# -- what becomes of a rank ------------------------------------------------------------------------


def dies(*_: Any) -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return ""


def stands_still(*_: Any) -> str:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()
    return ""


def raises(*_: Any) -> str:
    if dist.get_rank() == 1:
        raise ValueError("a wheel came off")
    dist.barrier()
    return ""


BREAKINGS: dict[str, Callable[[], None]] = {
    "all-gather": _wrong_element("all_gather_single all_gather_into_tensor"),
    "reduce-scatter": _wrong_element("reduce_scatter_single reduce_scatter_tensor"),
    "one bit of a sum at stage 3": sums(one_bit_at_stage_3),
    "sums a hundredth too large": sums(a_hundredth_more),
    "a gather is not waited for": a_gather_is_not_waited_for,
    "an offloaded step": offloaded_step_does_not_wait,
    "activations": activations_come_back_changed,
    "a wrong load": a_load_is_wrong,
    "a buffer stays": a_buffer_stays,
    "no prefetch": nothing_is_prefetched,
}
ENDS: dict[str, Callable[..., str]] = {"dies": dies, "stands still": stands_still, "raises": raises}


def main(*arguments: str) -> None:
    """A rank with what BROKEN names: one of `BREAKINGS`, or checks and their `ENDS`. LIMIT: seconds
    of a check that stands still.
    """
    from onefold.doctor import checks

    broken = os.environ["BROKEN"]
    if broken in BREAKINGS:
        BREAKINGS[broken]()
    ends = dict(part.split("=") for part in broken.split(",") if "=" in part)
    checks.CHECKS = tuple(
        replace(
            check,
            run=ENDS[ends[check.name]],
            limit=float(os.environ["LIMIT"]) if ends[check.name] == "stands still" else check.limit,
        )
        if check.name in ends
        else check
        for check in checks.CHECKS
    )
    checks.main(*arguments)
