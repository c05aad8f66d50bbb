"""The lifetime of each storage in a step: a log recorded while the step runs, and the reading of
that log.

    forward     (root)   block.0        block.1        (root)             an entry is a storage that comes or goes, a unit
    log         + +      + + - + +      + + - + +      + - +   ▲          that begins to run, a tensor saved for backward,
    backward    (root)   block.1        block.0                │          a parameter's gradient that is complete
    log         - + -    + + - ◆ - ◆    + - + ◆ - ◆            end of forward

The log holds sizes only. `read` goes through the whole log to answer what is saved, what the peak
inside a unit is, and what a larger micro-batch would need. Only then is the use of each storage
known: a gradient looks like any other activation until it arrives.

[Note: whose backward it is] Autograd numbers its nodes in the order in which the forward pass makes
them. A node in the backward pass belongs to the unit that ran when its number was given out.
Recomputation under checkpointing makes nodes with new numbers; they belong to the unit whose node
started the recomputation.

[Note: sums in place] If a tensor has several uses, autograd adds up the gradients of the uses. It
adds into the first gradient in place, if nobody else holds that gradient. Under a dispatch mode it
makes a third tensor instead. The log notes for such a sum which storage it would have reused (its
donor), and `read` counts the sum as in place. A view also holds its base, so autograd never adds to
a view in place.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from onefold.machine.flops import flop_formulas
from onefold.offload.activations import SMALLEST

_aten = torch.ops.aten
_IGNORED = {torch.ops.prim.device.default}


@dataclass
class Entry:
    """One line of the log. `what` is one of:

    - "come": storage `key` of `nbytes` is allocated. `wide`: its last dimension is the vocabulary.
      `donor`: for a sum of gradients, the storage of the first one. `in_place`: without the trace,
      autograd would reuse it.
    - "go", "save": storage `key` is freed, or saved for backward.
    - "arrive": `key` is the complete gradient of parameter `name`.
    - "run": unit `name` begins to run in `phase`.
    - "flops": `nbytes` is a number of FLOPs.
    - "turn", "over": the forward pass ends, the backward pass ends.
    """

    what: str
    key: int = -1
    nbytes: int = 0
    name: str = ""
    phase: str = ""
    wide: bool = False
    donor: int = -1
    in_place: bool = False


@dataclass
class Log:
    """The entries of a step, in order. `vocabulary` is 0 for a model without one."""

    root: str = "(root)"
    vocabulary: int = 0
    entries: list[Entry] = field(default_factory=list)

    def shape(self) -> list[tuple[Any, ...]]:
        """The log without its sizes."""
        return [(e.what, e.key, e.name, e.phase, e.wide, e.donor, e.in_place) for e in self.entries]


class Watch(TorchDispatchMode):
    """A dispatch mode that logs the operations inside it. `call` runs an operation; `excluded` are
    the storages that are not activations.

    It works below a FakeTensorMode and on real tensors, because it follows storages, not contents.
    """

    def __init__(
        self, log: Log, excluded: set[int], call: Callable[[Any, Any, dict[str, Any]], Any]
    ) -> None:
        super().__init__()
        self.log, self.excluded, self._call = log, excluded, call
        self.stack = [log.root]
        self._running: tuple[str, str] = ("", "")
        self._numbers: list[int] = []  # from which autograd number on ...
        self._units: list[str] = []  # ... nodes belong to which unit
        self._keys: dict[int, int] = {}
        self._next_key = 0
        self._in_place = False
        self._flops = flop_formulas()
        self.run(log.root, "forward")

    # -- who runs ----------------------------------------------------------------------------------

    def run(self, unit: str, phase: str) -> None:
        """Note that `unit` runs from now on."""
        if (unit, phase) != self._running:
            self._running = (unit, phase)
            self.log.entries.append(Entry("run", name=unit, phase=phase))
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._units.append(unit)

    def enter(self, unit: str) -> None:
        self.stack.append(unit)
        self.run(unit, self._phase)

    def leave(self) -> None:
        self.stack.pop()
        self.run(
            self.stack[-1] if self._phase == "forward" or len(self.stack) > 1 else self._running[0],
            self._phase,
        )

    def mark(self, what: str) -> None:
        """Note that the forward pass ("turn") or the backward pass ("over") has ended."""
        self.log.entries.append(Entry(what))

    @property
    def _phase(self) -> str:
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def _follow_backward(self) -> None:
        """Note which unit the running backward node is of. See [Note: whose backward it is]."""
        node = torch._C._current_autograd_node()
        # Inside a recomputation, the unit's own hooks call `enter`
        if node is None or len(self.stack) > 1:
            return
        number = node._sequence_nr()
        if number >= 1 << 62:  # the accumulation of a parameter's gradient has no number
            return
        self.run(self._units[max(0, bisect_right(self._numbers, number) - 1)], "backward")

    # -- what it holds -----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IGNORED:
            return func(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            self._follow_backward()
        donor = self._donor(func, args)
        out = self._call(func, args, kwargs)
        if (formula := self._flops.get(func.overloadpacket)) is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            self.log.entries.append(Entry("flops", nbytes=flops))
        for t in tree_iter(out):
            if isinstance(t, torch.Tensor):
                self.key(t, donor)
        return out

    def _donor(self, func: Any, args: Any) -> int:
        """Return the storage that a sum of gradients would reuse, else -1. See [Note: sums in
        place].
        """
        if (
            func is not _aten.add.Tensor
            or torch.is_grad_enabled()
            or torch._C._current_graph_task_id() == -1
        ):
            return -1
        first, second = args[:2]
        if (
            not isinstance(second, torch.Tensor)
            or first.shape != second.shape
            or first.dtype != second.dtype
        ):
            return -1
        self._in_place = not first._is_view()
        return self._keys.get(first.untyped_storage()._cdata, -1)

    def key(self, t: torch.Tensor, donor: int = -1) -> int:
        """Return the log's number for the storage of `t`, and log the storage if it is new.
        -1 if it is not an activation.
        """
        storage = t.untyped_storage()
        identity = storage._cdata
        if identity in self.excluded:
            return -1
        if identity not in self._keys:
            self._keys[identity] = key = self._next_key
            self._next_key += 1
            wide = t.dim() > 1 and t.shape[-1] == self.log.vocabulary
            self.log.entries.append(
                Entry(
                    "come",
                    key,
                    storage.nbytes(),
                    wide=wide,
                    donor=donor,
                    in_place=donor >= 0 and self._in_place,
                )
            )
            weakref.finalize(storage, self._gone, identity, key).atexit = False
        return self._keys[identity]

    def _gone(self, identity: int, key: int) -> None:
        if self._keys.get(identity) == key:
            del self._keys[identity]
        self.log.entries.append(Entry("go", key))

    # -- what autograd says ------------------------------------------------------------------------

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        """Log that `t` is saved; the pack hook of saved_tensors_hooks."""
        key = self.key(t)
        if key >= 0:
            self.log.entries.append(Entry("save", key, name=self._running[0]))
        # A node that saves its own output must not hold the tensor that holds the node.
        return t if t.grad_fn is None else t.detach()

    def arrived(self, name: str, gradient: torch.Tensor) -> None:
        """Log that the gradient of parameter `name` is complete."""
        self.log.entries.append(Entry("arrive", self.key(gradient), name=name))


# -- reading the log -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A part of the step in which one unit runs and no parameter's gradient arrives.

    Attributes:
        unit, phase: which unit runs, in the "forward" or "backward" pass. Recomputation is
            backward.
        begin, end: bytes in memory at the beginning and the end, without parameters and buffers.
        peak: the most such bytes in between. `gradients` of them are parameters' gradients that
            nobody has taken yet, `logits` are tensors over the vocabulary.
        flops: of its matrix products.
        arrives: the parameter whose gradient is complete at the end; "" if the span ends because
            another unit runs. `end` counts that gradient, the next span's `begin` does not.
    """

    unit: str
    phase: str
    begin: int
    end: int
    peak: int
    gradients: int
    logits: int
    flops: int
    arrives: str = ""


