"""Trace the activations of a real module without allocating them: what its forward pass saves, and
what its backward pass needs in addition.

    module ──► copy of fake tensors ──► forward, backward ──► what comes and goes ──► Activity
               (tracing/fake.py)        (its own code)        (tracing/watch.py)

Only integer tensors are allocated (tracing/fake.py says why), and of many equal blocks only a few
are run (tracing/blocks.py). A model of any size is therefore traced in about a second.

The trace counts every storage except parameters and buffers, once for all its views, from its first
use to its last:

- The batch counts.
- A parameter's gradient counts from its allocation to its arrival, when autograd hands it over and
  the engine copies and drops it.
- Workspace inside a kernel and the allocator's rounding do not count.

Logits are storages whose first tensor has the vocabulary as its last dimension, except gradients of
parameters: the logits, their upcast, log-probabilities, and the gradients of these.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from onefold.recipe import COMPUTE_DTYPES
from onefold.recipe.options import Precision
from onefold.runtime.differentiate import tensors_in
from onefold.runtime.units import find_units
from onefold.tracing.blocks import Checkpointing, Repetition, recompute, shorter
from onefold.tracing.calling import backward, call, loss_of, vocabulary_of
from onefold.tracing.cuda_kernels import CudaKernels
from onefold.tracing.fake import Integers, fake_batch, fake_tensors, tensors_of, twin_of
from onefold.tracing.watch import Pass, UnitActivity, Watch


@dataclass(frozen=True)
class Activity:
    """Activations and FLOPs of one micro-batch.

    Attributes:
        rows: in the order of the forward pass.
        notes: what was assumed, as sentences.
        beside: bytes that other micro-batches keep meanwhile.
        away: (unit, bytes that go to the host and come back). on_host: the host's bytes for them.
    """

    rows: Sequence[UnitActivity]
    notes: tuple[str, ...] = ()
    beside: int = 0
    away: tuple[tuple[str, int], ...] = ()
    on_host: int = 0

    @cached_property
    def passes(self) -> Mapping[tuple[str, str], Pass]:
        """The passes of each unit by (phase, unit): all bytes at their highest moment."""
        out: dict[tuple[str, str], Pass] = {}
        below = self.beside
        for row in self.rows:
            for phase, one in (("forward", row.forward), ("backward", row.backward)):
                here, before = one.above(below), out.get((phase, row.unit), Pass())
                highest = max(here, before)
                out[phase, row.unit] = highest._replace(flops=here.flops + before.flops)
            below += row.kept
        return out

    @property
    def flops(self) -> float:
        return sum(one.flops for one in self.passes.values())

    @property
    def peak(self) -> int:
        return max((one.nbytes for one in self.passes.values()), default=0)


def trace(
    module: nn.Module,
    batch: Any,
    *,
    checkpointing: Checkpointing = "none",
    precision: Precision | None = "fp32",
    device: str = "cpu",
    units: Sequence[str | type] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Activity:
    """Run forward and backward of a copy of `module` on fake tensors and record what is in memory
    when.

    The module may be real or on the meta device. It is traced in training mode.

    Args:
        batch: a mapping (called as `module(**batch)`), a tuple or list (`module(*batch)`), or one
            argument. The trace uses the contents of integer tensors, and only the sizes of
            floating-point tensors. Both may be on the meta device.
        checkpointing: "full" recomputes every repeated block, "selective" every second. "none"
            leaves the module as it is: a module that checkpoints by itself still does.
        precision: parameters and floating-point inputs are cast to it, as the engine casts them;
            None leaves them as they are. A module that enters autocast itself is traced under it.
        device: "cpu" or "cuda", whose kernels the trace assumes (see tracing/cuda_kernels.py). No
            such device is needed.
        units: names or classes of units, as `onefold.shard` takes them.
        loss: returns the scalar to differentiate, given the module's output. None takes `.loss`, a
            "loss" key or the first scalar; an output without a loss is summed.

    Raises:
        ValueError: the module cannot be traced; the message says why.
    """
    dtype = COMPUTE_DTYPES[precision] if precision is not None else None
    names = [spec.name for spec in find_units(module, units) if spec.name]

    few = shorter(module, names, checkpointing)

    def traced(some: Repetition | None) -> Activity | None:
        integers = Integers()
        twin = twin_of(module, dtype, some).train()
        recompute(twin, checkpointing)
        given = fake_batch(batch, dtype if precision != "fp32" else None)
        own = {t.untyped_storage()._cdata for t in tensors_of(twin)}
        watch = Watch(vocabulary_of(module), own, integers.call)
        for name, inner in twin.named_modules():
            if name in names:
                watch.follow(name, inner)
        for param in twin.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(watch.take)
        for t in tensors_in(given):
            watch.key(t)
        t = None  # the loop's name would keep it
        with torch.enable_grad(), CudaKernels() if device == "cuda" else nullcontext(), watch:
            with saved_tensors_hooks(watch.pack, lambda t: t):
                scalar = (loss or loss_of)(call(twin, given))
            if not scalar.requires_grad:
                raise ValueError(
                    "the loss depends on no trainable parameter, so there is no backward pass to"
                    " trace: unfreeze some parameters."
                )
            backward(scalar)
        notes = list(integers.notes)
        if any(isinstance(m, nn.RNNBase) for m in module.modules()):
            notes.append("recurrent layers keep workspaces of their kernels, which are not counted")
        rows = some.whole(watch.rows()) if some else watch.rows()
        return Activity(rows, tuple(notes)) if rows else None

    with _without_collector(), fake_tensors():
        found = traced(few) or traced(None)
    assert found is not None
    return found


def between(traced: Callable[[int], Activity], samples: int) -> Activity:
    """Return the trace of a micro-batch of any size, from those whose sizes are powers of two: bytes
    and FLOPs grow with the samples nearly in a straight line. A micro-batch is traced by itself if
    the two around it differ in more than sizes (a router's remainder).
    """
    low = 1 << (samples.bit_length() - 1)
    if samples in (3, low):  # of one sample, fewer copies are made
        return traced(samples)
    a, b = traced(low), traced(2 * low)
    if [row.unit for row in a.rows] != [row.unit for row in b.rows]:
        return traced(samples)

    def line(x: Any, y: Any) -> Any:
        if isinstance(x, tuple):
            return x._make(map(line, x, y))  # type: ignore[attr-defined]
        if isinstance(x, str):
            return x
        return -(-((2 * low - samples) * x + (samples - low) * y) // low)

    return replace(a, rows=list(map(line, a.rows, b.rows)))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's cyclic garbage collector is off inside the context: tensors die with their last
    reference, at the same moment in every trace.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
