"""Trace the activations of a real module without allocating them: what its forward pass saves, and
what its backward pass needs in addition.

    module ──► copy of fake tensors ──► forward, backward ──► what comes and goes ──► Trace
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
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from onefold.machine.flops import values_in
from onefold.runtime.units import find_units
from onefold.tracing.blocks import Checkpointing, recompute, shorten
from onefold.tracing.calling import backward, call, loss_of, vocabulary_of
from onefold.tracing.cuda_kernels import CudaKernels
from onefold.tracing.fake import Integers, fake_batch, fake_tensors, tensors_of, twin_of
from onefold.tracing.watch import Span, Watch

Precision = Literal["fp32", "bf16", "fp16"] | None
_DTYPES: Mapping[str | None, torch.dtype | None] = {
    None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """Activations of one micro-batch.

    Attributes:
        spans: the step from beginning to end. Added to what the engine holds at those times, their
            bytes give the joint peak.
        notes: the trace's assumptions, as sentences.
    """

    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes in memory during the step, including gradients that have not arrived."""
        return max(s.peak for s in self.spans)

    @property
    def saved(self) -> int:
        """Bytes that autograd keeps for the backward pass."""
        return sum(s.saved for s in self.spans)

    @property
    def logits(self) -> int:
        """How many of `saved` are logits."""
        return sum(s.kept_logits for s in self.spans)


def trace(
    module: nn.Module,
    batch: Any,
    *,
    checkpointing: Checkpointing = "none",
    precision: Precision = "fp32",
    device: str | torch.device = "cpu",
    units: Sequence[str | type] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Trace:
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
        ValueError: the module cannot be traced (the message says why), or an argument is none of
            the above.
    """
    if precision not in _DTYPES:
        raise ValueError(
            f"precision={precision!r}: expected one of {', '.join(filter(None, _DTYPES))}, or None."
        )
    where = torch.device(device).type
    if where not in ("cpu", "cuda"):
        raise ValueError(
            f"device={str(device)!r}: expected 'cpu' or 'cuda', whose kernels a trace knows."
        )
    names = [spec.name for spec in find_units(module, units) if spec.name]

    def traced(few: bool) -> Trace | None:
        integers = Integers()
        twin = twin_of(module, integers, _DTYPES[precision]).train()
        recompute(twin, checkpointing)
        left_out = shorten(twin, names) if few else None
        casts = _DTYPES[precision] if precision in ("bf16", "fp16") else None
        given = fake_batch(batch, casts, integers)
        own = {t.untyped_storage()._cdata for t in tensors_of(twin)}
        watch = Watch(vocabulary_of(module), own, integers.call)
        for name, inner in twin.named_modules():
            if name in names:
                watch.follow(name, inner)
        for param in twin.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(watch.take)
        _step(twin, given, watch, loss or loss_of, CudaKernels() if where == "cuda" else None)
        notes = list(integers.notes)
        if any(isinstance(m, nn.RNNBase) for m in module.modules()):
            notes.append("recurrent layers keep workspaces of their kernels, which are not counted")
        spans = left_out.whole(watch.read()) if left_out else watch.read()
        return Trace(spans, tuple(notes)) if spans else None

    with _without_collector(), fake_tensors():
        found = traced(few=True) or traced(few=False)
    assert found is not None
    return found


def between(traced: Callable[[int], Trace], samples: int) -> Trace:
    """Return the trace of a micro-batch of any size, from those whose sizes are powers of two: bytes
    and FLOPs grow with the samples nearly in a straight line. A micro-batch is traced by itself if
    the two around it differ in more than sizes (a router's remainder).
    """
    low = 1 << (samples.bit_length() - 1)
    if samples in (3, low):  # of one sample, fewer copies are made
        return traced(samples)
    a, b = traced(low), traced(2 * low)
    if [(s.unit, s.phase) for s in a.spans] != [(s.unit, s.phase) for s in b.spans]:
        return traced(samples)

    def line(x: int, y: int) -> Any:
        return -(-((2 * low - samples) * x + (samples - low) * y) // low)

    numbers = [f.name for f in fields(Span) if f.name not in ("unit", "phase", "changes")]
    spans = (
        replace(x, **{name: line(getattr(x, name), getattr(y, name)) for name in numbers})
        for x, y in zip(a.spans, b.spans, strict=True)
    )
    return replace(a, spans=tuple(spans))


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


def _step(
    module: nn.Module,
    batch: Any,
    watch: Watch,
    loss: Callable[[Any], torch.Tensor],
    kernels: CudaKernels | None,
) -> None:
    """Run forward and backward under `watch`."""
    for t in values_in(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(t, torch.Tensor):
            watch.key(t)
    t = None  # the loop's name would keep it
    with torch.enable_grad(), kernels or nullcontext(), watch:
        with saved_tensors_hooks(watch.pack, lambda t: t):
            scalar = loss(call(module, batch))
        if not scalar.requires_grad:
            raise ValueError(
                "the loss depends on no trainable parameter, so there is no backward pass to trace:"
                " unfreeze some parameters."
            )
        backward(scalar)