@dataclass(frozen=True)
class Read:
    """The reading of a log: spans in order, saved bytes by unit, and sums at the end of the forward
    pass. `movable`: saved bytes by unit in storages large enough to be worth offloading; `largest`:
    the bytes of the largest of these storages.
    """

    spans: tuple[Span, ...]
    saved: dict[str, int]
    saved_logits: int
    end_of_forward: int
    movable: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)


def read(log: Log, sizes: Iterable[int] | None = None) -> Read:
    """Read the log. `sizes` replaces the `nbytes` of its entries, one for each."""
    entries = log.entries
    nbytes = [e.nbytes for e in entries] if sizes is None else list(sizes)
    size_of = {e.key: n for e, n in zip(entries, nbytes, strict=True) if e.what == "come"}
    reused, gradients = _reused(entries, size_of)
    wide = {e.key for e in entries if e.what == "come" and e.wide} - gradients
    spans: list[Span] = []
    saved: dict[str, int] = {}
    movable: dict[str, int] = {}
    largest: dict[str, int] = {}
    saved_keys: set[int] = set()
    now = now_gradients = now_logits = turn = 0
    flops = 0
    unit, phase, begin, peak = log.root, "forward", 0, (0, 0, 0)

    def cut(arrives: str = "") -> None:
        spans.append(Span(unit, phase, begin, now, *peak, flops, arrives))

    arrived = -1
    for at, e in enumerate(entries):
        if e.what in ("come", "go"):
            if at in reused:
                continue
            change = size_of[e.key] if e.what == "come" else -size_of[e.key]
            now += change
            now_gradients += change if e.key in gradients else 0
            now_logits += change if e.key in wide else 0
            if e.key == arrived:  # the gradient that has just arrived was taken and dropped
                begin, peak = now, (now, now_gradients, now_logits)
            elif now > peak[0]:
                peak = (now, now_gradients, now_logits)
        elif e.what == "save" and e.key not in saved_keys:
            saved_keys.add(e.key)
            saved[e.name] = saved.get(e.name, 0) + size_of[e.key]
            size = size_of[e.key] if size_of[e.key] >= SMALLEST and turn == 0 else 0
            movable[e.name] = movable.get(e.name, 0) + size
            largest[e.name] = max(largest.get(e.name, 0), size)
        elif e.what == "flops":
            flops += nbytes[at]
        elif e.what == "turn":
            turn = now
        elif e.what == "over":
            break
        elif e.what in ("run", "arrive"):
            if at:
                cut(e.name if e.what == "arrive" else "")
            if e.what == "run":
                unit, phase = e.name, e.phase
            begin, peak, flops = now, (now, now_gradients, now_logits), 0
        arrived = e.key if e.what == "arrive" else -1
    cut()
    logits = sum(size_of[k] for k in saved_keys & wide)
    return Read(tuple(spans), saved, logits, turn, movable, largest)


def _reused(entries: list[Entry], size_of: dict[int, int]) -> tuple[set[int], set[int]]:
    """Return (entries to skip, keys of parameters' gradients).
    Skipped are the "come" of a sum in place and the "go" of its donor, since without the trace both
    are one storage. See [Note: sums in place].
    """
    gradients = {e.key for e in entries if e.what == "arrive"}
    reused: set[int] = set()
    heir: list[tuple[int, int]] = []
    for at, (e, following) in enumerate(pairwise(entries)):
        if (
            e.donor >= 0
            and following.what == "go"
            and following.key == e.donor
            and size_of[e.key] == size_of[e.donor]
        ):
            heir.append((e.donor, e.key))
            if e.in_place:
                reused |= {at, at + 1}
    for donor, key in reversed(heir):  # the donor of a parameter's gradient counts as one too
        if key in gradients:
            gradients.add(donor)
    return reused, gradients
