"""Trace the activations of a real module without allocating them: what its forward pass saves, and
what its backward pass needs in addition.

    module, batch ──► fake tensors ──► forward, backward ──► log of storages ──► ActivationTrace
                      (tracing/fake.py)    (its own code)       (tracing/lifetimes.py)

Only integer tensors are allocated (tracing/fake.py says why), and of many equal blocks only a few
are run (tracing/repeat.py). A model of any size is therefore traced in about a second.

The trace counts every storage except parameters and buffers, once for all its views, from its first
use to its last:

- The batch counts.
- A parameter's gradient counts from its allocation to its arrival, when autograd hands it over and
  the engine copies and drops it.
- Workspace inside a kernel and the allocator's rounding do not count.

`logits` are storages whose first tensor has the vocabulary as its last dimension, except gradients
of parameters: the logits, their upcast, log-probabilities, and the gradients of these.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from onefold.runtime.units import find_units
from onefold.tracing.calling import backward, call, loss_of, training, vocabulary_of
from onefold.tracing.cuda_kernels import CudaKernels
from onefold.tracing.fake import Integers, fake_batch, faked, passing_as_real
from onefold.tracing.lifetimes import Log, Read, Span, Watch, read
from onefold.tracing.repeat import (
    Checkpointing,
    Repetition,
    checkpointed,
    repetition_in,
    shortened,
    written_out,
)

Precision = Literal["fp32", "bf16", "fp16"] | None
_DTYPES: Mapping[str | None, torch.dtype | None] = {
    None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class UnitTrace:
    """The activations and FLOPs of one unit.

    Attributes:
        name: the engine's name of it; "(root)" for everything outside other units, with the loss.
        saved: bytes that autograd keeps for backward. Each storage counts in the unit that saves it
            first.
        movable: the part of `saved` in storages large enough to be offloaded to the host. largest:
            the bytes of the largest of these storages.
        forward_flops, backward_flops: of matrix products, as torch counts them. Recomputation
            counts as backward.
    """

    name: str
    saved: int
    forward_flops: int
    backward_flops: int
    movable: int = 0
    largest: int = 0


@dataclass(frozen=True)
class ActivationTrace:
    """Activations of one micro-batch, in bytes.

    Attributes:
        units: in the engine's order, the root first.
        spans: the step from beginning to end. Added to what the engine holds at those times, they
            give the joint peak.
        saved, logits: bytes that autograd keeps for backward, and how many of them are logits.
        end_of_forward: bytes in memory after the loss is computed and the model's output dropped.
        inputs: bytes of the batch.
        notes: the trace's assumptions, as sentences.
    """

    units: tuple[UnitTrace, ...]
    spans: tuple[Span, ...]
    saved: int
    logits: int
    end_of_forward: int
    inputs: int
    precision: str | None
    checkpointing: str
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes in memory during the step, including gradients that have not arrived."""
        return self.peak_span.peak

    @property
    def peak_span(self) -> Span:
        return max(self.spans, key=lambda s: s.peak)

    @property
    def forward_flops(self) -> int:
        return sum(u.forward_flops for u in self.units)

    @property
    def backward_flops(self) -> int:
        return sum(u.backward_flops for u in self.units)


