"""Stream the whole tensors of a sharded model on every rank, for example to an inference engine
that runs beside the training.

    parameters     [ a ][ b ][  c  ][ d ][ e ]...      in the order of the units
    buckets        └──── 1 ────┘└─── 2 ────┘           gathered whole, yielded, released

A bucket consists of stretches of flat buffers, with the elements in the same order. A rank
therefore sends its part of a stretch as one message to each other rank, and the tensors are views
of the gathered stretch. A parameter that ranks hold boxes of is a stretch of its own: the holders of
a box gather it, then DTensor puts the boxes together. A parameter larger than a bucket has its own
bucket. In a `for` loop, the loop variable keeps the last bucket's memory alive while the next one is
gathered, so a bucket has half of the bytes that the caller allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from onefold.comm.pending import Pending
from onefold.layout import overlap
from onefold.memory import GATHERED
from onefold.pretrained.merged import Merging
from onefold.recipe.options import bytes_of
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import MasterParts, StateItem, tell_all
from onefold.runtime.state.dicts import beside_parameters

#: Values of `dtype=` besides torch's dtypes: the compute dtype and the master weights' dtype.
COMPUTE, MASTER = "compute", "master"


@dataclass
class Stretch:
    """Neighbouring parameters of one flat buffer.

    Attributes:
        entries: the parameters, in the order of the flat buffer.
        dtype: the dtype to gather in.
    """

    flat: Flat
    entries: list[Entry]
    dtype: torch.dtype

    @property
    def span(self) -> tuple[int, int]:
        """Elements [start, end) of the flat buffer, including padding between parameters."""
        return self.entries[0].slot.start, self.entries[-1].slot.end

    @property
    def nbytes(self) -> int:
        if self.flat.in_boxes:  # the whole, and a box; the same on ranks with boxes of other sizes
            (entry,) = self.entries
            assert entry.box is not None
            return (entry.numel + entry.box.largest) * self.dtype.itemsize
        start, end = self.span
        return (end - start) * self.dtype.itemsize


@dataclass
class Bucket:
    """Stretches that are gathered together.

    Attributes:
        beside: bytes of the adapters' factors that are gathered while the bucket is resident.
    """

    stretches: list[Stretch] = field(default_factory=list)
    beside: int = 0

    @property
    def nbytes(self) -> int:
        return sum(stretch.nbytes for stretch in self.stretches) + self.beside


def stream_params(
    model: nn.Module,
    bucket: int | str = "1GB",
    dtype: torch.dtype | str = COMPUTE,
    *,
    merge_adapters: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) for each parameter and each persistent buffer of the model, on
    every rank. Collective: every rank must iterate to the end.

    Names are those of the module's state dict. Tied weights are yielded once, under their first
    name. A tensor is a copy on the model's device, which the next optimizer step does not change.
    In a `for` loop that keeps no tensors, a rank has at most `bucket` bytes of whole tensors at a
    time, or twice the bytes of the largest parameter if that is more. A tensor that the caller
    keeps also keeps the memory of tensors that were gathered with it.

    Args:
        model: the return value of `onefold.shard`.
        bucket: bytes of whole tensors at a time, as a number or a text such as "256MB".
        dtype: dtype of floating-point parameters: "compute" (bf16 under bf16), "master" (the dtype
            of the master weights), or a torch dtype.
        merge_adapters: for a peft model with LoRA: yield the base model's tensors under its own
            names, with s · B·A of the active adapter added in fp32. A layer's factors count toward
            the bucket. The product takes a few more MiB.

    Raises:
        CheckpointError: with `merge_adapters`: there are no adapters, or they do more than add B·A
            to weights of linear layers.
        ValueError: `bucket` is not a number of bytes above 0, `dtype` is none of the above, or
            arguments differ between ranks.
        UninitializedError: the model was built on the meta device, and something was never loaded.
        RuntimeError: it was called inside a forward or backward pass, or the model was changed or
            stepped during the iteration.
    """
    engine = engine_of(model)
    limit, chosen = bytes_of("bucket", bucket), _dtype_of(dtype)
    if limit < 1:
        raise ValueError(f"bucket={bucket!r}: expected a number of bytes above 0, or '1GB'.")
    if engine.in_any_pass():
        raise RuntimeError("stream_params was called inside a pass of the model; call it outside.")
    if not engine.unsharded:
        engine.refuse_changes("stream_params")
    engine.uninitialized.look()
    engine.uninitialized.refuse("stream_params() would give")
    engine.buffers.refuse_own(model, "stream_params()")
    merging = Merging.of(model) if merge_adapters else None
    said = tell_all(engine, "stream_params()", (limit, str(dtype), merge_adapters))
    if other := next((there for there in said if there != said[0]), None):
        raise ValueError(
            f"stream_params() was given bucket, dtype and merge_adapters {other} on one rank and"
            f" {said[0]} on rank 0: give all ranks the same."
        )
    added = None if merging is None else Added(engine, merging)
    return _stream(engine, model, buckets(engine, limit // 2, chosen, added), added)


class Added:
    """The adapters that are added to each weight as it is yielded. Their own tensors are not
    yielded.
    """

    def __init__(self, engine: Engine, merging: Merging) -> None:
        self.engine, self.merging = engine, merging
        entries = {entry.name: entry for entry in engine.entries}
        self.factors = {
            weight: [entries[name] for name in names] for weight, names in merging.factors.items()
        }

    def name_of(self, entry: Entry) -> str | None:
        """Return a parameter's name in the base model; None if it belongs to an adapter."""
        return self.merging.names.get(entry.name)

    def beside(self, entry: Entry) -> int:
        """Return the bytes of the adapter's factors for `entry`."""
        factors = self.factors.get(self.name_of(entry) or "", ())
        return sum(e.numel * e.flat.dtypes.master.itemsize for e in factors)

    def add(self, name: str, whole: torch.Tensor) -> None:
        """Add the adapter of the base model's weight `name`, if any, to it in place. Collective if
        there is one.
        """
        if name not in self.factors:
            return
        ((_, a),), ((_, b),) = (
            _gathered(self.engine, Bucket([Stretch(e.flat, [e], e.flat.dtypes.master)]))
            for e in self.factors[name]
        )
        with disable_torch_function(), torch.no_grad():
            self.merging.layers[name].add_to(whole, a, b)


def _dtype_of(dtype: torch.dtype | str) -> Callable[[Flat], torch.dtype]:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return lambda flat: dtype if flat.dtypes.compute.is_floating_point else flat.dtypes.compute
    if dtype in (COMPUTE, MASTER):
        return lambda flat: flat.dtypes.master if dtype == MASTER else flat.dtypes.compute
    raise ValueError(
        f"dtype={dtype!r}: expected 'compute', 'master' or a floating-point dtype of torch."
    )


def buckets(
    engine: Engine,
    limit: int,
    dtype: Callable[[Flat], torch.dtype],
    added: Added | None = None,
) -> list[Bucket]:
    """Divide all parameters into buckets of at most `limit` bytes, or of one larger parameter."""
    out = [Bucket()]
    for flat in engine.flats:
        wanted = dtype(flat)
        stretch: Stretch | None = None
        for entry in flat.entries:
            if added is not None and added.name_of(entry) is None:
                stretch = None  # a stretch has no gaps: the next parameter starts a new one
                continue
            beside = 0 if added is None else added.beside(entry)
            if flat.in_boxes:
                stretch = None
            longer = Stretch(flat, [*(stretch.entries if stretch else ()), entry], wanted)
            more = longer.nbytes - (stretch.nbytes if stretch else 0) + beside
            if out[-1].stretches and out[-1].nbytes + more > limit:
                out.append(Bucket())
                stretch = None
            if stretch is None:
                stretch = Stretch(flat, [entry], wanted)
                out[-1].stretches.append(stretch)
            else:
                stretch.entries.append(entry)
            out[-1].beside += beside
    return [bucket for bucket in out if bucket.stretches]


def _stream(
    engine: Engine, model: nn.Module, plan: list[Bucket], added: Added | None
) -> Iterator[tuple[str, torch.Tensor]]:
    step = engine.step_count
    for bucket in plan:
        if engine.step_count != step or engine.stack:
            raise RuntimeError(
                "the model was trained while stream_params() was gone through: what is still to"
                " come would be of another step. Go through all of it between two steps."
            )
        wholes = _gathered(engine, bucket)
        engine.memory.add(GATHERED, bucket.nbytes, "(stream_params)")
        try:
            while wholes:
                name, whole = wholes.pop(0)
                if added is not None:
                    name = added.merging.names[name]
                    added.add(name, whole)
                yield name, whole
                del whole  # frees its memory before the next bucket is gathered
        finally:
            engine.memory.add(GATHERED, -bucket.nbytes, "(stream_params)")
    with disable_torch_function():
        buffers, _ = beside_parameters(engine, model)
    for name, value in buffers.items():
        if added is None or name in added.merging.names:
            yield added.merging.names[name] if added else name, value.detach().clone()


def _gathered(engine: Engine, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """Gather a bucket. Returns its whole tensors with their names."""
    under_way: list[Pending] = []
    out: list[tuple[str, torch.Tensor]] = []
    masters = MasterParts()
    with disable_torch_function(), torch.no_grad():
        for stretch in bucket.stretches:
            start, end = stretch.span
            into = torch.empty(end - start, dtype=stretch.dtype, device=engine.device)
            under_way.append(_start(engine, masters, stretch, into))
            if stretch.flat.in_boxes:
                (entry,) = stretch.entries
                out.append((entry.name, _of_boxes(under_way.pop(), entry, into)))
                continue
            for entry in stretch.entries:
                at = entry.slot.start - start
                whole = into[at : at + entry.slot.numel].view(entry.slot.shape)
                out.append((entry.name, whole))
        for pending in under_way:
            pending.wait()
    return out


def _of_boxes(pending: Pending, entry: Entry, into: torch.Tensor) -> torch.Tensor:
    """Return a whole parameter, from each rank's box of it, which `pending` gathers `into`."""
    assert entry.box is not None
    pending.wait()
    return entry.box.gather(into.view(entry.slot.shape))


def _start(engine: Engine, masters: MasterParts, stretch: Stretch, into: torch.Tensor) -> Pending:
    """Start the gather of a stretch into `into`, [end - start] of its span."""
    flat, group, (start, end) = stretch.flat, stretch.flat.group, stretch.span
    sends: list[tuple[int, torch.Tensor]] = []
    recvs: list[tuple[int, torch.Tensor]] = []

    def place(interval: tuple[int, int], span: tuple[int, int] = (start, end)) -> slice:
        a, b = overlap(interval, span)
        return slice(a - start, b - start)

    for entry in stretch.entries:
        a, b = entry.owned()
        if a < b:
            item, at = StateItem(entry, "", flat.dtypes.master), entry.slot.start - start
            into[at + a : at + b].copy_(masters.read(item, a, b))
    if flat.divided and not flat.unsharded and not group.alone:
        raw, width = into.view(torch.uint8), into.element_size()

        def part(sender: int, receiver: int) -> torch.Tensor | None:
            """Return the elements that `sender` accounts for, unless `receiver` holds them."""
            there = overlap(flat.layout.interval(sender), (start, end))
            if there[0] >= there[1] or overlap(there, flat.spec.owned_by(receiver)) == there:
                return None
            at = place(there)
            return raw[at.start * width : at.stop * width]

        for peer in range(group.size):
            if peer != group.rank:
                if (mine := part(group.rank, peer)) is not None:
                    sends.append((peer, mine))
                if (theirs := part(peer, group.rank)) is not None:
                    recvs.append((peer, theirs))
    return group.exchange(
        sends, recvs, engine.state_context(flat.unit_name), flat.index, move="state"
    )
