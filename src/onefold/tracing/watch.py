"""What a step keeps in memory and computes, unit by unit, watched while it runs.

    forward     (root)   block.0        block.1        (root)             a span: one unit runs
    storages    + +      + + - + +      + + - + +      + - +              come and go
    backward    (root)   block.1        block.0
    storages    - + -    + + - + -      + - + - + -

A gradient looks like any other activation until it arrives. A span therefore lists the storages
that come and go, and their sums are made when the step is over (`Watch.read`).

[Note: whose backward it is] Autograd numbers its nodes in the order in which the forward pass makes
them. A node in the backward pass belongs to the unit that ran when its number was given out.
Recomputation under checkpointing makes nodes with new numbers; they belong to the unit whose node
started the recomputation.

[Note: sums in place] If a tensor has several uses, autograd adds up the gradients of the uses. It
adds into the first gradient in place, if nobody else holds that gradient. Under a dispatch mode it
makes a third tensor instead, and frees the first one (its donor) next: that counts as in place. A
view also holds its base, so autograd never adds to a view in place.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from onefold.machine.flops import flop_formulas
from onefold.offload.activations import SMALLEST

ROOT = "(root)"
_aten = torch.ops.aten
_IGNORED = {torch.ops.prim.device.default}


@dataclass
class Span:
    """A part of the step in which one unit runs.

    Attributes:
        phase: "forward" or "backward". Recomputation is backward.
        peak: the most bytes in memory, without parameters and buffers. `logits` of them are tensors
            over the vocabulary, `gradients` parameters' gradients that nobody has taken yet.
        saved: bytes that autograd keeps for the backward pass from here on, of which `kept_logits`
            are logits. movable: the part of them in storages large enough to be offloaded to the
            host. largest: the bytes of the largest of these.
        flops: of matrix products.
    """

    unit: str
    phase: str
    peak: int = 0
    logits: int = 0
    gradients: int = 0
    saved: int = 0
    kept_logits: int = 0
    movable: int = 0
    largest: int = 0
    flops: int = 0
    # (key of a storage, bytes that come with it, or go: less than 0)
    changes: list[tuple[int, int]] = field(default_factory=list, repr=False, compare=False)


class Watch(TorchDispatchMode):
    """A dispatch mode that watches the operations inside it.

    It works below a FakeTensorMode and on real tensors, because it follows storages, not contents.
    """

    def __init__(
        self, vocabulary: int, excluded: set[int], call: Callable[[Any, Any, dict[str, Any]], Any]
    ) -> None:
        """
        Args:
            vocabulary: rows of the head; 0 for a model without one.
            excluded: the storages that are no activations.
            call: runs an operation.
        """
        super().__init__()
        self._vocabulary, self._excluded, self._call = vocabulary, excluded, call
        self._stack = [ROOT]
        self.spans: list[Span] = []
        self._numbers: list[int] = []  # autograd's number at the beginning of each span
        self._keys: dict[int, int] = {}  # of living storages
        self._count = 0
        self._saved: set[int] = set()
        self._wide: set[int] = set()
        self._gradients: set[int] = set()
        self._sum = -1, -1, False  # the last sum of gradients: its key, its donor, in place
        self._sums: list[tuple[int, int]] = []  # (donor, sum)
        self._formulas = flop_formulas()
        self._run(ROOT, "forward")

    # -- who runs ----------------------------------------------------------------------------------

    def follow(self, name: str, module: nn.Module) -> None:
        """Note when the unit `module` runs."""
        module.register_forward_pre_hook(lambda *_: self._enter(name), prepend=True)
        module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _run(self, unit: str, phase: str) -> None:
        if not self.spans or (self.spans[-1].unit, self.spans[-1].phase) != (unit, phase):
            self.spans.append(Span(unit, phase))
            self._numbers.append(torch.autograd._get_sequence_nr())

    def _enter(self, unit: str) -> None:
        self._stack.append(unit)
        self._run(unit, self._phase)

    def _leave(self) -> None:
        self._stack.pop()
        again = self._phase == "backward" and len(self._stack) == 1
        self._run(self.spans[-1].unit if again else self._stack[-1], self._phase)

    @property
    def _phase(self) -> str:
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"

    def _follow_backward(self) -> None:
        """Note which unit the running backward node is of. See [Note: whose backward it is]."""
        node = torch._C._current_autograd_node()
        # Inside a recomputation, the unit's own hooks call `_enter`
        if node is None or len(self._stack) > 1:
            return
        number = node._sequence_nr()
        if number < 1 << 62:  # the accumulation of a parameter's gradient has no number
            at = max(0, bisect_right(self._numbers, number) - 1)
            self._run(self.spans[at].unit, "backward")

    # -- what it holds -----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _IGNORED:
            return func(*args, **kwargs)
        if self._phase == "backward":
            self._follow_backward()
        donor = self._donor(func, args)
        out = self._call(func, args, kwargs)
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            self.spans[-1].flops += int(formula(*args, **kwargs, out_val=out))
        for t in tree_iter(out):
            if isinstance(t, torch.Tensor):
                self.key(t)
        if donor is not None:
            self._sum = self.key(out), self.key(donor), not donor._is_view()
        return out

    def _donor(self, func: Any, args: Any) -> torch.Tensor | None:
        """Return the gradient to which a sum of gradients would be added. See [Note: sums in place]."""
        if (
            func is not _aten.add.Tensor
            or torch.is_grad_enabled()
            or self._phase == "forward"
            or not isinstance(args[1], torch.Tensor)
        ):
            return None
        alike = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
        return args[0] if alike else None

    def key(self, t: torch.Tensor) -> int:
        """Return the number of the storage of `t`, which may be new; -1 if it is no activation."""
        storage = t.untyped_storage()
        identity, nbytes = storage._cdata, storage.nbytes()
        if identity in self._excluded:
            return -1
        if identity not in self._keys:
            self._keys[identity] = key = self._count
            self._count += 1
            if t.dim() > 1 and t.shape[-1] == self._vocabulary:
                self._wide.add(key)
            self.spans[-1].changes.append((key, nbytes))
            weakref.finalize(storage, self._gone, identity, key, nbytes).atexit = False
        return self._keys[identity]

    def _gone(self, identity: int, key: int, nbytes: int) -> None:
        if self._keys.get(identity) == key:
            del self._keys[identity]
        changes = self.spans[-1].changes
        total, donor, in_place = self._sum
        if key == donor and changes[-1:] == [(total, nbytes)]:
            self._sums.append((donor, total))
            if in_place:  # one storage
                changes.pop()
                return
        changes.append((key, -nbytes))

    # -- what autograd says ------------------------------------------------------------------------

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        """Note that `t` is saved; the pack hook of saved_tensors_hooks."""
        key, nbytes, span = self.key(t), t.untyped_storage().nbytes(), self.spans[-1]
        if key >= 0 and key not in self._saved:
            self._saved.add(key)
            span.saved += nbytes
            span.kept_logits += nbytes if key in self._wide else 0
            if nbytes >= SMALLEST:
                span.movable += nbytes
                span.largest = max(span.largest, nbytes)
        # A node that saves its own output must not hold the tensor that holds the node.
        return t if t.grad_fn is None else t.detach()

    def take(self, param: torch.Tensor) -> None:
        """Take a parameter's gradient as soon as it is complete, as the engine does."""
        if param.grad is not None:
            self._gradients.add(self.key(param.grad))
            param.grad = None

    def read(self) -> tuple[Span, ...]:
        """Return the spans of the step, with their peaks."""
        gradients = set(self._gradients)
        for donor, total in reversed(self._sums):  # what a parameter's gradient began as
            if total in gradients:
                gradients.add(donor)
        logits = self._wide - gradients
        now = 0, 0, 0
        out = []
        for span in self.spans:
            most = now
            for key, n in span.changes:
                now = now[0] + n, now[1] + n * (key in logits), now[2] + n * (key in gradients)
                most = now if now[0] > most[0] else most
            peak, of_logits, of_gradients = most
            out.append(
                replace(span, peak=peak, logits=of_logits, gradients=of_gradients, changes=[])
            )
        return tuple(out)