def trace(
    module: nn.Module,
    batch: Any,
    *,
    checkpointing: Checkpointing = "none",
    precision: Precision = "fp32",
    device: str | torch.device = "cpu",
    units: Sequence[str | type] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> ActivationTrace:
    """Run forward and backward of `module` on fake tensors and record what is in memory when.

    The module may be real or on the meta device. It is traced in training mode; its mode, tensors
    and gradients are restored afterwards.

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
    settings = Settings(checkpointing, precision, device, units, loss)
    found = _trace_of(_record(module, batch, settings), settings)
    if found is None:
        found = _trace_of(_record(module, batch, settings, whole=True), settings)
    assert found is not None
    return found


def trace_at(
    module: nn.Module,
    batch_of: Callable[[int], Any],
    micro_batches: Iterable[int],
    *,
    memo: dict[Any, Any] | None = None,
    **options: Any,
) -> dict[int, ActivationTrace]:
    """Trace several micro-batch sizes at the cost of three traces.

    If two logs differ in sizes alone, each entry's size is an affine function of the micro-batch.
    The logs at 2 and 3 samples then give those of larger micro-batches. A micro-batch of 1 is
    traced by itself, because one sample needs fewer copies. If the logs differ in more than sizes
    (a router's remainder), every micro-batch is traced.

    Args:
        batch_of: returns the batch of a given number of samples.
        memo: a dictionary, at first empty. Later calls with the same module and batches may pass it
            again, and then record nothing.
        options: the options of `trace`.
    """
    memo = {} if memo is None else memo
    wanted = sorted(set(micro_batches))
    if any(b < 1 for b in wanted):
        raise ValueError(f"micro-batches {wanted}: expected samples, 1 or more.")
    settings = Settings(**options)
    larger = [b for b in wanted if b > 1] if max(wanted, default=0) >= 4 else []
    out: dict[int, ActivationTrace] = {}
    for whole in (False, True) if larger else ():
        if (settings, whole) not in memo:
            memo[settings, whole] = [_record(module, batch_of(b), settings, whole) for b in (2, 3)]
        low, high = memo[settings, whole]
        if low.log.shape() != high.log.shape():
            continue
        for b in larger:
            sizes = [
                x.nbytes + (b - 2) * (y.nbytes - x.nbytes)
                for x, y in zip(low.log.entries, high.log.entries, strict=True)
            ]
            inputs = low.inputs + (b - 2) * (high.inputs - low.inputs)
            found = _trace_of(replace(low, inputs=inputs), settings, sizes)
            if found is not None:
                out[b] = found
        if all(b in out for b in larger):
            break
    rest = {b: trace(module, batch_of(b), **options) for b in wanted if b not in out}
    return dict(sorted((out | rest).items()))


# -- recording -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The options of `trace`."""

    checkpointing: Checkpointing = "none"
    precision: Precision = "fp32"
    device: str | torch.device = "cpu"
    units: Sequence[str | type] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if self.precision not in _DTYPES:
            raise ValueError(
                f"precision={self.precision!r}: expected one of {', '.join(filter(None, _DTYPES))},"
                " or None."
            )
        if torch.device(self.device).type not in ("cpu", "cuda"):
            raise ValueError(
                f"device={str(self.device)!r}: expected 'cpu' or 'cuda', whose kernels a trace"
                " knows."
            )

    @property
    def casts(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are cast to, None if they stay."""
        return _DTYPES[self.precision] if self.precision in ("bf16", "fp16") else None


@dataclass(frozen=True)
class Recording:
    """One step's log, with what is needed to read it: the `names` of all units, the bytes of the
    batch (`inputs`), and the blocks that were left out (`repetition`).
    """

    log: Log
    names: tuple[str, ...]
    inputs: int
    notes: tuple[str, ...]
    repetition: Repetition | None


def _record(module: nn.Module, batch: Any, settings: Settings, whole: bool = False) -> Recording:
    """Run one step and record its log.
    `whole`: run every block, even if equal blocks could be left out.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    names = tuple(spec.name or "(root)" for spec in find_units(module, settings.units))
    log, integers = Log(vocabulary=vocabulary_of(module)), Integers()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_without_collector())
        stack.enter_context(training(module))
        stack.enter_context(checkpointed(module, settings.checkpointing))
        repetition = None if whole else repetition_in(module)
        if repetition is not None and not set(repetition.names) <= set(names):
            repetition = None
        if repetition is not None:
            stack.enter_context(shortened(repetition))
        stack.enter_context(passing_as_real())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        ours = stack.enter_context(faked(module, _DTYPES[settings.precision], integers))
        given = fake_batch(batch, settings.casts, integers)
        watch = Watch(log, ours.storages, integers.call)
        present = dict(module.named_modules())

        def follow(name: str, inner: nn.Module) -> None:
            enter = inner.register_forward_pre_hook(lambda *_: watch.enter(name), prepend=True)
            leave = inner.register_forward_hook(lambda *_: watch.leave(), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)

        for name in (n for n in names[1:] if n in present):
            follow(name, present[name])
        for name, param in ours.parameters.items():
            _take(watch, name, param)
        inputs = _step(module, given, watch, settings)
    notes = list(integers.notes)
    if any(isinstance(m, nn.RNNBase) for m in module.modules()):
        notes.append("recurrent layers keep workspaces of their kernels, which are not counted")
    return Recording(log, names, inputs, tuple(notes), repetition)


def _step(module: nn.Module, batch: Any, watch: Watch, settings: Settings) -> int:
    """Run forward and backward under `watch`, and return the bytes of the batch."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    inputs = sum({watch.key(t): t.untyped_storage().nbytes() for t in tensors}.values())
    del leaves, tensors
    kernels = CudaKernels() if torch.device(settings.device).type == "cuda" else nullcontext()
    with torch.enable_grad(), kernels, watch:
        with saved_tensors_hooks(watch.pack, lambda t: t):
            scalar = (settings.loss or loss_of)(call(module, batch))
        watch.mark("turn")
        if not scalar.requires_grad:
            raise ValueError(
                "the loss depends on no trainable parameter, so there is no backward pass to trace:"
                " unfreeze some parameters."
            )
        backward(scalar)
        watch.mark("over")
    return inputs


def _take(watch: Watch, name: str, param: nn.Parameter) -> None:
    """Take the parameter's gradient as soon as it is complete, as the engine does."""

    def take(param: torch.Tensor) -> None:
        if param.grad is not None:
            watch.arrived(name, param.grad)
            param.grad = None

    if param.requires_grad:
        param.register_post_accumulate_grad_hook(take)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turn off Python's cyclic garbage collector, inside the context. Tensors then die with their
    last reference, at the same moment in every trace.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _trace_of(
    recording: Recording, settings: Settings, sizes: list[int] | None = None
) -> ActivationTrace | None:
    """Return the trace that a recording gives, with other `sizes` if given.
    None if the traced blocks do not behave alike, so that nothing is known of the others.
    """
    found: Read | None = read(recording.log, sizes)
    if recording.repetition is not None and found is not None:
        found = written_out(found, recording.repetition)
    if found is None:
        return None
    flops = Counter[tuple[str, str]]()
    for span in found.spans:
        flops[span.unit, span.phase] += span.flops
    units = (
        UnitTrace(
            name,
            found.saved.get(name, 0),
            flops[name, "forward"],
            flops[name, "backward"],
            found.movable.get(name, 0),
            found.largest.get(name, 0),
        )
        for name in recording.names
    )
    return ActivationTrace(
        units=tuple(units),
        spans=found.spans,
        saved=sum(found.saved.values()),
        logits=found.saved_logits,
        end_of_forward=found.end_of_forward,
        inputs=recording.inputs,
        precision=settings.precision,
        checkpointing=settings.checkpointing,
        notes=recording.notes,
    )
